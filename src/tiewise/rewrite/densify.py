"""`densify`: a boundary that only this package loads, as plain matrices in the family's own type.

Maps and scales are multiplied into the tables. The result is tied where both ends come out equal, else untied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import BASE_TYPE, OWN_PREFIX
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import DELETE, Change, NewTensor, copy_of
from tiewise.rewrite.dense import Dense
from tiewise.rewrite.ends import opened
from tiewise.rewrite.flags import flags
from tiewise.rewrite.groups import groups
from tiewise.rewrite.measure import measured
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.stored_boundary import Boundary, read_boundary
from tiewise.rewrite.transaction import apply


def densify(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write a checkpoint with plain tables that computes what the source computes, up to rounding.

    Args:
        source: a checkpoint of config type `tiewise`.
        to: the new folder.
        dry_run: compute and measure, write nothing.
        force: drop a soft-cap or a bias that no plain table can hold.

    Raises:
        CheckpointError: the tables are plain already, the boundary has a soft-cap or a bias that no table can hold, or
            its tensors are not what its spec says.
    """
    facts = opened(Path(source))
    boundary = read_boundary(facts)
    lost = _lost(facts, boundary, force=force)
    lookup, head = boundary.lookup, boundary.head
    one = lookup.mark == head.mark
    merged: frozenset[str] = frozenset() if one else _merged(facts, boundary)
    tied = one or bool(merged)
    outputs, inputs = ((end.exact(), end.rounded()) if end.changed else None for end in (head, lookup))
    moved = measured(outputs, inputs)
    if not math.isfinite(moved.logits + moved.input_rows):
        what = f"{facts.path}: a product of table and map is not finite in {lookup.table.dtype}"
        raise CheckpointError(what, "look for NaN with tiewise check --deep, or cast the checkpoint to F32 first")
    change = Change(
        moved,
        drop=frozenset(tensor.name for tensor in (*boundary.maps, *lost)) | merged,
        put=tuple(_tensors(boundary, tied)) + (() if tied else tuple(_parted(facts, boundary))),
        config=_declared(facts) | ({} if one or facts.claims.t5_like else flags(facts, tied)),
        notes=tuple(_notes(facts, boundary, tied)),
    )
    return apply(facts.folder, change, Path(to), command="densify", dry_run=dry_run, force=force)


def _lost(facts: Facts, boundary: Boundary, *, force: bool) -> tuple[Stored, ...]:
    """Tensors that the family's own class has no place for; refused unless forced, as is a soft-cap."""
    spec, fix = boundary.spec, "keep the boundary, and load the model with tiewise.load; --force drops it"
    if spec.softcap is not None and not force:
        what = f"{facts.path}: {spec}: a soft-cap is no matrix, so no dense table does the same"
        raise CheckpointError(what, fix)
    if spec.bias and not force:
        what = f"{facts.path}: {spec}: the family's own head has no bias to keep this one in"
        raise CheckpointError(what, fix)
    bias = facts.folder.tensors.get(boundary.head_name.removesuffix("weight") + "bias")
    return (bias,) if spec.bias and bias is not None else ()


def _merged(facts: Facts, boundary: Boundary) -> frozenset[str]:
    """Tensors that go because two unequal ends come out equal, and the class can keep them as one; mostly none."""
    lookup, head, claims = boundary.lookup, boundary.head, facts.claims
    sizes = [(end.table.dtype, end.table.rows, end.width) for end in (lookup, head)]
    if sizes[0] != sizes[1] or claims.t5_like or claims.fixed is False:
        return frozenset()
    if any(a != b for a, b in zip(lookup.pieces(), head.pieces(), strict=True)):
        return frozenset()
    gone = set()
    for group in groups(facts):
        if any(not facts.same(group.stored[0], other) for other in group.stored[1:] if other.name != head.table.name):
            return frozenset()  # BERT's two biases, trained apart
        gone |= {other.name for other in group.stored if other.name in group.targets}
    return frozenset(gone)


def _tensors(boundary: Boundary, tied: bool) -> Iterator[NewTensor]:
    lookup, head = boundary.lookup, boundary.head
    if lookup.changed:
        yield _new(lookup.table.name, lookup)
    if not tied and (head.changed or head.table.name != boundary.head_name):
        yield _new(boundary.head_name, head)


def _parted(facts: Facts, boundary: Boundary) -> Iterator[NewTensor]:
    """Whatever else the class ties by the flag that turns false: BART's stacks, BERT's second bias."""
    if facts.claims.t5_like:
        return
    table = boundary.lookup.table
    for group in groups(facts):
        for name in group.missing:
            if group.kept is not None and name != boundary.head_name:
                yield _new(name, boundary.lookup) if group.kept.name == table.name else copy_of(group.kept, name)


def _new(name: str, dense: Dense) -> NewTensor:
    table = dense.table
    return NewTensor(name, table.dtype, (table.rows, dense.width), table.path.name, dense.pieces)


def _declared(facts: Facts) -> dict[str, Any]:
    config = facts.config
    base, names = config.get(BASE_TYPE), config.get("architectures")
    if not isinstance(base, str):
        fix = f"write {BASE_TYPE}: llama, say, into it"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's family", fix)
    names = names if isinstance(names, list) else []
    plain = [name.removeprefix(OWN_PREFIX) if isinstance(name, str) else name for name in names]
    return {"model_type": base, BASE_TYPE: DELETE, SPEC: DELETE, "architectures": plain}


def _notes(facts: Facts, boundary: Boundary, tied: bool) -> Iterator[str]:
    yield "both ends use one table" if tied else "each end has a table of its own"
    if not tied and facts.claims.t5_like:
        yield "this family claims one table whatever its config says: loaders that do not compare the two drop the head"
    spec = boundary.spec
    dropped = [f"pad={spec.pad}"] if spec.pad is not None else []
    dropped += [f"alpha={spec.alpha:g}"] if spec.alpha != 1.0 else []
    dropped += [f"penalty={spec.penalty:g}"] if spec.penalty else []
    dropped += [f"decay={spec.decay:g}"] if spec.decay else []
    if spec.softcap is not None:
        yield f"softcap={spec.softcap:g} is lost, which changes the logits"
    if spec.bias:
        yield "the head's bias is lost, which changes the logits"
    if dropped:
        yield f"{short(', '.join(dropped))} acts in training only, and plain tables do not know of it"
