"""SIGKILL at any moment, then resume: the final numbers of every run are those of the undisturbed comparison.

Each moment patches one function of the Trainer or of ours, in a process of its own, so that the kill falls where a file
is half there. Children come from a server that has imported everything once and trained nothing, so that each costs
little and starts clean.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.training.conftest import assert_same
from transformers import Trainer, TrainerState, trainer

from tiewise.training import compare, run
from tiewise.training.compare import Display
from tiewise.training.kinds.seq2seq import Seq2SeqOptions
from tiewise.training.trainer import RunRecord

FLAX, STEPS = "tiewise.training.kinds.flax", "tiewise.boundary.flax.training"


def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner, name, number, first=None):
    """Die at call `number` of a function, after `first(real, …)` where given, before it otherwise."""
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


# Two runs of 40 steps, a checkpoint every 8: five saves each. A call beyond 5 is the second run's.
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
        "while the final loss is measured": (run, "_concluded", 1),
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
        "while the final loss is measured": (run, "_concluded", 1),
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
    """Run or finish the comparison in `out`."""
    return compare.finish(Path(out), Display(lambda line: None))


def dies(out, backend, moment):
    """Run it until `moment`, or its so many-th step."""
    step = (STEPS, "_step") if backend == "flax" else (RunRecord, "on_step_end")
    on_call(*(MOMENTS[backend][moment] if isinstance(moment, str) else (*step, moment)))
    finish(out)


def dies_at_touch(out, backend, number):
    """Run it until it touches the disk below `out` for the `number`-th time: opening, renaming, making, removing."""
    touches = []

    def hook(event, arguments):
        if event in TOUCHES and str(arguments[0]).startswith(out):
            touches.append(event)
            if len(touches) == number:
                die()

    sys.addaudithook(hook)
    finish(out)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Run one of these functions in a process of its own; say whether it was killed."""
    made = multiprocessing.get_context("forkserver")
    # not our own module: the server has another path
    made.set_forkserver_preload(["tiewise.training.compare", FLAX])

    def ran(target, *arguments):
        child = made.Process(target=target, args=arguments)
        child.start()
        child.join(1800)  # its first steps by JAX are compiled
        assert not child.is_alive()
        return child.exitcode == -signal.SIGKILL

    with pytest.MonkeyPatch.context() as patch:
        # what one child has compiled the next one loads
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield ran


@pytest.fixture(scope="module")
def begun(tiny, tmp_path_factory):
    """Make a copy of a backend's run that is started and not yet trained; return what it ends with undisturbed."""
    made = {}

    def copied(backend, out):
        if backend not in made:
            folder = tmp_path_factory.mktemp(backend)
            compare.start(tiny(**BACKENDS[backend]), folder / "begun", "tiewise compare", Display(lambda line: None))
            shutil.copytree(folder / "begun", folder / "whole")
            made[backend] = folder / "begun", finish(folder / "whole")
        shutil.copytree(made[backend][0], out)
        return made[backend][1]

    return copied


def check(out, undisturbed):
    resumed = finish(out)
    for one, whole in zip(resumed.runs, undisturbed.runs, strict=True):
        assert_same(one, whole)
    means = [found.difference("untied", "heldout_nll").mean for found in (resumed, undisturbed)]
    assert means[0] == pytest.approx(means[1], abs=1e-6)


@pytest.mark.parametrize(
    ("backend", "moment"),
    [
        pytest.param(backend, moment, marks=[] if backend != "flax" and moment in QUICK else pytest.mark.slow)
        for backend, moments in MOMENTS.items()
        for moment in moments
    ],
)
def test_killed_at(killed, begun, tmp_path, backend, moment):
    undisturbed = begun(backend, tmp_path / "run")
    assert killed(dies, str(tmp_path / "run"), backend, moment)
    check(tmp_path / "run", undisturbed)


TARGETS = [("torch", dies_at_touch, 1, 150, seed) for seed in range(8)]
TARGETS += [("torch", dies, 1, 70, seed) for seed in range(8)]
TARGETS += [("flax", dies, 20, 70, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "target", "least", "most", "seed"), TARGETS)
def test_killed_at_random_moments_again_and_again(killed, begun, tmp_path, backend, target, least, most, seed):
    """At a random touch of the disk, or after a random step, until it gets through before its next one."""
    out, draw, kills = tmp_path / "run", random.Random(seed), 0
    undisturbed = begun(backend, out)
    while killed(target, str(out), backend, draw.randint(least, most)):
        kills += 1
        assert kills < 100
    assert kills
    check(out, undisturbed)
