"""Test `tie`, `untie` and `repair` against the logits that transformers computes from their results."""

import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as tr
from rewrite_models import FAMILIES, config_of, ends, logits, same_table, saved, tensors
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from tests.checkpoint import saved_models as sm
from tests.checkpoint.tiny_checkpoints import llama, llama_config, llama_tensors, table, write_checkpoint, write_sparse

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import repair, tie, untie
from tiewise.checkpoint.stored import read_header
from tiewise.core.errors import CheckpointError

FLAG = "tie_word_embeddings"
TIED = ["llama", "gpt2", "gemma2", "granite", "cohere", "opt_350m", "bart", "qwen2", "bert", "roberta", "marian", "phi"]


def load(path, name):
    model, info = FAMILIES[name][0].from_pretrained(path, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model


def bytes_of(path):
    """Return {name: (dtype, bytes)} of a folder, read by the safetensors library."""
    return {n: (t.dtype, t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in tensors(path).items()}


# exactness


@pytest.mark.parametrize("name", TIED)
def test_untie_keeps_every_logit_and_tie_restores_every_byte(tmp_path, name):
    before = logits(saved(tmp_path / "a", name))
    receipt = untie(tmp_path / "a", tmp_path / "b")
    assert (receipt.logit_change, receipt.input_change) == (0.0, 0.0)
    model = load(tmp_path / "b", name)
    assert not same_table(model)
    assert not model.config.tie_word_embeddings
    assert torch.equal(logits(model), before)
    tie(tmp_path / "b", tmp_path / "c")
    assert bytes_of(tmp_path / "c") == bytes_of(tmp_path / "a")
    assert config_of(tmp_path / "c") == config_of(tmp_path / "a") | {"tie_word_embeddings": True}
    model = load(tmp_path / "c", name)
    assert same_table(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_untie_and_tie_keep_half_precision_and_shards(tmp_path, dtype):
    a, b, c = (tmp_path / name for name in "abc")
    saved(a, "llama", dtype=dtype, shard="4KB")
    shards = sorted(path.name for path in a.glob("*.safetensors"))
    assert len(shards) == 3
    receipt = untie(a, b)
    assert sorted((*receipt.rewritten, *receipt.linked)) == shards
    assert len(receipt.rewritten) == 1
    assert torch.equal(logits(load(b, "llama")), logits(load(a, "llama")))
    index, made = json.loads((b / "model.safetensors.index.json").read_text()), tensors(b).values()
    sizes = {"total_parameters": sum(t.numel() for t in made), "total_size": sum(t.nbytes for t in made)}
    assert index["metadata"] == sizes
    assert all(tensor in load_torch(b / file) for tensor, file in index["weight_map"].items())
    tie(b, c)
    for path in a.iterdir():
        assert path.name == "config.json" or (c / path.name).read_bytes() == path.read_bytes(), path.name


def test_untie_writes_flag_at_every_level_of_nested_config(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    model = sm.tiny("LlavaForConditionalGeneration", True).eval()
    model.save_pretrained(a)
    ids = torch.arange(3, 23).reshape(2, 10)
    before = logits(model, ids)
    assert untie(a, b).written == ("language_model.lm_head.weight",)
    written = config_of(b)
    assert (written["tie_word_embeddings"], written["text_config"]["tie_word_embeddings"]) == (False, False)
    back, info = type(model).from_pretrained(b, output_loading_info=True)
    assert not any(info.values())
    assert not same_table(back)
    assert torch.equal(logits(back, ids), before)
    tie(b, c)
    assert (bytes_of(c), config_of(c)) == (bytes_of(a), config_of(a))


def test_untie_keeps_all_other_text_of_config(tmp_path):
    path = llama(tmp_path / "a")
    text = '{\n    "z": 1e-5,\n    "model_type": "llama", "vocab_size": 24,\n    "hidden_size": 8,\n    "é": [1,2]\n}'
    (path / "config.json").write_text(text)
    untie(path, tmp_path / "b")
    want = text.replace("[1,2]\n", '[1,2],\n    "tie_word_embeddings": false\n')
    assert (tmp_path / "b" / "config.json").read_text() == want


# which table is kept


@pytest.mark.parametrize("keep", ["input", "output", "mean"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "opt_350m", "bart"])
def test_tie_keeps_chosen_table_and_reports_largest_changes(tmp_path, name, keep):
    model = saved(tmp_path / "a", name, tied=False)
    lookup, head = (end.weight.detach().clone() for end in ends(model))
    receipt, back = tie(tmp_path / "a", tmp_path / "b", keep=keep), load(tmp_path / "b", name)
    want = {"input": lookup, "output": head, "mean": (lookup + head) / 2}[keep]
    exact = {"rtol": 1e-6, "atol": 1e-7} if keep == "mean" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(back.get_input_embeddings().weight, want, **exact)
    assert same_table(back)
    assert back.config.tie_word_embeddings
    probes = np.random.default_rng(20_250_903).standard_normal((64, head.shape[1]))
    probes /= np.sqrt(np.square(probes).mean(1, keepdims=True))
    lookup, head, want = (table.double().numpy() for table in (lookup, head, want))
    logit_change = np.abs(probes @ (head - want).T).max()
    assert receipt.logit_change == pytest.approx(logit_change, rel=1e-5, abs=1e-6)
    assert receipt.input_change == pytest.approx(np.linalg.norm(lookup - want, axis=1).max(), rel=1e-5, abs=1e-6)
    assert [receipt.logit_change == 0, receipt.input_change == 0] == [keep == "output", keep == "input"]


FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def nearest(value, kind):
    """Return the number of a type nearest to a fraction; a tie goes to the one with last bit 0."""
    near = [np.asarray(float(value)).astype(kind)]
    with np.errstate(over="ignore"):
        near += [np.nextafter(near[0], np.asarray(end, kind)) for end in (-np.inf, np.inf)]
    bits = f"u{near[0].itemsize}"
    near = [x for x in near if np.isfinite(x.astype(float))]
    return float(min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(bits)) & 1)))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_tie_mean_is_exact_and_rounded_once_in_either_order(tmp_path, kind, other):
    a, b = table(400, 8, 1).astype(kind), table(400, 8, 2).astype(other)
    step = float(ml_dtypes.finfo(kind).eps)
    hard = [(1, 1 + step), (1, 1 + step + 2**-23), (1, 1 + step - 2**-24), (1 + step, 1), (1 + step, 1 + 2**-40)]
    hard += [(3 * 2.0**-24, 2.0**-60), (1, 2.0**-30), (1 + 3 * step, -(2.0**-40)), (60000, 60000), (2.0**15, step)]
    if kind is other:  # the sum of two large numbers overflows, although their mean is finite
        most = float(ml_dtypes.finfo(kind).max)
        hard += [(0.9 * most, 0.8 * most), (most, most)]
    for row, (one, two) in enumerate(hard):
        a[row], b[row] = one, two
    for to, (table_, head) in {"x": (a, b), "y": (b, a)}.items():
        llama(tmp_path / to, False, rows=400, tensors={"model.embed_tokens.weight": table_}, head=head)
        tie(tmp_path / to, tmp_path / f"{to}-tied", keep="mean")
    made = load_file(tmp_path / "x-tied" / "model.safetensors")["model.embed_tokens.weight"]
    pairs = zip(a.astype(float).ravel(), b.astype(float).ravel(), strict=True)
    assert made.astype(float).ravel().tolist() == [nearest((Fraction(x) + Fraction(y)) / 2, kind) for x, y in pairs]
    if kind is other:
        assert bytes_of(tmp_path / "x-tied") == bytes_of(tmp_path / "y-tied")


def test_tie_renames_head_without_input_table_to_input_table(tmp_path):
    made = llama_tensors()
    made["lm_head.weight"] = made.pop("model.embed_tokens.weight")
    write_checkpoint(tmp_path / "a", llama_config(), made)
    tie(tmp_path / "a", tmp_path / "b")
    assert set(tensors(tmp_path / "b")) == set(llama_tensors())
    assert np.array_equal(tensors(tmp_path / "b")["model.embed_tokens.weight"], made["lm_head.weight"])


# families with special cases


def test_untie_of_t5_with_force_notes_that_it_was_forced(tmp_path):
    saved(tmp_path / "a", "t5")
    assert any("forced" in note for note in untie(tmp_path / "a", tmp_path / "b", force=True).notes)


STACKS = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")


@pytest.mark.parametrize(("name", "copies"), [("t5", (*STACKS, "lm_head.weight")), ("t5_v11", STACKS[1:])])
def test_repair_of_t5_drops_table_copies_and_keeps_separate_head(tmp_path, name, copies):
    a, b, c = (tmp_path / folder for folder in "abc")
    saved(a, name, tied=name == "t5")
    made, config = load_file(a / "model.safetensors"), config_of(a)
    made |= {copy: made["shared.weight"].copy() for copy in copies}
    write_checkpoint(b, config if name == "t5" else config | {"tie_word_embeddings": False}, made)
    assert repair(b, c).dropped == copies
    assert bytes_of(c) == bytes_of(a)
    assert name == "t5" or config_of(c) == config_of(b)
    assert torch.equal(logits(load(c, name)), logits(load(b, name)))


def test_untie_keeps_names_and_config_keys_with_surrogates(tmp_path):
    path = llama(tmp_path / "a", config={"x.y_config": {"tie_word_embeddings": True}, "é\ud800": "\ud800"})
    held = load_file(path / "model.safetensors")
    entries = {"\ud800": ("U8", [1])} | {name: ("F32", value.shape) for name, value in held.items()}
    write_sparse(path / "model.safetensors", entries, {name: value.tobytes() for name, value in held.items()})
    untie(path, tmp_path / "b")
    assert config_of(tmp_path / "b") == config_of(path) | {"tie_word_embeddings": False}
    made = read_header(tmp_path / "b" / "model.safetensors").tensors
    assert set(made) == {*entries, "lm_head.weight"}


def test_untie_of_unknown_family_uses_usual_names(tmp_path):
    llama(tmp_path / "a", config={"model_type": "nobody_knows", "architectures": ["NobodyForCausalLM"]})
    receipt = untie(tmp_path / "a", tmp_path / "b")
    assert receipt.written == ("lm_head.weight",)
    assert any("usual names" in note for note in receipt.notes)


def test_untie_accepts_single_file(tmp_path):
    llama(tmp_path / "a")
    receipt = untie(tmp_path / "a" / "model.safetensors", tmp_path / "b")
    assert receipt.source == tmp_path / "a" / "model.safetensors"
    assert set(tensors(tmp_path / "b")) == set(llama_tensors()) | {"lm_head.weight"}
    write_checkpoint(tmp_path / "c", None, llama_tensors())
    receipt = untie(tmp_path / "c" / "model.safetensors", tmp_path / "d")
    assert any("no config.json" in note for note in receipt.notes)


# `repair`, in addition to the repairs of each rule's table


@pytest.mark.parametrize(
    ("config", "head", "dropped", "tied"),
    [
        ({}, table(seed=5), (), False),  # tied config with a different stored head
        ({}, table(), ("lm_head.weight",), True),
        ({"tie_word_embeddings": None}, None, (), True),
    ],
)
def test_repair_takes_the_flag_from_the_tensors(tmp_path, config, head, dropped, tied):
    llama(tmp_path / "a", True, config=config, head=head)
    assert repair(tmp_path / "a", tmp_path / "b").dropped == dropped
    assert config_of(tmp_path / "b")["tie_word_embeddings"] is tied
    kept = {name: value for name, value in bytes_of(tmp_path / "a").items() if name not in dropped}
    assert bytes_of(tmp_path / "b") == kept


def test_repair_of_bart_keeps_logits_of_transformers(tmp_path):
    saved(tmp_path / "a", "bart", tied=False)  # the flag says tied, and the head differs
    model = FAMILIES["bart"][0].from_pretrained(tmp_path / "a")
    repair(tmp_path / "a", tmp_path / "b")
    assert torch.equal(logits(load(tmp_path / "b", "bart")), logits(model))


@pytest.mark.parametrize("config", [{}, {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], FLAG: None}])
def test_repair_refuses_head_that_was_never_trained(tmp_path, config):
    """Megatron-LM#7577 wrote a tied model whose file also has an untrained head."""
    path = llama(tmp_path / "a", True, config=config, head=0.02 * table(seed=5))
    finding = next(found for found in check(path).findings if found.rule == "B012")
    assert not finding.safe
    assert finding.repair.startswith(f"if it was never trained: tiewise tie {path} --keep input")
    with pytest.raises(CheckpointError, match="no finding has a safe fix; fix by hand: B0"):
        repair(path, tmp_path / "b")
    tie(path, tmp_path / "c", keep="input")
    assert bytes_of(tmp_path / "c") == bytes_of(llama(tmp_path / "d", True))


def test_repair_restores_index_and_drops_equal_copies(tmp_path):
    path = llama(tmp_path / "a", shards=2)
    index, (first, second) = path / "model.safetensors.index.json", sorted(path.glob("*.safetensors"))
    good = json.loads(index.read_text())
    files = good["weight_map"] | {"lm_head.weight": first.name}
    del files["model.norm.weight"]
    index.write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": files}))
    repair(path, tmp_path / "b")
    assert json.loads((tmp_path / "b" / index.name).read_text()) == good
    index.write_text(json.dumps(good))
    held = load_file(second) | {"model.embed_tokens.weight": table()}  # the table is in both shards
    save_file(held, second, {"format": "pt"})
    assert repair(path, tmp_path / "c").rewritten == (second.name,)
    assert json.loads((tmp_path / "c" / index.name).read_text()) == good
    save_file(held | {"model.embed_tokens.weight": table() + 1}, second, {"format": "pt"})
    with pytest.raises(CheckpointError, match="no finding has a safe fix; fix by hand: B004"):
        repair(path, tmp_path / "d")


# flags that tie more than the two ends


ZAMBAS = {
    "ZambaForCausalLM": "shared_transf",
    "Zamba2ForCausalLM": "shared_transformer",
}
HYBRID = {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 1}


def save_zamba(path, name, **changes):
    """Save a tied model whose later hybrid layers reuse the block of the first."""
    model = sm.tiny(name, True, **HYBRID | changes).eval()
    model.save_pretrained(path)
    return model


def missing_keys(name, path):
    return getattr(tr, name).from_pretrained(path, output_loading_info=True)[1]["missing_keys"]


@pytest.mark.parametrize("name", ZAMBAS)
def test_untie_refuses_flag_that_also_ties_layers_without_force(tmp_path, name):
    a, b, c = (tmp_path / folder for folder in "abc")
    save_zamba(a, name)
    block = ZAMBAS[name]
    reason = rf"also ties model.layers.#.{block} of several layers, stored here as model.layers.1.{block}; with a false"
    with pytest.raises(CheckpointError, match=reason):
        untie(a, b)
    receipt = untie(a, b, force=True)
    assert any("forced" in note and block in note for note in receipt.notes)
    missing = missing_keys(name, b)  # the reason for the refusal
    assert {key.split(".")[2] for key in missing} == {"3", "5"}
    assert all(block in key for key in missing)
    tie(b, c)  # undoes the forced untie
    assert bytes_of(c) == bytes_of(a)
    assert not missing_keys(name, c)


@pytest.mark.parametrize("name", ZAMBAS)
def test_tie_refuses_to_set_flag_that_also_ties_layers(tmp_path, name):
    model = sm.tiny(name, False, **HYBRID)
    model.save_pretrained(tmp_path / "a")  # each layer has a separate block
    with pytest.raises(CheckpointError, match=r"also ties .* stored here as model\.layers\.1\..* and|keep it untied"):
        tie(tmp_path / "a", tmp_path / "b", keep="input")


def test_repair_does_not_unset_flag_that_also_ties_layers(tmp_path):
    a = tmp_path / "a"
    save_zamba(a, "ZambaForCausalLM")
    held = load_file(a / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"][::-1].copy()
    save_file(held, a / "model.safetensors", {"format": "pt"})
    assert not missing_keys("ZambaForCausalLM", a)
    finding = next(found for found in check(a).findings if found.rule == "B012")
    assert not finding.safe
    assert "also ties model.layers.#.shared_transf" in finding.repair
    with pytest.raises(CheckpointError, match="no finding has a safe fix"):
        repair(a, tmp_path / "b")
    config = config_of(a)
    del config[FLAG]
    (a / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no finding has a safe fix"):
        repair(a, tmp_path / "b")


def test_untie_of_t5gemma2_stores_all_parameters_of_both_stacks(tmp_path):
    """T5Gemma2 saves its encoder's table under another name than the module has."""
    name = "T5Gemma2ForConditionalGeneration"
    sm.tiny(name, True).save_pretrained(tmp_path / "a")
    untie(tmp_path / "a", tmp_path / "b")
    assert not missing_keys(name, tmp_path / "b")


@pytest.mark.parametrize("is_tied", [True, False])
def test_older_flag_of_lfm2_is_rewritten_too(tmp_path, is_tied):
    model = sm.tiny("Lfm2ForCausalLM", is_tied)
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.save_pretrained(tmp_path / "a")
    config = config_of(tmp_path / "a") | {"tie_embedding": is_tied}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    verb = untie if is_tied else tie
    verb(tmp_path / "a", tmp_path / "b")
    result, info = tr.Lfm2ForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["missing_keys"]
    assert (result.lm_head.weight is result.model.embed_tokens.weight) is not is_tied


# a quarter of the classes that transformers can tie: results store every tensor that they load

EVERY = 4  # one class of four, because the full sweep takes minutes


def tied_model(name):
    """Return a tied tiny model of the class; None if it cannot be built, has no head, or never ties."""
    try:
        model = sm.tiny(name, True).eval()
    except Exception:  # some configs cannot be shrunk, and the test skips these classes
        return None
    tables, head = sm.ends(model)
    return model if head is not None and any(table.weight is head.weight for table in tables) else None


@pytest.mark.slow
def test_untie_and_tie_round_trip_every_fourth_class(tmp_path):
    refused, done = {}, 0
    for name in sm.classes()[::EVERY]:
        model = tied_model(name)
        if model is None:
            continue
        source, apart, back = (tmp_path / name / folder for folder in ("a", "b", "c"))
        model.save_pretrained(source)
        try:
            untie(source, apart)
        except CheckpointError as error:
            refused[name] = str(error)
            continue
        made, info = getattr(tr, name).from_pretrained(apart, output_loading_info=True)
        assert not any(info.values()), (name, info)
        tables, head = sm.ends(made)
        assert not any(table.weight is head.weight for table in tables), name
        new, old = made.state_dict(), model.state_dict()
        assert all(torch.equal(new[key], old[key]) for key in old if key in new), name
        tie(apart, back)
        first, last = tensors(source), tensors(back)
        assert first.keys() == last.keys(), name
        assert all(torch.equal(first[key], last[key]) for key in first), name
        done += 1
    assert done > 40
    reasons = ("always ties", "the flag also ties")
    assert all(any(reason in why for reason in reasons) for why in refused.values()), refused
