"""Tests of comparisons from start to results.json: refusals, interruption, the atlas and matched operations."""

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from tests.training.conftest import refusal
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from tiewise.core.errors import DataError, Interrupted, RunError, SpecError, TiewiseError
from tiewise.training import compare, tuning
from tiewise.training.compare import finish, finish_one
from tiewise.training.kinds.decoder import KIND
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings


def test_comparison_trains_all_arms_and_saves_results(tiny_settings, tmp_path, lines):
    arms = ("tied", "untied", "untied+tie_at=4")
    out = lines.begin(tiny_settings(arms=arms, seeds=2, steps=8), tmp_path / "out")
    found = finish(out, lines.display)
    assert [(run.seed, run.arm) for run in found.runs] == [(seed, arm) for seed in (1, 2) for arm in arms]
    assert found.reference == "tied"
    assert found.command == "tiewise compare --as typed"
    difference = found.difference("untied", "heldout_nll")
    by_hand = [u.heldout_nll - t.heldout_nll for t, u in zip(found.of("tied"), found.of("untied"), strict=True)]
    assert (difference.n, difference.mean) == (2, pytest.approx(sum(by_hand) / 2))
    assert found.setting["tokens_per_run"] == 8 * 4 * 16
    assert found.of("untied")[0].curve[-1].tokens == 8 * 4 * 16
    assert Comparison.from_dict(json.loads((out / "results.json").read_text())) == found
    assert not found.demo
    assert [d.arm for d in found.direct_path] == list(arms)
    assert len(found.direct_path[0].logits) == len(found.direct_path[0].tokens) > 3
    assert sum("validation loss" in line for line in lines) == 6


def test_progress_bar_covers_all_runs_and_treats_earlier_steps_as_initial(tiny_settings, tmp_path, lines, monkeypatch):
    bars = []

    class Recorded(tqdm):
        def __init__(self, **named):
            super().__init__(**named, file=StringIO())
            bars.append(self)

    out = lines.begin(tiny_settings(seeds=2, steps=4, tune=True), tmp_path / "out")
    monkeypatch.setattr(compare, "tqdm", Recorded)
    monkeypatch.setattr(tuning, "FACTORS", (1.0, 2.0))
    monkeypatch.setattr(tuning, "LEAST_FACTOR", 1.0)
    monkeypatch.setattr(tuning, "MOST_FACTOR", 4.0)
    finish(out, compare.Display(lines.append, bars=True))
    (out / "untied" / "seed-1" / "result.json").unlink()
    finish(out, compare.Display(lines.append, bars=True))
    whole = 2 * (3 + 2) * 4  # two trials, one beyond the largest rate, and two seeds of each arm
    assert [(bar.total, bar.n, bar.initial) for bar in bars] == [(whole, whole, 0), (whole, whole, whole - 4)]


def test_scheduled_arm_unties_tables_at_named_step(tiny_settings, tmp_path, lines):
    out = lines.begin(tiny_settings(arms=("tied", "tied+untie_at=20"), steps=40), tmp_path / "out")
    tied, untying = finish(out, lines.display).runs
    same = [(a.step, a.train_nll == b.train_nll) for a, b in zip(tied.curve, untying.curve, strict=True)]
    # the tables are still equal in step 21, so losses and windows differ from step 22 on
    assert [step for step, equal in same if equal] == list(range(2, 21, 2))
    assert all(point.cosine is None for point in untying.curve if point.step > 20)
    assert all(point.cosine is not None for point in untying.curve if point.step <= 20)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"length": 5000}, DataError, "length"),
        ({"arms": ("tied", "tied+pad=300")}, SpecError, "pad=300"),
        ({"arms": ("tied", "tied+vectors=none.txt")}, TiewiseError, "none.txt"),
        ({"minutes": 1.0, "arms": ("tied+untie_at=9000000",)}, RunError, "step 9000000 is not within "),
    ],
)
def test_start_refuses_unusable_settings_before_first_run(tiny_settings, tmp_path, lines, changes, error, says):
    with refusal(says, error):
        lines.begin(tiny_settings(**changes), tmp_path / "a" / "out")
    assert list(tmp_path.iterdir()) == []


def test_finish_refuses_single_run_and_finish_one_refuses_comparison(tiny_settings, tmp_path, lines):
    single = lines.begin(tiny_settings(arms=("untied",), seed=3, steps=5), tmp_path / "single")
    several = lines.begin(tiny_settings(steps=5), tmp_path / "several")
    with pytest.raises(RunError, match="use tiewise train --out"):
        finish(single, lines.display)
    with pytest.raises(RunError, match="use tiewise compare --out"):
        finish_one(several, lines.display)
    trained = finish_one(single, lines.display)
    assert (trained.result.arm, trained.result.seed) == ("untied", 3)
    assert trained.model == single / "untied" / "seed-3" / "final"
    assert (trained.model / "model.safetensors").is_file()


def test_interrupted_comparison_writes_no_results_and_resumes_without_sources(
    source, tiny_settings, tmp_path, lines, monkeypatch
):
    path = tmp_path / "text.txt"
    path.write_text(source.read_text())
    out = lines.begin(tiny_settings(text=(str(path),), steps=5), tmp_path / "out")
    path.unlink()

    def stop(job):
        raise Interrupted(str(job.folder))

    with monkeypatch.context() as patch:
        patch.setattr(compare, "train", stop)
        with pytest.raises(Interrupted):
            finish(out, lines.display)
    assert not (out / "results.json").exists()
    assert len(finish(out, lines.display).runs) == 2


def test_match_flops_gives_every_arm_equal_operations(tiny_settings, text, job):
    """PyTorch counts the operations of one forward pass over one block."""
    arms = ("untied", "tied", "factored:4", "projected:24", "residual:2", "factored-untied:in=4,out=8")
    settings = tiny_settings(arms=arms, match="flops", width=32).checked()
    wide, found = KIND.feed_forward(settings, text.vocab), {}
    assert wide["tied"] == wide["untied"]
    for arm in arms:
        model = KIND.build(job(settings, arm=arm, feed_forward=wide[arm])).model
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            # logits are deferred until they are read
            model(torch.zeros(1, settings.length, dtype=torch.long)).logits + 0
        found[arm] = counter.get_total_flops()
    unit = 2 * 3 * 32 * settings.length  # operations of one more column in a gated feed-forward layer
    for arm, count in found.items():
        assert count == pytest.approx(max(found.values()), abs=unit), arm


def test_steps_of_arm_includes_trials_only_when_tuning():
    settings = Settings(seeds=3, steps=40)
    assert compare._steps_of_arm(settings) == 120
    assert compare._steps_of_arm(replace(settings, tune=True)) > 120
