"""What tests of the rewriting engine share: a verb in another process, and folders told apart by content."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).parent / "verb_child.py"


def start(verb, source, to, **options):
    """Start a verb in a process of its own and wait until it stands ready; it begins when told by `go`."""
    command = [sys.executable, str(CHILD), verb, str(source), str(to), json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    """Let it begin."""
    process.stdin.write("go\n")
    process.stdin.flush()


def child(verb, source, to, **options):
    """Run a verb in a process of its own; return what it printed."""
    process = start(verb, source, to, **options)
    out, _ = process.communicate("go\n")
    assert process.returncode == 0
    return json.loads(out)


def listing(path):
    """{path below: SHA-256} of every file; None for a folder."""
    found = {}
    for folder, names, files in os.walk(path):
        here = Path(folder)
        found |= {str((here / name).relative_to(path)): None for name in names}
        for name in files:
            file = here / name
            found[str(file.relative_to(path))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def untimed(path):
    """The listing of a result, its provenance without the times."""
    record = json.loads((path / "tiewise.json").read_text())
    for operation in record["operations"]:
        operation.pop("time")
    return listing(path) | {"tiewise.json": record}
