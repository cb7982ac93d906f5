"""Tests that a killed and resumed comparison ends with the results of an undisturbed one.

Each moment patches one function of the Trainer or of tiewise in a separate process, so the kill comes while a file is
half written. A fork server has imported everything and trained nothing, so each child starts fast and clean.
"""

import os
import random
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.fork_server import fork_context
from tests.training.conftest import assert_same_results
from transformers import Trainer, TrainerState, trainer

from tiewise.training import compare, run
from tiewise.training.compare import Display
from tiewise.training.kinds.seq2seq import Seq2SeqOptions
from tiewise.training.trainer import RunRecord

FLAX, STEPS = "tiewise.training.kinds.flax", "tiewise.boundary.flax.training"


def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner, name, number, first=None):
    """Die at call `number` of a function: after `first(real, …)` if given, else before the call."""
    owner = import_module(owner) if isinstance(owner, str) else owner
    real, calls = getattr(owner, name), []

    def replaced(*arguments, **named):
        calls.append(name)
        if len(calls) == number:
            if first is not None:
                first(real, *arguments, **named)
            die()
        return real(*arguments, **named)

    setattr(owner, name, replaced)


def half_a_state(real, state, path):
    Path(path).write_text('{"epoch": 1.5, "global')


def half_a_line(real, path, line):
    with path.open("a") as file:
        file.write('{"step": 1')


def half_of_the_arrays(real, path, data):
    path.with_name(f".{path.name}.1.partial").write_bytes(b"half")


def half_a_rotation(real, output_dir, **named):
    (Path(output_dir) / "checkpoint-8" / "optimizer.pt").unlink()


def half_a_model(real, made, final):
    shutil.rmtree(final, ignore_errors=True)


def after(real, *arguments, **named):
    real(*arguments, **named)


# Two runs of 40 steps save a checkpoint every 8 steps, five each. A call beyond 5 belongs to the second run.
MOMENTS = {
    "torch": {
        "before the first checkpoint": (RunRecord, "on_step_end", 5),
        "at a step": (RunRecord, "on_step_end", 29),
        "at a step of the second run": (RunRecord, "on_step_end", 60),
        "checkpoint without optimizer": (Trainer, "_save_optimizer_and_scheduler", 2),
        "checkpoint without random state": (Trainer, "_save_rng_state", 1),
        "checkpoint without its state": (TrainerState, "save_to_json", 3),
        "checkpoint with half its state": (TrainerState, "save_to_json", 7, half_a_state),
        "old checkpoint half removed": (trainer, "rotate_checkpoints", 3, half_a_rotation),
        "half a line of metrics": ("tiewise.training.trainer", "add_line", 13, half_a_line),
        "while the final loss is measured": (run, "_conclude", 1),
        "before the final model is in place": (run, "replace_path", 2, half_a_model),
        "before the result is written": (run, "write_json", 1),
        "before checkpoints are removed": (run, "write_json", 1, after),
        "before the comparison is written": (compare, "write_json", 1),
    },
    "flax": {
        "at a step of the second run": (STEPS, "_step", 60),
        "checkpoint with half its arrays": (FLAX, "write_atomically", 2, half_of_the_arrays),
        "checkpoint without its state": (FLAX, "write_json", 3),
        "checkpoint not in its place": (FLAX, "replace_path", 4),
        "half a line of metrics": (FLAX, "add_line", 13, half_a_line),
        "while the final loss is measured": (run, "_conclude", 1),
    },
    "seq2seq": {
        "at a step of the second run": (RunRecord, "on_step_end", 60),
        "checkpoint without its state": (TrainerState, "save_to_json", 3),
    },
}
BACKENDS = {"torch": {}, "flax": {"backend": "flax"}}
BACKENDS |= {"seq2seq": {"kind": "seq2seq", "model": "t5", "kind_options": Seq2SeqOptions()}}
QUICK = ("at a step", "checkpoint without its state", "before the result is written")
TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def finish(out):
    """Train or resume the comparison in `out` and return it."""
    return compare.finish(Path(out), Display(lambda line: None))


def dies(out, backend, moment):
    """Train the comparison until a named moment or a number of steps, then die."""
    step = (STEPS, "_step") if backend == "flax" else (RunRecord, "on_step_end")
    on_call(*(MOMENTS[backend][moment] if isinstance(moment, str) else (*step, moment)))
    finish(out)


def dies_at_touch(out, backend, number):
    """Train until the `number`-th disk access below `out` (open, rename, remove, mkdir, rmdir), then die."""
    touches = []

    def hook(event, arguments):
        if event in TOUCHES and str(arguments[0]).startswith(out):
            touches.append(event)
            if len(touches) == number:
                die()

    sys.addaudithook(hook)
    finish(out)


@pytest.fixture(scope="module")
def was_killed(tmp_path_factory):
    """Return a function that calls a target in a process and returns whether SIGKILL ended it."""
    made = fork_context()

    def ran(target, *arguments):
        child = made.Process(target=target, args=arguments)
        child.start()
        child.join(1800)  # JAX compiles its first steps
        assert not child.is_alive()
        return child.exitcode == -signal.SIGKILL

    with pytest.MonkeyPatch.context() as patch:
        # children share compiled functions
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield ran


@pytest.fixture(scope="module")
def copy_started_run(tiny_settings, tmp_path_factory):
    """Return a function that copies a started, untrained run to `out` and returns its undisturbed result."""
    made = {}

    def copied(backend, out):
        if backend not in made:
            folder = tmp_path_factory.mktemp(backend)
            compare.start(
                tiny_settings(**BACKENDS[backend]), folder / "begun", "tiewise compare", Display(lambda line: None)
            )
            shutil.copytree(folder / "begun", folder / "whole")
            made[backend] = folder / "begun", finish(folder / "whole")
        shutil.copytree(made[backend][0], out)
        return made[backend][1]

    return copied


def assert_resumes(out, undisturbed):
    resumed = finish(out)
    for one, whole in zip(resumed.runs, undisturbed.runs, strict=True):
        assert_same_results(one, whole)
    means = [found.difference("untied", "heldout_nll").mean for found in (resumed, undisturbed)]
    assert means[0] == pytest.approx(means[1], abs=1e-6)


@pytest.mark.parametrize(
    ("backend", "moment"),
    [
        pytest.param(backend, moment, marks=[] if backend == "torch" and moment in QUICK else pytest.mark.slow)
        for backend, moments in MOMENTS.items()
        for moment in moments
    ],
)
def test_run_killed_at_named_moment_resumes_to_same_results(was_killed, copy_started_run, tmp_path, backend, moment):
    undisturbed = copy_started_run(backend, tmp_path / "run")
    assert was_killed(dies, str(tmp_path / "run"), backend, moment)
    assert_resumes(tmp_path / "run", undisturbed)


# each seed kills a run several times; a touch is rarer in what it hits than a step, so it has more seeds
TARGETS = [("torch", dies_at_touch, 1, 150, seed) for seed in range(5)]
TARGETS += [("torch", dies, 1, 70, seed) for seed in range(4)]
TARGETS += [("flax", dies, 20, 70, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "target", "least", "most", "seed"), TARGETS)
def test_run_killed_repeatedly_at_random_moments_resumes_to_same_results(
    was_killed, copy_started_run, tmp_path, backend, target, least, most, seed
):
    """Each process dies at a random disk access or step, until one finishes before that."""
    out, draw, kills = tmp_path / "run", random.Random(seed), 0
    undisturbed = copy_started_run(backend, out)
    while was_killed(target, str(out), backend, draw.randint(least, most)):
        kills += 1
        assert kills < 100
    assert kills
    assert_resumes(out, undisturbed)
