"""Tests of study tables against their comparisons, Holm's correction and commands."""

import csv
import shlex
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
from tests.report.comparison_sample import sample_comparison

from tiewise.cli.train_settings import OPTIONS, choose_settings
from tiewise.core.estimates import mean_interval
from tiewise.core.spec import split_specs
from tiewise.training.results import LastStep
from tiewise.training.settings import Settings
from tiewise.training.study.grid import StudyGrid
from tiewise.training.study.study import Study, command_for

ARMS = ("untied", "tied", "factored:64")


@pytest.fixture
def study(tmp_path):
    grid = StudyGrid.of(
        {"settings": {"arms": list(ARMS)}, "axes": {"width": [64, 128], "train_tokens": [9, None]}}, "g"
    )
    made = sample_comparison(ARMS)
    made = replace(made, data={"splits": {"train": {"tokens": 521416}}}, setting={**made.setting, "tokens_per_run": 7})
    broken = replace(made, runs=[replace(run, heldout_nll=float("nan")) for run in made.runs])
    cells = list(grid.cells())
    return Study.of(grid, {cells[0]: made, cells[2]: made, cells[3]: broken}, tmp_path), made


def test_study_rows_match_differences_of_comparison(study):
    found, comparison = study
    assert found.left == 1
    row = next(row for row in found.results if row.arm == "tied")
    losses = [[getattr(run, name) for run in comparison.of("tied")] for name in ("heldout_nll", "train_nll")]
    for d, own, name in zip((row.heldout, row.training), losses, ("heldout_nll", "train_nll"), strict=True):
        e = mean_interval([a - getattr(b, name) for a, b in zip(own, comparison.of("untied"), strict=True)])
        assert (d.mean, d.low, d.high, d.n) == pytest.approx((e.value, e.low, e.high, 3))
    assert row.error == pytest.approx((row.heldout.high - row.heldout.low) / 2 / 4.302652729)
    assert (row.contrast, row.vocab, row.tokens, row.rank) == ("tied − untied", 4096, 521416, None)
    assert found.results[1].rank == 64
    assert [row.measure("train_tokens") for row in found.results[:1]] == [521416]


def test_study_rows_have_differences_in_bits_per_byte(study):
    found, comparison = study
    row = next(row for row in found.results if row.arm == "tied")
    own, reference = ([run.bits_per_byte for run in comparison.of(arm)] for arm in ("tied", "untied"))
    e = mean_interval([a - b for a, b in zip(own, reference, strict=True)])
    flat = row.flat()
    written = [flat[name] for name in ("bits", "bits_low", "bits_high", "bits_per_byte")]
    assert written == pytest.approx([e.value, e.low, e.high, sum(own) / 3])
    masked = replace(row, bits=None, bits_per_byte=None).flat()  # of a masked model
    assert [masked[name] for name in ("bits", "bits_low", "bits_high", "bits_per_byte")] == [None] * 4


def test_study_rows_have_differences_at_last_step(study):
    found, comparison = study
    (cell, *_) = found.grid.cells()
    runs = [
        replace(run, last=LastStep(None, 1.0, run.heldout_nll + seed_loss, 2.0))
        for run, seed_loss in zip(comparison.runs, np.arange(len(comparison.runs)) ** 2 / 100, strict=True)
    ]
    later = replace(comparison, runs=runs)
    row = next(row for row in Study.of(found.grid, {cell: later}, found.folder).results if row.arm == "tied")
    own, reference = ([run.last.heldout_nll for run in later.of(arm)] for arm in ("tied", "untied"))
    e = mean_interval([a - b for a, b in zip(own, reference, strict=True)])
    assert [row.flat()[name] for name in ("last", "last_low", "last_high")] == pytest.approx([e.value, e.low, e.high])
    without = next(row for row in found.results if row.arm == "tied").flat()
    assert [without[name] for name in ("last", "last_low", "last_high")] == [None] * 3


def test_study_corrects_p_values_by_holm_over_all_rows(study):
    found, comparison = study
    alone = {arm: mean_interval([a.heldout_nll - b.heldout_nll for a, b in zip(
        comparison.of(arm), comparison.of("untied"), strict=True)]) for arm in ARMS[1:]}  # fmt: skip
    assert len([row for row in found.results if row.heldout.p is not None]) == 4
    smallest = min(found.results[:2], key=lambda row: row.heldout.p)
    within = Study.of(found.grid, {next(iter(found.grid.cells())): comparison}, found.folder)
    same = next(row for row in within.results if row.arm == smallest.arm)
    assert smallest.heldout.p == pytest.approx(min(1, same.heldout.p * 4 / 2))
    assert {row.arm for row in found.results if row.sign} <= {
        arm for arm, e in alone.items() if e.low > 0 or e.high < 0
    }


def test_save_writes_same_rows_to_csv_and_parquet(study):
    found, _ = study
    found.save()
    with (found.folder / "sweep.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(found.folder / "sweep.parquet").to_pylist()
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in table] == read
    assert [row["heldout"] for row in read[-2:]] == ["", ""]  # one cell diverged
    assert {"width", "train_tokens", "contrast", "detectable", "seeds", "parameters", "command"} <= set(read[0])
    assert len(found.record()["rows"]) == 6


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"arms": ["untied", "factored-untied:in=8,out=16", "tied+alpha=4"], "steps": 9, "train_tokens": 70},
        {"learning_rate": 1e-5, "init": 0.125, "text": ["a b.txt", "c.txt"], "match": "flops", "tune": True},
        {"model": "albert", "share": "ffn", "arms": ["factored:8+share=none", "tied+share=all"], "dropout": 0.1},
        {"kind": "recurrent", "model": "lstm", "arms": ["untied", "tied"], "width": 8, "inner": 8},
        {"backend": "flax", "arms": ["untied", "tied"], "model": "llama"},
    ],
)
def test_command_for_row_reproduces_its_settings(record):
    settings = Settings.of(record).checked()
    words = shlex.split(command_for(settings, "runs/here"))
    assert words[:2] == ["tiewise", "compare"]
    asked = dict.fromkeys((*OPTIONS, "arms", "share", "config", "corpus", "resume", "overwrite"))
    asked |= {"text": [], "set_": []}
    for name, value in zip(words[2::2], words[3::2], strict=True):
        name = {"--set": "set_"}.get(name, name.removeprefix("--"))
        if name in ("text", "set_"):
            asked[name].append(value)
        else:
            asked[name] = int(value) if name in ("seeds", "steps") else value
    assert asked.pop("out") == "runs/here"
    assert split_specs(asked["arms"]) == list(settings.arms)
    assert choose_settings(None, asked, single=False) == settings
