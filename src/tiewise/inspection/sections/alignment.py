"""Similarity of a model's input and output table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.measurement import Curve, Measurement, Quantity
from tiewise.inspection.tables.align_tables import Alignment, align
from tiewise.inspection.tables.model_tables import ends_of, left_out, one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings
from tiewise.inspection.workspace import InspectedModel, Workspace, section


@section(question="Are input and output table alike?", order=40)
def alignment(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Align the input table of a model with its output table."""
    request = workspace.request
    return alignment_of(model.folder, seed=request.seed, held_out=request.effort.held_out)


def alignment_of(
    folder: Folder, settings: AlignSettings | None = None, seed: int = 0, held_out: float = AlignSettings.held_out
) -> Measurement:
    """Report the similarity of a model's two tables by every measure, with chance levels.

    By default `settings` are `AlignSettings.sized`, with this seed and share of held-out rows.

    Raises:
        CheckpointError: no output head, quantised tables, or as `align`.
    """
    ends = ends_of(folder)
    if ends.tied:
        notes = (f"input and output are {ends.names[0]}", *ends.notes, *left_out(ends.indexed_tensors))
        return Measurement("the model has one table", notes=notes)
    every = one_vocabulary(ends.input.rows, ends.output.rows)
    unusable = ends.unusable()
    pairs = every.without(unusable, unusable)
    if settings is None:
        width = max(ends.input.width, ends.output.width)
        settings = AlignSettings.sized(len(pairs), width, seed, held_out)
    measured = align(ends.input, ends.output, pairs, settings)
    # one stored table with two maps is no choice between one and two
    quantities = list(measured.quantities(decides=len(set(ends.names)) == 2))
    answer = _answer(quantities)
    why = "a row is zero, repeated or not finite"
    quantities.append(Quantity("tokens left out", len(every) - len(pairs), main=False, why=why))
    return Measurement(
        answer=answer,
        quantities=tuple(quantities),
        curves=(*_spectrum_curves(measured), *_subspace_curves(measured)),
        notes=(*measured.left_out, *ends.notes, *left_out(ends.indexed_tensors)),
    )


def _answer(quantities: Sequence[Quantity]) -> str:
    """Return the main cosines whose intervals are above every value that no effect gives."""
    above = []
    for quantity in quantities:
        if not quantity.main or quantity.unit != "cosine":
            continue
        if quantity.low > max(quantity.chance or 0.0, *quantity.null):
            above.append(quantity.name)
    if not above:
        return "no similarity of the two tables above chance was detected"
    return f"the two tables are more alike than chance {', and '.join(above)}"


def _spectrum_curves(alignment: Alignment) -> Iterator[Curve]:
    """Yield the singular values above zero of both tables."""
    for end, spectrum in zip(("input", "output"), alignment.spectra, strict=True):
        values = tuple(value for value in spectrum.values if value > 0)
        numbers = tuple(range(1, len(values) + 1))
        yield Curve(
            "Spectra of both tables", numbers, values, which=end, along="direction",
            unit="singular value", log=True, log_x=True,
            why="Less the mean row; steep: few directions.",
        )  # fmt: skip


def _subspace_curves(alignment: Alignment) -> Iterator[Curve]:
    """Yield the principal angles between leading subspaces of both tables."""
    for space in alignment.subspaces:
        numbers = tuple(range(1, space.dimension + 1))
        yield Curve(
            "Do the leading directions agree?", numbers, space.cosines, along="direction",
            which=f"{space.dimension} over {space.over}", unit="cosine of the principal angle",
            why="1: both have that direction.",
        )  # fmt: skip
