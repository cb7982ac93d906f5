"""Input and output tables of small checkpoints, against tables multiplied by their maps with numpy."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_tables import factored, gaussian, llama, opt

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.inspection.sections.alignment import alignment_of
from tiewise.inspection.sections.tokens import tokens_of
from tiewise.inspection.tables.model_tables import StoredTable, ends_of, views_of

ROWS, WIDTH = 600, 12
IN, OUT = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("head", "config", "ends", "note"),
    [
        (None, {}, ["table"], ()),
        (0, {}, ["table"], ()),  # equal values: a tied model
        (1, {}, ["input", "output"], ()),
        (1, {"tie_word_embeddings": True}, ["input", "output"], ("the config says tied",)),
    ],
)
def test_ends_of_reports_one_table_or_two(head, config, ends, note, tmp_path):
    head = None if head is None else gaussian(ROWS, WIDTH, head)
    found = ends_of(llama(tmp_path / "m", gaussian(ROWS, WIDTH), head, **config))
    assert [name for name, _ in found.tables] == ends
    assert found.tied == (found.shared is found.input) == (len(ends) == 1)
    assert found.names == (IN, IN if found.tied else OUT)
    assert tuple(said[: len(begin)] for said, begin in zip(found.notes, note, strict=True)) == note


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ends_of_multiplies_a_factored_table_by_its_maps(tmp_path, scale):
    """The oracle is the product E = T Aᵀ · scale and U = T B."""
    table, into, out = gaussian(ROWS, 4), gaussian(WIDTH, 4, 1), gaussian(4, WIDTH, 2)
    spec = "factored:4" + f"+input_scale={scale:g}" * (scale != 1)
    ends = ends_of(factored(tmp_path / "m", table, into, out, tiewise_boundary=spec))
    wide = table.astype(float)
    ids = np.array([3, 3, 500, 0])
    assert np.allclose(ends.input.take(ids), wide[ids] @ into.T.astype(float) * scale, rtol=1e-12, atol=1e-12)
    assert np.allclose(ends.output.read(10, 20), wide[10:20] @ out.astype(float), rtol=1e-12, atol=1e-12)
    assert ends.input.take(ids, np.float32).dtype == np.float32
    assert not ends.tied
    assert (ends.shared.width, ends.input.width) == (4, WIDTH)


def test_ends_of_leaves_out_and_names_the_projections_of_opt(tmp_path):
    ends = ends_of(opt(tmp_path / "m", gaussian(30, 4), gaussian(10, 4, 1), gaussian(4, 10, 2)))
    assert ends.input.width == 4
    assert ends.notes == (
        "model.decoder.project_in.weight stands between a table and the body: tables are taken as stored",
    )


@pytest.mark.parametrize("model", [factored, opt])
def test_views_of_returns_a_table_before_and_after_its_maps(model, tmp_path):
    table, into, out = (gaussian(*shape, seed) for seed, shape in enumerate(((30, 4), (10, 4), (4, 10))))
    views, notes = views_of(model(tmp_path / "m", table, into, out))
    assert list(views) == ["both ends", "input after its map", "output after its map"]
    assert [isinstance(view, StoredTable) for view in views.values()] == [True, False, False]
    for view, dense in zip(views.values(), (table, table @ into.T, table @ out), strict=True):
        assert view.read(0, 30) == pytest.approx(dense.astype(float), abs=1e-5)
        assert view.take([29, 1]) == pytest.approx(dense[[29, 1]].astype(float), abs=1e-5)
    assert any(("left out" if model is opt else "4 wide") in note for note in notes)


def test_views_of_includes_mtp_tables_and_names_omitted_per_layer_tables(tmp_path):
    model = llama(tmp_path / "m", gaussian(ROWS, WIDTH), num_hidden_layers=1)
    held = load_file(model.path / "model.safetensors")
    held["model.layers.1.embed_tokens.weight"] = gaussian(ROWS, WIDTH, 3)
    held["model.embed_tokens_per_layer.weight"] = gaussian(ROWS, 2 * WIDTH, 4)
    save_file(held, model.path / "model.safetensors")
    views, notes = views_of(open_folder(model.path))
    assert list(views) == ["both ends", "MTP input model.layers.1.embed_tokens"]
    assert np.array_equal(views["MTP input model.layers.1.embed_tokens"].read(0, 9), gaussian(ROWS, WIDTH, 3)[:9])
    assert notes == ("token ids index more, which is left out: model.embed_tokens_per_layer.weight (per-layer table)",)
    for section in (alignment_of, tokens_of):
        assert any("model.embed_tokens_per_layer.weight" in note for note in section(open_folder(model.path)).notes)
