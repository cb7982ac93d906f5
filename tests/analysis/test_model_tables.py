"""Both ends of a checkpoint: what each meets, which tokens say nothing, and whole models beside each other."""

import numpy as np
import pytest
import scipy.linalg
from tiny_tables import LLAMA, factored, opt, untied, write

from tiewise.analysis.model_tables import StoredTable, ends_of, views_of
from tiewise.analysis.table_maps import LARGE, AlignSettings
from tiewise.core.errors import CheckpointError
from tiewise.inspection.sections.alignment import alignment_of
from tiewise.inspection.sections.which_end import across

ROWS, WIDTH = 600, 12
IN, OUT = "model.embed_tokens.weight", "lm_head.weight"
QUICK = AlignSettings(permutations=1, sampled=300)


def checkpoint(where, tensors, texts=(), **config):
    """Write a Llama-like folder: tensors, config, and a vocabulary of the given texts."""
    rows, width = tensors[IN].shape
    sizes = {"vocab_size": rows, "hidden_size": width, "tie_word_embeddings": OUT not in tensors}
    return write(
        where, {k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}, LLAMA | sizes | config, texts
    )


def gaussian(seed, rows=ROWS, width=WIDTH):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def rotation(seed, width=WIDTH):
    return scipy.linalg.qr(gaussian(seed, width, width).astype(float))[0]


def words(order):
    return [f"w{number}" for number in order]


def test_a_tied_model_has_one_table_and_nothing_to_align(tmp_path):
    folder = checkpoint(tmp_path / "m", {IN: gaussian(0)})
    ends = ends_of(folder)
    assert ends.tied
    assert ends.shared is ends.input
    assert [name for name, _ in ends.tables] == ["table"]
    found = alignment_of(folder)
    assert (found.answer, found.quantities) == ("they are one table", ())
    assert found.notes == (f"input and output are {IN}",)


def test_a_head_with_the_same_values_is_a_tied_model(tmp_path):
    assert ends_of(checkpoint(tmp_path / "m", {IN: gaussian(0), OUT: gaussian(0)})).tied


def test_two_tables_are_aligned_without_rows_that_say_nothing(tmp_path):
    table, turned = gaussian(0), gaussian(0) @ rotation(1)
    table[5] = 0
    table[[7, 9]] = table[11]
    turned[13] = np.nan
    folder = checkpoint(tmp_path / "m", {IN: table, OUT: turned})
    ends = ends_of(folder)
    assert not ends.tied
    assert ends.shared is None
    assert ends.names == (IN, OUT)
    assert np.nonzero(ends.unusable())[0].tolist() == [5, 7, 9, 11, 13]
    found = alignment_of(folder, QUICK)
    assert (found["tokens left out"].value, found["tokens compared"].value) == (5, ROWS - 5)
    assert found["after the best rotation"].value > 0.9999
    assert abs(found["as they stand"].value) < 0.2
    assert found.answer.startswith("more than by chance after the best rotation")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_factored_table_is_met_behind_its_maps(tmp_path, scale):
    """The oracle is the product, written out: E = T Aᵀ · scale and U = T B."""
    table, into, out = gaussian(0, width=4), gaussian(1, WIDTH, 4), gaussian(2, 4, WIDTH)
    spec = "factored:4" + f"+input_scale={scale:g}" * (scale != 1)
    ends = ends_of(factored(tmp_path / "m", table, into, out, tiewise_boundary=spec))
    wide = table.astype(float)
    ids = np.array([3, 3, 500, 0])
    assert np.allclose(ends.input.take(ids), wide[ids] @ into.T.astype(float) * scale, rtol=1e-12, atol=1e-12)
    assert np.allclose(ends.output.read(10, 20), wide[10:20] @ out.astype(float), rtol=1e-12, atol=1e-12)
    assert ends.input.take(ids, np.float32).dtype == np.float32
    assert not ends.tied
    assert (ends.shared.width, ends.input.width) == (4, WIDTH)
    assert "4 wide" in ends.notes[0]


def test_which_end_a_tied_table_came_from_is_found_by_text(tmp_path):
    """The tied table is the other's output table, rotated, with its rows in another order and another vocabulary."""
    first, second = gaussian(0), gaussian(1)
    order = np.random.default_rng(2).permutation(ROWS)[:500]
    turned = second[order] @ rotation(3)
    made = turned + 0.5 * gaussian(4, 500)
    planted = (turned * made).sum(1) / np.linalg.norm(turned, axis=1) / np.linalg.norm(made, axis=1)
    two = checkpoint(tmp_path / "two", {IN: first, OUT: second}, words(range(ROWS)))
    one = checkpoint(tmp_path / "one", {IN: made}, words(order))
    for first_is_tied in (True, False):
        models, labels = ((one, two), ("a", "b")) if first_is_tied else ((two, one), ("b", "a"))
        found = across(*models, labels, QUICK)
        assert found.answer.startswith("the output of b after the best rotation")
        assert found["tokens in both vocabularies"].value == 500
        apart = ("after the best rotation", "after the best linear map", "by nearest neighbours in common")
        assert all(found[f"output − input, {name}"].low > 0 for name in apart)
        scores = {q.of: q.value for q in found.quantities if q.name == apart[0]}
        pairs = {end: f"a table – b {end}" if first_is_tied else f"b {end} – a table" for end in ("input", "output")}
        assert abs(scores[pairs["input"]]) < 0.15
        assert scores[pairs["output"]] == pytest.approx(planted.mean(), abs=0.03)


def test_two_models_of_one_kind_ask_no_question_which_is_closer(tmp_path):
    two = checkpoint(tmp_path / "two", {IN: gaussian(0), OUT: gaussian(1)}, words(range(ROWS)))
    one = checkpoint(tmp_path / "one", {IN: gaussian(2)}, words(range(ROWS)))
    for model, tables, kind in ((two, 4, "two tables"), (one, 1, "one table")):
        found = across(model, model, ("a", "b"), QUICK)
        assert found.answer == f"no question here: both models have {kind}"
        same = {q.of: q.value for q in found.quantities if q.name == "as they stand"}
        assert len(same) == tables
        assert not any(q.name.startswith("output − input") for q in found.quantities)
    same = {q.of: q.value for q in across(two, two, ("a", "b"), QUICK).quantities if q.name == "as they stand"}
    assert same["a input – b input"] == pytest.approx(1)
    assert abs(same["a input – b output"]) < 0.2


def test_tables_of_different_width_say_which_maps_are_left_out(tmp_path):
    wide = checkpoint(tmp_path / "wide", {IN: gaussian(0)}, words(range(ROWS)))
    narrow = checkpoint(tmp_path / "narrow", {IN: gaussian(1, width=7)}, words(range(ROWS)))
    found = across(wide, narrow, settings=QUICK)
    assert "as they stand" not in {q.name for q in found.quantities}
    assert f"no identity map: widths {WIDTH} and 7 differ" in found.notes


def test_what_cannot_be_held_side_by_side_is_one_line(tmp_path):
    one = checkpoint(tmp_path / "one", {IN: gaussian(0)}, words(range(ROWS)))
    far = checkpoint(tmp_path / "far", {IN: gaussian(1)}, words(range(ROWS - 9, 2 * ROWS - 9)))
    unnamed = checkpoint(tmp_path / "unnamed", {IN: gaussian(1)})
    headless = checkpoint(tmp_path / "a", {IN: gaussian(0)}, architectures=["LlamaForSequenceClassification"])
    lost = checkpoint(tmp_path / "b", {IN: gaussian(0)}, tie_word_embeddings=False)
    for ask, said in (
        (lambda: across(one, far, settings=QUICK), "600 and 600 rows share 9 tokens, 9 usable; at least 16"),
        (lambda: across(one, unnamed, settings=QUICK), r"no tokenizer\.json"),
        (lambda: alignment_of(headless), "without an output head; give one with a token head"),
        (lambda: alignment_of(lost), "says untied and stores no head"),
    ):
        with pytest.raises(CheckpointError, match=said):
            ask()


def test_two_tables_under_a_tied_config_are_noted(tmp_path):
    ends = ends_of(checkpoint(tmp_path / "m", {IN: gaussian(0), OUT: gaussian(1)}, tie_word_embeddings=True))
    assert not ends.tied
    assert "the config says tied" in ends.notes[0]


def test_large_tables_are_permuted_once():
    assert AlignSettings.sized(1000, 64, 5) == AlignSettings(seed=5)
    assert AlignSettings.sized(int(LARGE / 1024**2) + 1, 1024).permutations == 1


@pytest.mark.parametrize("model", [factored, opt])
def test_a_table_before_and_after_its_maps(model, tmp_path):
    table, into, out = (gaussian(seed, *shape) for seed, shape in enumerate(((30, 4), (10, 4), (4, 10))))
    views, notes = views_of(model(tmp_path / "m", table, into, out))
    assert list(views) == ["both ends", "input after its map", "output after its map"]
    assert [isinstance(view, StoredTable) for view in views.values()] == [True, False, False]
    for view, dense in zip(views.values(), (table, table @ into.T, table @ out), strict=True):
        assert view.read(0, 30) == pytest.approx(dense.astype(float), abs=1e-5)
        assert view.take([29, 1]) == pytest.approx(dense[[29, 1]].astype(float), abs=1e-5)
    assert any(("left out" if model is opt else "4 wide") in note for note in notes)


def test_two_tables_are_two_views(tmp_path):
    views, notes = views_of(untied(tmp_path / "m", gaussian(0, 20, 6), gaussian(1, 20, 6)))
    assert (list(views), notes) == (["input", "output"], ())
