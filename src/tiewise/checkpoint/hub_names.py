"""Names and addresses of models of the Hugging Face Hub, and remedies in errors about them.

An address is `hf://org/model[@revision][/subfolder]`. `check`, `diff`, `inspect` and `plan` read it by range requests.
Any other command needs the files on disk. A plain name, such as `org/model`, never leads to the network.
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import TypeGuard
from urllib.parse import quote, unquote

from tiewise.core.errors import CheckpointError

_COMMIT, _COMMIT_LETTERS = re.compile("[0-9a-f]{40}"), 41  # and a line break
HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
FOLDER_REMEDY = "give a checkpoint folder, or one .safetensors file"
_SCHEME = re.compile(r"hf:(/{1,2}|$)")  # a Path keeps one of two slashes, and none at its end
_WRITE = "write hf://org/model, hf://org/model@revision or hf://org/model/subfolder"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_ADDRESS = re.compile(
    rf"(?:models/)?(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/[\w.-]+|[^/]+))?(?:/(?P<folder>.+))?",
    re.ASCII,
)


class HubPath(PosixPath):
    """Address of a repository's folder or file. It prints with both slashes, and nothing on disk has it."""

    def __str__(self) -> str:
        return "hf://" + "/".join(self.parts[1:])

    __fspath__ = __str__


@dataclass(frozen=True)
class HubAddress:
    """Parts of an address `hf://org/model[@revision][/subfolder]`."""

    repo: str  # org/model
    revision: str | None  # branch, tag or commit; None: the default branch
    folder: str  # path within the repository; "" for its root

    @property
    def name(self) -> str:
        """Return the last part of the address, as the name of a local folder."""
        return (self.folder or self.repo).rpartition("/")[2]

    def download_command(self) -> str:
        """Return the command that downloads the repository's files to a folder `name`."""
        words = ["hf", "download", self.repo, "--local-dir", self.repo.rpartition("/")[2]]
        if self.revision is not None:
            words += ["--revision", self.revision]
        if self.folder:
            words += ["--include", f"{self.folder}/*"]
        return shlex.join(words)

    def local_path(self) -> str:
        """Return the folder in which `download_command` stores this address."""
        return "/".join(filter(None, (self.repo.rpartition("/")[2], self.folder)))


def is_hub_path(path: Path) -> TypeGuard[HubPath]:
    """Return whether a path is an address of the Hub."""
    return isinstance(path, HubPath)


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return a `HubPath` for an address hf://…, else a path on disk."""
    text = os.fspath(path)
    if _SCHEME.match(text):
        return HubPath(text)
    return Path(text)


def parse_address(path: HubPath) -> HubAddress:
    """Return the parts of an address.

    Raises:
        CheckpointError: it names no model of the Hub.
    """
    text = "/".join(path.parts[1:])
    match = _ADDRESS.fullmatch(text)
    if match is None or ".." in path.parts:
        raise CheckpointError(f"{path}: no model of the Hub has this address", _WRITE)
    revision = match["revision"]
    if revision is not None:
        revision = unquote(revision)
    return HubAddress(match["repo"], revision, match["folder"] or "")


def quoted_revision(revision: str) -> str:
    """Return a revision as one part of a URL."""
    return quote(revision, safe="")


def files_needed_on_disk(path: HubPath) -> CheckpointError:
    """Return the error of a command that cannot read from the Hub."""
    address = parse_address(path)
    remedy = f"download it first: {address.download_command()}, then give {address.local_path()}"
    return CheckpointError(f"{path}: this command needs the files on disk", remedy)


def remedy_for_missing(path: Path, reads_hub: bool = False) -> str:
    """Return the remedy for a missing folder.

    For a name of the Hub, it is the address, if the command reads from the Hub (`reads_hub`), or the command that
    stores the model.
    """
    name = path.as_posix()
    if not _may_be_hub_name(path):
        return FOLDER_REMEDY
    if reads_hub and "/" in name:
        return f"{FOLDER_REMEDY}; the local cache lacks it: hf://{name} reads the model from the Hub"
    cached = cached_folder(name)
    if cached is not None:
        return f"{FOLDER_REMEDY}; the cache of the hub has {name}: {cached}"
    return f"{FOLDER_REMEDY}; for a model of the hub: hf download {name} --local-dir {path.name}"


def cached_model(path: Path) -> Path | None:
    """Return the folder of the local cache for a name of the Hub.

    None: the name is a path, or the cache lacks the model.
    """
    name, at, revision = path.as_posix().partition("@")
    if os.path.lexists(path) or not _may_be_hub_name(Path(name)):
        return None
    if not at:
        return cached_folder(name)
    if ".." in revision.split("/"):
        return None
    return cached_folder(name, revision)


def _may_be_hub_name(path: Path) -> bool:
    """Return whether a missing path can be a name of the Hub.

    Such a name is `model` or `org/model`, and there is no folder `org`.
    """
    if HUB_NAME.fullmatch(path.as_posix()) is None:
        return False
    return path.parent == Path() or not path.parent.exists()


def cached_folder(name: str, revision: str = "main") -> Path | None:
    """Return the folder of a model in the local cache of the hub.

    It is the one of the revision's commit; without a record of the main branch, the newest one.
    None: the cache lacks the model or the revision.
    """
    model = _cache() / f"models--{name.replace('/', '--')}"
    commit = _cached_commit(model, revision)
    if commit is not None:
        return model / "snapshots" / commit
    if revision != "main":
        return None
    try:
        folders = sorted((model / "snapshots").iterdir(), key=os.path.getmtime)
    except OSError:
        return None
    return next(reversed(folders), None)


def _cached_commit(model: Path, revision: str) -> str | None:
    """Return the cached commit of a branch, tag or commit; None without one."""
    commit = revision
    with suppress(OSError, ValueError), open(model / "refs" / revision, encoding="ascii") as file:
        commit = file.read(_COMMIT_LETTERS).strip()
    if _COMMIT.fullmatch(commit) and (model / "snapshots" / commit).is_dir():
        return commit
    return None


def _cache() -> Path:
    """Return the folder of the local cache, as huggingface_hub chooses it."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
