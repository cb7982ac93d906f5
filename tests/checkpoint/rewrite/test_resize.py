"""Test that `resize` keeps old rows bit for bit and draws new rows from their distribution, against scipy's tests."""

import json
from itertools import product

import numpy as np
import pytest
import torch
import transformers as hf
from rewrite_models import FAMILIES, V, config_of, ends, logits, same_table, saved, store, tensors
from scipy import stats
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table, write_checkpoint

import tiewise.hf
from tiewise.checkpoint.rewrite import factor, resize
from tiewise.checkpoint.rewrite.verbs.resize import new_rows
from tiewise.core.errors import CheckpointError

# drawn rows


def draw_rows(part, used, count, seed=0):
    return np.concatenate(list(new_rows(part, used, count, seed)))


def p_values(rows, mean, covariance):
    """Return the p-values of likelihood ratio tests of the mean and the covariance of normal rows.

    The distribution is known: with z = L⁻¹(x − m) and S the covariance of z around 0, n·|z̄|² is χ² with p degrees of
    freedom, and n(tr S − log det S − p) is nearly χ² with p(p+1)/2.
    """
    n, p = rows.shape
    z = np.linalg.solve(np.linalg.cholesky(covariance), (rows - mean).T)
    s = z @ z.T / n
    ratio = n * (np.trace(s) - np.linalg.slogdet(s)[1] - p)
    return stats.chi2.sf(n * np.square(z.mean(axis=1)).sum(), p), stats.chi2.sf(ratio, p * (p + 1) / 2)


def population(rng, rows=1500):
    """Return correlated input rows, output rows and biases, with means far from zero."""
    latent = rng.normal(size=(rows, 5))
    lookup = latent @ rng.normal(size=(5, 4)) + 0.3 * rng.normal(size=(rows, 4)) + 2
    head = latent @ rng.normal(size=(5, 3)) + 0.5 * rng.normal(size=(rows, 3)) - 1
    return lookup.astype(np.float32), head.astype(np.float32), (latent[:, 0] + 3).astype(np.float32)


def test_new_rows_have_the_joint_distribution_of_the_old(tmp_path):
    lookup, head, bias = population(np.random.default_rng(0))
    used = np.ones(1500, bool)
    used[1000:] = False
    parts = store(tmp_path, lookup=lookup, head=head, bias=bias)
    new = [draw_rows(parts[name], used, 20_000).reshape(20_000, -1) for name in ("lookup", "head", "bias")]
    old = np.concatenate([lookup, head, bias[:, None]], axis=1)[:1000].astype(np.float64)
    mean, covariance = old.mean(axis=0), np.cov(old.T)
    assert min(p_values(np.concatenate(new, axis=1), mean, covariance)) > 1e-3
    # the test fails with another seed at one end and with the statistics of all rows
    other = draw_rows(parts["head"], used, 20_000, seed=1)
    assert p_values(np.concatenate([new[0], other, new[2]], axis=1), mean, covariance)[1] < 1e-12
    everything = np.concatenate([lookup, head, bias[:, None]], axis=1).astype(np.float64)
    assert min(p_values(np.concatenate(new, axis=1), everything.mean(axis=0), np.cov(everything.T))) < 1e-6


def test_new_rows_equal_the_formula(tmp_path):
    """The oracle sums all rows at once in fp64, with the same independent normal numbers."""
    x = population(np.random.default_rng(2), 1300)[0]
    used = np.random.default_rng(3).random(1300) < 0.8

    def block(old, new):
        return np.random.default_rng([7, new, old]).standard_normal((512, 256), np.float32)

    g = np.block([[block(old, new) for new in range(2)] for old in range(3)])[:1300, :300].astype(np.float64)
    kept = x[used].astype(np.float64)
    wanted = kept.mean(axis=0) + g[used].T @ (kept - kept.mean(axis=0)) / np.sqrt(used.sum() - 1)
    np.testing.assert_allclose(draw_rows(store(tmp_path, x=x)["x"], used, 300, 7), wanted, atol=2e-5)


def test_new_rows_depend_only_on_seed_and_row_number(tmp_path, monkeypatch):
    part = store(tmp_path, x=population(np.random.default_rng(2))[0])["x"]
    used = np.ones(1500, bool)
    many = draw_rows(part, used, 1000)
    np.testing.assert_array_equal(draw_rows(part, used, 10), many[:10])
    assert not np.isclose(draw_rows(part, used, 10, seed=1), many[:10]).any()
    monkeypatch.setitem(new_rows.__globals__, "SUM_BYTES", 1)
    np.testing.assert_array_equal(draw_rows(part, used, 1000), many)


def test_new_rows_copy_single_row_in_use(tmp_path):
    part = store(tmp_path, x=table(30, 4))["x"]
    used = np.arange(30) == 11
    np.testing.assert_allclose(draw_rows(part, used, 3), np.repeat(table(30, 4)[11:12], 3, axis=0), rtol=1e-6)


# the result as transformers loads it


SOME = [("llama", True), ("llama", False), ("phi", False), ("bert", True), ("bart", True), ("t5", False)]
REST = [case for case in product(FAMILIES, (True, False)) if case not in SOME]
CASES = [(*case, "drawn", {}) for case in SOME] + [("llama", False, "drawn", {"dtype": torch.bfloat16, "shard": "3KB"})]
# zero rows, with which engines pad a draft's vocabulary, keep old logits and give new logits of 0
CASES += [("llama", True, "zero", {}), ("phi", False, "zero", {}), ("bert", True, "zero", {})]
BIASES = {"phi": {"lm_head.bias"}, "bert": {"cls.predictions.bias"}, "bart": {"final_logits_bias"}}


@pytest.mark.parametrize(
    ("name", "tied", "rows", "how"),
    CASES + [pytest.param(*case, "drawn", {}, marks=pytest.mark.slow) for case in REST],
)
def test_resize_grows_tables_and_keeps_old_logits(name, tied, rows, how, tmp_path):
    model = type(saved(tmp_path / "a", name, tied, **how)).from_pretrained(tmp_path / "a")
    receipt = resize(tmp_path / "a", tmp_path / "b", multiple_of=64, rows=rows)
    assert (receipt.logit_change, receipt.input_change) == (0, 0)
    assert any("are new and zero: their logits are always 0" in note for note in receipt.notes) == (rows == "zero")
    loaded = type(model).from_pretrained(tmp_path / "b")
    assert same_table(loaded) == tied
    assert loaded.config.get_text_config().vocab_size == 64
    assert [end.weight.shape[0] for end in ends(loaded)] == [64, 64]
    assert logits(loaded).shape[-1] == 64
    assert torch.equal(logits(loaded)[..., :V], logits(model))
    assert bool(logits(loaded)[..., V:].any()) == (rows == "drawn")
    old, new = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert old.keys() == new.keys()
    for part, value in old.items():
        if part in receipt.written:
            made = new[part].reshape(64, -1)
            assert torch.equal(made[:V], value.reshape(V, -1))
            assert ((made[V:] != 0).any(dim=1) == (rows == "drawn")).all()
        else:
            assert torch.equal(new[part], value)
    if (name, tied) in SOME:
        assert {n for n in receipt.written if "bias" in n} == BIASES.get(name, set())
        assert (len(list((tmp_path / "b").glob("*.safetensors"))) > 2) == ("shard" in how)
    if name == "llama":
        assert loaded.generate(torch.tensor([[5, 62, 63]]), max_new_tokens=3, do_sample=False).shape[1] > 3


def test_resize_with_zero_rows_needs_no_row_in_use(tmp_path):
    llama(tmp_path / "a", rows=8, tensors={"model.embed_tokens.weight": table(8, 4) * 0}, width=4)
    with pytest.raises(CheckpointError, match="no row of"):
        resize(tmp_path / "a", tmp_path / "b", vocab=10, force=True)
    resize(tmp_path / "a", tmp_path / "b", vocab=10, rows="zero", force=True)


def test_resize_grows_factored_checkpoint(tmp_path):
    saved(tmp_path / "a", "llama")
    factor(tmp_path / "a", tmp_path / "b", rank=6)
    resize(tmp_path / "b", tmp_path / "c", multiple_of=64)
    old, new = tiewise.hf.load(tmp_path / "b"), tiewise.hf.load(tmp_path / "c")
    assert new.get_output_embeddings().weight.shape == (64, 6)
    assert torch.equal(logits(new)[..., :V], logits(old))


def test_resize_gives_stored_copy_same_rows_by_seed(tmp_path):
    llama(tmp_path / "a", True, head=table())
    made = []
    for to, seed in (("b", 3), ("c", 3), ("d", 4)):
        resize(tmp_path / "a", tmp_path / to, vocab=30, seed=seed)
        made.append(tensors(tmp_path / to))
        assert torch.equal(made[-1]["lm_head.weight"], made[-1]["model.embed_tokens.weight"])
    one, same, other = (each["lm_head.weight"] for each in made)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# rows in use


def test_resize_draws_from_rows_in_use_only(tmp_path):
    """Padding beyond the tokenizer, reserved tokens, zero rows and rows with NaN are excluded."""
    weights = table(40, 8)
    weights[[5, 6]] = [[0], [np.nan]]
    weights[30:] = 1e6
    weights[29] = -1e6
    tokenizer = bpe_tokenizer(29, added=[(29, "<|reserved_special_token_0|>", True)])
    llama(tmp_path / "a", rows=40, tensors={"model.embed_tokens.weight": weights}, tokenizer=tokenizer)
    receipt = resize(tmp_path / "a", tmp_path / "b", vocab=300)
    assert any("drawn like the 27 rows in use" in note for note in receipt.notes)
    new = tensors(tmp_path / "b")["model.embed_tokens.weight"].numpy()
    assert new[:40].tobytes() == weights.tobytes()
    kept = np.delete(weights[:29], [5, 6], axis=0).astype(np.float64)
    assert min(p_values(new[40:].astype(np.float64), kept.mean(axis=0), np.cov(kept.T))) > 1e-3


def test_resize_reports_lengths_of_new_rows(tmp_path):
    weights = table(64, 8)
    llama(tmp_path / "a", False, rows=64, tensors={"model.embed_tokens.weight": weights})
    receipt = resize(tmp_path / "a", tmp_path / "b", vocab=70)
    made = tensors(tmp_path / "b")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        lengths = np.linalg.norm(made[name].numpy()[64:], axis=1)
        low, high = np.quantile(np.linalg.norm(made[name].numpy()[:64].astype(float), axis=1), (0.05, 0.95))
        note = next(note for note in receipt.notes if note.startswith(name))
        assert f"new rows have lengths {lengths.min():.4g} to {lengths.max():.4g};" in note
        assert f"in use have {low:.4g} to {high:.4g}" in note


# numbers of rows


SIZES = [
    ({"vocab": 25}, 25),
    ({"multiple_of": 16}, 32),
    ({"vocab": 33, "multiple_of": 8}, 40),
    ({"tokenizer": "longer"}, 31),
    ({"tokenizer": "longer", "multiple_of": 64}, 64),
    ({"tokenizer": "shorter", "multiple_of": 5}, 25),
    ({"vocab": 17, "multiple_of": 7, "shrink": True}, 21),
    ({"vocab": 20, "shrink": True}, 20),
]


@pytest.mark.parametrize("tied", [True, False])
def test_resize_derives_row_count_from_options(tied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = llama(tmp_path / "a", tied, rows=24, tokenizer=bpe_tokenizer(20))
    for name, words in {"longer": bpe_tokenizer(25, [(30, "<new>", True)]), "shorter": bpe_tokenizer(10)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(words))
    for number, (size, rows) in enumerate(SIZES):
        to = resize(source, tmp_path / str(number), **size).to
        made = {len(value) for name, value in tensors(to).items() if "embed_tokens" in name or "lm_head" in name}
        assert made == {config_of(to)["vocab_size"]} == {rows}
    whole, cut = tensors(source), tensors(to)
    for name in whole:
        assert torch.equal(cut[name], whole[name][:20] if len(whole[name]) == 24 else whole[name])


def test_resize_refuses_to_drop_ids_that_configs_name(tmp_path):
    made = {"image_token_id": 22, "eos_token_id": [2, 23]}
    source = llama(tmp_path / "a", config=made, files={"generation_config.json": {"pad_token_id": 21}})
    with pytest.raises(CheckpointError, match="name token 23"):
        resize(source, tmp_path / "b", vocab=23, shrink=True)
    config = config_of(source)
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 2, "image_token_id": 200}))
    with pytest.raises(CheckpointError, match="name token 21"):
        resize(source, tmp_path / "b", vocab=21, shrink=True)
    resize(source, tmp_path / "b", vocab=22, shrink=True)


def test_resize_refuses_to_drop_the_padding_row_of_a_boundary(tmp_path):
    source = llama(tmp_path / "a", True, config={"tiewise_boundary": "tied+pad=21"})
    with pytest.raises(CheckpointError, match="name token 21; choose 22 or more"):
        resize(source, tmp_path / "b", vocab=21, shrink=True)
    resize(source, tmp_path / "b", vocab=22, shrink=True)
    assert config_of(tmp_path / "b")["tiewise_boundary"] == "tied+pad=21"


def test_resize_grows_encoder_without_head(tmp_path):
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "hidden_size": 16}
    hf.BertModel(hf.BertConfig(vocab_size=60, **small)).save_pretrained(tmp_path / "a")
    resize(tmp_path / "a", tmp_path / "b", multiple_of=64)
    loaded = hf.BertModel.from_pretrained(tmp_path / "b")
    assert loaded.get_input_embeddings().weight.shape == (64, 16)


def test_resize_refuses_other_table_with_same_row_count_without_force(tmp_path):
    name = "model.ngrams.weight"
    llama(tmp_path / "a", tensors={name: table(24, 4), "model.layers.0.up_proj.weight": table(24, 4)})
    with pytest.raises(CheckpointError, match=f"{name} has 24 rows too"):
        resize(tmp_path / "a", tmp_path / "b", vocab=32)
    receipt = resize(tmp_path / "a", tmp_path / "b", vocab=32, force=True)
    assert any(f"{name} has 24 rows too" in note for note in receipt.notes)


def test_resize_updates_every_config_level_with_vocab_size(tmp_path):
    config = {"model_type": "x", "vocab_size": 24, "type_vocab_size": 24, "decoder_vocab_size": 24}
    config |= {"text_config": {"vocab_size": 24, "hidden_size": 8}, "audio_config": {"vocab_size": 99}}
    write_checkpoint(tmp_path / "a", config, {"model.embed_tokens.weight": table(), "lm_head.weight": table(seed=1)})
    resize(tmp_path / "a", tmp_path / "b", vocab=32)
    wanted = config | {"vocab_size": 32, "decoder_vocab_size": 32, "text_config": {"vocab_size": 32, "hidden_size": 8}}
    assert config_of(tmp_path / "b") == wanted


def test_resize_accepts_single_file_without_config(tmp_path):
    llama(tmp_path / "a", False)
    (tmp_path / "a" / "config.json").unlink()
    receipt = resize(tmp_path / "a" / "model.safetensors", tmp_path / "b", vocab=30)
    assert any("no config.json" in note for note in receipt.notes)
    assert {value.shape[0] for name, value in tensors(tmp_path / "b").items() if value.dim() == 2} == {30, 8}


def test_resize_refuses_to_drop_ids_that_generation_config_lists(tmp_path):
    ids = {"suppress_tokens": [3, 20], "forced_decoder_ids": [[1, 18]], "codebook_pad_token_id": 23}
    path = llama(tmp_path / "a", True, files={"generation_config.json": ids})
    with pytest.raises(CheckpointError, match="name token 20; choose 21 or more"):
        resize(path, tmp_path / "b", vocab=20, shrink=True)
    resize(path, tmp_path / "b", vocab=21, shrink=True)
