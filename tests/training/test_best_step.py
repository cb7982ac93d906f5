"""Test the best step of a run: its choice by the tuning split, its weights, and resumed runs."""

import json
import math
from dataclasses import replace

import pytest
from tests.training.conftest import LENGTH, differing_fields, jobs_on, refusal
from tests.training.test_results import comparison, make_run

from tiewise.boundary.hf import load
from tiewise.boundary.installation import installed
from tiewise.core.errors import RunError
from tiewise.core.spec import BoundarySpec
from tiewise.core.step_names import BEST, LAST
from tiewise.training.best_step import keep_if_best, lowest_step
from tiewise.training.compare import finish
from tiewise.training.data.corpus import prepare
from tiewise.training.finding import complete, explanations
from tiewise.training.kinds.decoder import measure
from tiewise.training.results import LastStep
from tiewise.training.run import train
from tiewise.training.settings import Settings

STEPS = 61  # the curve's points are 3, 6, …, 60, so the last step is none of them


@pytest.fixture(scope="module")
def short_text(source, tmp_path_factory):
    """Prepare a text of 20 training blocks, which a model learns by heart."""
    folder = tmp_path_factory.mktemp("short") / "data"
    return prepare([str(source)], "bpe:300", folder, length=LENGTH, train_tokens=20 * LENGTH)


@pytest.fixture(scope="module")
def overfitted_settings(tiny_settings):
    """Return a function that makes settings of a run that is past its best long before its end."""
    return lambda **changes: tiny_settings(steps=STEPS, width=32, learning_rate=2e-2, **changes)


@pytest.fixture(scope="module")
def best_and_last(short_text, overfitted_settings, tmp_path_factory):
    """Return the folders and results of one run that keeps its best step, and one that keeps its last."""
    out, job = tmp_path_factory.mktemp("steps"), jobs_on(short_text)
    folders = {select: out / select for select in (BEST, LAST)}
    results = {}
    for select, folder in folders.items():
        results[select] = train(job(overfitted_settings(select=select), folder)).result
    return folders, results


def test_run_keeps_step_with_lowest_tuning_loss_and_reports_last_step(best_and_last, short_text):
    folders, results = best_and_last
    best, last = results[BEST], results[LAST]
    lines = [json.loads(line) for line in (folders[BEST] / "metrics.jsonl").read_text().splitlines()]
    lowest = min(lines, key=lambda line: line["tune_nll"])
    assert best.selected_step == best.lowest_tuning_step == lowest["step"] < STEPS
    assert best.tune_nll == lowest["tune_nll"] < best.last.tune_nll - 0.1
    assert best.is_before_end
    assert not last.is_before_end
    # the same training: only the choice of the step differs
    assert best.curve == last.curve
    assert (last.selected_step, last.lowest_tuning_step) == (STEPS, lowest["step"])
    assert best.last.heldout_nll == last.heldout_nll == last.last.heldout_nll > best.heldout_nll + 0.1
    assert (best.last.train_nll, best.last.bits_per_byte) == (last.train_nll, last.bits_per_byte)
    # losses by document: of both steps, or once if they are the same
    for documents, nats, nll in (
        (best.documents, best.documents.nats, best.heldout_nll),
        (best.documents, best.last.document_nats, last.heldout_nll),
        (last.documents, last.documents.nats, last.heldout_nll),
    ):
        assert len(nats) == len(documents.tokens)
        assert sum(nats) / sum(documents.tokens) == pytest.approx(nll, abs=1e-5)
    assert last.last.document_nats is None
    # the saved model is that of the selected step
    for select, tune_nll in ((BEST, lowest["tune_nll"]), (LAST, best.last.tune_nll)):
        model = installed(load(str(folders[select] / "final")))
        blocks = [measure(model, short_text.split(split), LENGTH, short_text.counts) for split in ("tune", "heldout")]
        few = measure(model, short_text.split("tune"), LENGTH, short_text.counts, 32)
        assert few.nll == pytest.approx(tune_nll, abs=1e-5)
        assert blocks[1].nll == pytest.approx(results[select].heldout_nll, abs=1e-5)
    assert {path.name for path in folders[BEST].iterdir()} == {"final", "metrics.jsonl", "result.json"}


@pytest.mark.parametrize("step", [14, 59])
def test_interrupted_run_resumes_to_same_best_step(
    best_and_last, short_text, overfitted_settings, interrupted, tmp_path, step
):
    """The first checkpoint, at step 15, is near the best step; the second, at 60, is far past it."""
    _, results = best_and_last
    run = jobs_on(short_text)(overfitted_settings(select=BEST), tmp_path / "run")
    interrupted(run, step)
    assert differing_fields(train(run).result, results[BEST]) == set()


def test_run_of_rising_loss_before_its_first_checkpoint_keeps_nothing_of_lost_steps(
    best_and_last, short_text, overfitted_settings, interrupted, tmp_path
):
    """A second Ctrl-C writes no checkpoint, so the run starts again and finds weights of steps that it lost."""
    _, results = best_and_last
    run = jobs_on(short_text)(overfitted_settings(select=BEST), tmp_path / "run")
    interrupted(run, 18, times=2, raises=KeyboardInterrupt)
    assert list(run.folder.glob("best-*"))
    assert differing_fields(train(run).result, results[BEST]) == set()


def test_lowest_step_is_first_of_equal_finite_losses_after_the_change_of_the_boundary():
    losses = {10: 2.0, 20: 3.0, 30: 2.5, 40: 2.5, 50: math.nan}
    assert lowest_step(losses, BoundarySpec.parse("tied")) == 10
    assert lowest_step(losses, BoundarySpec.parse("tied+untie_at=20")) == 30
    assert lowest_step(losses, BoundarySpec.parse("untied+tie_at=40")) is None
    assert lowest_step({}, BoundarySpec.parse("tied")) is None


def test_weights_of_the_best_step_up_to_each_checkpoint_are_kept(short_text, tiny_settings, tmp_path):
    job = jobs_on(short_text)(tiny_settings(select=BEST), tmp_path)
    for step, nll in ((10, 3.0), (20, 2.9), (30, 3.1), (40, 2.8), (50, 2.7)):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "tune_nll": nll}) + "\n")
        keep_if_best(job, step, lambda path: path.write_text(path.name))
        if step in (30, 40):
            (tmp_path / f"checkpoint-{step}").mkdir()
    kept = {path.name for path in tmp_path.glob("best-*")}
    assert kept == {"best-20", "best-40", "best-50"}  # 20 is the best step up to the checkpoint at 30


def test_scheduled_arm_keeps_a_step_after_its_change(short_text, overfitted_settings, tmp_path):
    settings = overfitted_settings(select=BEST, arms=("tied+untie_at=40",))
    result = train(jobs_on(short_text)(settings, tmp_path / "run")).result
    assert result.selected_step > 40
    assert result.parameters.keys() >= {"input table", "output table"}


def test_comparison_keeps_best_steps_unless_told_otherwise_and_single_run_the_last(tiny_settings, tmp_path):
    assert tiny_settings().checked().select == BEST
    assert tiny_settings(seed=1, arms=("tied",)).checked().select == LAST
    assert tiny_settings(select=LAST).checked().select == LAST
    with refusal("select = 'beast'", RunError):
        tiny_settings(select="beast").checked()
    # a run of a version without the choice resumes as it began
    tiny_settings().checked().save(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(path.read_text().replace("select: best\n", ""))
    assert Settings.load(path).select == LAST


def test_recurrent_run_keeps_its_option_for_the_best_epoch():
    settings = Settings.of({"kind": "recurrent", "text": ["corpus"], "arms": ["tied", "untied"]})
    assert settings.checked().select == LAST
    with refusal("keep=best", RunError):
        replace(settings, select=BEST).checked()


def test_comparison_reports_both_steps(source, tmp_path, lines):
    small = {"width": 32, "layers": 1, "heads": 2, "length": LENGTH, "batch": 4, "learning_rate": 2e-2}
    settings = Settings(
        arms=("tied", "untied"), seeds=2, text=(str(source),), tokenizer="bpe:300", steps=40, train_tokens=320, **small
    )
    out = lines.begin(settings, tmp_path / "out")
    found = finish(out, lines.display)
    assert found.setting["select"] == BEST
    chosen, last = (found.difference("untied", name) for name in ("heldout_nll", "last:heldout_nll"))
    for difference, value in ((chosen, lambda run: run.heldout_nll), (last, lambda run: run.last.heldout_nll)):
        pairs = zip(found.of("tied"), found.of("untied"), strict=True)
        differences = [value(untied) - value(tied) for tied, untied in pairs]
        assert difference.mean == pytest.approx(sum(differences) / 2)
    assert f" of {settings.steps} steps" in "\n".join(lines)
    assert any(line.startswith("At the last step, validation loss untied − tied is ") for line in explanations(found))
    row = found.rows()[0]
    assert row["last_heldout_nll"] == found.runs[0].last.heldout_nll
    assert row["selected_step"] == found.runs[0].selected_step


def test_explanations_name_the_best_steps_and_the_other_choice():
    def run(arm, seed, best, select):
        step = best if select == BEST else 600
        last = LastStep(3.0, 2.0, 3.1, 1.4)
        return replace(make_run(arm, seed, 3.0), steps=600, selected_step=step, lowest_tuning_step=best, last=last)

    for select, advice in ((BEST, "--select last keeps the last ones"), (LAST, "--select best compares the best ones")):
        runs = [run("tied", seed, 600, select) for seed in (1, 2)]
        runs += [run("untied", seed, best, select) for seed, best in ((1, 180), (2, 240))]
        found = complete(replace(comparison(runs), setting={"select": select}))
        note = next(line for line in explanations(found) if line.startswith("Lowest loss on tuning text"))
        assert "untied at steps 180–240 of 600" in note
        assert "tied at step" not in note.replace("untied", "")
        assert advice in note
        at_last = [line for line in explanations(found) if line.startswith("At the last step")]
        assert len(at_last) == (select == BEST)
