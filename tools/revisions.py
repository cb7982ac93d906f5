"""Check out revisions of a git repository for the tools that compare two of them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RevisionError(Exception):
    """Error of a git command."""


def git(*arguments: str, repository: Path | None = None) -> str:
    """Run git in a repository, by default that of the current folder, and return its output."""
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True)
    if done.returncode:
        raise RevisionError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def git_output(*arguments: str, repository: Path) -> str:
    """Return what a git command prints; an empty text if it fails or git is missing."""
    try:
        return git(*arguments, repository=repository)
    except (RevisionError, OSError):
        return ""


@contextmanager
def worktree(revision: str, repository: Path | None = None) -> Iterator[Path]:
    """Check a revision out into a temporary worktree, and remove it at the end."""
    name = f"{revision}^{{commit}}"
    try:
        commit = git("rev-parse", "--verify", "--end-of-options", name, repository=repository)
    except RevisionError as error:
        raise RevisionError(f"no revision {revision!r}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="revision-") as temporary:
        folder = Path(temporary) / "tree"
        git("worktree", "add", "--detach", str(folder), commit, repository=repository)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder), repository=repository)
