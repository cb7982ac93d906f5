"""Compare the answers of every command, section, kind, rule, verb, option and public function with the records.

If an answer changes on purpose, `python -m tests.answers.record --only NAME…` records the case again.
"""

import functools
import shlex

import pytest

from tests.answers import package, record
from tests.answers.cases import CASES
from tests.answers.compare import COMMITTED, MOST, differences

recorded = functools.cache(record.recorded)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return the folder of the inputs, which each process writes once."""
    return record.Place(tmp_path_factory.mktemp("answers"))


def _parameters():
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(case, id=name, marks=marks[case.slow]) for name, case in CASES.items()]


@pytest.mark.parametrize("case", _parameters())
def test_answer_matches_recorded_answer(case, place):
    was = recorded(case.command).get(case.name, {})
    now = record.as_recorded(record.answer(case, place, package.check_schema))
    lines = list(differences(was, now, COMMITTED[case.tolerance]))
    if lines:
        more = [f"… and {len(lines) - MOST} more"] if len(lines) > MOST else []
        again = f"if this is meant: python -m tests.answers.record --only {shlex.quote(case.name)}"
        pytest.fail("\n".join([f"{case.name} answers differently:", *lines[:MOST], *more, again]), pytrace=False)


def test_every_recorded_answer_has_a_case():
    files = {path.name for path in record.RECORDED.glob("*.json")}
    names = {name for case in CASES.values() for name in recorded(case.command)}
    missing, of_no_case = sorted(CASES.keys() - names), sorted(names - CASES.keys())
    assert missing == [], f"run python -m tests.answers.record --only {shlex.join(missing)}"
    assert of_no_case == [], "delete these entries of tests/answers/recorded"
    assert files == {record.file_name(case.command) for case in CASES.values()}
