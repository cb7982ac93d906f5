"""Test `slim`, `merge` and `lora_config` against adapters that PEFT makes, loads and merges."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint import saved_models as sm
from transformers import AutoConfig, AutoModelForCausalLM

from tiewise.checkpoint.adapter_settings import lora_config
from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import merge, slim
from tiewise.core.errors import CheckpointError

peft = pytest.importorskip("peft", exc_type=ImportError)
pytestmark = [
    # peft reads the flag under transformers' former name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft warns of adapters that separate tied ends, name missing ends or have odd shapes, which is intended here
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`, but no tied modules are added"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 4 LoRA tensor.s. have invalid shape"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"),
]
V, D = 97, 16
IDS = torch.arange(V)[None]


@pytest.fixture
def save_base(tmp_path):
    """Return a function that saves a base and returns (its folder, a function that loads it)."""

    def made(tied, family="llama", **config):
        torch.manual_seed(0)
        config |= {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
        config = AutoConfig.for_model(family, tie_word_embeddings=tied, **config)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
        return tmp_path / "base", lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()

    return made


def save_adapter(base, path, change, **config):
    """Save an adapter with random low-rank updates and the changes of `change`; return its path."""
    adapted = peft.get_peft_model(base, peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
        change(adapted)
    adapted.save_pretrained(path)
    return path


@torch.no_grad()
def logits(base, path=None):
    """Return the logits in fp64, so that only differences of stored numbers matter."""
    return (base if path is None else peft.PeftModel.from_pretrained(base, path)).double()(IDS).logits


def shift(rows, *ends):
    """Return a function that shifts some rows of the copies at these ends equally."""

    def change(adapted):
        for end in ends:
            copy = adapted.get_submodule(end).modules_to_save.default.weight
            copy[rows] += torch.arange(len(rows), dtype=copy.dtype)[:, None] + 1

    return change


E_, H_ = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
COPIES = [
    (True, ["embed_tokens", "lm_head"], {}, (E_, H_), {"model.embed_tokens": [3, 90]}),
    (True, ["embed_tokens"], {"ensure_weight_tying": True}, (E_,), {"model.embed_tokens": [3, 90]}),
    (False, ["embed_tokens", "lm_head"], {}, (E_, H_), {"model.embed_tokens": [3, 90], "lm_head": [3, 90]}),
    (False, ["lm_head"], {}, (H_,), {"lm_head": [3, 90]}),
]


@pytest.mark.parametrize(("tied", "saved", "config", "ends", "rows"), COPIES)
def test_slim_adapter_gives_same_logits_in_peft(tmp_path, save_base, tied, saved, config, ends, rows):
    base, load = save_base(tied)
    fat = save_adapter(load(), tmp_path / "fat", shift([3, 90], *ends), modules_to_save=saved, **config)
    assert {found.rule for found in check(fat, base=base).findings} >= {"B063"}
    receipt = slim(fat, tmp_path / "slim", base=base)
    assert receipt.bytes_after < receipt.bytes_before
    record = json.loads((tmp_path / "slim/adapter_config.json").read_text())
    assert (record["trainable_token_indices"], record["modules_to_save"]) == (rows, None)
    assert torch.equal(logits(load(), fat), logits(load(), tmp_path / "slim"))
    assert not torch.equal(logits(load()), logits(load(), fat))
    found = check(tmp_path / "slim", base=base).at_least("info")
    assert {finding.rule for finding in found} == {"B064"}  # llama.cpp does not convert trained rows


def rows(adapted):
    """Shift every trained row."""
    for name, parameter in adapted.named_parameters():
        if "trainable_tokens_delta" in name and parameter.requires_grad:
            parameter += 0.5


def nothing(adapted):
    pass


def assert_close(found, wanted, within):
    """Assert that tensors agree within a share of each one's largest number."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = (found[name].double() - tensor.double()).abs().max()
        assert error <= within * tensor.double().abs().max(), (name, error)


@pytest.fixture
def merge_and_compare(tmp_path, save_base):
    """Return a function that merges an adapter, compares the logits with PEFT's, and returns both models."""

    def made(tied, chosen, change, **config):
        base, load = save_base(tied, **config)
        path = save_adapter(load(), tmp_path / "a", change, **chosen)
        receipt = merge(base, tmp_path / "merged", adapter=path)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert_close({"logits": logits(merged)}, {"logits": logits(load(), path)}, 1e-5)
        return receipt, merged, peft.PeftModel.from_pretrained(load(), path)

    return made


LINEARS = {"target_modules": "all-linear"}
GPT2 = {"family": "gpt2", "n_positions": 128}  # stores its layers transposed, and some are square
OPT = {"family": "opt", "word_embed_proj_dim": D, "ffn_dim": 32}  # has biases and another body prefix
FORMS = [
    (False, {}, LINEARS, nothing),
    (True, {}, LINEARS, nothing),
    (False, {}, LINEARS | {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"\d+.self_attn.q_proj": 5}}, nothing),
    (False, {}, LINEARS | {"alpha_pattern": {"^model.layers.0.mlp.down_proj": 5}, "use_rslora": True}, nothing),
    (False, {}, LINEARS | {"use_dora": True}, nothing),
    (False, {"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "all"}, nothing),
    (False, {"attention_bias": True}, {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}, nothing),
    (False, {}, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, nothing),
    (False, {}, {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, shift([2], E_, H_)),
    (False, {}, {"trainable_token_indices": {"embed_tokens": [9, 4], "lm_head": [5]}}, rows),
    (True, {}, {"trainable_token_indices": [9, 4]}, rows),
    (True, {}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, shift([2], E_)),
    (True, GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}, nothing),
    (True, OPT, {"target_modules": ["fc1"]}, nothing),
]


@pytest.mark.parametrize(("tied", "config", "chosen", "change"), FORMS)
def test_merge_equals_merge_of_peft(tmp_path, merge_and_compare, tied, config, chosen, change):
    merge_and_compare(tied, chosen, change, **config)[2].merge_and_unload().save_pretrained(tmp_path / "theirs")
    assert_close(
        load_file(tmp_path / "merged/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors"), 1e-6
    )
    assert not check(tmp_path / "merged").at_least("error")


APART = [
    ({}, {"target_modules": ["embed_tokens"]}, nothing),
    ({}, {"target_modules": ["lm_head"]}, nothing),
    ({}, {"target_modules": ["embed_tokens", "lm_head"]}, nothing),
    ({}, {"modules_to_save": ["embed_tokens"]}, shift([2], E_)),
    ({}, {"modules_to_save": ["embed_tokens", "lm_head"]}, shift([2], E_)),
    ({}, {"trainable_token_indices": {"embed_tokens": [9, 4], "lm_head": [5]}}, rows),
    ({"family": "gemma3_text", "head_dim": 8}, {"target_modules": ["q_proj", "embed_tokens"]}, nothing),  # scales rows
]


@pytest.mark.parametrize(("config", "chosen", "change"), APART)
def test_merge_unties_base_if_adapter_separates_ends(merge_and_compare, config, chosen, change):
    receipt, merged, _ = merge_and_compare(True, chosen, change, **config)
    assert receipt.summary.endswith("; the one table became two")
    assert merged.config.tie_word_embeddings is False


def test_merge_keeps_tie_if_ends_share_factors(merge_and_compare):
    chosen = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    receipt, merged, _ = merge_and_compare(True, chosen, nothing)
    assert merged.config.tie_word_embeddings is True
    assert any("low-rank update alone" in note for note in receipt.notes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("from_folder", [True, False])
@pytest.mark.parametrize("asked", [{"new_tokens": [3, 90]}, {"tables": True}, {}])
def test_training_with_lora_config_keeps_tie(tmp_path, save_base, tied, from_folder, asked):
    base, load = save_base(tied)
    adapted = peft.get_peft_model(load(), peft.LoraConfig(**lora_config(base if from_folder else load(), **asked)))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(IDS, labels=IDS).loss.backward()
        optimizer.step()
    adapted.save_pretrained(tmp_path / "a")
    merge(base, tmp_path / "merged", adapter=tmp_path / "a")
    stored = load_file(tmp_path / "merged/model.safetensors")
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    moved = (stored["model.embed_tokens.weight"] != old).any(1).nonzero()[:, 0].tolist()
    assert moved == asked.get("new_tokens", moved if asked else [])
    assert len(moved) >= V - 1 or not asked.get("tables")  # the last token of the text predicts nothing
    assert ("lm_head.weight" in stored) is not tied  # the number of tables is unchanged
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_close({"logits": logits(merged)}, {"logits": logits(load(), tmp_path / "a")}, 1e-5)
    assert not check(tmp_path / "a", base=base).at_least("warning")


@pytest.mark.parametrize("tied", [True, False])
def test_slim_drops_copies_below_low_rank_updates(tmp_path, save_base, tied):
    base, load = save_base(tied)
    fat = save_adapter(load(), tmp_path / "fat", nothing, target_modules=["embed_tokens", "lm_head"])
    receipt = slim(fat, tmp_path / "slim", base=base)
    assert len(receipt.dropped) == 2
    assert torch.equal(logits(load(), fat), logits(load(), tmp_path / "slim"))


def test_merge_does_not_unset_flag_that_also_ties_layers(tmp_path):
    """Zamba shares a transformer block between layers by the flag that ties its head."""
    hybrid = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    base = sm.tiny("ZambaForCausalLM", True, **hybrid)
    base.save_pretrained(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", lambda adapted: None, target_modules=["lm_head"])
    with pytest.raises(CheckpointError, match="the flag also ties"):
        merge(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
    assert not (tmp_path / "merged").exists()


def test_merge_accepts_arguments_in_command_line_order(save_base, tmp_path):
    base, load = save_base(True)
    adapter = save_adapter(load(), tmp_path / "adapter", lambda adapted: None, target_modules=["q_proj"])
    one = merge(base, tmp_path / "one", adapter=adapter)
    other = merge(adapter, tmp_path / "other", base=base)
    assert (
        (one.verb, one.source, one.written) == (other.verb, other.source, other.written) == ("merge", base, one.written)
    )
    file = "model.safetensors"
    assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    for neither_or_both in ({}, {"base": base, "adapter": adapter}):
        with pytest.raises(CheckpointError, match=r"call merge\(adapter, to, base=base\)"):
            merge(base, tmp_path / "none", **neither_or_both)
