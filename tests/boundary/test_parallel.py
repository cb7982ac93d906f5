"""Installed models under DDP and FSDP2 beside one process; what the processes do is in `parallel_ranks`."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from parallel_ranks import CASES

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
def test_processes_beside_one(tmp_path, some, world):
    command = [sys.executable, str(_PROCESSES), str(tmp_path / "store"), str(world), some]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_pair_is_among_the_cases():
    for one, two in combinations(range(len(CASES[0])), 2):
        values = {case[one] for case in CASES}, {case[two] for case in CASES}
        assert {(case[one], case[two]) for case in CASES} == {(a, b) for a in values[0] for b in values[1]}
