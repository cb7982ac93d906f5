"""Test the numbers of the trained tables against numpy, and the tables against a new training."""

import json
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from tests.report.explorer.test_symmetry import assert_rounded, open_step

from tiewise.report.explorer import page

STORED = Path(page.__file__).parent / "data" / "trained_tables.json"
TOOL = Path(__file__).parents[3] / "tools" / "make_explorer_tables.py"
MOST_BYTES = 1_000_000


def tables_of(path):
    """Return (record, tables by name as fp64) of a file."""
    record = json.loads(path.read_text(encoding="utf-8"))
    shape = (len(record["words"]), record["width"])
    tables = {
        name: np.frombuffer(b64decode(text), "<f2").reshape(shape).astype(float)
        for name, text in record["tables"].items()
    }
    return record, tables


def nearest(table, place, most):
    """Return [(place, cosine)] of the rows with the smallest angle to a row."""
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    cosines = unit @ unit[place]
    order = [other for other in np.argsort(-cosines, kind="stable").tolist() if other != place]
    return [(other, cosines[other]) for other in order[:most]]


READ_NEAREST = """words => words.map(word => {
  keep({ trained: word });
  const rows = document.querySelectorAll(`[aria-label="Nearest words of ${word}"] tbody tr`);
  const cell = (td) => [td.querySelector("span").firstChild.textContent, td.querySelector("small").textContent];
  return [...rows].map(r => [...r.querySelectorAll("td")].map(cell));
})"""
READ_PAIRS = """pairs => pairs.map(pair => {
  keep({ pair });
  const rows = document.querySelectorAll(`[aria-label="Both orders of the pair"] tr`);
  return [...rows].map(r => [...r.children].map(c => c.textContent));
})"""


def test_file_is_small_and_names_its_command_and_text():
    record, tables = tables_of(STORED)
    assert STORED.stat().st_size < MOST_BYTES
    assert record["source"]["command"].startswith("tiewise compare --text builtin ")
    assert set(record["source"]) == {"command", "python", "sha256", "tokens", "vocab", "loss"}
    assert len(set(record["words"])) == len(record["words"]) == len(record["counts"])
    assert all(np.isfinite(table).all() for table in tables.values())


def test_page_shows_the_nearest_rows_of_numpy(visit):
    record, tables = tables_of(STORED)
    words = record["words"]
    for word, rows in zip(words, open_step(visit, 1).page.evaluate(READ_NEAREST, words), strict=True):
        for column, name in enumerate(("tied", "input", "output")):
            expected = nearest(tables[name], words.index(word), 6)
            assert [row[column][0] for row in rows] == [words[place] for place, _ in expected], (word, name)
            assert_rounded([row[column][1] for row in rows], [cosine for _, cosine in expected])


def test_page_shows_both_orders_of_every_pair_as_numpy_multiplies_them(visit):
    record, tables = tables_of(STORED)
    words, pairs = record["words"], record["pairs"]
    tied, untied = tables["tied"] @ tables["tied"].T, tables["input"] @ tables["output"].T
    named = [f"{words[first]} {words[second]}" for first, second, *_ in pairs]
    shown = open_step(visit, 3).page.evaluate(READ_PAIRS, named)
    for (first, second, there, back), (header, counts, one, two) in zip(pairs, shown, strict=True):
        assert header == ["", f"{words[first]} {words[second]}", f"{words[second]} {words[first]}"]
        assert counts[1:] == [f"{there:,}", f"{back:,}"]
        assert_rounded(one[1:], [tied[first, second], tied[second, first]])
        assert one[1] == one[2]
        assert_rounded(two[1:], [untied[first, second], untied[second, first]])


def test_two_trained_tables_prefer_the_order_of_the_text():
    """Of pairs that the text has in one order, two tables score that order higher; one table cannot."""
    record, tables = tables_of(STORED)
    untied = tables["input"] @ tables["output"].T
    preferred = [untied[first, second] > untied[second, first] for first, second, *_ in record["pairs"]]
    assert np.mean(preferred) > 0.9


def test_unknown_word_is_marked_and_changes_nothing(visit):
    shown = open_step(visit, 1).page
    box = shown.get_by_label("or any of these")
    box.fill("zebra")
    assert box.get_attribute("aria-invalid") == "true"
    assert shown.get_by_role("region", name="Nearest words of must").count() == 1
    box.fill("list")
    assert box.get_attribute("aria-invalid") == "false"
    assert "trained=list" in shown.url
    assert shown.get_by_role("region", name="Nearest words of list").count() == 1


@pytest.mark.slow
def test_new_training_by_the_tool_finds_the_same_neighbours(tmp_path):
    """Most nearest words of common words remain, after a tenth of the steps and with another Python's text."""
    target = tmp_path / "tables.json"
    subprocess.run([sys.executable, TOOL, "--out", target, "--steps", "300"], check=True, cwd=tmp_path)
    (old, old_tables), (new, new_tables) = tables_of(STORED), tables_of(target)
    shared = [word for word in old["words"][:100] if word in new["words"]]
    assert len(shared) > 60
    for name in ("tied", "input", "output"):
        common = 0
        for word in shared:
            before = nearest(old_tables[name], old["words"].index(word), 6)
            after = nearest(new_tables[name], new["words"].index(word), 6)
            common += len({old["words"][i] for i, _ in before} & {new["words"][i] for i, _ in after})
        chance = 6 / len(new["words"])  # share of a random list's words that are among six
        assert common / (6 * len(shared)) > 10 * chance, name
