"""SIGKILL at any moment, then resume: the final numbers of every run are those of the undisturbed comparison.

Children come from a server that has imported everything once and trained nothing, so that each costs little and starts
clean.
"""

import multiprocessing
import random
import shutil
import signal

import killed_child
import pytest
from killed_child import finish, killed
from tests.training.conftest import assert_same

from tiewise.training.compare import Display, start

QUICK = ("at a step", "checkpoint without its state", "before the result is written")


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    made = multiprocessing.get_context("forkserver")
    # not our own module: the server has another path
    made.set_forkserver_preload(["tiewise.training.compare", "tiewise.training.kinds.flax"])
    with pytest.MonkeyPatch.context() as patch:
        # what one child has compiled the next one loads
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield made


@pytest.fixture(scope="module")
def begun(tiny, tmp_path_factory):
    """Make a copy of a backend's run that is started and not yet trained; return what it ends with undisturbed."""
    made = {}

    def copied(backend, out):
        if backend not in made:
            folder = tmp_path_factory.mktemp(backend)
            settings = tiny(arms=("tied", "untied"), backend=backend)
            start(settings, folder / "begun", "tiewise compare", Display(lambda line: None))
            shutil.copytree(folder / "begun", folder / "whole")
            made[backend] = folder / "begun", finish(folder / "whole")
        shutil.copytree(made[backend][0], out)
        return made[backend][1]

    return copied


def check(out, undisturbed):
    resumed = finish(out)
    for run, whole in zip(resumed.runs, undisturbed.runs, strict=True):
        assert_same(run, whole)
    assert resumed.difference("untied", "heldout_nll").mean == pytest.approx(
        undisturbed.difference("untied", "heldout_nll").mean, abs=1e-6
    )


@pytest.mark.parametrize(
    ("backend", "moment"),
    [
        pytest.param(backend, moment, marks=[] if backend == "torch" and moment in QUICK else pytest.mark.slow)
        for backend, moments in killed_child.MOMENTS.items()
        for moment in moments
    ],
)
def test_killed_at(context, begun, tmp_path, backend, moment):
    undisturbed = begun(backend, tmp_path / "run")
    assert killed(context, killed_child.dies, str(tmp_path / "run"), backend, moment) == -signal.SIGKILL
    check(tmp_path / "run", undisturbed)


TARGETS = [("torch", "dies_at_touch", 1, 150, seed) for seed in range(8)]
TARGETS += [("torch", "dies_at_step", 1, 70, seed) for seed in range(8)]
TARGETS += [("flax", "dies_at_step", 20, 70, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "target", "least", "most", "seed"), TARGETS)
def test_killed_at_random_moments_again_and_again(context, begun, tmp_path, backend, target, least, most, seed):
    """At a random touch of the disk, or after a random step, until it gets through before its next one."""
    out, draw, kills = tmp_path / "run", random.Random(seed), 0
    undisturbed, dies = begun(backend, out), getattr(killed_child, target)
    while killed(context, dies, str(out), backend, draw.randint(least, most)) == -signal.SIGKILL:
        kills += 1
        assert kills < 100
    assert kills
    check(out, undisturbed)
