"""Are input and output table alike?"""

from __future__ import annotations

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.found import Curve, Found, Quantity
from tiewise.inspection.bench import Bench, Subject, section
from tiewise.inspection.tables.align_tables import align
from tiewise.inspection.tables.model_tables import ends_of, left_out, one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings


@section(asks="Are input and output table alike?", place=40)
def alignment(subject: Subject, bench: Bench) -> Found:
    """Align the input table of a model with its output table."""
    request = bench.request
    return alignment_of(subject.folder, seed=request.seed, held_out=request.effort.held_out)


def alignment_of(
    folder: Folder, settings: AlignSettings | None = None, seed: int = 0, held_out: float = AlignSettings.held_out
) -> Found:
    """Say how alike the two tables of a model are by every measure, and what unrelated tables would give.

    By default `settings` are `AlignSettings.sized`, with this seed and share of rows held out.

    Raises:
        CheckpointError: no output head, quantised tables, or as `align`.
    """
    ends = ends_of(folder)
    if ends.tied:
        notes = (f"input and output are {ends.names[0]}", *ends.notes, *left_out(ends.beside))
        return Found("they are one table", notes=notes)
    every, mask = one_vocabulary(ends.input.rows, ends.output.rows), ends.unusable()
    pairs = every.without(mask, mask)
    width = max(ends.input.width, ends.output.width)
    found = align(ends.input, ends.output, pairs, settings or AlignSettings.sized(len(pairs), width, seed, held_out))
    # one stored table behind two maps is no choice of two
    quantities = tuple(found.quantities(decides=len(set(ends.names)) == 2))
    above = [q.name for q in quantities if q.main and q.unit == "cosine" and q.low > max(q.chance or 0.0, *q.null)]
    curves = []
    for end, spectrum in zip(("input", "output"), found.spectra, strict=True):
        kept = tuple(value for value in spectrum.values if value > 0)
        curves.append(Curve(
            "Spectra of both tables", tuple(range(1, len(kept) + 1)), kept, which=end, along="direction",
            unit="singular value", log=True, log_x=True,
            why="Less the mean row; steep: few directions.",
        ))  # fmt: skip
    for space in found.subspaces:
        curves.append(Curve(
            "Do the leading directions agree?", tuple(range(1, space.k + 1)), space.cosines, along="direction",
            which=f"{space.k} over {space.over}", unit="cosine of the principal angle",
            why="1: both have that direction.",
        ))  # fmt: skip
    unusable, why = len(every) - len(pairs), "a row is zero, repeated or not finite"
    return Found(
        answer=f"more than by chance {', and '.join(above)}" if above else "no more than by chance",
        quantities=(*quantities, Quantity("tokens left out", unusable, main=False, why=why)),
        curves=tuple(curves),
        notes=(*found.left_out, *ends.notes, *left_out(ends.beside)),
    )
