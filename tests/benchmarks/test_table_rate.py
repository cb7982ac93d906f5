"""Tests of the learning rate of tables: rules against planted optima, and steps against separate optimizers."""

import copy
import csv
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.optim import AdamW, Muon

from benchmarks import study_curves, table_rate
from tiewise.training.settings import Settings


def planted(exponent, curvature=0.2):
    """Return losses whose best rate is 0.032 (width / 64)^exponent: a parabola in its binary logarithm, lowest 5."""
    return {
        width: {r: 5 + curvature * math.log2(r / 0.032 / (width / 64) ** exponent) ** 2 for r in table_rate.RATES}
        for width in (64, 256)
    }


@pytest.mark.parametrize(("rule", "exponent"), [("constant", 0), ("1/√D", -0.5), ("1/D", -1), ("√D", 0.5)])
def test_planted_rule_has_no_excess_and_others_that_of_the_parabola(rule, exponent):
    excess = table_rate.excess_of_rules(planted(exponent))
    assert excess[rule] == pytest.approx(0, abs=1e-12)
    for name, other in {"constant": 0, "1/√D": -0.5, "1/D": -1, "√D": 0.5}.items():
        assert excess[name] == pytest.approx(0.2 * (2 * (other - exponent)) ** 2 / 5)


def test_excess_is_that_of_worst_width_and_interpolated_between_rates():
    losses = {64: {0.5: 5.0, 1.0: 4.0}, 128: {0.5: 3.0, 1.0: 4.0}, 256: {0.5: 2.0, 1.0: 2.0}}
    excess = table_rate.excess_of_rules(losses)
    assert excess["constant"] == pytest.approx(1 / 3)
    assert excess["1/√D"] == pytest.approx(3.5 / 3 - 1)  # at width 128 halfway between the two rates
    assert math.isnan(excess["1/D"])  # 1/4 at width 256 was not measured
    assert not table_rate.transfers(excess["1/D"])


@pytest.mark.parametrize(("excess", "holds"), [(0.05, True), (0.0501, False), (0.0, True)])
def test_rule_transfers_up_to_five_percent(excess, holds):
    assert table_rate.transfers(excess) is holds


def test_joined_optimizer_equals_its_parts_after_its_state_was_loaded():
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(4, 6)), torch.nn.Parameter(torch.randn(5))
    ours, theirs = [matrix, vector], [copy.deepcopy(matrix), copy.deepcopy(vector)]
    joined = table_rate.JoinedOptimizer([Muon(ours[:1], lr=0.1), AdamW(ours[1:], lr=0.01)])
    apart = [Muon(theirs[:1], lr=0.1), AdamW(theirs[1:], lr=0.01)]
    for step in range(4):
        if step == 2:
            joined.load_state_dict(copy.deepcopy(joined.state_dict()))
            for group in (*joined.param_groups, *apart[0].param_groups, *apart[1].param_groups):
                group["lr"] *= 0.5
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        joined.step()
        for part in apart:
            part.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.slow
def test_small_study_writes_losses_of_all_models(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table_rate, "CSV_FILE", tmp_path / "table_rate.csv")
    monkeypatch.setattr(table_rate, "RULES_FILE", tmp_path / "rules.csv")
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    sizes = {"heads": 2, "length": 8, "batch": 2, "steps": 4, "layers": 1, "tokenizer": "bytes", "measured": 64}
    small = replace(Settings(arms=("untied", "tied"), seeds=1, text=("synthetic:words=4000",)), **sizes)
    table_rate.main(tmp_path / "runs", small, (8, 16), (0.004, 0.008))
    rows = list(csv.DictReader((tmp_path / "table_rate.csv").open(encoding="utf-8")))
    assert [(row["optimizer"], row["arm"], row["width"]) for row in rows] == [
        *product(("adamw",), ("untied", "tied"), ("8", "16")),
        *product(("muon",), ("untied", "tied"), ("8", "16")),
    ]
    losses = {row[rate] for row in rows for rate in ("0.004", "0.008")}
    assert len(losses) == 16  # each optimizer, arm, width and rate has an effect
    rules = list(csv.DictReader((tmp_path / "rules.csv").open(encoding="utf-8")))
    assert [(row["optimizer"], row["arm"]) for row in rules] == [*product(("adamw", "muon"), ("untied", "tied"))]
    assert float(rules[0]["constant"]) >= 0
    assert rules[0]["constant"] in capsys.readouterr().out
    assert len(study_curves.read(tmp_path / "curves" / "table-rate.jsonl")) == 16
