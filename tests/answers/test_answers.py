"""What every command, every section and every kind of run answers on fixed inputs stays as it was recorded.

A name may change, if `renamed.py` says why; a figure may not. `python -m tests.answers.record` records anew where an
answer is meant to change.
"""

import json
import math
import re

import pytest

from tests.answers import cases, inputs, record, renamed


@pytest.fixture
def place(tmp_path):
    inputs.make(tmp_path)
    return tmp_path


def recorded(group):
    return json.loads((record.RECORDED / f"{group}.json").read_text())


def now(path):
    """Today's path of a recorded leaf; None where it is gone on purpose."""
    for pattern, new, _ in renamed.RENAMED:
        if re.search(pattern, path):
            return None if new is None else now(re.sub(pattern, new, path))
    return path


FP32 = 1e-6  # of figures that go through a model: processors round them differently. Whole numbers are equal


def same(was, found, tolerance):
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (was, found)]
    if all(numbers) and (tolerance > FP32 or isinstance(was, float) or isinstance(found, float)):
        return math.isclose(was, found, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(was, list) and isinstance(found, list):
        return len(was) == len(found) and all(same(*pair, tolerance) for pair in zip(was, found, strict=True))
    return was == found


def differences(group, found, tolerance):
    """One line for each leaf, exit code or file that is not as recorded; those that are new are no difference."""
    for name, was in recorded(group).items():
        if was["exit"] != found[name]["exit"]:
            yield f"{name}: exit {was['exit']} is now {found[name]['exit']}"
        flat = {f"{name}:{path}": leaf for path, leaf in found[name]["said"].items()}
        flat |= {f"{name}:file {file}": True for file in found[name]["files"]}
        old = {f"{name}:{path}": leaf for path, leaf in was["said"].items()}
        for path, leaf in (old | {f"{name}:file {file}": True for file in was["files"]}).items():
            here = now(path)
            if here is not None and (here not in flat or not same(leaf, flat[here], tolerance)):
                yield f"{path} = {leaf!r} is now {flat.get(here, 'gone')!r}"


def test_what_is_counted_read_and_rewritten(place):
    assert list(differences("exact", record.answers(cases.EXACT, place), FP32)) == []


@pytest.mark.slow
def test_what_is_trained_or_run(place):
    assert list(differences("trained", record.answers(cases.TRAINED, place), 1e-3)) == []


def test_what_is_refused(place):
    assert record.wrong(place) == recorded("wrong")
