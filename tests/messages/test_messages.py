"""Compare the messages of every command with the reviewed ones: each word, and numbers up to rounding."""

import difflib
import math

import pytest

from tests.answers import texts
from tests.answers.record import Place
from tests.messages import record

ROUNDING = 0.01  # relative; machines round products of matrices differently


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of the inputs, which each process writes once."""
    return Place(tmp_path_factory.mktemp("messages"))


@pytest.mark.parametrize("name", record.files())
def test_messages_match_reviewed_messages(name, place):
    reviewed = record.files()[name].read_text(encoding="utf-8")
    printed = record.rerun(reviewed, place)
    was, now = reviewed.splitlines(), printed.splitlines()
    if len(was) != len(now) or not all(map(_same, was, now)):
        changes = difflib.unified_diff(was, now, "reviewed", "printed", lineterm="", n=1)
        again = f"if this is meant: python -m tests.messages.record {name}"
        pytest.fail("\n".join([*changes, again]), pytrace=False)


def _same(was, now):
    """Return whether two lines have the same words, and numbers that differ by rounding at most."""
    old, new = texts.parts(was), texts.parts(now)
    if old.words != new.words:
        return False
    return all(map(_close, old.numbers, new.numbers))


def _close(was, now):
    return math.isclose(texts.value(was), texts.value(now), rel_tol=ROUNDING, abs_tol=texts.last_place(was))


@pytest.mark.parametrize("name", record.files())
def test_no_message_is_a_traceback(name):
    assert "traceback" not in record.files()[name].read_text(encoding="utf-8").lower()


def test_line_with_another_word_or_number_is_different():
    assert _same("4 of 24 rows, 0.123", "4 of 24 rows, 0.124")
    assert not _same("4 of 24 rows", "4 of 24 tokens")
    assert not _same("4 of 24 rows", "5 of 24 rows")
