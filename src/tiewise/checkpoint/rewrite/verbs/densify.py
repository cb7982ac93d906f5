"""`densify`: products of a narrow table and a map as plain tables again.

Maps and scales of a boundary are multiplied into its tables. Every loader reads the result, which is tied if both ends
come out equal, else untied.
"""

from __future__ import annotations

import math

from tiewise.checkpoint.claims import BASE_TYPE, OWN_PREFIX
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.numeric_ends import Dense, StoredBoundary, read_boundary, tied_names
from tiewise.checkpoint.rewrite.change import DELETE, Change, NewTensor, TableRows, measure_move
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import flags, keep_layer_ties
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.spec_options import DENSIFY, TRAINING_ONLY


@verb(order=40, live="tiewise.hf.plain_copy(model)", example="factored")
def densify(facts: Facts, *, force: bool = False) -> Change:
    """Turn factored or mapped boundaries into plain matrices that every loader reads.

    The result computes what the source computes, up to rounding. The source is a checkpoint of config type `tiewise`.
    With `force` a soft-cap or a bias that no plain table can hold is dropped.
    """
    boundary = read_boundary(facts, DENSIFY)
    spec, lookup, head, t5_like = boundary.spec, boundary.lookup, boundary.head, facts.claims.t5_like
    fix = "keep the boundary, and load the model with tiewise.load; --force drops it"
    if spec.softcap is not None and not force:
        raise CheckpointError(f"{facts.path}: {spec}: a soft-cap is no matrix, so no dense table does the same", fix)
    if spec.bias and not force:
        raise CheckpointError(f"{facts.path}: {spec}: the family's own head has no bias to keep this one in", fix)
    family, classes = facts.config.get(BASE_TYPE), facts.config.get("architectures")
    if not isinstance(family, str):
        fix = f"write {BASE_TYPE}: llama, say, into it"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's family", fix)
    moved = measure_move(_rounding(head), _rounding(lookup))
    if not math.isfinite(moved.logits + moved.input_rows):
        what = f"{facts.path}: a product of table and map is not finite in {lookup.table.dtype}"
        raise CheckpointError(what, "look for NaN with tiewise check --deep, or cast the checkpoint to F32 first")

    one = lookup.mark == head.mark
    merged = set() if one else _merged(facts, boundary)
    tied = one or bool(merged)
    put = {lookup.table.name: lookup} if lookup.changed else {}
    if not tied and (head.changed or head.table.name != boundary.head_name):
        put[boundary.head_name] = head
    copies = []
    # whatever else the class ties by the flag that turns false: BART's stacks, BERT's second bias
    for one_tensor in [] if tied or t5_like else tied_names(facts):
        for name in one_tensor.missing:
            if one_tensor.kept is not None and one_tensor.kept.name == lookup.table.name:
                put.setdefault(name, lookup)
            elif one_tensor.kept is not None and name != boundary.head_name:
                copies.append(NewTensor.copy(one_tensor.kept, name=name))
    shapes = {name: (end.table.rows, end.width) for name, end in put.items()}
    tables = (NewTensor.like(end.table, end.pieces, name=name, shape=shapes[name]) for name, end in put.items())
    drop = {tensor.name for tensor in boundary.maps} | merged
    if spec.bias:
        drop |= {boundary.head_name.removesuffix("weight") + "bias"} & facts.folder.tensors.keys()
    classes = classes if isinstance(classes, list) else []
    plain = [name.removeprefix(OWN_PREFIX) if isinstance(name, str) else name for name in classes]
    config = {"model_type": family, BASE_TYPE: DELETE, SPEC: DELETE, "architectures": plain}
    config |= {} if one or t5_like else flags(facts, tied)
    forced = () if one or t5_like else keep_layer_ties(facts, tied, force)

    notes = [*forced, "both ends use one table" if tied else "each end has a table of its own"]
    if not tied and t5_like:
        claims = "this family claims one table whatever its config says"
        notes.append(f"{claims}: loaders that do not compare the two drop the head")
    if spec.softcap is not None:
        notes.append(f"softcap={spec.softcap:g} is lost, which changes the logits")
    if spec.bias:
        notes.append("the head's bias is lost, which changes the logits")
    in_training = [row for row in spec.given() if row.changes in TRAINING_ONLY]
    trained = [row.written(getattr(spec, row.field)) for row in in_training]
    if trained:
        notes.append(f"{short(', '.join(trained))} acts in training only, and plain tables do not know of it")
    return Change(moved, frozenset(drop), (*tables, *copies), config, notes=tuple(notes))


def _rounding(end: Dense) -> tuple[TableRows, TableRows] | None:
    """The table before and after rounding; None where nothing is computed."""
    one, two = (TableRows(end.table.rows, end.width, read) for read in (end.exact, end.rounded))
    return (one, two) if end.changed else None


def _merged(facts: Facts, boundary: StoredBoundary) -> set[str]:
    """Tensors that go because two unequal ends come out equal, and the class can keep them as one; mostly none."""
    lookup, head, claims = boundary.lookup, boundary.head, facts.claims
    sizes = [(end.table.dtype, end.table.rows, end.width) for end in (lookup, head)]
    if sizes[0] != sizes[1] or claims.t5_like or claims.fixed is False:
        return set()
    if any(a != b for a, b in zip(lookup.pieces(), head.pieces(), strict=True)):
        return set()
    gone = set()
    for tied in tied_names(facts):
        if any(not facts.same(tied.stored[0], other) for other in tied.stored[1:] if other.name != head.table.name):
            return set()  # BERT's two biases, trained apart
        gone |= {other.name for other in tied.stored if other.name in tied.targets}
    return gone
