"""Test that a fault at any write, close, fsync, link or rename of a rewrite leaves a complete result or none."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.checkpoint.rewrite.faulty_rewrite import VERBS

from tiewise.checkpoint.rewrite import listing

FAULTY = Path(__file__).with_name("faulty_rewrite.py")
ROOT = Path(__file__).parents[3]
SAYS = {"ENOSPC": "no space left while writing (No space left on device); make room there, or choose another disk"}
SAYS |= {
    "EIO": "the disk or its file system failed (Input/output error); check the disk, or choose another disk",
    "EROFS": "the file system is read-only (Read-only file system); mount it for writing, or choose another disk",
}
KINDS = {"write", "close", "fsync", "mkdir", "replace"}  # calls that every rewrite makes
REFUSED = ("write", "chmod", "replace")  # no rewrite survives a fault there


def records(folder, how, step, verbs=tuple(VERBS)):
    """Run the program and return {verb: its record}."""
    command = [sys.executable, FAULTY, folder / "folder", how, str(step), *verbs]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_faulty_rewrite_covers_every_verb():
    assert VERBS.keys() == set(listing.verb_names())


ALL = pytest.mark.slow
SOME = ("tie", "untie", "slim")


@pytest.mark.parametrize(
    ("how", "step", "verbs"),
    [
        pytest.param("ENOSPC", 4, SOME, id="ENOSPC, some"),
        pytest.param("EROFS", 9, SOME[:1], id="EROFS, some"),
        *(pytest.param(how, 1, tuple(VERBS), id=how, marks=ALL) for how in ("ENOSPC", "EIO")),
    ],
)
def test_system_error_at_any_call_is_one_line_and_leaves_complete_result_or_none(tmp_path, how, step, verbs):
    for verb, record in records(tmp_path, how, step, verbs).items():
        calls, faults = record["calls"], record["faults"]
        kinds = Counter(call.split()[0] for call in calls)
        assert kinds.keys() >= KINDS, verb
        assert len(faults) == len(range(0, len(calls), step))
        for fault in faults:
            assert fault["untouched"], (verb, fault)
            if fault["outcome"] == "made":
                assert fault["result"] == "complete", (verb, fault)
                assert not fault["call"].startswith(REFUSED), (verb, fault)
            else:
                assert fault["result"] == "absent", (verb, fault)
                expected = f"refused: {tmp_path / 'folder/new'}: {SAYS[how]}"
                assert fault["outcome"] == expected, (verb, fault)
        survived = [fault for fault in faults if fault["call"] == "fsync" and fault["outcome"] == "made"]
        assert len(survived) <= 1, verb  # of the parent folder, after the rename


def test_unchanged_shards_are_linked_or_copied_if_the_link_fails(tmp_path):
    record = records(tmp_path, "EIO", 1, ["untie"])["untie"]
    links = [fault for fault in record["faults"] if fault["call"].startswith("link")]
    assert [(fault["outcome"], fault["result"]) for fault in links] == [("made", "complete")]


@pytest.mark.parametrize(
    ("step", "verbs"),
    [
        pytest.param(5, SOME[:1], id="some"),
        pytest.param(1, tuple(VERBS), id="all", marks=ALL),
    ],
)
def test_kill_at_any_call_leaves_complete_result_or_none_and_next_run_cleans_up(tmp_path, step, verbs):
    for verb, record in records(tmp_path, "kill", step, verbs).items():
        for fault in record["faults"]:
            assert (fault["outcome"], fault["result"]) == ("killed", "complete"), (verb, fault)
            assert fault["untouched"], (verb, fault)
            assert not fault["ran_again"] or fault["left"] == [], (verb, fault)
            assert all(name.endswith(".lock") for name in fault["left"]), (verb, fault)
        assert any(fault["ran_again"] for fault in record["faults"]), verb
