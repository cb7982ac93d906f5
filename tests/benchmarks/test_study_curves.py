"""Tests of compact curves: a study's folder made by hand, and the refusal of large files."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from benchmarks.study_curves import RunCurve

from benchmarks import atlas, study_curves, tuned_rates
from tiewise.training.results import CurvePoint

CURVE = RunCurve("width=32", "tied", 1, 20, (10, 20), (5.1235, 4.9))


def run_of(arm, seed, losses, selected):
    """Return what a run records of its curve; a loss of None is a point of an older version."""
    points = [CurvePoint(10 * place, 640 * place, tune_nll=loss) for place, loss in enumerate(losses, 1)]
    return SimpleNamespace(arm=arm, seed=seed, steps=30, curve=points, selected_step=selected)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return the folder of a study with two finished cells and one that is not finished."""
    runs = {
        "width=64": [run_of("tied", 1, [5.123456, 4.9], 20), run_of("untied", 1, [None, None], None)],
        "width=32": [run_of("tied", 1, [6.0, 5.5, 5.75], None)],
        "width=16": None,
    }
    for cell, of_cell in runs.items():
        (tmp_path / "mine" / cell).mkdir(parents=True)
        if of_cell is not None:
            (tmp_path / "mine" / cell / "results.json").write_text(json.dumps(cell))
    monkeypatch.setattr(
        study_curves, "Comparison", SimpleNamespace(from_dict=lambda cell: SimpleNamespace(runs=runs[cell]))
    )
    return tmp_path / "mine"


def test_curves_of_study_are_rounded_and_ordered_by_cell(study):
    assert study_curves.collect(study) == [
        RunCurve("width=32", "tied", 1, 30, (10, 20, 30), (6.0, 5.5, 5.75)),
        RunCurve("width=64", "tied", 1, 20, (10, 20), (5.1235, 4.9)),
    ]


def test_file_of_curves_names_steps_once_and_is_read_back(tmp_path):
    curves = [CURVE, replace(CURVE, seed=2), replace(CURVE, steps=(5,), tune_nll=(float("nan"),), arm="tied+alpha=½")]
    path = tmp_path / "new" / "mine.jsonl"
    study_curves.write(curves, path)
    first, *_ = lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5  # three runs, and steps twice
    assert json.loads(first) == {"steps": [10, 20]}
    assert json.loads(lines[1]) == {
        "cell": "width=32", "arm": "tied", "seed": 1, "selected": 20, "tune_nll": [5.1235, 4.9],
    }  # fmt: skip
    assert repr(study_curves.read(path)) == repr(curves)


def test_curves_larger_than_limit_are_refused(tmp_path):
    many = [replace(CURVE, seed=seed) for seed in range(3000)]
    with pytest.raises(ValueError, match=r"mine.jsonl would have 2\d\d,\d+ bytes, more than 200,000"):
        study_curves.write(many, tmp_path / "mine.jsonl")
    assert not (tmp_path / "mine.jsonl").exists()


def test_atlas_writes_curves_of_each_study(study, tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "ATLAS", tmp_path / "atlas.csv")
    monkeypatch.setattr(atlas, "read_rows", lambda folder: [{"study": folder.name}])
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(tuned_rates, "replace_rows", lambda studies: None)  # the results here have no setting
    atlas.main([study])
    assert study_curves.read(tmp_path / "curves" / "mine.jsonl") == study_curves.collect(study)
