"""SIGKILL and Ctrl-C at any moment of a comparison in JAX, then resume: the figures of the undisturbed one.

Children come from a server that has imported everything once, as in test_killed.py.
"""

import json
import multiprocessing
import random
import shutil
import signal

import flax_killed_child
import numpy as np
import pytest
from flax import nnx
from killing import killed

from tiewise.core.errors import CheckpointError, Interrupted
from tiewise.core.spec import BoundarySpec
from tiewise.flax import flax_training
from tiewise.flax.flax_models import FlaxRNN
from tiewise.flax.flax_training import OptaxRecipe
from tiewise.training.display import Display
from tiewise.training.folder import newest_checkpoint
from tiewise.training.kinds import flax
from tiewise.training.run import train
from tiewise.training.settings import Job
from tiewise.training.start import start


def trained(tiny, text, counts, folder, **changes):
    return train(
        Job("tied", BoundarySpec.parse("tied"), 1, tiny(backend="flax", **changes), folder), text, counts, [3, 4]
    )


def pressed(monkeypatch, number):
    """Press Ctrl-C before the `number`-th step from here on."""
    real, calls = flax_training._step, []

    def step(*arguments):
        calls.append(number)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(flax_training, "_step", step)


def same(one, other):
    """Whether two runs' figures are the same; times and memory are each run's own."""
    for name in ("heldout_nll", "train_nll", "initial_nll", "bits_per_byte"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-6), name
    assert [p.step for p in one.curve] == [p.step for p in other.curve]
    for a, b in zip(one.curve, other.curve, strict=True):
        for name in ("train_nll", "heldout_nll", "path_a", "path_b", "cosine"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-6), (a.step, name)


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint_and_the_run_goes_on(tiny, text, counts, tmp_path, monkeypatch):
    """In the middle of a window of the curve, right before one ends, and at the last step."""
    whole = trained(tiny, text, counts, tmp_path / "whole").result
    folder = tmp_path / "cut"
    for number, step in ((5, 5), (3, 8), (32, 40)):
        with monkeypatch.context() as patch:
            pressed(patch, number)
            with pytest.raises(Interrupted):
                trained(tiny, text, counts, folder)
        assert json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["global_step"] == step
        assert len(list(folder.glob("checkpoint-*"))) <= 2
    resumed = trained(tiny, text, counts, folder).result
    same(resumed, whole)
    assert resumed.seconds > 0
    assert resumed.tokens_per_second == pytest.approx((40 - 3) * 64 / resumed.seconds)  # three processes' first steps
    assert sorted(path.name for path in folder.iterdir()) == ["final", "metrics.jsonl", "result.json"]


def begun(seed, width=8):
    """A training run of seconds, no step taken."""
    recipe = OptaxRecipe(steps=60, batch=4, length=6, learning_rate=3e-2)
    return flax_training.Fitting(FlaxRNN("untied", 7, width, 1, rngs=nnx.Rngs(seed)), np.arange(700) % 7, recipe)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    run = begun(0)
    flax.keep(run, tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint-0 is of another model or optimizer; use the versions"):
        flax.take_up(begun(0, width=4), tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-0" / flax.ARRAYS).write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        flax.take_up(run, tmp_path / "checkpoint-0")
    (tmp_path / "checkpoint-0" / flax.STATE).write_text('{"global_step": 0}')
    with pytest.raises(CheckpointError, match="checkpoint-0 is no checkpoint of the flax backend"):
        flax.take_up(run, tmp_path / "checkpoint-0")


def test_a_fitting_goes_on_from_its_newest_checkpoint_digit_for_digit(tmp_path):
    """Cut in the middle of a window of the curve, with two older checkpoints and a torn newer one."""

    def points(run):
        return [point for point in run.steps() if point is not None]

    whole, cut = begun(0), begun(0)
    wanted = points(whole)
    seen = []
    for point in cut.steps():
        seen += [] if point is None else [point]
        if cut.step in (9, 20, 31):
            flax.keep(cut, tmp_path)
        if cut.step == 31:
            break
    (tmp_path / "checkpoint-33").mkdir()
    (tmp_path / "checkpoint-34.partial").mkdir()
    resumed = begun(1)
    flax.take_up(resumed, newest_checkpoint(tmp_path)[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-31"]
    assert resumed.step == 31
    assert str(seen + points(resumed)) == str(wanted)  # a cosine of two tables is nan, which equals nothing
    for name, value in whole.arrays().items():
        assert np.array_equal(value, resumed.arrays()[name]), name
    assert (whole.timed, resumed.timed) == (59, 30 + 28)


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # what one child has compiled the next one loads
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield _server()


def _server():
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tiewise.training.compare", "tiewise.training.kinds.flax"])
    return made


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory):
    """A run that is started and not yet trained."""
    out = tmp_path_factory.mktemp("prepared") / "run"
    start(tiny(arms=("tied", "untied"), backend="flax"), out, "tiewise compare", Display(lambda line: None))
    return out


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(prepared, out)
    return flax_killed_child.finish(out)


@pytest.mark.slow
@pytest.mark.parametrize("moment", flax_killed_child.MOMENTS)
def test_killed_at(context, prepared, undisturbed, tmp_path, moment):
    out = tmp_path / "run"
    shutil.copytree(prepared, out)
    assert killed(context, flax_killed_child.dies, str(out), moment) == -signal.SIGKILL
    for one, other in zip(flax_killed_child.finish(out).runs, undisturbed.runs, strict=True):
        same(one, other)


@pytest.mark.slow
def test_killed_at_random_steps_again_and_again(context, prepared, undisturbed, tmp_path):
    """After a random step, until it gets through before its next one."""
    out, draw, kills = tmp_path / "run", random.Random(0), 0
    shutil.copytree(prepared, out)
    while killed(context, flax_killed_child.dies_at_step, str(out), draw.randint(20, 70)) == -signal.SIGKILL:
        kills += 1
    assert kills
    for one, other in zip(flax_killed_child.finish(out).runs, undisturbed.runs, strict=True):
        same(one, other)
