"""The K most frequent tokens, whose output rows `+free=K` sets free."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec, Vocabularies


def most_frequent(spec: BoundarySpec, counts: Any, vocab: Vocabularies) -> tuple[int, ...]:
    """Return the ids of the K most frequent tokens, in ascending order.

    Tokens of one count are taken by ascending id. A padding row is never taken.

    Args:
        spec: a spec with `free=K`.
        counts: [V_out], how often each output token occurs, such as the counts of a training text.
        vocab: V of input and output.

    Raises:
        SpecError: there are no counts, or they are not V finite numbers of 0 or more, or K exceeds the tokens.

    >>> most_frequent(BoundarySpec.parse("tied+free=2"), [5, 0, 9, 5], Vocabularies.same(4))
    (0, 2)
    """
    assert spec.free is not None, "only a spec with free=K has such tokens"
    spec.require_free_tokens(vocab.outputs)
    if counts is None:
        problem = f"{spec}: which {spec.free} tokens are the most frequent is not known"
        raise SpecError(problem, "give the tokens' counts in the training text: counts=…")
    order = np.argsort(-_checked(spec, counts, vocab.outputs), kind="stable")
    if spec.pad is not None:
        rows = np.asarray(vocab.output_index() or range(vocab.outputs))
        order = order[rows[order] != spec.pad]
        spec.require_free_tokens(len(order))
    return tuple(sorted(order[: spec.free].tolist()))


def _checked(spec: BoundarySpec, counts: Any, vocab: int) -> np.ndarray[Any, Any]:
    """Return counts [V] as an array, after checking them."""
    try:
        checked = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError):
        raise SpecError(f"{spec}: counts of type {type(counts).__name__}", "give V numbers") from None
    if checked.shape != (vocab,):
        problem = f"{spec}: counts of shape {list(checked.shape)} for {vocab} tokens"
        raise SpecError(problem, f"give one number for each of the {vocab} tokens")
    if not (np.isfinite(checked) & (checked >= 0)).all():
        raise SpecError(f"{spec}: a count is negative or not finite", "give numbers of 0 or more")
    return checked
