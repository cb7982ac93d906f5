"""Installed models under DDP and FSDP2, compared with one process, and the watch of first steps."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from parallel_ranks import CASES
from tiny_models import batch, build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiewise.boundary.installation import install
from tiewise.boundary.saved import link_of
from tiewise.boundary.sharded_tables import require_same_tables
from tiewise.boundary.watch import _FIRST, _LAST, _UNDECIDED, _digest, _Watch
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.spec import BoundarySpec

_PROCESSES = Path(__file__).with_name("parallel_ranks.py")


@pytest.mark.parametrize(
    ("some", "world"),
    [
        ("quick", 2),
        pytest.param("traps", 2, marks=pytest.mark.slow),
        pytest.param("parity", 2, marks=pytest.mark.slow),
        pytest.param("parity", 4, marks=pytest.mark.slow),
    ],
)
def test_ddp_and_fsdp_processes_train_as_one_process_does(tmp_path, some, world):
    command = [sys.executable, str(_PROCESSES), str(tmp_path / "store"), str(world), some]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_cases_contain_every_pair_of_settings():
    for one, two in combinations(range(len(CASES[0])), 2):
        values = {case[one] for case in CASES}, {case[two] for case in CASES}
        assert {(case[one], case[two]) for case in CASES} == {(a, b) for a in values[0] for b in values[1]}


class HostReads(TorchDispatchMode):
    """Count of operations that make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_watch_of_a_step_does_not_wait_for_the_device():
    model = build("llama")
    install(model)
    watched = _Watch(model, link_of(model), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(3):
            model.train()(**batch(model)).loss.backward()
            with HostReads() as reads:
                watched.before_step(optimizer)
                watched.after_step(optimizer)
            assert reads.count == 0
        assert watched.is_watched_optimizer(optimizer)
        assert bool(watched.saw_gradient)
        assert int(watched.digest) == int(_digest(model.lm_head.weight.detach()))  # no step was taken
    finally:
        watched.stop()


def test_watch_compares_processes_at_powers_of_two_until_the_last_step(monkeypatch):
    model = build("llama")
    install(model)
    watched = _Watch(model, link_of(model), None)
    compared, stopped = [], []
    monkeypatch.setattr(_Watch, "compare", lambda self, model: compared.append(self.steps) or _UNDECIDED)
    monkeypatch.setattr("tiewise.boundary.watch.unwatch", lambda model: stopped.append(watched.steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        watched.before_step(optimizer)
        for _ in range(_LAST):
            watched.after_step(optimizer)
    finally:
        watched.stop()
    assert compared == [2**n for n in range(20) if _FIRST <= 2**n <= _LAST]
    assert stopped == [_LAST]


def test_sharded_tables_refuse_a_schedule_and_another_spec():
    model, has = nn.Linear(2, 2), BoundarySpec.parse("untied")
    with pytest.raises(SpecError, match="changes during training"):
        require_same_tables(model, BoundarySpec.parse("untied+tie_at=5"), has, changed=False, verified=False)
    with pytest.raises(InstallError, match="has untied tables that are sharded, and tied would change them"):
        require_same_tables(model, BoundarySpec.parse("tied"), has, changed=False, verified=False)
