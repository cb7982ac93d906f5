"""Rewrite tiny folders repeatedly, each time with a fault at another write, close, fsync, link or rename.

    python faulty_rewrite.py FOLDER HOW STEP VERB…

test_disk_faults.py runs this program. HOW is the name of an error, such as ENOSPC, that the call raises, or "kill": the
process dies there, in a fork. FOLDER gets the sources. The faults are at call 0, STEP, 2 · STEP, … of those that a
rewrite makes. The program prints one JSON object: for each verb the names of all calls, and for each fault the outcome.
It imports no torch, so a fork copies little memory.
"""

import builtins
import errno
import fcntl
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.checkpoint.rewrite.rewrite_hashes import hash_files, hash_without_times
from tests.checkpoint.rewrite.verb_examples import write_sources
from tests.checkpoint.tiny_checkpoints import llama

from tiewise.checkpoint import rewrite
from tiewise.core.errors import CheckpointError

# {verb: (source, options)}
VERBS = {
    "repair": ("wrong", {}),
    "tie": ("untied", {"keep": "mean"}),
    "untie": ("sharded", {}),
    "factor": ("untied", {"rank": 4}),
    "resize": ("tied", {"vocab": 50}),
    "trim": ("tied", {"size": 35}),
    "transplant": ("tied", {"tokenizer": "untied"}),
    "merge": ("tied", {"adapter": "adapter"}),
    "slim": ("adapter", {"base": "tied"}),
}
SOURCES = {"adapter", "base", "tokenizer"}  # options that name a source
CALLS = ("fsync", "link", "replace", "rename", "mkdir", "chmod")  # of module os
WRITING = set("wax+")  # letters of a mode that opens a file for writing


class WatchedFile:
    """Open file that reports each `write` and its `close`."""

    def __init__(self, file, report):
        self.file, self.report = file, report

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def write(self, data):
        self.report(f"write {Path(self.file.name).name}")
        return self.file.write(data)

    def close(self):
        is_open = not self.file.closed
        self.file.close()
        if is_open:  # the last bytes reach the disk here
            self.report(f"close {Path(self.file.name).name}")


class Watch:
    """Calls that write, while the block runs; `at_call` gets the number of each before it is made."""

    def __init__(self, at_call: Callable[[int], None]) -> None:
        self.at_call = at_call
        self.calls = []
        self.originals = {name: getattr(os, name) for name in CALLS}
        self.open, self.ioctl = builtins.open, fcntl.ioctl

    def report(self, name):
        self.calls.append(name)
        self.at_call(len(self.calls) - 1)

    def __enter__(self):
        builtins.open = io.open = self.opened
        fcntl.ioctl = self.refused_reflink
        for name in CALLS:
            setattr(os, name, self.watched(name))
        return self

    def __exit__(self, *error):
        builtins.open = io.open = self.open
        fcntl.ioctl = self.ioctl
        for name, original in self.originals.items():
            setattr(os, name, original)

    def opened(self, file, mode="r", *rest, **options):
        made = self.open(file, mode, *rest, **options)
        if WRITING.isdisjoint(mode):
            return made
        return WatchedFile(made, self.report)

    def refused_reflink(self, *given):
        raise OSError(errno.EOPNOTSUPP, "no reflinks here")

    def watched(self, name):
        def call(*given, **options):
            self.report(f"{name} {Path(str(given[0])).name if name != 'fsync' else ''}".strip())
            return self.originals[name](*given, **options)

        return call


def run_verb(name, folder, to, at_call):
    """Run a verb and return the calls that it made; `at_call` may raise."""
    source, options = VERBS[name]
    given = dict(options)
    for key in SOURCES.intersection(given):
        given[key] = folder / given[key]
    with Watch(at_call) as watch:
        try:
            getattr(rewrite, name)(folder / source, to, **given)
        finally:
            calls = watch.calls
    return calls


def outcome_of_error(name, folder, to, moment, code):
    """Return the outcome of a rewrite whose call number `moment` raises a system error."""

    def fail(number):
        if number == moment:
            raise OSError(code, os.strerror(code))

    try:
        run_verb(name, folder, to, fail)
    except CheckpointError as error:
        return f"refused: {error}"
    return "made"


def outcome_of_kill(name, folder, to, moment):
    """Return the outcome of a rewrite in a fork that dies at its call number `moment`."""

    def die(number):
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            run_verb(name, folder, to, die)
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if status == -signal.SIGKILL else f"exit code {status}"


def remove_leftovers(folder):
    """Remove the lock of a process that died after its rename; return the names of all leftovers."""
    left = sorted(folder.glob(".new.tiewise-*"))
    for path in left:
        path.unlink()
    return [path.name for path in left]


def faults_of(name, folder, how, step):
    """Return the record of one verb: its calls, and what each fault led to."""
    before = hash_files(folder)
    whole, to = folder / "whole", folder / "new"
    calls = run_verb(name, folder, whole, lambda number: None)
    expected = hash_without_times(whole)
    whole.rename(folder.with_name(f"{folder.name}-{name}"))
    faults = []
    for moment in range(0, len(calls), step):
        if how == "kill":
            outcome = outcome_of_kill(name, folder, to, moment)
        else:
            outcome = outcome_of_error(name, folder, to, moment, getattr(errno, how))
        fault = {"call": calls[moment], "outcome": outcome, "result": "absent"}
        if how == "kill":  # the next run removes what a killed one left
            fault["ran_again"] = not to.exists()
            if fault["ran_again"]:
                run_verb(name, folder, to, lambda number: None)
            fault["left"] = remove_leftovers(folder)
        if to.exists():
            fault["result"] = "complete" if hash_without_times(to) == expected else "partial"
            for path in sorted(to.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            to.rmdir()
        fault["untouched"] = hash_files(folder) == before
        faults.append(fault)
    return {"calls": calls, "faults": faults}


def main(folder, how, step, names):
    """Write the sources and return the records of all verbs."""
    folder.mkdir()
    np.seterr(all="ignore")
    write_sources(folder)
    llama(folder / "sharded", shards=2)
    return {name: faults_of(name, folder, how, step) for name in names}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])))
