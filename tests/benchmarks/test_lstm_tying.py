"""Tests of new seeds for tied LSTMs: the runs that the rule names, and the table of a small study."""

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks import lstm_tying
from tiewise.training.settings import Settings


def test_runs_are_those_of_the_rule():
    by_name = lstm_tying.cells()
    assert [settings.files[0] for settings in (s.kind_options for s in by_name.values())] == [
        "valid.txt@0-10", "valid.txt@0-30",
    ]  # fmt: skip
    for settings in by_name.values():
        assert (settings.arms, settings.seeds, settings.kind_options.keep) == (("untied", "tied"), 10, "best")


def test_small_study_has_seeds_after_the_earlier_ones_and_a_row_for_each_text(tmp_path):
    sizes = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 8, "layers": 1, "tokenizer": "bpe:300"}
    small = Settings(arms=("untied", "tied"), seeds=2, text=("synthetic:words=4000",), **sizes)
    by_name = {"few": replace(small, train_tokens=1000), "more": small}
    comparisons = lstm_tying.train(tmp_path, by_name)
    for comparison in comparisons:
        assert sorted((run.arm, run.seed) for run in comparison.runs) == [
            ("tied", 6), ("tied", 7), ("untied", 6), ("untied", 7),
        ]  # fmt: skip
    few, more = lstm_tying.table(comparisons)
    assert int(few["words"]) < 1001 < int(more["words"])
    for row, comparison in zip((few, more), comparisons, strict=True):
        untied, tied = (fmean(run.heldout_nll for run in comparison.of(arm)) for arm in ("untied", "tied"))
        assert float(row["untied"]) == pytest.approx(untied, abs=1e-5)
        assert float(row["tied − untied"]) == pytest.approx(tied - untied, abs=2e-5)
        assert float(row["low"]) <= float(row["tied − untied"]) <= float(row["high"])
        assert row["verdict"] in ("better", "worse", "equivalent", "undecided")
