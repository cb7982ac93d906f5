"""Does the direct path, from the input table straight to the output table, know the order of words?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError, doing, progress
from tiewise.core.found import Found, Listing, Quantity, count, plain, visible
from tiewise.inspection.bench import Bench, Subject, section
from tiewise.inspection.tables import path_matrix
from tiewise.inspection.tables.open_path import NONE, open_path
from tiewise.inspection.tables.token_texts import read_as

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
        linear = whole = path_matrix.grams(path)
    if path.norm.kind != NONE:
        with doing("direct path without its norm", path.rows):
            linear = path_matrix.grams(path.linear)
    with doing("own tokens", path.output.rows):
        own = path_matrix.own_token(path, whole, OWN_TOKENS, seed)
    kinds = {APPLIED: whole, "by gain and scales alone": linear, CENTRED: whole.centred}
    quantities = [
        Quantity(
            f"asymmetry {kind}", path_matrix.asymmetry(g)[1], chance=2.0, unit=ASYMMETRY, main=kind == APPLIED,
            figure="Asymmetry of the direct path", why="0 symmetric, 2 unrelated tables, 4 antisymmetric",
        )
        for kind, g in kinds.items()
    ]  # fmt: skip
    for kind, g in kinds.items():
        quantities.append(Quantity(f"‖M‖² {kind}", path_matrix.asymmetry(g)[0], unit="squared logits", main=False))
    for kind in (APPLIED, CENTRED):
        values, first = path_matrix.eigenvalues(kinds[kind]).tolist() or [0.0], kind == APPLIED
        where, why = "" if first else f", {kind}", "none in W Wᵀ, half in unrelated tables"
        sides = ("above", sum(v > 0 for v in values)), ("below", sum(v < 0 for v in values))
        ends = ("largest", values[-1]), ("smallest", values[0])
        share = sum(v * v for v in values if v < 0) / (sum(v * v for v in values) or 1.0)
        quantities += [
            Quantity(f"energy of eigenvalues below 0{where}", share, unit="%", main=first, why=why),
            *(Quantity(f"eigenvalues {side} 0{where}", n, main=False) for side, n in sides),
            *(Quantity(f"{end} eigenvalue{where}", v, unit="logits", main=False) for end, v in ends),
        ]
    quantities += own
    orders, figure = path_matrix.word_orders(path, words, ids), "Requested pairs: {}"
    why = "symmetric: one logit both ways"
    for order, (logit, _, _) in orders.items():
        quantities.append(Quantity(order, logit, unit="logit", main=False, figure=figure.format("logits"), why=why))
    for order, (_, log, rank) in orders.items():
        quantities.append(Quantity(
            f"p({order})", math.exp(log), unit="probability", main=False, figure=figure.format("probabilities"),
            why=f"rank {count(rank + 1)}",
        ))  # fmt: skip
    chosen = path_matrix.sampled(path.rows, samples, seed)
    pairs = path_matrix.asymmetric_pairs(path, chosen, top=20)
    progress("asymmetric pairs", len(chosen), len(chosen))
    texts = [visible(text) for text in read_as(folder, [number for pair in pairs for number in pair[:2]])]
    listed = tuple(
        (f"{first} → {second}", plain(there, 3), plain(back, 3))
        for first, second, (_, _, there, back) in zip(texts[::2], texts[1::2], pairs, strict=True)
    )
    listing = f"Most asymmetric pairs among {count(len(chosen))} tokens"
    return Found(
        answer="only by row lengths" if path.tied else "it can: two tables",
        quantities=tuple(quantities),
        listings=(Listing(listing, ("pair", "there", "back"), listed),),
        notes=(f"{count(path.rows)} tokens, {count(path.input.width)} wide", *path.notes),
    )
