"""Names that are one tensor while the ends are tied: where it is kept, and what must be stored once they are not."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.stored import Stored


@dataclass(frozen=True)
class Group:
    """One tensor under several names: the table under the input's, the head's, and in some families more.

    Args:
        source: the name under which a tied checkpoint keeps it.
        targets: the other names.
        stored: those of all the names that are stored, the source first.
    """

    source: str
    targets: tuple[str, ...]
    stored: tuple[Stored, ...]

    @property
    def kept(self) -> Stored | None:
        """The stored tensor that stands for all: the source where it is stored."""
        return self.stored[0] if self.stored else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that are not stored."""
        held = {tensor.name for tensor in self.stored}
        return tuple(name for name in (self.source, *self.targets) if name not in held)


def groups(facts: Facts) -> list[Group]:
    """Return every group of the class; of an unknown class the table and the head.

    BERT ties its head's bias by the same flag, BART its stacks' input tables.
    """
    roles = facts.roles
    ties = dict(roles.ties)
    if not ties and roles.input_name is not None and roles.output_name is not None:
        ties = {roles.output_name: roles.input_name}
    prefix = _wrapper(roles.input or roles.output, roles.input_name if roles.input else roles.output_name)
    found: dict[str, list[str]] = {}
    for target, source in ties.items():
        while source in ties and ties[source] != target:
            source = ties[source]
        found.setdefault(prefix + source, []).append(prefix + target)
    tensors = facts.folder.tensors
    return [
        Group(source, tuple(targets), tuple(tensors[name] for name in (source, *targets) if name in tensors))
        for source, targets in found.items()
    ]


def _wrapper(tensor: Stored | None, name: str | None) -> str:
    """What stands before every name of this checkpoint: `_orig_mod.` and the like."""
    if tensor is None or name is None or not tensor.name.endswith(name):
        return ""
    return tensor.name.removesuffix(name)
