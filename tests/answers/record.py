"""Run the recorded command lines and keep what they answer: `python -m tests.answers.record` writes `recorded/` anew.

An answer is the exit code, the names of the files that appeared, and every leaf of the JSON by its path. Long lists are
kept as their length with two sums or their first entries, a sentence as the fact that there is one. What the machine or
the hour decides is left out (`VOLATILE`).
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from unittest import mock

import jsonschema

from tests.answers import cases, inputs
from tiewise.cli.main import COMMANDS, main

RECORDED = Path(__file__).parent / "recorded"
# command → the published schema that its answer is held against
SCHEMAS = {"plan": "plan", "check": "audit", "inspect": "inspection", "compare": "results", "train": "run"}
SCHEMAS |= {name: "receipt" for name, module in COMMANDS["Checkpoints"].items() if module == "rewrite"}
LONG = 8  # a list of more numbers than this is kept as sums
# what differs from hour to hour, machine to machine or version to version, or is words that may be put better any day;
# and how many singular values rounding leaves of tables of rank 4: processors differ, their sum does not
VOLATILE = re.compile(
    r"/(seconds|tokens_per_second|peak_memory\w*|started|finished|date|versions?|host|machine|commit|cpu|pid|hash|sha256"
    r"|command|processor)(/|$)|/sections/\w+/found/[^/]*/(answer|(curves|points)/\d+/why)$"
    r"|/alignment/found/factored:4/curves/[01]/[xy]$"
)


def answers(group, folder):
    """{name: answer} of one group of cases, run one after the other in `folder`, which holds the inputs."""
    return {name: answer(shlex.split(line), folder) for name, line in group.items()}


def answer(arguments, folder):
    """What one command line answers in `folder`: {"exit", "files", "said"}."""
    before = set(_files(folder))
    arguments = [next((str(p.relative_to(folder)) for p in folder.glob(a) if "*" in a), a) for a in arguments]
    code, out = run([*arguments, "--json"], folder)
    said = json.loads(out) if out.strip() else {}
    if code in (0, 1) and (name := SCHEMAS.get(arguments[0])) and not {"audits", "rules"} & set(said):
        (path,) = (files("tiewise") / "schemas").glob(f"{name}-*.json")
        jsonschema.validate(said, json.loads(path.read_text(encoding="utf-8")))
    new = sorted(set(_files(folder)) - before)
    return {"exit": code, "files": new, "said": dict(sorted(leaves(said).items()))}


def run(arguments, folder):
    """(exit code, stdout) of one command line in this process."""
    out = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["tiewise", *arguments]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            main()
        except SystemExit as end:
            return end.code, out.getvalue()
    raise AssertionError("a command ends by SystemExit")


def leaves(value, path=""):
    """{path: leaf} of a JSON value."""
    if VOLATILE.search(path):
        return {}
    if isinstance(value, dict):
        return {p: leaf for key, part in value.items() for p, leaf in leaves(part, f"{path}/{key}").items()}
    if isinstance(value, list) and len(value) > LONG and all(isinstance(item, int | float | None) for item in value):
        numbers = [float(item) for item in value if item is not None]
        return {f"{path}[]": [len(value), math.fsum(numbers), math.fsum(map(abs, numbers))]}
    if isinstance(value, list) and len(value) > LONG:
        return {f"{path}/length": len(value)} | leaves(value[:2], path)
    if isinstance(value, list):
        return {p: leaf for i, part in enumerate(value) for p, leaf in leaves(part, f"{path}/{i}").items()}
    return {path: value if not isinstance(value, str) or _is_name(value) else "words"}


def _is_name(text):
    """Whether a string is a name and no sentence, path or figure in words, which may be put better any day."""
    return len(text) <= 40 and text.count(" ") <= 2 and "/" not in text and not re.search(r"\d\.\d", text)


def _files(folder):
    hidden = ("*/tensorboard/*", "*/checkpoint-*/*", "*events.out*")
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return [name for name in found if not any(fnmatch(name, pattern) for pattern in hidden)]


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        inputs.make(folder)
        record = {"exact": answers(cases.EXACT, folder), "trained": answers(cases.TRAINED, folder)}
    for group, found in record.items():
        (RECORDED / f"{group}.json").write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")
