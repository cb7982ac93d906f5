"""Answer of `tiewise check` for one path, which every format renders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.rules.rule import Finding


@dataclass(frozen=True)
class CheckedPath:
    """Audit of one path, or the error that prevented it."""

    path: Path  # as the user wrote it
    audit: Audit | None = None  # None if the path cannot be read
    error: str = ""  # one line: the problem and the remedy; "" if there is an audit


def audits_of(answers: Iterable[CheckedPath]) -> list[Audit]:
    """Return the audits of the paths that could be read."""
    return [answer.audit for answer in answers if answer.audit is not None]


def file_of(audit: Audit, finding: Finding) -> Path:
    """Return the file that a finding is about.

    That is the file that it names or that stores the tensor, else the folder's config, else the checkpoint itself.
    """
    if not audit.path.is_dir():
        return audit.path
    for name in (finding.where, *_file_of_part(audit, finding.where), CONFIG):
        if Path(name).name == name and (audit.path / name).is_file():
            return audit.path / name
    return audit.path


def _file_of_part(audit: Audit, tensor: str) -> list[str]:
    """Return the name of the file with a table of the boundary; none for another tensor."""
    return [part.tensor.path.name for part in audit.parts if part.tensor.name == tensor][:1]


def uri_of(path: Path) -> str:
    """Return a path as a URI reference: relative as it was written, absolute with `file://`.

    >>> uri_of(Path("my models/a,b"))
    'my%20models/a%2Cb'
    """
    if path.is_absolute():
        return path.as_uri()
    return quote(os.fsencode(path.as_posix()))  # a name that is no UTF-8 keeps its bytes
