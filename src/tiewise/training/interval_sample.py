"""Note on the sample behind a comparison's intervals: seeds, and documents if the runs recorded them."""

from __future__ import annotations

from tiewise.core.measurement import plain
from tiewise.training.document_losses import BLOCKS_OF_TEXT
from tiewise.training.results import Comparison, Difference

WIDER = 1.5  # standard error with documents over that of seeds alone, from which the note names both


def sample_note(comparison: Comparison) -> str:
    """Return what the intervals cover, and which part of the sample widens them.

    "" if there is no interval, or if seeds alone give nearly the same one.
    """
    measured = [d for d in comparison.differences if d.metric == "heldout_nll" and d.estimated is not None]
    if not measured:
        return ""
    if not measured[0].documents:
        return "The intervals cover seeds only, for this held-out text."
    notes = [_errors_in_words(d, comparison.reference) for d in measured if _is_widened(d)][:1]
    if measured[0].unit == BLOCKS_OF_TEXT:
        notes.insert(0, "The held-out text has few documents, so the intervals cover blocks of it, which are alike.")
    return " ".join(notes)


def _is_widened(d: Difference) -> bool:
    """Return whether documents add much to the standard error over seeds."""
    return (d.error or 0.0) > WIDER * (d.seed_error or 0.0)


def _errors_in_words(d: Difference, reference: str) -> str:
    """Return both standard errors of a difference, and what makes the larger one smaller."""
    errors = f"{plain(d.seed_error)} over seeds alone and {plain(d.error)} with the {d.unit}"
    remedy = "more held-out text narrows the interval further than more seeds"
    return f"Standard error of {d.arm} − {reference}: {errors}; {remedy}."
