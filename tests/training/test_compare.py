"""A comparison from its start to results.json: what is refused before anything is trained, minutes, resuming."""

import json
from dataclasses import replace
from io import StringIO
from statistics import fmean

import pytest
import torch
from tests.report.comparison_sample import sample_comparison
from tests.training.conftest import refusal
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from tiewise.core.errors import DataError, Interrupted, RunError, SpecError, TiewiseError
from tiewise.training import compare, short_trials
from tiewise.training.compare import finish, finish_one
from tiewise.training.kinds.decoder import KIND
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings


def test_a_comparison(tiny, tmp_path, lines):
    arms = ("tied", "untied", "untied+tie_at=10")
    out = lines.begin(tiny(arms=arms, seeds=2, steps=20), tmp_path / "out")
    found = finish(out, lines.display)
    assert [(run.seed, run.arm) for run in found.runs] == [(seed, arm) for seed in (1, 2) for arm in arms]
    assert found.reference == "tied"
    assert found.command == "tiewise compare --as typed"
    difference = found.difference("untied", "heldout_nll")
    by_hand = [u.heldout_nll - t.heldout_nll for t, u in zip(found.of("tied"), found.of("untied"), strict=True)]
    assert (difference.n, difference.mean) == (2, pytest.approx(sum(by_hand) / 2))
    assert found.setting["tokens_per_run"] == 20 * 4 * 16
    assert found.of("untied")[0].curve[-1].tokens == 20 * 4 * 16
    assert Comparison.from_dict(json.loads((out / "results.json").read_text())) == found
    assert not found.demo
    assert [d.arm for d in found.direct_path] == list(arms)
    assert len(found.direct_path[0].logits) == len(found.direct_path[0].tokens) > 3
    assert sum("validation nll" in line for line in lines) == 6


def test_one_bar_over_all_runs_which_takes_no_earlier_steps_for_its_own_speed(tiny, tmp_path, lines, monkeypatch):
    bars = []

    class Recorded(tqdm):
        def __init__(self, **named):
            super().__init__(**named, file=StringIO())
            bars.append(self)

    out = lines.begin(tiny(seeds=2, steps=8, tune=True), tmp_path / "out")
    monkeypatch.setattr(compare, "tqdm", Recorded)
    monkeypatch.setattr(short_trials, "INIT_FACTORS", (1.0,))
    finish(out, compare.Display(lines.append, bars=True))
    (out / "untied" / "seed-1" / "result.json").unlink()
    finish(out, compare.Display(lines.append, bars=True))
    whole = 2 * (3 * 2 + 2 * 8)
    assert [(bar.total, bar.n, bar.initial) for bar in bars] == [(whole, whole, 0), (whole, whole, whole - 8)]


def test_a_scheduled_arm_goes_through_what_its_name_says(tiny, tmp_path, lines):
    out = lines.begin(tiny(arms=("tied", "tied+untie_at=20"), steps=40), tmp_path / "out")
    tied, untying = finish(out, lines.display).runs
    same = [(a.step, a.train_nll == b.train_nll) for a, b in zip(tied.curve, untying.curve, strict=True)]
    # step 21 still sees equal tables: its loss, and that of the window, differ from step 22 on
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
def test_whatever_cannot_be_used_is_said_before_the_first_run(tiny, tmp_path, lines, changes, error, says):
    with refusal(says, error):
        lines.begin(tiny(**changes), tmp_path / "a" / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_and_a_comparison_are_told_apart(tiny, tmp_path, lines):
    single = lines.begin(tiny(arms=("untied",), seed=3, steps=5), tmp_path / "single")
    several = lines.begin(tiny(steps=5), tmp_path / "several")
    with pytest.raises(RunError, match="use tiewise train --out"):
        finish(single, lines.display)
    with pytest.raises(RunError, match="use tiewise compare --out"):
        finish_one(several, lines.display)
    trained = finish_one(single, lines.display)
    assert (trained.result.arm, trained.result.seed) == ("untied", 3)
    assert trained.model == single / "untied" / "seed-3" / "final"
    assert (trained.model / "model.safetensors").is_file()


def test_an_interrupt_between_runs_is_no_finding_and_sources_are_not_needed_again(
    source, tiny, tmp_path, lines, monkeypatch
):
    path = tmp_path / "text.txt"
    path.write_text(source.read_text())
    out = lines.begin(tiny(text=(str(path),), steps=5), tmp_path / "out")
    path.unlink()

    def stop(job):
        raise Interrupted(str(job.folder))

    with monkeypatch.context() as patch:
        patch.setattr(compare, "train", stop)
        with pytest.raises(Interrupted):
            finish(out, lines.display)
    assert not (out / "results.json").exists()
    assert len(finish(out, lines.display).runs) == 2


def test_a_comparison_is_held_against_the_atlas(monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "assess_difference", lambda *a: asked.append(a) or "held")
    one = sample_comparison(("untied", "tied"))
    one.setting["tokens_per_run"], one.data["splits"] = 307_200, {"train": {"tokens": 99_968}}
    settings = Settings(arms=("untied", "tied"), width=64, steps=60)
    assert compare.compare_with_atlas(settings, one) == "held"
    sizes = {"width": 64, "layers": 2, "vocab": 4096, "tokens": 99_968, "seen": 307_200}
    gap = fmean(t.heldout_nll - u.heldout_nll for t, u in zip(one.of("tied"), one.of("untied"), strict=True))
    assert asked.pop() == (sizes, pytest.approx(gap), 3, "")
    compare.compare_with_atlas(replace(settings, model="gpt2", learning_rate=0.01, tune=True, batch=2), one)
    assert asked.pop()[3] == "model=gpt2, batch=2, learning_rate=0.01"
    compare.compare_with_atlas(replace(settings, layers=0), one)  # of which no logarithm is taken
    assert asked.pop()[3] == "no layers"
    compare.compare_with_atlas(replace(settings, text=("synthetic:zipf=1",)), one)
    assert asked.pop()[3] == "synthetic:zipf=1"
    assert compare.compare_with_atlas(settings, sample_comparison(("tied", "factored:64"))) is None


def test_every_arm_takes_as_many_operations(tiny, text, job):
    """Of one forward pass over one block, counted by PyTorch."""
    arms = ("untied", "tied", "factored:4", "projected:24", "residual:2", "factored-untied:in=4,out=8")
    settings = tiny(arms=arms, match="flops", width=32).checked()
    wide, found = KIND.feed_forward(settings, text.vocab), {}
    assert wide["tied"] == wide["untied"]
    for arm in arms:
        model = KIND.build(job(settings, arm=arm, feed_forward=wide[arm])).model
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, settings.length, dtype=torch.long)).logits + 0  # deferred until they are read
        found[arm] = counter.get_total_flops()
    unit = 2 * 3 * 32 * settings.length  # of one more column of a gated feed-forward layer
    for arm, count in found.items():
        assert count == pytest.approx(max(found.values()), abs=unit), arm


def test_the_bar_of_a_comparison_counts_trials_only_where_it_tunes():
    settings = Settings(seeds=3, steps=40)
    assert compare._steps_of_arm(settings) == 120
    assert compare._steps_of_arm(replace(settings, tune=True)) > 120
