"""Test that `tools/compare_answers.py` runs cases with two trees of the package and reports a planted change."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SENTENCE = "the number of rows divides by 64"
TOOL = ROOT / "tools" / "compare_answers.py"


def test_renames_replace_whole_words():
    renamed = runpy.run_path(str(TOOL))["renamed"]
    answer = {"json": {"/heldout_nll": 1.5, "/heldout_nll_low": 1.4}, "stdout": ["heldout_nll: 1.5", 3]}
    assert renamed(answer, {"heldout_nll": "validation_nll"}) == {
        "json": {"/validation_nll": 1.5, "/heldout_nll_low": 1.4},
        "stdout": ["validation_nll: 1.5", 3],
    }


def git(folder, *arguments):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository of two commits, of which the second changes the text of one rule."""
    folder = tmp_path_factory.mktemp("repository") / "clone"
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("src/tiewise", "tests/answers", "tests/checkpoint", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    (folder / "tests" / "__init__.py").touch()
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    for rule in folder.glob("src/tiewise/checkpoint/**/*.py"):
        rule.write_text(rule.read_text().replace(SENTENCE, "64 divides the number of rows"))
    git(folder, "commit", "-qam", "second")
    return folder


def compare(repository, *arguments):
    command = [sys.executable, str(repository / "tools" / "compare_answers.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


CASES = ("--only", "check explain b042", "check explain b041")


@pytest.mark.slow
def test_tool_prints_differences_between_two_revisions(repository):
    done = compare(repository, "HEAD~1", "HEAD", *CASES)
    assert done.returncode == 1, done.stderr
    assert "check explain b042: " in done.stdout
    assert "was the number of rows divides by 64" in done.stdout
    assert "b041" not in done.stdout


@pytest.mark.slow
def test_tool_prints_no_difference_for_equal_trees(repository):
    done = compare(repository, "HEAD", ".", *CASES)
    assert (done.returncode, done.stdout) == (0, "no difference\n"), done.stderr


def test_tool_exits_2_for_unknown_revision(repository):
    done = compare(repository, "nowhere", "HEAD", *CASES)
    assert done.returncode == 2
    assert "no revision 'nowhere'" in done.stderr
