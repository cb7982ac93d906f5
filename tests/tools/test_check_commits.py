"""`tools/check_commits.py` on messages and in repositories that the test makes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from check_commits import Commit, problems  # noqa: E402

GOOD = "check: accept T5 encoders without a head"


@pytest.mark.parametrize(
    ("subject", "body", "lines", "reason"),
    [
        (GOOD, "", 30, ""),
        (GOOD, "Why, and how it was verified.", 31, ""),
        (GOOD, "", 31, "no body"),
        ("docs: `plan` prints its choices", "", 1, ""),
        ("boundary/ops: " + "x" * 58, "", 1, ""),
        ("boundary/ops: " + "x" * 59, "", 1, "73 characters"),
        ("Means without a rank are read", "", 1, "area"),
        ("check: Accept T5 encoders", "", 1, "area"),
        ("check accept T5 encoders", "", 1, "area"),
        (GOOD + ".", "", 1, "period"),
    ],
)
def test_a_message_is_reported_with_the_rule_it_breaks(subject, body, lines, reason):
    reported = list(problems(Commit("0" * 40, subject, body, lines)))
    assert len(reported) == bool(reason)
    assert all(reason in problem for problem in reported)


def copy_tool(folder: Path) -> None:
    for name in ("check_commits.py", "revisions.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")


class Repository:
    """A repository that contains the tool and whatever the test commits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        self.git("init", "-q")
        for key, value in (("user.name", "test"), ("user.email", "test@example.com"), ("commit.gpgsign", "false")):
            self.git("config", key, value)

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True)

    def commit(self, message: str, lines: int = 1) -> None:
        file = self.folder / "file.txt"
        before = file.read_text() if file.exists() else ""
        file.write_text(before + "line\n" * lines)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def add_tool(self) -> None:
        copy_tool(self.folder)

    def check(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.folder / "tools" / "check_commits.py")]
        return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_only_commits_after_the_tool_are_checked(repository):
    repository.commit("An old subject that follows no rule")
    repository.add_tool()
    repository.commit("Adds the tool without an area")
    repository.commit(GOOD)
    result = repository.check()
    assert (result.returncode, result.stdout) == (0, "commit messages: 1 checked, 0 problems\n")


def test_a_large_commit_without_a_body_fails(repository):
    repository.add_tool()
    repository.commit("tools: add the check")
    repository.commit(GOOD, lines=31)
    result = repository.check()
    assert result.returncode == 1
    assert "31 lines change and no body says why" in result.stdout


def test_merge_commits_are_skipped(repository):
    repository.add_tool()
    repository.commit("tools: add the check")
    repository.git("checkout", "-q", "-b", "side")
    (repository.folder / "side.txt").write_text("side")
    repository.git("add", "-A")
    repository.git("commit", "-q", "-m", "docs: add a side")
    repository.git("checkout", "-q", "-")
    repository.commit(GOOD)
    repository.git("merge", "-q", "--no-ff", "-m", "Merge branch side", "side")
    result = repository.check()
    assert (result.returncode, result.stdout) == (0, "commit messages: 2 checked, 0 problems\n")


def test_a_shallow_clone_has_nothing_to_check(repository, tmp_path_factory):
    repository.add_tool()
    repository.commit("tools: add the check")
    repository.commit("This subject follows no rule")
    clone = tmp_path_factory.mktemp("clone")
    source = f"file://{repository.folder}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", source, str(clone)], check=True, capture_output=True)
    result = subprocess.run([sys.executable, str(clone / "tools" / "check_commits.py")], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "commit messages: 0 checked, 0 problems\n")


def test_an_unpacked_archive_has_nothing_to_check(tmp_path):
    (tmp_path / "tools").mkdir()
    copy_tool(tmp_path)
    command = [sys.executable, str(tmp_path / "tools" / "check_commits.py")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "commit messages: no git history to check\n")


def test_a_machine_without_git_has_nothing_to_check(tmp_path):
    (tmp_path / "tools").mkdir()
    copy_tool(tmp_path)
    command = [sys.executable, str(tmp_path / "tools" / "check_commits.py")]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": ""})
    assert (result.returncode, result.stdout) == (0, "commit messages: no git history to check\n")
