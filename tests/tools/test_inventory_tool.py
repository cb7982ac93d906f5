"""Test that `tools/test_inventory.py` reports exactly the tests that a toy repository loses, gains or moves."""

import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "test_inventory.py"
INVENTORY = runpy.run_path(str(TOOL))

SETTINGS = "[pytest]\naddopts = -q -m 'not slow'\nmarkers = slow: long\n"
CODE_A = "VALUES = ('one', 'two')\n"
CODE_B = "VALUES = ('one', 'three')\n"
TESTS_A = """
import os
import tempfile
import pytest
from toy import VALUES

def test_moves_to_another_file(): pass
def test_is_lost(): pass
def test_becomes_slow(): pass
def test_says_one(): pass
def test_says_two(): pass
@pytest.mark.slow
def test_becomes_quick(): pass
@pytest.mark.parametrize("value", VALUES)
def test_of_the_package(value): pass
@pytest.mark.parametrize("thing", [object()], ids=repr)
def test_of_an_object(thing): pass
@pytest.mark.parametrize("path", [tempfile.mkdtemp(), os.path.dirname(__file__)])
def test_of_a_path(path): pass
"""
TWICE = "def test_in_two_files(): pass\n"
TESTS_B = """
import os
import tempfile
import pytest
from toy import VALUES

@pytest.mark.slow
def test_becomes_slow(): pass
def test_reports_one(): pass
def test_reports_two(): pass
def test_becomes_quick(): pass
def test_is_new(): pass
@pytest.mark.parametrize("value", VALUES)
def test_of_the_package(value): pass
@pytest.mark.parametrize("thing", [object()], ids=repr)
def test_of_an_object(thing): pass
@pytest.mark.parametrize("path", [tempfile.mkdtemp(), os.path.dirname(__file__)])
def test_of_a_path(path): pass
"""
RENAMES = "# bulk\ntest_says_*\ttest_reports_*\ntest_nowhere  test_somewhere\n"
REASONS = """Removed tests

- `test_is_lost`: the function is gone.
- `test_of_the_package[two]`: three replaces it.
"""
EXPECTED = """\
A: 12 quick tests, 1 slow tests
B: 11 quick tests, 1 slow tests
renamed: 2
      2  test_says_*  → test_reports_*
      0  test_nowhere → test_somewhere  (fits no test)
removed: 3
  test_in_two_files: NO REASON
  test_is_lost: the function is gone.
  test_of_the_package[two]: three replaces it.
moved from quick to slow: 1
  test_becomes_slow
moved from slow to quick: 1
  test_becomes_quick
added: 2
  test_is_new
  test_of_the_package
"""


def git(folder, *arguments):
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder, files, tag):
    for name in ("src", "tests"):
        if (folder / name).exists():
            git(folder, "rm", "-rq", name)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", tag)
    git(folder, "tag", tag)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A repository of two revisions, A and B."""
    folder = tmp_path_factory.mktemp("toy")
    git(folder, "init", "-q")
    first = {"pytest.ini": SETTINGS, "src/toy/__init__.py": CODE_A}
    tests = {"tests/test_all.py": TESTS_A, "tests/test_more.py": TWICE, "tests/test_most.py": TWICE}
    commit(folder, first | tests, "A")
    tests = {"tests/test_some.py": TESTS_B, "tests/test_rest.py": f"{TWICE}def test_moves_to_another_file(): pass\n"}
    commit(folder, {"src/toy/__init__.py": CODE_B, "tests/removed.md": REASONS} | tests, "B")
    (folder / "renames.txt").write_text(RENAMES)
    (folder / "enough.md").write_text("- `/test_(in|is|of)_.*/`: all of these.\n")
    return folder


def run(toy, *arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], cwd=toy, capture_output=True, text=True)


def test_inventory_reports_every_difference(toy):
    done = run(toy, "A", "B", "--renames", "renames.txt")
    assert done.stdout == EXPECTED, done.stderr
    assert done.returncode == 1
    assert "1 removed tests have no reason" in done.stderr
    listed = subprocess.run(["git", "worktree", "list"], cwd=toy, capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1


def test_inventory_reads_reasons_from_another_file(toy):
    assert run(toy, "A", "B", "--renames", "renames.txt", "--removed", "enough.md").returncode == 0


def test_inventory_refuses_revision_that_does_not_collect(toy):
    folder = toy / "broken"
    git(toy, "clone", "-q", str(toy), str(folder))
    commit(folder, {"tests/test_all.py": "import nowhere\n"}, "C")
    done = run(folder, "C", "C")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No module named 'nowhere'" in done.stderr
    assert run(folder, "no-such-revision", "C").returncode == 2


def test_inventory_refuses_package_imported_from_another_folder(toy, tmp_path):
    folder = tmp_path / "astray"
    git(toy, "clone", "-q", str(toy), str(folder))
    other = f"import sys\nsys.path.insert(0, {str(toy / 'src')!r})\nimport toy\n"
    commit(folder, {"src/toy/__init__.py": CODE_B, "tests/test_all.py": f"{other}def test_a(): pass\n"}, "C")
    done = run(folder, "C", "C")
    assert done.returncode == 2
    assert f"toy was imported from {toy}" in done.stderr


@pytest.mark.parametrize(
    ("row", "test", "renamed"),
    [
        ("test_a\ttest_b", "test_a", "test_b"),
        ("test_a  test_b", "test_a[1-x y]", "test_b[1-x y]"),
        ("test_a → test_b", "test_ab", None),
        ("test_*_ok -> test_*", "test_loss_ok[1]", "test_loss[1]"),
        ("test_*_ok  test_all", "test_loss_ok[1]", "test_all[1]"),
        ("test_a[*-old]  test_a[*-new]", "test_a[1-old]", "test_a[1-new]"),
        ("test_a[*-old]  test_a[*-new]", "test_a", None),
        (r"/test_(\w+)\[(.*)\]/  test_\1_of[\2]", "test_a[1.5]", "test_a_of[1.5]"),
        (r"/test_(\w+)/  test_\1_of", "test_a[1.5]", None),
    ],
)
def test_rename_row_maps_old_name_to_new_name(tmp_path, row, test, renamed):
    (tmp_path / "renames").write_text(row)
    (rename,) = INVENTORY["read_renames"](tmp_path / "renames")
    assert rename.apply(test) == renamed


@pytest.mark.parametrize(
    ("reader", "text", "says"),
    [
        ("read_renames", "test_a test_b", "has 1 columns"),
        ("read_renames", "test_a  test_b  test_c", "has 3 columns"),
        ("read_renames", "test_*_*  test_a", "has 2 stars"),
        ("read_renames", "test_a  test_*", "has a star"),
        ("read_renames", "/test_(/  test_a", "correct the regular expression"),
        ("read_reasons", "- `test_a` is gone", "is no reason"),
        ("read_reasons", "- `test_a`: ", "is no reason"),
    ],
)
def test_readers_refuse_malformed_lines_of_renames_and_reasons(tmp_path, reader, text, says):
    (tmp_path / "file").write_text(text)
    with pytest.raises(INVENTORY["InventoryError"], match=says):
        INVENTORY[reader](tmp_path / "file")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [  # (quick, slow) of one test; (removed, added, to slow, to quick)
        ((2, 0), (1, 0), (1, 0, 0, 0)),
        ((1, 0), (2, 1), (0, 2, 0, 0)),
        ((2, 0), (0, 1), (1, 0, 1, 0)),
        ((0, 2), (1, 2), (0, 1, 0, 0)),
        ((1, 2), (2, 1), (0, 0, 0, 1)),
        ((1, 1), (1, 1), (0, 0, 0, 0)),
    ],
)
def test_compare_counts_tests_of_one_name(before, after, expected):
    suites = [INVENTORY["Suites"](Counter(t=quick), Counter(t=slow)) for quick, slow in (before, after)]
    comparison = INVENTORY["compare"](*suites)
    assert (
        tuple(part["t"] for part in (comparison.removed, comparison.added, comparison.to_slow, comparison.to_quick))
        == expected
    )


def test_rename_tests_counts_two_tests_that_get_one_name():
    (row,) = [INVENTORY["Rename"](INVENTORY["Pattern"].parse("test_*"), "test_all")]
    renamed, uses = INVENTORY["rename_tests"](Counter(["test_a", "test_b", "other"]), [row])
    assert renamed == {"test_all": 2, "other": 1}
    assert uses == {row: 2}


def test_without_paths_removes_addresses_and_paths_from_names():
    clean = INVENTORY["without_paths"]
    folder = Path(os.sep) / "srv" / "tree"
    assert clean("test_a[<A at 0x7f00aa11>-0x1]", folder) == "test_a[<A at 0x…>-0x1]"
    assert clean("test_a[/srv/tree/tests/x.py-3]", folder) == "test_a[…/tests/x.py-3]"
