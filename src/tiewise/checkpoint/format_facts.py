"""What rules may ask about an adapter or a GGUF file, alone or with the checkpoint that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tiewise.checkpoint.adapter import Adapter, EndUpdate
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import Gguf
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.likeness import same_bytes
from tiewise.checkpoint.names import module_of, usual
from tiewise.core.progress import progress


@dataclass(frozen=True)
class GgufFacts:
    """One GGUF file.

    Args:
        gguf: what it says of itself.
        source: the Hugging Face checkpoint that it was made from; None where none was given.
        scan: tables may be read (False: headers only).
    """

    gguf: Gguf
    source: Facts | None = None
    scan: bool = True

    @cached_property
    def equal(self) -> bool | None:
        """Whether `token_embd` and `output` hold the same bytes; None unless both are stored and may be read."""
        table, head = self.gguf.table, self.gguf.head
        if table is None or head is None or not self.scan:
            return None
        return same_bytes(table, head, lambda done: progress("comparing the two tables", done, table.nbytes))


@dataclass(frozen=True)
class AdapterFacts:
    """One PEFT adapter.

    Args:
        adapter: its config and its tensors.
        base: the checkpoint that it changes; None where none was given.
        scan: tables may be read (False: headers only).
    """

    adapter: Adapter
    base: Facts | None = None
    scan: bool = True

    @cached_property
    def input(self) -> EndUpdate | None:
        """What the adapter does to the input table."""
        paths = {path.rpartition(".")[2] for path, _ in usual().pairs}
        return self.adapter.update(_names(None if self.base is None else self.base.roles.input_name, paths))

    @cached_property
    def output(self) -> EndUpdate | None:
        """What the adapter does to the output head."""
        return self.adapter.update(_names(None if self.base is None else self.base.roles.output_name, usual().outputs))

    @cached_property
    def tied(self) -> bool | None:
        """Whether the base has one table at both ends, by flag and by tensors; None where that is not known."""
        if self.base is None:
            return None
        if self.base.roles.output is None:
            return self.base.claims.tied
        return False if self.base.claims.tied is False else self.base.truth

    @cached_property
    def equal(self) -> bool | None:
        """Whether the adapter's full copies of both ends hold the same bytes; None without both, or unread."""
        if self.input is None or self.output is None or not self.scan:
            return None
        a, b = self.input.copy, self.output.copy
        return None if a is None or b is None else self._same(a, b)

    def _same(self, a: Stored, b: Stored) -> bool:
        return same_bytes(a, b, lambda done: progress("comparing the adapter's two copies", done, a.nbytes))


def _names(stored: str | None, usually: Iterable[str]) -> tuple[str, ...]:
    """A module as the base stores it, and the last part of its name: PEFT names modules as they are once loaded."""
    if stored is None:
        return tuple(usually)
    module = module_of(stored)[0]
    return module, module.rpartition(".")[2]
