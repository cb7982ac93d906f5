"""Tests of study grids: cells, rehearsals, committed grids, and refusals that name the key."""

import pytest
import yaml

from tiewise.core.errors import RunError
from tiewise.training.study import grid as module
from tiewise.training.study.grid import MOST, StudyGrid

COMMITTED = sorted(path.stem for path in module._HERE.glob("*.yaml"))
RUNS = 170  # limit for a committed grid: more runs take over an hour on two cores


def grid(settings=None, axes=None, **more):
    return {"settings": {"arms": ["untied", "tied"], **(settings or {})}, "axes": axes or {"width": [32, 64]}, **more}


def test_cells_list_all_combinations_with_last_axis_fastest():
    made = StudyGrid.of(grid(axes={"width": [32, 64], "tokenizer": ["bytes", "bpe:512"]}), "g.yaml")
    cells = made.cells()
    assert [(s.width, s.tokenizer) for s in cells.values()] == [
        (32, "bytes"), (32, "bpe:512"), (64, "bytes"), (64, "bpe:512"),
    ]  # fmt: skip
    assert list(cells)[1] == "width=32-tokenizer=bpe-512"
    assert all(s.arms == ("untied", "tied") for s in cells.values())


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (grid(axis={}), "unknown key 'axis' in g.yaml; a grid has asks, settings and axes"),
        ({"settings": {}}, "axes in g.yaml cannot be read; write axes: {width: [32, 64, 128]}"),
        (grid(axes=[1]), "axes in g.yaml cannot be read"),
        (grid(asks=["a"]), "asks in g.yaml cannot be read"),
        (grid(axes={"width": 32}), "axis width in g.yaml has no list of values; write width: [1, 2], say"),
        (grid(axes={"width": []}), "axis width in g.yaml has no list of values"),
        (grid(axes={"width": [32, 64, 32]}), "axis width in g.yaml has a value twice; name each once"),
        (grid({"width": 8}), "width in g.yaml is a setting and an axis; leave one of the two out"),
        (grid(axes={"widht": [1, 2]}), "unknown setting 'widht' in g.yaml"),
        (grid(axes={"width": [32, "wide"]}), "cell width=wide: width in g.yaml must be a whole number, not 'wide'"),
        (grid(axes={"width": [32, 33]}), "cell width=33: 4 heads do not divide width 33; choose heads that do"),
        (grid({"arms": ["tied"]}), "cell width=32 has one arm; write arms: [untied, tied], say"),
        (grid(axes={"seed": [1, 2]}), "seed in g.yaml: no grid has it; use seeds: N"),
        (grid({"minutes": 3}), "minutes in g.yaml: no grid has it; use steps"),
        (grid({"recipe": "none"}), "no recipe 'none'"),
        (grid(axes={"steps": [*range(40)], "width": [*range(40)]}), f"1,600 cells; leave values out: {MOST:,}"),
    ],
)  # fmt: skip
def test_study_grid_refuses_invalid_records(record, says):
    with pytest.raises(RunError) as refused:
        StudyGrid.of(record, "g.yaml")
    assert says in str(refused.value)


def test_quick_grid_keeps_first_and_last_value_of_every_axis():
    axes = {"width": [32, 64, 128], "steps": [10, 20, 90], "seeds": [3]}
    made = StudyGrid.of(grid({"tune": True}, axes), "g").quick()
    assert made.axes == {"width": [32, 128], "steps": [15, 30], "seeds": [2]}
    assert "tune" not in made.settings
    assert {(s.seeds, s.steps) for s in made.cells().values()} == {(2, 15), (2, 30)}


@pytest.mark.parametrize(
    ("arm", "steps", "rehearsed"),
    [
        ("tied+untie_at=200", 600, "tied+untie_at=10"),
        ("untied+bias+tie_at=599", 600, "untied+bias+tie_at=29"),
        ("tied+untie_at=1", 600, "tied+untie_at=1"),
        ("tied+untie_at=12", 20, "tied+untie_at=18"),
        ("tied+alpha=200", 600, "tied+alpha=200"),
    ],
)
def test_quick_grid_changes_tying_at_same_fraction_of_training(arm, steps, rehearsed):
    made = StudyGrid.of(grid({"arms": ["untied", arm], "steps": steps}), "g").quick()
    assert made.settings["arms"] == ["untied", rehearsed]
    assert all(settings.steps == 30 for settings in made.cells().values())


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_grids_state_question_and_fit_run_budget(name):
    made = StudyGrid.named(name)
    assert made.asks.endswith("?")
    assert (module._HERE / f"{name}.yaml").read_text().startswith("# ")
    cells = made.cells()
    assert sum(len(s.arms) * s.seeds for s in cells.values()) <= RUNS
    assert all(s.seeds >= 3 for s in cells.values())  # a confidence interval needs three seeds
    made.quick().cells()
    assert yaml.safe_load((module._HERE / f"{name}.yaml").read_text())["axes"] == made.axes
