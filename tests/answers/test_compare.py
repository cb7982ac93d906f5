"""Test that the comparison of answers reports missing, changed and new parts, and ignores rounding."""

import dataclasses
import json
import sys

import pytest

from tests.answers import describe, texts
from tests.answers.compare import COMMITTED, ONE_MACHINE, differences, same
from tiewise.training.compare import environment

EXACT, TRAINED, WORDS = (COMMITTED[name] for name in ("exact", "trained", "words"))
ANSWER = {
    "check tied": {
        "exit": 0,
        "stdout": ["2 tables of 1,024 rows", "cosine 0.123"],
        "files": {"new/config.json": {"/vocab_size": 24}},
        "json": {"/loss": 1.5, "/name": "tied", "/rows": 24},
    }
}


def changed_answer(*path, to):
    """Return the answer with one entry changed, added, or removed where `to` is None."""
    answer = {name: dict(line) for name, line in ANSWER.items()}
    for name in ("json", "files"):
        answer["check tied"][name] = dict(answer["check tied"][name])
    part = answer
    for key in path[:-1]:
        part = part[key]
    if to is None:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return answer


LINE = "check tied"
CHANGES = [
    ((LINE, "exit"), 1, "check tied exit: was 0"),
    ((LINE, "json", "/loss"), 1.6, "check tied json /loss: was 1.5"),
    ((LINE, "json", "/loss"), None, "check tied json /loss: gone"),
    ((LINE, "json", "/new"), 3, "check tied json /new: new"),
    ((LINE, "json", "/name"), "untied", "check tied json /name: was tied"),
    ((LINE, "json", "/rows"), 25, "check tied json /rows: was 24"),
    ((LINE, "json", "/rows"), 24.0, "check tied json /rows: was 24"),
    ((LINE, "json", "/rows"), True, "check tied json /rows: was 24"),
    ((LINE, "stdout"), ["2 tables of 1,024 rows"], "check tied stdout: 2 lines, is 1 lines"),
    ((LINE, "stdout"), ["2 tables of 1,024 rows", "cosine 0.223"], "check tied stdout line 2: was cosine 0.123"),
    ((LINE, "stdout"), ["2 tables of 1,024 lines", "cosine 0.123"], "check tied stdout line 1: was 2 tables"),
    ((LINE, "files", "new/config.json"), None, "check tied files new/config.json: gone"),
    ((LINE, "files", "new/other"), "a file", "check tied files new/other: new"),
    ((LINE, "files", "new/config.json"), {"/vocab_size": 25}, "check tied files new/config.json /vocab_size: was 24"),
]


@pytest.mark.parametrize(("path", "to", "message"), CHANGES)
@pytest.mark.parametrize("tolerance", [EXACT, WORDS, ONE_MACHINE["exact"], ONE_MACHINE["trained"]])
def test_differences_reports_a_change(path, to, message, tolerance):
    lines = list(differences(ANSWER, changed_answer(*path, to=to), tolerance))
    assert lines
    assert lines[0].startswith(message)


def test_differences_is_empty_for_equal_answers():
    for tolerance in (EXACT, TRAINED, WORDS):
        assert list(differences(ANSWER, changed_answer(LINE, "exit", to=0), tolerance)) == []


@pytest.mark.parametrize(
    ("path", "to", "passes"),
    [
        ((LINE, "json", "/loss"), 1.5 * (1 + 9e-6), {"exact", "trained"}),
        ((LINE, "json", "/loss"), 1.5 * (1 + 2e-5), {"trained"}),
        ((LINE, "json", "/loss"), 1.5 * 1.02, set()),
        ((LINE, "stdout"), ["2  tables of 1,024 rows", "cosine 0.124"], {"exact", "trained"}),
        ((LINE, "stdout"), ["2 tables of 1,024 rows", "cosine 0.126"], set()),
        ((LINE, "stdout"), ["2 tables of 1,025 rows", "cosine 0.123"], {"trained"}),
    ],
)
def test_differences_accepts_numbers_within_tolerance(path, to, passes):
    equal = {
        name
        for name, tolerance in COMMITTED.items()
        if not list(differences(ANSWER, changed_answer(*path, to=to), tolerance))
    }
    assert equal == passes


def test_tolerance_of_one_machine_is_stricter():
    strict = ONE_MACHINE["exact"]
    assert list(differences({"x": 1.5}, {"x": 1.5 * (1 + 1e-8)}, strict))
    assert not list(differences({"x": 1.5}, {"x": 1.5 * (1 + 1e-10)}, strict))
    assert list(differences({"stdout": ["0.123"]}, {"stdout": ["0.124"]}, strict))
    assert not list(differences({"x": 1.5}, {"x": 1.5006}, ONE_MACHINE["trained"]))
    assert dataclasses.is_dataclass(strict)


@pytest.mark.parametrize("tolerance", [*COMMITTED.values(), *ONE_MACHINE.values()])
def test_differences_reports_another_number_of_digits(tolerance):
    for line in ("1.23", "1.2345", "1"):
        assert list(differences({"stdout": ["1.234"]}, {"stdout": [line]}, tolerance))


@pytest.mark.parametrize("line", ["1.2", "1.21", "1.19"])
def test_differences_accepts_missing_zeros_at_the_end(line):
    assert list(differences({"stdout": ["1.20"]}, {"stdout": [line]}, TRAINED)) == []


@pytest.mark.parametrize("place", [0, 7, 40])
def test_differences_compares_all_entries_of_long_list(place):
    numbers = [0.1 * n for n in range(50)]
    moved = [*numbers[:place], numbers[place] + 0.5, *numbers[place + 1 :]]
    swapped = [*numbers[1:], numbers[0]]
    for other in (moved, swapped):
        assert list(differences(describe.leaves({"x": numbers}), describe.leaves({"x": other}), EXACT))
    records = [{"name": f"n{n}", "value": n} for n in range(50)]
    renamed = [*records[:place], {"name": "other", "value": place}, *records[place + 1 :]]
    assert list(differences(describe.leaves({"x": records}), describe.leaves({"x": renamed}), EXACT))


def test_parts_separates_numbers_from_words():
    split = texts.parts("B012: 1,024 of w7, −0.5 ± 1e-3 and 30%")
    assert [texts.value(number) for number in split.numbers] == [1024, -0.5, 1e-3, 30]
    assert split.words == "B012: # of w7, # ± # and #%"


def test_normalised_replaces_text_that_differs_between_runs(tmp_path):
    folder = tmp_path / "here"
    text = f"\x1b[1m{folder}/a in 3.2 s at 2026-01-02 03:04, torch {texts.version('torch')}"
    assert texts.normalised(text, folder) == "FOLDER/a in TIME at DATE, torch VERSION"
    assert texts.normalised(f"exec srun {sys.executable} -m tiewise", folder) == "exec srun PYTHON -m tiewise"
    assert texts.normalised("4 cores need 3 min", folder) == "CORES need TIME"
    text = f"pip install 'tiewise[torch]=={texts.version('tiewise')}'"
    assert texts.normalised(text, folder) == "pip install 'tiewise[torch]==VERSION'"


def test_differences_compares_sums_by_magnitude_of_their_terms():
    """Terms of either sign cancel, so that rounding moves a sum by a large share of itself."""
    terms = [1.0, -1.0, 1e-6]
    rounded, other = [1.0, -1.0, 3e-6], [1.0, -1.0, 1e-3]
    was, near, far = (describe.leaves({"x": texts.sums(numbers)}) for numbers in (terms, rounded, other))
    assert not list(differences(was, near, EXACT))
    assert list(differences(was, far, EXACT))


@pytest.mark.parametrize("script", ["range = [0, 0.9]", "range = [0, 2]"])
def test_differences_reports_small_number_of_page_next_to_large_ones(script):
    page = "<p>1,234,567,890 and 2</p><script>const total = 1234567890; range = [0, 1]</script>"
    other = page.replace("range = [0, 1]", script)
    pages = [describe.page_leaf(text, trained=False) for text in (page, other)]
    assert list(differences(*pages, EXACT))
    in_text = describe.page_leaf(page.replace("and 2", "and 3"), trained=False)
    assert list(differences(pages[0], in_text, EXACT))


def test_same_accepts_full_precision_number_with_one_digit_less():
    assert same("cell,0.26666704739133484", "cell,0.2666670473913349", EXACT)
    assert not same("cell,0.26666704739133484", "cell,0.26667", EXACT)
    assert not same("cell,0.26666704739133484", "cell,0.2667670473913349", EXACT)


def test_normalised_replaces_the_names_of_the_machine(tmp_path):
    machine = environment()
    text = f"on {machine['processor']} with {machine['platform']}"
    assert texts.normalised(text, tmp_path) == "on PROCESSOR with PLATFORM"


def test_parsed_normalises_strings_and_leaves_escaped_characters_alone(tmp_path):
    text = json.dumps({"tokens": ["\u0120 s", "\u0120"], f"{tmp_path}/a": "in 3 s", "loss": 3.5})
    assert texts.parsed(text, tmp_path) == {"tokens": ["\u0120 s", "\u0120"], "FOLDER/a": "in TIME", "loss": 3.5}
