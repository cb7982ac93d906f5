"""Does the direct path, from the input table straight to the output table, know the order of words?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tiewise.checkpoint.family_record import NONE
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError, doing, progress
from tiewise.core.found import Found, Listing, Quantity, count, plain, visible
from tiewise.inspection.bench import Bench, Subject, section
from tiewise.inspection.tables import path_matrix
from tiewise.inspection.tables.open_path import open_path
from tiewise.inspection.tables.token_texts import read_as

MOST_ASYMMETRIC = 20  # pairs that are listed
OWN_TOKENS = 2000  # whose whole row of logits is looked at
ASYMMETRY = "‖M − Mᵀ‖²/‖M‖²"
APPLIED, CENTRED = "as the model applies it", "less row and column means"


@section(asks="Does the direct path know the order of words?", place=10)
def direct_path(subject: Subject, bench: Bench) -> Found:
    """Measure M = A Bᵀ [V, V] of input rows and output rows, and what it makes of the requested pairs."""
    request = bench.request
    return direct_path_of(subject.folder, request.pairs, request.effort.samples, request.seed)


def direct_path_of(folder: Folder, words: Sequence[tuple[str, str]] = (), samples: int = 4000, seed: int = 0) -> Found:
    """Measure the direct path of a checkpoint, and ask it for pairs of `words`, each one token, both ways.

    The most asymmetric pairs are searched among `samples` tokens, drawn by `seed`; all where there are fewer.

    Raises:
        CheckpointError: no head, quantised tables, maps between a table and the body, a tokenizer that cannot be read.
        DataError: words that are no tokens, values that are no numbers.
    """
    path = open_path(folder)
    ids = path_matrix.find_pairs(folder, words, path.rows)
    if path.rows < 2:
        raise CheckpointError(f"{folder.path}: a vocabulary of {path.rows}", "give two tokens or more")
    with doing("direct path", path.rows):
        applied = linear = path_matrix.grams(path)
    if path.norm.kind != NONE:
        with doing("direct path without its norm", path.rows):
            linear = path_matrix.grams(path.linear)
    with doing("own tokens", path.output.rows):
        own = path_matrix.own_token(path, applied, OWN_TOKENS, seed)
    kinds = {APPLIED: applied, "by gain and scales alone": linear, CENTRED: applied.centred}
    orders = path_matrix.word_orders(path, words, ids)
    chosen = path_matrix.sampled(path.rows, samples, seed)
    pairs = path_matrix.asymmetric_pairs(path, chosen, top=MOST_ASYMMETRIC)
    progress("asymmetric pairs", len(chosen), len(chosen))
    listing = f"Most asymmetric pairs among {count(len(chosen))} tokens"
    return Found(
        answer="only by row lengths" if path.tied else "it can: two tables",
        quantities=(
            *_asymmetries(kinds),
            *_eigenvalues(kinds[APPLIED], APPLIED),
            *_eigenvalues(kinds[CENTRED], CENTRED),
            *own,
            *_requested_pairs(orders),
        ),
        listings=(Listing(listing, ("pair", "there", "back"), tuple(_listed_pairs(folder, pairs))),),
        notes=(f"{count(path.rows)} tokens, {count(path.input.width)} wide", *path.notes),
    )


def _asymmetries(kinds: dict[str, path_matrix.Grams]) -> Iterator[Quantity]:
    """Yield how far each kind of M is from symmetric, then its size."""
    for kind, grams in kinds.items():
        yield Quantity(
            f"asymmetry {kind}", path_matrix.asymmetry(grams)[1], chance=2.0, unit=ASYMMETRY, main=kind == APPLIED,
            figure="Asymmetry of the direct path", why="0 symmetric, 2 unrelated tables, 4 antisymmetric",
        )  # fmt: skip
    for kind, grams in kinds.items():
        yield Quantity(f"‖M‖² {kind}", path_matrix.asymmetry(grams)[0], unit="squared logits", main=False)


def _eigenvalues(grams: path_matrix.Grams, kind: str) -> Iterator[Quantity]:
    """Yield signs, ends and negative energy of the eigenvalues of M's symmetric part."""
    values = path_matrix.eigenvalues(grams).tolist() or [0.0]
    is_applied = kind == APPLIED
    where = "" if is_applied else f", {kind}"
    negative = [value for value in values if value < 0]
    energy = sum(value * value for value in values) or 1.0
    yield Quantity(
        f"energy of eigenvalues below 0{where}", sum(value * value for value in negative) / energy, unit="%",
        main=is_applied, why="none in W Wᵀ, half in unrelated tables",
    )  # fmt: skip
    for side, number in (("above", sum(value > 0 for value in values)), ("below", len(negative))):
        yield Quantity(f"eigenvalues {side} 0{where}", number, main=False)
    for end, value in (("largest", values[-1]), ("smallest", values[0])):
        yield Quantity(f"{end} eigenvalue{where}", value, unit="logits", main=False)


def _requested_pairs(orders: dict[str, tuple[float, float, int]]) -> Iterator[Quantity]:
    """Yield logits, then probabilities of the requested pairs, each in both orders."""
    figure, why = "Requested pairs: {}", "symmetric: one logit both ways"
    for order, (logit, _, _) in orders.items():
        yield Quantity(order, logit, unit="logit", main=False, figure=figure.format("logits"), why=why)
    for order, (_, log, rank) in orders.items():
        yield Quantity(
            f"p({order})", math.exp(log), unit="probability", main=False, figure=figure.format("probabilities"),
            why=f"rank {count(rank + 1)}",
        )  # fmt: skip


def _listed_pairs(folder: Folder, pairs: Sequence[tuple[int, int, float, float]]) -> Iterator[tuple[str, str, str]]:
    """Yield each pair of tokens as text, with its logit there and back."""
    tokens = [token for pair in pairs for token in pair[:2]]
    texts = [visible(text) for text in read_as(folder, tokens)]
    for first, second, (_, _, there, back) in zip(texts[::2], texts[1::2], pairs, strict=True):
        yield f"{first} → {second}", plain(there, 3), plain(back, 3)
