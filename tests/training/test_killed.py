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
from killed_child import killed

from tiewise.training.compare import finish, start
from tiewise.training.display import Display

SILENT = Display(lambda line: None)
QUICK = ("at a step", "checkpoint without its state", "before the result is written")


@pytest.fixture(scope="module")
def context():
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tiewise.training.compare"])  # not our own module: the server has another path
    return made


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory):
    """A run that is started and not yet trained."""
    out = tmp_path_factory.mktemp("prepared") / "run"
    start(tiny(arms=("tied", "untied")), out, "tiewise compare", SILENT)
    return out


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    shutil.copytree(prepared, out)
    return finish(out, SILENT)


def check(out, undisturbed):
    resumed = finish(out, SILENT)
    assert [(r.arm, r.seed) for r in resumed.runs] == [(r.arm, r.seed) for r in undisturbed.runs]
    for run, whole in zip(resumed.runs, undisturbed.runs, strict=True):
        assert run.heldout_nll == pytest.approx(whole.heldout_nll, abs=1e-6)
        assert run.train_nll == pytest.approx(whole.train_nll, abs=1e-6)
        assert [p.step for p in run.curve] == [p.step for p in whole.curve]
        for point, other in zip(run.curve, whole.curve, strict=True):
            assert point.train_nll == pytest.approx(other.train_nll, abs=1e-6)
            assert point.path_a == pytest.approx(other.path_a, abs=1e-6)
    assert resumed.difference("untied", "heldout_nll").mean == pytest.approx(
        undisturbed.difference("untied", "heldout_nll").mean, abs=1e-6
    )


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=[] if m in QUICK else pytest.mark.slow) for m in killed_child.MOMENTS]
)
def test_killed_at(context, prepared, undisturbed, tmp_path, moment):
    out = tmp_path / "run"
    shutil.copytree(prepared, out)
    assert killed(context, killed_child.dies, str(out), moment) == -signal.SIGKILL
    check(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("target", "most"), [("dies_at_touch", 150), ("dies_at_step", 70)])
def test_killed_at_random_moments_again_and_again(context, prepared, undisturbed, tmp_path, target, most, seed):
    """At a random touch of the disk, or after a random step, until it gets through before its next one."""
    out, draw = tmp_path / "run", random.Random(seed)
    shutil.copytree(prepared, out)
    kills = 0
    while killed(context, getattr(killed_child, target), str(out), draw.randint(1, most)) == -signal.SIGKILL:
        kills += 1
        assert kills < 100
    assert kills
    check(out, undisturbed)
