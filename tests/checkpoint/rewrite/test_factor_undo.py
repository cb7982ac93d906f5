"""Test `factor` with `undo` against the boundary's arithmetic in torch and transformers' loads of the result."""

import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import FAMILIES, V, config_of, ends, logits, same_table, saved, tensors, truncated
from safetensors.torch import save_file
from tests.checkpoint import saved_models
from tests.checkpoint.tiny_checkpoints import llama

import tiewise.hf
from tiewise.checkpoint.rewrite import factor, untie
from tiewise.core.errors import CheckpointError

SPECS = [
    *("factored:5", "factored-untied:5", "factored-untied:in=4,out=7", "factored:5+output_scale=0.3+pad=2"),
    *("projected:20", "projected:12,untied", "projected:16,in=linear,out=none", "projected:16", "residual:3,s=0.2"),
    *("spd", "spd+input_scale=2", "tied+output_scale=1/sqrt_d", "untied+input_scale=sqrt_d"),
]


def save_with_boundary(path, spec, name="llama", dtype=torch.float32, shard="1GB"):
    """Save a tiny model with a boundary and perturbed maps; return the model that loads from the folder."""
    model = saved(path.parent / "plain", name, tied=not spec.startswith("untied"))
    model.requires_grad_(True)
    tiewise.install(model, spec)
    torch.manual_seed(1)
    with torch.no_grad():
        for part, value in model.named_parameters():
            if "_map." in part:
                value.add_(0.1 * torch.randn_like(value))
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    return tiewise.hf.load(path)


def plain_class(model):
    return type(model).plain_class if hasattr(type(model), "plain_class") else type(model)


def assert_within_one_rounding(model, path, dtype=torch.float32):
    """Assert that the dense ends equal the mapped ones up to one rounding per entry; return the dense model."""
    loaded = plain_class(model).from_pretrained(path)
    assert loaded.dtype == dtype
    unit = torch.finfo(dtype).eps / 2 * (1 + 1e-9)
    tiny = torch.finfo(dtype).smallest_normal * unit
    (lookup, head), (plain_lookup, plain_head) = ends(model.double()), ends(loaded.double())
    with torch.no_grad():
        ids = torch.arange(lookup.weight.shape[0])
        old, new = lookup(ids), plain_lookup(ids)
        assert ((new - old).abs() <= unit * old.abs() + tiny).all()
        hidden = torch.randn(50, plain_head.weight.shape[1], dtype=torch.float64)
        change = (plain_head(hidden) - head(hidden)).abs()
        # Σ |h| |U - Û| ≤ u Σ |h| |U| for U before rounding; the stored Û approximates U up to another u
        assert (change <= unit * (1 + 2 * unit) * hidden.abs() @ plain_head.weight.abs().T + 1e-12).all()
    return loaded


@pytest.mark.parametrize("spec", SPECS)
def test_undo_equals_every_boundary_in_torch(spec, tmp_path):
    model = save_with_boundary(tmp_path / "a", spec)
    theirs = tiewise.hf.plain_copy(model).state_dict()
    before = logits(model)
    receipt = factor(tmp_path / "a", tmp_path / "b", undo=True)
    loaded = plain_class(model).from_pretrained(tmp_path / "b")
    torch.testing.assert_close(logits(loaded), before, atol=2e-5, rtol=1e-5)
    assert loaded.state_dict().keys() == theirs.keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, theirs[name], atol=3e-6, rtol=3e-6, msg=name)
    loaded = assert_within_one_rounding(model, tmp_path / "b")
    assert not same_table(loaded)
    assert loaded.config.tie_word_embeddings is False
    assert config_of(tmp_path / "b") == config_of(tmp_path / "plain") | {"tie_word_embeddings": False}
    assert receipt.logit_change < 1e-5
    assert not [name for name in tensors(tmp_path / "b") if "_map" in name]


SHARING = [("t5", "factored:5"), ("bart", "factored-untied:5"), ("bert", "residual:3")]  # families that share more
KINDS = ["factored:5", "factored-untied:5", "spd", "tied+output_scale=0.5"]
REST = [case for case in product(FAMILIES, KINDS) if case not in SHARING]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_undo_keeps_half_precision_and_shards(dtype, tmp_path):
    model = save_with_boundary(tmp_path / "a", "factored:5", dtype=dtype, shard="3KB")
    factor(tmp_path / "a", tmp_path / "b", undo=True)
    before, after = ([p.name for p in sorted((tmp_path / to).glob("*.safetensors"))] for to in "ab")
    assert before == after
    assert len(before) > 2
    assert_within_one_rounding(model, tmp_path / "b", dtype)


@pytest.mark.parametrize(("name", "spec"), SHARING + [pytest.param(*case, marks=pytest.mark.slow) for case in REST])
def test_undo_keeps_logits_of_every_family(name, spec, tmp_path):
    model = save_with_boundary(tmp_path / "a", spec, name)
    before = logits(model)
    factor(tmp_path / "a", tmp_path / "b", undo=True)
    loaded = plain_class(model).from_pretrained(tmp_path / "b")
    torch.testing.assert_close(logits(loaded), before, atol=2e-4, rtol=1e-4)
    assert_within_one_rounding(model, tmp_path / "b")


@pytest.mark.parametrize("name", ["llama", "bert", "bart"])
def test_untie_factor_and_undo_give_one_truncated_table(name, tmp_path):
    model = saved(tmp_path / "a", name)
    untie(tmp_path / "a", tmp_path / "b")
    factor(tmp_path / "b", tmp_path / "c", rank=10)
    factor(tmp_path / "c", tmp_path / "d", undo=True)
    factored, dense = tiewise.hf.load(tmp_path / "c"), type(model).from_pretrained(tmp_path / "d")
    assert factored.config.tiewise_boundary == "factored-untied:10"
    torch.testing.assert_close(logits(dense), logits(factored), atol=1e-4, rtol=1e-4)
    best = torch.from_numpy(truncated(ends(model)[0].weight.numpy(), 10))
    for end in ends(dense):
        torch.testing.assert_close(end.weight.double(), best, atol=1e-5, rtol=1e-5)
    assert same_table(dense)
    assert dense.config.tie_word_embeddings
    assert set(tensors(tmp_path / "d")) == set(tensors(tmp_path / "a"))


def test_undo_keeps_equal_ends_untied_if_flag_also_ties_differing_biases(tmp_path):
    """One flag of BERT ties tables and biases, and the two biases differ after training."""
    saved(tmp_path / "a", "bert")
    untie(tmp_path / "a", tmp_path / "b")
    factor(tmp_path / "b", tmp_path / "c", rank=10)
    made = tensors(tmp_path / "c")
    made["cls.predictions.decoder.bias"] += 1
    save_file(made, tmp_path / "c" / "model.safetensors", {"format": "pt"})
    factor(tmp_path / "c", tmp_path / "d", undo=True)
    dense = tensors(tmp_path / "d")
    assert torch.equal(dense["cls.predictions.decoder.bias"], made["cls.predictions.decoder.bias"])
    assert not config_of(tmp_path / "d")["tie_word_embeddings"]


@settings(max_examples=25)
@given(rows=st.integers(8, 40), width=st.sampled_from([8, 12, 16]), tied=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_factor_then_undo_gives_truncated_matrix(rows, width, tied, seed):
    rng = np.random.default_rng(seed)
    old = {"model.embed_tokens.weight": rng.normal(size=(rows, width)).astype(np.float32)}
    old |= {} if tied else {"lm_head.weight": rng.normal(size=(rows, width)).astype(np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        llama(path / "a", tied, tensors=old, rows=rows, width=width)
        factor(path / "a", path / "b", rank=2)
        receipt = factor(path / "b", path / "c", undo=True)
        made = tensors(path / "c")
        assert config_of(path / "a") == config_of(path / "c")
    assert ("lm_head.weight" in made) == (not tied)
    assert ("both ends use one table" in receipt.notes) == tied
    for name, table in old.items():
        s = np.linalg.svd(table.astype(np.float64), compute_uv=False)
        if s[1] - s[2] > 1e-3 * s[0]:  # otherwise the best approximation is not unique
            assert np.abs(made[name].double().numpy() - truncated(table, 2)).max() < 1e-6 * s[0]


def test_undo_of_untrained_corrections_keeps_one_table(tmp_path):
    """P = 0 and S = I are the identity, so the result is the old table byte for byte."""
    for spec in ("residual:3", "spd"):
        model, path = saved(tmp_path / spec / "plain", "llama"), tmp_path / spec
        old = ends(model)[0].weight.clone()
        tiewise.install(model, spec)
        model.save_pretrained(path / "a")
        factor(path / "a", path / "b", undo=True)
        assert "lm_head.weight" not in tensors(path / "b")
        assert torch.equal(tensors(path / "b")["model.embed_tokens.weight"], old)


@pytest.mark.parametrize(("option", "words"), [("softcap=2", "cannot express a soft-cap"), ("bias", "no bias")])
def test_undo_refuses_softcap_and_bias_without_force(option, words, tmp_path):
    model = save_with_boundary(tmp_path / "a", f"factored:5+{option}")
    with pytest.raises(CheckpointError, match=words):
        factor(tmp_path / "a", tmp_path / "b", undo=True)
    receipt = factor(tmp_path / "a", tmp_path / "b", force=True, undo=True)
    assert any("lost" in note for note in receipt.notes)
    assert "lm_head.bias" not in tensors(tmp_path / "b")
    loaded = plain_class(model).from_pretrained(tmp_path / "b")
    assert ends(loaded)[1].weight.shape == (V, 16)


COMPOSITES = ["LlavaForConditionalGeneration"]
COMPOSITES += [
    pytest.param(f"{name}ForConditionalGeneration", marks=pytest.mark.slow)
    for name in ("Idefics3", "Mistral3", "AyaVision", "PaliGemma", "Gemma3")
]


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("tied", [True, False])
def test_undo_of_a_composite_model_gives_tables_that_its_class_loads(tmp_path, name, tied):
    saved_models.tiny(name, tied).save_pretrained(tmp_path / "plain")
    plain_class = getattr(transformers, name)
    model = plain_class.from_pretrained(tmp_path / "plain")  # a loaded model renames tensors when it is saved
    tiewise.install(model, "factored:3" if tied else "factored-untied:3")
    model.save_pretrained(tmp_path / "a")
    ids = torch.arange(3, 23).reshape(2, 10)
    before = logits(tiewise.hf.load(tmp_path / "a").eval(), ids)
    factor(tmp_path / "a", tmp_path / "b", undo=True)
    back, info = plain_class.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    torch.testing.assert_close(logits(back.eval(), ids), before, atol=2e-5, rtol=1e-5)
    stored = {key: value.double() for key, value in tensors(tmp_path / "a").items()}
    in_map, out_map = (
        next(value for key, value in stored.items() if part in key) for part in (".in_map.", ".out_map.")
    )
    table = back.get_input_embeddings().weight.double()
    narrow = [value for key, value in stored.items() if value.shape == (len(table), 3)]
    assert len(narrow) == (1 if tied else 2)
    assert any(torch.allclose(table, one @ in_map.T, atol=1e-6, rtol=1e-6) for one in narrow)
    head = back.get_output_embeddings().weight.double()
    assert any(torch.allclose(head, one @ out_map, atol=1e-6, rtol=1e-6) for one in narrow)


@pytest.mark.parametrize("spec", ["factored:3", "factored-untied:3", "spd"])
def test_undo_of_a_decoder_with_a_boundary_inside_a_composite_gives_its_logits(tmp_path, spec):
    """Such a folder is loaded by no class: transformers builds the decoder from its type `tiewise`."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        vocab_size=99, **sizes, initializer_range=0.5, is_decoder=True, add_cross_attention=True
    )
    decoder = transformers.BertLMHeadModel(bert)
    tiewise.install(decoder, spec)
    encoder = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "decoder_input_ids": torch.arange(3, 23).reshape(2, 10)}
    with torch.no_grad():
        before = model(**inputs).logits
    model.save_pretrained(tmp_path / "a")
    factor(tmp_path / "a", tmp_path / "b", undo=True)
    made = config_of(tmp_path / "b")["decoder"]
    assert made["model_type"] == "bert"
    assert made.get("architectures") == config_of(tmp_path / "a")["decoder"].get("architectures")
    assert "tiewise" not in (tmp_path / "b" / "config.json").read_text()
    back, info = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(**inputs).logits, before, atol=1e-4, rtol=1e-5)
    assert before.abs().max() > 1
