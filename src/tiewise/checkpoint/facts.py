"""All that rules may ask about one checkpoint, read at most once and only when asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tiewise.checkpoint.claims import Claims, read_claims
from tiewise.checkpoint.folder import Folder
from tiewise.checkpoint.likeness import Likeness, likeness
from tiewise.checkpoint.roles import Roles, find_roles

Progress = Callable[[str, int, int], None]  # (what is read, bytes done, bytes in all)


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Facts:
    """One checkpoint. Everything beyond the headers is read by the first rule that asks.

    Args:
        folder: files, headers, config.
        scan: tables may be read (False: headers only).
        progress: hears of long reads.
    """

    folder: Folder
    scan: bool = True
    progress: Progress = _silent

    @cached_property
    def claims(self) -> Claims:
        """What the config says of tying."""
        return read_claims(self.folder.config)

    @cached_property
    def roles(self) -> Roles:
        """Which tensor plays which part."""
        return find_roles(self.folder.tensors, self.folder.config)

    @cached_property
    def ends(self) -> Likeness | None:
        """How alike the two tables are; None unless both are stored, comparable, and may be read."""
        table, head = self.roles.input, self.roles.output
        if not self.scan or table is None or head is None:
            return None
        return likeness(table, head, lambda done: self.progress("comparing the two tables", done, table.nbytes))
