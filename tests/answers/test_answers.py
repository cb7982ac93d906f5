"""What every command, every section and every kind of run answers on fixed inputs stays as it was recorded.

`python -m tests.answers.record` records anew where an answer is meant to change; of one leaf that is meant to go, the
line in `recorded/` goes.
"""

import json
import math

import pytest

from tests.answers import cases, inputs, record


@pytest.fixture
def place(tmp_path):
    inputs.make(tmp_path)
    return tmp_path


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
    for name, was in json.loads((record.RECORDED / f"{group}.json").read_text()).items():
        old, new = (x["said"] | dict.fromkeys(x["files"], "a file") | {"exit": x["exit"]} for x in (was, found[name]))
        for path, leaf in old.items():
            if path not in new or not same(leaf, new[path], tolerance):
                yield f"{name}:{path} = {leaf!r} is now {new.get(path, 'gone')!r}"


def test_what_is_counted_read_and_rewritten(place):
    assert list(differences("exact", record.answers(cases.EXACT, place), FP32)) == []


@pytest.mark.slow
def test_what_is_trained_or_run(place):
    assert list(differences("trained", record.answers(cases.TRAINED, place), 1e-3)) == []
