"""What it takes to store the two ends apart, and to store them as one: shared by the verbs and by `repair`."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import NewTensor, copy_of
from tiewise.rewrite.ends import how_they_differ
from tiewise.rewrite.groups import Group, groups


@dataclass(frozen=True)
class Moves:
    """Tensors that go and come."""

    drop: frozenset[str] = frozenset()
    put: tuple[NewTensor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drop or self.put)


def apart(facts: Facts) -> Moves:
    """Return a copy of the stored tensor for every name that the class looks for once its flag is false."""
    put = [copy_of(group.kept, name) for group in groups(facts) if group.kept is not None for name in group.missing]
    return Moves(put=tuple(put))


def joined(facts: Facts, head: Stored | None = None, chosen: NewTensor | None = None) -> Moves:
    """Return what leaves one tensor of each group, under its source's name.

    Args:
        facts: of the checkpoint.
        head: goes although it differs; None where all tensors of a group must be equal.
        chosen: new content of the table, under its source's name; None where it stays.

    Raises:
        CheckpointError: two tensors of a group differ.
    """
    drop: set[str] = set()
    put = [] if chosen is None else [chosen]
    known = set(facts.folder.tensors) | set(facts.folder.index.weight_map if facts.folder.index else ())
    for group in groups(facts):
        if group.kept is None:
            continue
        _require_equal(facts, group, head)
        drop |= known & set(group.targets)
        if group.kept.name != group.source and (chosen is None or chosen.name != group.source):
            put.append(copy_of(group.kept, group.source))
    return Moves(frozenset(drop), tuple(put))


def _require_equal(facts: Facts, group: Group, head: Stored | None) -> None:
    first, *others = group.stored
    for other in others:
        if other is not head and not facts.same(first, other):
            how = how_they_differ(facts, first, other)
            what = (
                f"{facts.path}: {short(first.name)} and {short(other.name)} are tied in this class and differ ({how})"
            )
            raise CheckpointError(what, "choose for the head with tiewise tie --keep, or tiewise untie to keep both")
