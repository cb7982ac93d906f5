"""Check the messages of commits: `area: verb the thing`, at most 72 characters, and a body for larger changes.

    python tools/check_commits.py             all commits after the one that added this file (part of `make check`)
    python tools/check_commits.py REV..REV    these commits instead

Merge commits are skipped. Without a git history (an unpacked archive, a shallow clone) there is nothing to check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from revisions import git_output

ROOT = Path(__file__).parents[1]
THIS_FILE = "tools/check_commits.py"
AREA = r"[a-z0-9_./-]+: "
SUBJECT = re.compile(AREA + "[a-z`]")
SUBJECT_LENGTH = 72  # characters
LARGE = 30  # changed lines; a larger change needs a body that says why
FIELD, RECORD = "\x01", "\x02"  # between the parts of a commit, and before each commit, in git's output


class Commit(NamedTuple):
    """One commit without parents or author."""

    revision: str
    subject: str
    body: str
    changed_lines: int


def new_commits() -> str:
    """Return the range of commits after the one that added this file; an empty text without a history."""
    added = git_output("log", "--diff-filter=A", "--format=%H", "--", THIS_FILE, repository=ROOT).split()
    if not added:
        return ""
    return f"{added[-1]}..HEAD"


def commits(revisions: str) -> Iterator[Commit]:
    """Yield the commits of a range that are no merges, newest first."""
    layout = RECORD + FIELD.join(["%H", "%s", "%b"]) + FIELD
    log = git_output("log", "--no-merges", f"--format={layout}", "--shortstat", revisions, repository=ROOT)
    for record in log.split(RECORD)[1:]:
        revision, subject, body, statistics = record.split(FIELD)
        counts = re.findall(r"(\d+) (?:insertion|deletion)", statistics)
        yield Commit(revision, subject, body.strip(), sum(map(int, counts)))


def problems(commit: Commit) -> Iterator[str]:
    """Yield each rule that the message of a commit breaks."""
    if len(commit.subject) > SUBJECT_LENGTH:
        yield f"the subject has {len(commit.subject)} characters; at most {SUBJECT_LENGTH}"
    if not SUBJECT.match(commit.subject):
        yield "the subject is not `area: verb the thing` in lower case"
    if commit.subject.endswith("."):
        yield "the subject ends with a period"
    if commit.changed_lines > LARGE and not commit.body:
        yield f"{commit.changed_lines} lines change and no body says why"


def main(arguments: list[str]) -> int:
    """Print every problem; return 1 if there is one."""
    revisions = arguments[0] if arguments else new_commits()
    if not revisions:
        print("commit messages: no git history to check")
        return 0
    checked, broken = 0, 0
    for commit in commits(revisions):
        checked += 1
        for problem in problems(commit):
            broken += 1
            print(f"{commit.revision[:10]} {commit.subject}: {problem}")
    print(f"commit messages: {checked} checked, {broken} problems")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
