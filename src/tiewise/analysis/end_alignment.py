"""Alignment of the ends of checkpoints: input with output of one model, and all ends of one with all of another."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiewise.analysis.align_tables import Alignment, Closer, Settings, align, closer
from tiewise.analysis.model_ends import Ends, ends_of
from tiewise.analysis.row_pairs import FEWEST, Pairs, by_text, one_vocabulary
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError

LARGE = 2e11  # rows × d²: from here on `sized` permutes once


@dataclass(frozen=True)
class AlignmentFound:
    """Input and output table of one model."""

    tied: bool  # whether both ends are one table; there is then nothing to align
    names: tuple[str, str]  # stored names of the input and the output table
    rows: tuple[int, int]  # of both tables
    widths: tuple[int, int]  # of both tables, as the model meets them
    unusable: int  # tokens left out because a row of theirs is zero, repeated or not finite
    alignment: Alignment | None  # None where the model is tied
    notes: tuple[str, ...]  # what a reader must know of these tables


@dataclass(frozen=True)
class EndPair:
    """One end of the first model held beside one end of the second; an end is `input`, `output` or `table` (tied)."""

    first: str
    second: str
    alignment: Alignment


@dataclass(frozen=True)
class AcrossFound:
    """The ends of two models, tokens matched by their text."""

    labels: tuple[str, str]  # what the two models are called
    tied: tuple[bool, bool]  # whether each is tied
    rows: tuple[int, int]  # rows of each vocabulary
    shared: int  # tokens in both, before any is left out
    unusable: int  # shared tokens left out because a row of theirs is zero, repeated or not finite
    pairs: tuple[EndPair, ...]  # every end of the first with every end of the second
    one: int | None  # which of the two (0 or 1) has one stored table where the other has two; None otherwise
    # whether that table is more like the input or the output table of the other; None where `one` is
    closer: Closer | None
    notes: tuple[str, ...]  # what a reader must know of these tables


def alignment_of(
    folder: Folder,
    settings: Settings | None = None,
    seed: int = 0,
    held_out: float = Settings.held_out,
) -> AlignmentFound:
    """Align the input table of one model with its output table; a tied model has one table and nothing to align.

    Args:
        folder: an opened checkpoint.
        settings: what to measure; by default `sized`.
        seed: of the default settings.
        held_out: of the default settings; 0 fits maps on all rows and scores all.

    Raises:
        CheckpointError: no output head, quantised tables, or as `align`.
    """
    ends = ends_of(folder)
    rows, widths = (ends.input.rows, ends.output.rows), (ends.input.width, ends.output.width)
    if ends.tied:
        return AlignmentFound(True, ends.names, rows, widths, 0, None, ends.notes)
    every = one_vocabulary(*rows)
    mask = ends.unusable()
    pairs = every.without(mask, mask)
    settings = settings or sized(len(pairs), max(widths), seed, held_out)
    found = align(ends.input, ends.output, pairs, settings)
    return AlignmentFound(False, ends.names, rows, widths, len(every) - len(pairs), found, ends.notes)


def across(
    first: Folder,
    second: Folder,
    settings: Settings | None = None,
    labels: tuple[str, str] = ("A", "B"),
    seed: int = 0,
    held_out: float = Settings.held_out,
) -> AcrossFound:
    """Align every end of one model with every end of another, tokens matched by text.

    Where one of the two has one stored table and the other has two, `closer` says which of the two it is more like.

    Args:
        first: an opened checkpoint.
        second: another.
        settings: what to measure; by default `sized`.
        labels: what to call the two.
        seed: of the default settings.
        held_out: of the default settings; 0 fits maps on all rows and scores all.

    Raises:
        CheckpointError: no output head, quantised tables, no tokenizer, too few tokens in both, or as `align`.
    """
    ends = ends_of(first), ends_of(second)
    every = by_text(ends[0].texts(), ends[1].texts())
    pairs = every.without(ends[0].unusable(), ends[1].unusable())
    rows = ends[0].input.rows, ends[1].input.rows
    if len(pairs) < FEWEST:
        what = f"vocabularies of {rows[0]:,} and {rows[1]:,} rows share {len(every):,} tokens, {len(pairs):,} usable"
        raise CheckpointError(what, f"at least {FEWEST} are needed")
    width = max(table.width for end in ends for _, table in end.tables)
    settings = settings or replace(sized(len(pairs), width, seed, held_out), sampled=8192)
    found = tuple(
        EndPair(name_a, name_b, align(a, b, pairs, settings))
        for name_a, a in ends[0].tables
        for name_b, b in ends[1].tables
    )
    one = _one(ends)
    leaning = None
    if one is not None:
        turned = pairs if one == 0 else Pairs(pairs.b, pairs.a, pairs.how)
        table, other = ends[one].shared, ends[1 - one]
        assert table is not None
        leaning = closer(table, other.input, other.output, turned, settings)
    notes = tuple(f"{label}: {note}" for label, end in zip(labels, ends, strict=True) for note in end.notes)
    tied = ends[0].tied, ends[1].tied
    return AcrossFound(labels, tied, rows, len(every), len(every) - len(pairs), found, one, leaning, notes)


def sized(pairs: int, width: int, seed: int = 0, held_out: float = Settings.held_out) -> Settings:
    """Return settings for tables of this size: the usual ones; one permutation in place of three for large tables."""
    permutations = 1 if pairs * width**2 > LARGE else Settings.permutations
    return Settings(seed=seed, permutations=permutations, held_out=held_out)


def _one(ends: tuple[Ends, Ends]) -> int | None:
    """Which of two models has one stored table where the other has two."""
    first, second = (end.shared is not None for end in ends)
    return None if first == second else 0 if first else 1
