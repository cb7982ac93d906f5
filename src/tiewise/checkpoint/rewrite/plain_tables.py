"""Change that multiplies the maps and scales of a boundary into plain tables: `factor --undo`.

Every loader reads the result. It is tied if both ends become equal, else untied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tiewise.checkpoint.claims import BASE_TYPE, SPEC, TIEWISE_PREFIX, dotted_path
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.numeric_ends import TiedNames, find_tied_names
from tiewise.checkpoint.rewrite.change import DELETE, Change, NewTensor, TableRows, measure_movement, same_pieces
from tiewise.checkpoint.rewrite.ties import copies_to_untie, flag_changes, keep_layer_ties
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.stored_boundary import Dense, StoredBoundary, read_boundary
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import TRAINING_ONLY, UNDO


def plain_tables(facts: Facts, force: bool) -> Change:
    """Return the change that turns a factored or mapped boundary into plain tables.

    The result computes the same logits as the source, up to rounding. The source has the config type `tiewise`. Plain
    tables can hold neither a soft-cap nor a bias; `force` drops them.
    """
    boundary = read_boundary(facts, UNDO)
    _require_matrix(facts, boundary.spec, force)
    family = _family(facts)
    movement = measure_movement(_before_and_after(boundary.head), _before_and_after(boundary.lookup))
    if not math.isfinite(movement.logits + movement.input_rows):
        problem = f"{facts.path}: a product of table and map is not finite in {boundary.lookup.table.dtype}"
        raise CheckpointError(problem, "look for NaN with tiewise check --deep, or cast the checkpoint to F32 first")
    result = _PlainCheckpoint(facts, boundary, _dropped_equal_end(facts, boundary))
    layer_notes: tuple[str, ...] = ()
    if result.writes_flag:
        layer_notes = keep_layer_ties(facts, result.is_tied, force)
    return Change(
        movement,
        drop=result.dropped(),
        put=(*result.tables(), *result.copies()),
        config=result.config(family),
        notes=(*layer_notes, *result.notes()),
        summary="plain tables, which every loader reads",
    )


def _require_matrix(facts: Facts, spec: BoundarySpec, force: bool) -> None:
    """Raise if a plain table cannot compute what the boundary does, unless forced."""
    if force:
        return
    remedy = "keep the boundary, and load the model with tiewise.load; --force drops it"
    if spec.softcap is not None:
        raise CheckpointError(f"{facts.path}: {spec}: plain tables cannot express a soft-cap", remedy)
    if spec.bias:
        raise CheckpointError(
            f"{facts.path}: {spec}: the head of this family has no bias, so plain tables lose it", remedy
        )


def _family(facts: Facts) -> str:
    """Return the `model_type` of the plain model."""
    family = _level(facts).get(BASE_TYPE)
    if not isinstance(family, str):
        remedy = f"write {BASE_TYPE} into it, for example llama"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's family", remedy)
    return family


def _level(facts: Facts) -> Mapping[str, Any]:
    """Return the level of the config that describes the boundary."""
    return facts.levels[facts.boundary_level or ""]


def _before_and_after(end: Dense) -> tuple[TableRows, TableRows] | None:
    """Return the table of an end before and after rounding, None if its bytes stay."""
    if not end.changed:
        return None
    rows = end.table.rows
    return TableRows(rows, end.width, end.exact), TableRows(rows, end.width, end.rounded)


def _dropped_equal_end(facts: Facts, boundary: StoredBoundary) -> frozenset[str]:
    """Return the names of tensors to drop because both ends become equal; mostly none.

    The tensors stay if the class cannot store both ends as one table.
    """
    lookup, head = boundary.lookup, boundary.head
    class_reads_flag = not facts.claims.t5_like and facts.claims.fixed is not False
    if lookup.mark == head.mark or not class_reads_flag:
        return frozenset()
    if not _come_out_equal(lookup, head):
        return frozenset()
    dropped: set[str] = set()
    for tied in find_tied_names(facts):
        if not _are_one_tensor(facts, tied, head.table):
            return frozenset()
        dropped |= {tensor.name for tensor in tied.stored}.intersection(tied.targets)
    return frozenset(dropped)


def _come_out_equal(lookup: Dense, head: Dense) -> bool:
    """Return True if the dense tables of both ends have the same bytes."""
    if (lookup.table.dtype, lookup.table.rows, lookup.width) != (head.table.dtype, head.table.rows, head.width):
        return False
    return same_pieces(lookup.pieces(), head.pieces())


def _are_one_tensor(facts: Facts, tied: TiedNames, head: Stored) -> bool:
    """Return True if all tensors that the class ties are equal.

    They may differ: BERT's two biases may have been trained separately.

    Args:
        head: stored table of the output end. It is not compared, because its dense table replaces it.
    """
    others = [other for other in tied.stored[1:] if other.name != head.name]
    return all(facts.are_equal(tied.stored[0], other) for other in others)


@dataclass(frozen=True)
class _PlainCheckpoint:
    """The plain checkpoint that replaces a boundary."""

    facts: Facts
    boundary: StoredBoundary
    dropped_end: frozenset[str]  # names of the tensors of the output end, if it becomes equal to the input end

    @property
    def is_one_table(self) -> bool:
        """True if both ends are the same product of the same table."""
        return self.boundary.lookup.mark == self.boundary.head.mark

    @property
    def is_tied(self) -> bool:
        """True if the result stores one table for both ends."""
        return self.is_one_table or bool(self.dropped_end)

    @property
    def writes_flag(self) -> bool:
        """True if the config's flag must be written.

        That is so if the class reads the flag and the two ends are different products.
        """
        return not self.is_one_table and not self.facts.claims.t5_like

    @cached_property
    def ends(self) -> dict[str, Dense]:
        """The dense ends, by the name under which the result stores each."""
        lookup, head, head_name = self.boundary.lookup, self.boundary.head, self.boundary.head_name
        ends: dict[str, Dense] = {}
        if lookup.changed:
            ends[lookup.table.name] = lookup
        head_is_new = head.changed or head.table.name != head_name
        if head_is_new and not self.is_tied:
            ends[head_name] = head
        for name, source in self._untied_names():
            if source.name == lookup.table.name:
                ends.setdefault(name, lookup)
        return ends

    def tables(self) -> list[NewTensor]:
        """Return the dense tables."""
        tables = []
        for name, end in self.ends.items():
            tables.append(NewTensor.like(end.table, end.pieces, name=name, shape=(end.table.rows, end.width)))
        return tables

    def copies(self) -> list[NewTensor]:
        """Return copies of other tensors that the class ties by the same flag.

        An example is BERT's second head bias.
        """
        copies = []
        for name, source in self._untied_names():
            if source.name != self.boundary.lookup.table.name and name != self.boundary.head_name:
                copies.append(NewTensor.copy(source, name=name))
        return copies

    def _untied_names(self) -> Iterator[tuple[str, Stored]]:
        """Yield (missing name, tensor that it was tied to), if the result is not tied."""
        if self.is_tied or self.facts.claims.t5_like:
            return
        yield from copies_to_untie(self.facts)

    def dropped(self) -> frozenset[str]:
        """Return the names of tensors to drop.

        They are the maps, the output end if it equals the input end, and a bias that no plain head has.
        """
        dropped = self.dropped_end | {tensor.name for tensor in self.boundary.maps}
        bias = self.boundary.head_name.removesuffix("weight") + "bias"
        if self.boundary.spec.bias and bias in self.facts.folder.tensors:
            dropped |= {bias}
        return dropped

    def config(self, family: str) -> dict[str, Any]:
        """Return the changes of config.json: the plain class replaces the boundary."""
        changes: dict[str, Any] = {"model_type": family, BASE_TYPE: DELETE, SPEC: DELETE}
        classes = _level(self.facts).get("architectures")
        if isinstance(classes, list):
            changes["architectures"] = _plain_classes(classes)
        level = self.facts.boundary_level or ""
        config = {dotted_path(level, key): value for key, value in changes.items()}
        config |= self.boundary.spec.export_entry()
        if self.writes_flag:
            config |= flag_changes(self.facts, self.is_tied)
        return config

    def notes(self) -> list[str]:
        """Return notes on the number of tables, and on options of the boundary that are lost."""
        return [*self._notes_on_tables(), *_notes_on_lost_options(self.boundary.spec)]

    def _notes_on_tables(self) -> list[str]:
        """Return notes on the number of tables, and on loaders that ignore one."""
        if self.is_tied:
            return ["both ends use one table"]
        notes = ["the result is untied: each end has a separate table"]
        if self.facts.claims.t5_like:
            claims = "this family claims one table whatever its config says"
            notes.append(f"{claims}; loaders that do not compare the tables drop the head")
        return notes


def _plain_classes(classes: list[Any]) -> list[Any]:
    """Return the class names of a config, without the prefix of tiewise's classes."""
    plain = []
    for name in classes:
        if isinstance(name, str):
            plain.append(name.removeprefix(TIEWISE_PREFIX))
        else:
            plain.append(name)
    return plain


def _notes_on_lost_options(spec: BoundarySpec) -> list[str]:
    """Return notes on options of a boundary that plain tables lack."""
    notes = []
    if spec.softcap is not None:
        notes.append(f"softcap={spec.softcap:g} is lost, which changes the logits")
    if spec.bias:
        notes.append("the head's bias is lost, which changes the logits")
    in_training = [
        entry.written(getattr(spec, entry.field)) for entry in spec.changed_rows() if entry.changes in TRAINING_ONLY
    ]
    written = ", ".join(in_training)
    if written:
        notes.append(f"{short(written)} acts only in training, and plain tables cannot store it")
    return notes
