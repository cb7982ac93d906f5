"""Test the published claims: their data, the verdict of planted results, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tiewise.core.errors import RunError
from tiewise.core.estimates import Estimate
from tiewise.lab.claims import listing, recorded
from tiewise.lab.claims.expected import CONTRADICTED, NOT_RUN, OTHER_TEXT, REPRODUCED, UNDECIDED, Expected
from tiewise.lab.claims.outcome import MEASURES, ClaimRuns, equal_size, run_value
from tiewise.lab.claims.recorded import ClaimResult
from tiewise.lab.claims.registry import PRICES, ClaimGrid, find_claim, published_claims
from tiewise.lab.claims.run import has_text, judge, run_claim
from tiewise.lab.claims.texts import write_text
from tiewise.report.papers import TEXTS
from tiewise.training.compare import Display
from tiewise.training.results import Comparison, CurvePoint, RunResult

FEWEST_CHEAP, FEWEST = 15, 25


def run(arm, seed, loss, *, parameters=100, train=0.0, curve=()):
    return RunResult(
        arm=arm, seed=seed, steps=10, train_nll=train, heldout_nll=loss, perplexity=math.exp(loss),
        bits_per_byte=loss / 2, frequency=[], parameters={}, total_parameters=parameters, bytes=0,
        tokens_per_second=1.0, seconds=1.0, init_std=0.1, learning_rate=0.1, predicted_initial_nll=0.0,
        initial_nll=0.0, curve=list(curve),
    )  # fmt: skip


def comparison(runs, tokens=1, vocab=1):
    arms = list(dict.fromkeys(each.arm for each in runs))
    seeds = sorted({each.seed for each in runs})
    data = {"splits": {"train": {"tokens": tokens}}, "tokenizer": {"vocab": vocab}}
    return Comparison(
        version="", command="", demo=True, arms=arms, seeds=seeds, reference=arms[0], setting={}, data=data, env={},
        runs=runs,
    )  # fmt: skip


def planted(losses, **more):
    """Return the runs of one cell, whose arms have these losses by seed."""
    runs = [run(arm, seed, loss) for arm, row in losses.items() for seed, loss in enumerate(row, 1)]
    return ClaimRuns({(64,): comparison(runs, **more)}, {})


def test_enough_claims_are_registered_with_a_price_and_a_source():
    claims = published_claims().values()
    assert len(claims) >= FEWEST
    assert sum(claim.price == PRICES[0] for claim in claims) >= FEWEST_CHEAP
    for claim in claims:
        assert claim.price in PRICES
        assert claim.measure["kind"] in MEASURES
        assert all([claim.paper, claim.where, claim.says, claim.their, claim.published, claim.unit])
        assert claim.expects.low < claim.expects.high
        assert claim.text in ("", *TEXTS)


@pytest.mark.parametrize("name", published_claims())
def test_each_measure_names_arms_and_cells_of_its_grid(name, tmp_path):
    claim = find_claim(name)
    grid = claim.grid.study(claim.says, tmp_path / "text.jsonl" if claim.grid.make else None)
    settings = next(iter(grid.cells().values()))
    measure, arms = claim.measure, settings.specs()
    terms = [*measure.get("terms", []), *measure.get("over", [])]
    named = [arm for _, arm, *_ in terms] + [measure[key] for key in ("arm", "curve", "model") if key in measure]
    assert set(named) <= set(arms)
    assert named
    for _, _, _, *at in terms:
        assert len(at) in (0, len(grid.axes))
        assert all(value in values for value, values in zip(at, grid.axes.values(), strict=False))
    assert settings.seeds >= 3


@pytest.mark.parametrize(
    ("expected", "interval", "verdict"),
    [
        (Expected(above=0), (0.01, 0.2), REPRODUCED),
        (Expected(above=0), (-0.2, 0.0), CONTRADICTED),
        (Expected(above=0), (-0.1, 0.1), UNDECIDED),
        (Expected(below=0), (-0.2, -0.1), REPRODUCED),
        (Expected(below=0), (0.1, 0.2), CONTRADICTED),
        (Expected(-0.02, 0.02), (-0.01, 0.01), REPRODUCED),
        (Expected(-0.02, 0.02), (-0.03, 0.01), UNDECIDED),
        (Expected(-0.02, 0.02), (0.03, 0.05), CONTRADICTED),
        (Expected(-0.02, 0.02), (-1.0, 1.0), UNDECIDED),
        (Expected(above=0), (math.nan, math.nan), UNDECIDED),
        (Expected(above=0), (-math.inf, math.inf), UNDECIDED),
    ],
)
def test_verdict_compares_the_whole_interval_with_the_range(expected, interval, verdict):
    low, high = interval
    assert expected.verdict(Estimate((low + high) / 2, low, high, 5)) == verdict


@pytest.mark.parametrize(
    ("untied", "verdict"),
    [([2.0, 2.02, 1.98], REPRODUCED), ([4.0, 4.02, 3.98], CONTRADICTED), ([2.0, 3.0, 4.1], UNDECIDED)],
)
def test_a_claim_is_judged_by_its_planted_runs(untied, verdict):
    claim = find_claim("untie-small-vocabulary")
    result = judge(claim, planted({"tied": [3.0, 3.0, 3.0], "untied": untied}), "command")
    assert (result.verdict, result.seeds, result.rule) == (verdict, 3, claim.rule_hash)
    assert result.outcome == pytest.approx((sum(untied) / 3 - 3.0) / 2)
    assert claim.name in result.answer_text()


@pytest.mark.parametrize(("counts", "same"), [(TEXTS["PTB"], True), ((930, 10_000), False)])
def test_a_claim_of_one_text_needs_that_text(counts, same):
    claim = find_claim("ptb-pytorch-200")
    tokens, vocab = counts
    runs = planted({"untied": [3.0, 3.0, 3.0], "tied": [2.94, 2.94, 2.94]}, tokens=tokens, vocab=vocab)
    assert has_text(claim, runs) is same
    assert judge(claim, runs, "").verdict == (REPRODUCED if same else OTHER_TEXT)


def test_ratio_is_that_of_the_means():
    runs = planted({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0]})
    measure = {"kind": "ratio", "terms": [[1, "a", "heldout_nll"]], "over": [[1, "b", "heldout_nll"]]}
    outcome = MEASURES["ratio"](measure, runs)
    assert (outcome.value, outcome.low, outcome.high) == pytest.approx((0.5, 0.5, 0.5))


def test_equivalent_depth_finds_a_planted_exponent():
    def losses(seed, depth):
        return 3.0 - 0.2 * math.log(depth) + 0.01 * seed

    cells = {}
    for depth in (1, 2, 4):
        runs = [run("none", seed, losses(seed, depth)) for seed in (1, 2, 3)]
        runs += [run("all", seed, losses(seed, depth**0.46)) for seed in (1, 2, 3)]
        cells[(depth,)] = comparison(runs)
    outcome = MEASURES["equivalent_depth"]({"curve": "none", "arm": "all", "at": 4}, ClaimRuns(cells, {}))
    assert outcome.value == pytest.approx(0.46)
    assert outcome.high - outcome.low == pytest.approx(0, abs=1e-9)


def test_equivalent_size_finds_planted_parameters():
    cells = {}
    for width in (32, 64, 96):
        size = 10 * width
        runs = [run("tied", seed, 5 - math.log(size), parameters=size) for seed in (1, 2, 3)]
        # two fifths of the 200 parameters of the second table count
        runs += [run("untied", seed, 5 - math.log(size + 80), parameters=size + 200) for seed in (1, 2, 3)]
        cells[(width,)] = comparison(runs)
    outcome = MEASURES["equivalent_size"]({"curve": "tied", "arm": "untied", "at": 64}, ClaimRuns(cells, {}))
    assert outcome.value == pytest.approx(0.4)


def test_a_size_needs_losses_that_fall():
    assert math.isnan(equal_size([1, 2, 4], [1.0, 2.0, 3.0], 2.0))


def test_metrics_of_a_run():
    curve = [CurvePoint(step, step, path_a=1.0, path_b=share / (1 - share)) for step, share in ((1, 0.9), (9, 0.6))]
    one = run("tied", 1, 3.0, train=2.5, curve=curve)
    assert run_value(one, "gap") == 0.5
    assert run_value(one, "output_share@0-0.1") == pytest.approx(0.9)
    assert run_value(one, "output_share@0.5-1") == pytest.approx(0.6)
    assert math.isnan(run_value(one, "output_share@0.2-0.3"))


def test_hash_changes_with_the_rule_alone():
    claim = find_claim("retie")
    assert replace(claim, says="other words").rule_hash == claim.rule_hash
    for change in ({"expects": Expected(below=0.1)}, {"text": "PTB"}, {"measure": {"kind": "sum"}}):
        assert replace(claim, **change).rule_hash != claim.rule_hash


def test_result_of_another_rule_is_named(monkeypatch):
    claim = find_claim("retie")
    result = ClaimResult("retie", REPRODUCED, -0.1, -0.2, -0.05, 5, "0" * 12, {}, "", 1.0)
    monkeypatch.setattr(recorded, "recorded_results", lambda: {"retie": result})
    assert recorded.recorded_verdict("retie") == "reproduced (by another rule)"
    assert claim.rule_hash in result.answer_text()
    assert recorded.recorded_verdict("untie-late") == NOT_RUN


def test_recorded_results_have_a_registered_rule():
    for name, result in recorded.recorded_results().items():
        assert (result.claim, result.rule) == (name, find_claim(name).rule_hash)
        assert result.command.startswith(f"tiewise sweep --claim {name} ")


def test_unknown_claim_is_refused_with_near_names():
    with pytest.raises(RunError, match="no claim 'untie-lat'; did you mean untie-late"):
        find_claim("untie-lat")


def test_listing_has_a_row_and_a_record_for_each_claim():
    claims = published_claims()
    assert [row[0] for row in listing.claim_rows()] == list(claims)
    records = json.loads(json.dumps(listing.claim_records()))
    assert [record["name"] for record in records] == list(claims)
    assert listing.summary().startswith(f"{len(claims)} published claims")


def test_page_lists_the_recorded_results():
    page = (Path(__file__).parents[2] / "docs" / "dev" / "claims.md").read_text(encoding="utf-8")
    assert listing.summary() in page
    for name, claim in published_claims().items():
        assert page.count(f"| `{name}` |") == 2
        assert f"| {claim.rule_hash} |" in page


def test_numbered_text_is_that_of_the_page(tmp_path):
    lines = write_text("numbered", tmp_path).read_text().splitlines()
    first = json.loads(lines[0])["text"]
    assert len(lines) == 1500
    assert first.startswith("Number 1 is the ")


@pytest.mark.slow
def test_claims_of_one_grid_share_their_runs(tmp_path):
    settings = {
        "arms": ["tied", "untied"], "seeds": 3, "steps": 2, "heads": 2, "length": 8, "batch": 2, "tokenizer": "bytes",
        "text": ["synthetic:words=4000"], "layers": 0,
    }  # fmt: skip
    grid = ClaimGrid("tiny", settings, {"width": [16]})
    first, second = (replace(find_claim(name), grid=grid) for name in ("retie", "untie-small-vocabulary"))
    display = Display.on_stderr(quiet=True)
    result = run_claim(first, tmp_path, display, jobs=1)
    assert json.loads((tmp_path / "retie.json").read_text())["rule"] == first.rule_hash == result.rule
    assert result.has_other_rule
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert len(trained) == 6
    other = run_claim(second, tmp_path, display, jobs=1)
    assert {path: path.stat().st_mtime_ns for path in trained} == trained
    comparison_record = json.loads((tmp_path / "runs" / "width=16" / "results.json").read_text())
    bits = {
        arm: [run["bits_per_byte"] for run in comparison_record["runs"] if run["arm"] == arm]
        for arm in settings["arms"]
    }
    assert other.outcome == pytest.approx(fmean(bits["untied"]) - fmean(bits["tied"]))
    run_claim(first, tmp_path, display, overwrite=True, jobs=1)
    assert all(path.stat().st_mtime_ns > stamp for path, stamp in trained.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the claim would start")
def test_a_claim_of_gpu_price_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(RunError, match="claim untie-golf-size needs a GPU"):
        run_claim(find_claim("untie-golf-size"), tmp_path, Display.on_stderr(quiet=True))
    assert not list(tmp_path.iterdir())
