"""The direct path of a small checkpoint and the bigrams of a text, against dense numpy."""

import numpy as np
import pytest
from scipy.special import softmax
from tests.inspection.tables.tiny_tables import LLAMA, write_folder
from tokenizers import Tokenizer, models

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.measurement import plain
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.sections.bigrams import Fits, bigrams_of
from tiewise.inspection.sections.direct_path import direct_path_of
from tiewise.inspection.tables.bigram_counts import Chain, irreversibility
from tiewise.inspection.tables.bigram_paths import split
from tiewise.inspection.tables.token_texts import read_as

V, E = 50, 6
PAIR = ("w3", "w7")


def checkpoint(path, tied, words=V, head=True):
    """Write a Llama's ends in fp64 with a tokenizer; return (folder, dense logits [V, V])."""
    generator = np.random.default_rng(0)
    table, other = generator.normal(size=(2, V, E))
    gain = generator.normal(size=E)
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": gain}
    tensors |= {} if tied or not head else {"lm_head.weight": other}
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((4, E))
    config = LLAMA | {"vocab_size": V, "hidden_size": E, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6}
    rows = table / np.sqrt((table**2).mean(1, keepdims=True) + 1e-6) * gain
    return write_folder(path, tensors, config, [f"w{i}" for i in range(words)]), rows @ (table if tied else other).T


def asymmetry_ratio(m):
    return ((m - m.T) ** 2).sum() / (m**2).sum()


@pytest.mark.parametrize("tied", [True, False])
def test_direct_path_of_matches_dense_numpy(tied, tmp_path):
    folder, m = checkpoint(tmp_path, tied)
    told = []
    with listen_to_progress(lambda *said: told.append(said)):
        found = direct_path_of(folder, [PAIR])
    middle = np.eye(V) - 1 / V
    values = np.linalg.eigvalsh((m + m.T) / 2)
    values = values[abs(values) > 1e-10 * np.linalg.norm(m)]
    expected = {
        "asymmetry as the model applies it": asymmetry_ratio(m),
        "asymmetry less row and column means": asymmetry_ratio(middle @ m @ middle),
        "‖M‖² as the model applies it": (m**2).sum(),
        "energy of eigenvalues below 0": (values[values < 0] ** 2).sum() / (values**2).sum(),
        "eigenvalues above 0": (values > 0).sum(),
        "eigenvalues below 0": (values < 0).sum(),
        "largest eigenvalue": values[-1],
        "smallest eigenvalue": values[0],
        "own token first": (m.argmax(1) == np.arange(V)).mean(),
        "mean of the diagonal": m.diagonal().mean(),
    }
    assert {name: found[name].value for name in expected} == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert (found["asymmetry by gain and scales alone"].value == 0) == tied
    p = softmax(m, axis=1)
    for order, (i, j) in {"w3 → w7": (3, 7), "w7 → w3": (7, 3)}.items():
        assert found[order].value == pytest.approx(m[i, j], abs=1e-10)
        assert found[f"p({order})"].value == pytest.approx(p[i, j], abs=1e-10)
        assert found[f"p({order})"].why == f"rank {(m[i] > m[i, j]).sum() + 1}"
    i, j = np.unravel_index(np.argmax(m - m.T), m.shape)
    (pairs,) = found.listings
    assert pairs.name == f"Most asymmetric pairs among {V} tokens"
    assert pairs.rows[0] == (f"w{i} → w{j}", plain(m[i, j], 3), plain(m[j, i], 3))
    assert found.notes[:2] == (f"{V} tokens, {E} wide", "rms norm applied, eps 1e-06")
    assert found.answer.startswith("one table scores") == tied
    assert {done <= total for _, done, total in told} == {True}


def test_direct_path_of_refuses_unusable_pairs_and_a_missing_head(tmp_path):
    folder, _ = checkpoint(tmp_path, True, words=60)
    for pair, said in (
        (("w1", "w55"), "'w55' is token 55, its tables have 50 rows"),
        (("w1 w2", "w3"), "not one token"),
    ):
        with pytest.raises(DataError, match=said):
            direct_path_of(folder, [pair])
    (tmp_path / "tokenizer.json").unlink()
    assert direct_path_of(open_folder(tmp_path)).listings[0].rows[0][0].startswith("#")
    checkpoint(tmp_path, False, head=False)
    with pytest.raises(CheckpointError, match="stores no head"):
        direct_path_of(open_folder(tmp_path))


def test_read_as_returns_the_text_of_a_token_or_its_id(tmp_path):
    tokenizer = Tokenizer(models.BPE({"▁York": 0, "x": 1}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_as(open_folder(tmp_path), [0, 1, 9]) == (" York", "x", "#9")


def text(length=3000):
    generator = np.random.default_rng(2)
    return generator.choice(40, length, p=generator.dirichlet(np.ones(40)))


def test_bigrams_of_matches_dense_numpy(tmp_path):
    folder, m = checkpoint(tmp_path, False)
    ids = text()
    fits = Fits(frequent_count=8, starts=1, steps=60)
    found = bigrams_of(ids, folder, [PAIR], fits)
    chain, whole = Chain.of(ids, V), irreversibility(ids, V)
    log_p = np.log(softmax(m, axis=1))
    assert found["own direct path pays"].value == pytest.approx(-log_p[ids, np.roll(ids, -1)].mean(), abs=1e-10)
    assert np.isnan(found["own direct path pays"].low)  # all pairs were used, so there is no interval
    shares = np.bincount(ids)[np.bincount(ids) > 0] / len(ids)
    assert found["a bias alone pays"].value == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-12)
    assert found["entropy behind a known token"].value == chain.entropy
    assert (found["irreversibility"].value, found["irreversibility"].low) == (whole.heldout.value, whole.heldout.low)
    assert (found["… as counted"].value, found["… as counted"].chance) == (whole.plug_in, whole.coin)
    assert found.answer == "no cost of word order was detected in this text"
    frequent_count = np.argsort(-np.bincount(ids, minlength=V), kind="stable")[:8]
    states = np.full(V, 8)
    states[frequent_count] = np.arange(8)
    parts = split(Chain.of(states[ids], 9), E, 1, 60)
    assert found["frequent tokens: best tied path"].value == parts.tied
    stacks = {stack.bar: dict(stack.parts) for stack in found.stacks}
    assert sum(stacks[f"best tied, width {E}"].values()) == pytest.approx(parts.tied, abs=0.02)  # none is below 0
    assert sum(stacks[""].values()) == pytest.approx(found["frequent tokens: own path"].value)
    (pairs,) = found.listings
    there, back = (sum((ids == a) & (np.roll(ids, -1) == b)) for a, b in ((3, 7), (7, 3)))
    assert pairs.rows[0][:3] == ("w3 → w7", str(there), str(back))
    grids = {grid.name: grid for grid in found.grids}
    assert grids["Bigrams"].top == grids["Direct path"].top
    unseen = sum(np.isnan(value) for row in grids["Bigrams"].values for value in row)
    assert unseen > 0 == sum(np.isnan(value) for row in grids["Direct path"].values for value in row)


def test_bigrams_of_a_directed_text_cost_a_symmetric_path(tmp_path):
    folder, _ = checkpoint(tmp_path, True)
    turning = np.where(np.random.default_rng(0).random(3000) < 0.1, text(), np.arange(3000) % 9)
    assert bigrams_of(turning, folder, fits=Fits(frequent_count=4, steps=5)).answer.startswith(
        "without layers, one table costs at least"
    )


def test_bigrams_of_reuses_fits_only_for_the_same_text(tmp_path):
    (one, _), (two, _) = checkpoint(tmp_path / "a", True), checkpoint(tmp_path / "b", False)
    fits, fitted = Fits(frequent_count=5, steps=20), {}
    first = bigrams_of(text(), one, fits=fits, fitted=fitted)
    (key,) = fitted
    second = bigrams_of(text(), two, fits=fits, fitted=fitted)
    assert list(fitted) == [key]
    name = "frequent tokens: best tied path"
    assert second[name] == first[name]
    assert second["frequent tokens: own path"] != first["frequent tokens: own path"]
    bigrams_of(text(2999), two, fits=fits, fitted=fitted)
    assert len(fitted) == 2


def test_bigrams_of_refuses_short_texts_and_tokens_outside_the_vocabulary(tmp_path):
    folder, _ = checkpoint(tmp_path, True)
    with pytest.raises(DataError, match="a text of 999 tokens; bigrams need 1,000 or more"):
        bigrams_of(text(999), folder)
    with pytest.raises(DataError, match="outside a vocabulary of 50"):
        bigrams_of(text() + 45, folder)
    with pytest.raises(DataError, match="keep 2 to 2,047"):
        bigrams_of(text(), folder, fits=Fits(frequent_count=2048))
