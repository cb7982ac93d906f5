"""Thousands of damaged checkpoints: plain errors or findings, and never anything outside the folder."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tiewise.checkpoint.untrusted import MOST_VALUES, parse_json
from tiewise.core.errors import CheckpointError

CHILD = Path(__file__).with_name("hostile_child.py")


@pytest.mark.parametrize(
    ("first", "count"), [(0, 150), pytest.param(1000, 10_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_checkpoints(tmp_path, first, count):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(tmp_path / "home"), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert not told["failed"], f"{len(told['failed'])} of {count}: " + "\n".join(told["failed"][:20])
    assert told["checked"] + told["refused"] == count
    assert told["refused"] > count // 100
    assert told["checked"] > count // 2
    assert told["grown"] < 200 * 2**20


@pytest.mark.parametrize("values", [b"[],", b"{},", b"0,"])
def test_json_of_too_many_values_is_not_parsed(values):
    text = b"[" + values * (MOST_VALUES // len(values) * 2) + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="more than 6,000,000 values"):
            parse_json(text, "tokenizer.json")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
