"""Test `tiewise sweep`: its cells, table and page, resuming after interruptions, and the command of each row."""

import csv
import json
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from cli_tiny import assert_refused, write_text
from launched import launch, training_advances, wait_for_exit, wait_until

from tiewise.core.errors import RunError
from tiewise.core.estimates import detectable_difference
from tiewise.lab import studies
from tiewise.training.compare import Display
from tiewise.training.study.grid import StudyGrid

SIZES = {"width": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4, "steps": 12}
SMALL = {**SIZES, "learning_rate": 0.004, "tokenizer": "bytes"}


@pytest.fixture
def grid(tmp_path):
    """Return a function that writes a grid of two cells with two arms and two seeds; keywords are settings."""

    def write_grid(axes=None, **more):
        settings = {**SMALL, "text": [write_text(tmp_path)], "arms": ["untied", "tied"], "seeds": 2, **more}
        axes = axes or {"train_tokens": [1000, 4000]}
        fixed = {name: value for name, value in settings.items() if name not in axes}
        (tmp_path / "g.yaml").write_text(yaml.safe_dump({"asks": "Why?", "settings": fixed, "axes": axes}))
        return "g.yaml"

    return write_grid


def rows(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_sweep_writes_one_comparison_and_one_row_per_cell(tiewise, grid, tmp_path):
    result = tiewise("sweep", grid(), "--out=s", "--jobs=1")
    assert result.code == 0, result.err
    assert "cell 2/2 train_tokens=4000" in result.err
    assert result.out.startswith("tied against untied")
    assert "s/report.html" in result.out
    table_rows = rows(tmp_path / "s")
    assert [(row["train_tokens"], row["contrast"], row["tokens"]) for row in table_rows] == [
        ("1000", "tied − untied", "992"), ("4000", "tied − untied", "4000"),
    ]  # fmt: skip
    for row in table_rows:
        record = json.loads((tmp_path / "s" / row["cell"] / "results.json").read_text())
        (d,) = [d for d in record["differences"] if d["arm"] == "tied" and d["metric"] == "heldout_nll"]
        assert [float(row[name]) for name in ("heldout", "heldout_low", "heldout_high")] == [
            d[name] for name in ("mean", "low", "high")
        ]
        # neither row is significant, so Holm's method tests each of the two at half the level of one comparison
        assert row["sign"] == "0"
        assert float(row["detectable"]) == pytest.approx(
            d["detectable"] * detectable_difference(1, 0.025) / detectable_difference(1, 0.05)
        )
    assert "Why?" in (tmp_path / "s" / "report.html").read_text()

    assert_refused(
        tiewise("sweep", "g.yaml", "--out=s"), "s holds a study already; add --resume to finish it, --overwrite"
    )
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("result.json")}
    again = tiewise("sweep", "g.yaml", "--out=s", "--resume", "--json")  # the same command, resumed
    assert len(json.loads(again.out)["rows"]) == 2
    grid({"train_tokens": [1000, 2000]})
    assert_refused(
        tiewise("sweep", "g.yaml", "--out=s", "--resume"), "s holds a study of another grid; give only --out s"
    )
    again = tiewise("sweep", "--out=s", "--resume", "--json")
    assert len(json.loads(again.out)["rows"]) == 2
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert rows(tmp_path / "s") == table_rows

    grid_text = (tmp_path / "s" / "grid.yaml").read_text()
    for old, new in (("- tied", "- factored:4"), ("seeds: 2", "seeds: 3")):
        assert old in grid_text
        (tmp_path / "s" / "grid.yaml").write_text(grid_text.replace(old, new))
        assert_refused(tiewise("sweep", "--out=s", "--resume"), "grid.yaml in s has other arms or seeds than its runs")
    assert rows(tmp_path / "s") == table_rows

    tiewise("sweep", grid({"width": [8]}), "--out=s", "--jobs=1", "--overwrite")
    assert sorted(path.name for path in (tmp_path / "s").iterdir() if path.is_dir()) == ["width=8"]
    assert [row["width"] for row in rows(tmp_path / "s")] == ["8"]


def test_sweep_names_impossible_cell_and_writes_nothing(tiewise, grid, tree):
    name = grid({"train_tokens": [1000, 99999]})
    before = tree()
    assert_refused(tiewise("sweep", name, "--out=s", "-q"), "cell train_tokens=99999: the text has")
    assert tree() == before


@pytest.mark.parametrize("moment", [1, 3])
def test_sweep_interrupted_while_it_moves_folder_into_place_resumes(tiewise, grid, tmp_path, monkeypatch, moment):
    real, calls = studies.replace_path, []

    def interrupt_at_moment(*paths):
        calls.append(paths)
        if len(calls) == moment:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(studies, "replace_path", interrupt_at_moment)
    result = tiewise("sweep", grid(steps=2), "--out=s", "--jobs=1", "-q")
    assert (result.code, result.out) == (130, "")
    assert result.err == "tiewise: interrupted; resume with: tiewise sweep --out s --resume\n"
    assert tiewise("sweep", "--out=s", "--resume", "--jobs=1", "-q").code == 0
    assert len(rows(tmp_path / "s")) == 2
    assert not (tmp_path / "s" / ".starting").exists()


def test_sweep_interrupted_during_preparation_leaves_nothing(tiewise, grid, tree, monkeypatch):
    name = grid()
    before = tree()
    monkeypatch.setattr(StudyGrid, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    result = tiewise("sweep", name, "--out=s", "-q")
    assert (result.code, result.err, tree()) == (130, "tiewise: interrupted\n", before)


@pytest.mark.slow
def test_sweep_interrupted_and_killed_in_turn_ends_with_same_table(tmp_path, grid):
    name = grid(steps=400)
    [(code, _, err)] = wait_for_exit(launch(tmp_path, 1, "sweep", name, "--out=whole", "--jobs=1"))
    assert code == 0, err
    (process,) = launch(tmp_path, 1, "sweep", name, "--out=cut", "--jobs=1")
    for number in (signal.SIGKILL, signal.SIGINT):
        wait_until(training_advances(tmp_path / "cut"), process)
        process.send_signal(number)
        [(code, _, err)] = wait_for_exit([process])
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), err
        if number == signal.SIGINT:
            assert err.splitlines()[-1] == "tiewise: interrupted; resume with: tiewise sweep --out cut --resume"
        (process,) = launch(tmp_path, 1, "sweep", "--out=cut", "--resume", "--jobs=1")
    [(code, _, err)] = wait_for_exit([process])
    assert code == 0, err
    for one, other in zip(rows(tmp_path / "whole"), rows(tmp_path / "cut"), strict=True):
        for metric in ("heldout", "heldout_low", "training", "nll"):
            assert float(one[metric]) == pytest.approx(float(other[metric]), abs=1e-6)


@pytest.mark.slow
def test_command_of_sweep_row_reproduces_its_result(tiewise, grid, tmp_path):
    axes = {"match": ["width", "flops"], "tokenizer": ["bytes", "bpe:300"]}
    name = grid(axes, arms=["untied", "tied+alpha=4", "factored:4"], train_tokens=1500)
    assert tiewise("sweep", name, "--out=s", "--jobs=1", "-q").code == 0
    table_rows = rows(tmp_path / "s")
    assert len(table_rows) == 8
    for row in table_rows[::3]:
        assert tiewise(*shlex.split(row["command"])[1:], "--overwrite", "--jobs=1", "-q").code == 0
        again = json.loads(Path(shlex.split(row["command"])[-1], "results.json").read_text())
        (d,) = [d for d in again["differences"] if (d["arm"], d["metric"]) == (row["arm"], "heldout_nll")]
        assert d["mean"] == pytest.approx(float(row["heldout"]), abs=1e-3)


def test_sweep_with_grid_prepares_study_unless_resume_is_given(tmp_path, monkeypatch):
    grid = StudyGrid.named("quick")
    prepared = []
    monkeypatch.setattr(
        studies, "_prepare_study", lambda grid, out, display, overwrite: prepared.append((grid, overwrite))
    )
    with pytest.raises(RunError, match="holds no study to resume"):
        studies.carry_out_study(grid, tmp_path / "out", "", Display.on_stderr(quiet=True))
    assert prepared == [(grid, False)]
    with pytest.raises(RunError, match="holds no study to resume"):
        studies.carry_out_study(grid, tmp_path / "out", "", Display.on_stderr(quiet=True), resume=True)
    assert len(prepared) == 1
