"""The direct path from input table to output table, and its knowledge of word order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tiewise.checkpoint.family_record import NONE
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.measurement import Listing, Measurement, Quantity, count, plain, visible
from tiewise.core.progress import progress_of, report_progress
from tiewise.inspection.tables import path_matrix
from tiewise.inspection.tables.open_path import open_path
from tiewise.inspection.tables.token_texts import read_as
from tiewise.inspection.workspace import InspectedModel, Workspace, section

MOST_ASYMMETRIC = 20  # most pairs that are listed
SAMPLED_TOKENS = 2000  # sampled tokens whose full row of logits is computed
ASYMMETRY = "‖M − Mᵀ‖²/‖M‖²"
ONE_TABLE = "one table scores “of the” and “the of” alike, apart from the lengths of rows"
TWO_TABLES = "two tables can score “of the” and “the of” differently"
APPLIED, CENTRED = "as the model applies it", "less row and column means"


@section(question="Without layers, does the model know the order of words?", order=10)
def direct_path(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Measure M = A Bᵀ [V, V] of the direct path, and the requested pairs."""
    request = workspace.request
    return direct_path_of(model.folder, request.pairs, request.effort.samples, request.seed)


def direct_path_of(
    folder: Folder, words: Sequence[tuple[str, str]] = (), samples: int = 4000, seed: int = 0
) -> Measurement:
    """Measure the direct path of a checkpoint, and pairs of `words` in both orders.

    Each word is one token. The most asymmetric pairs are searched among `samples` tokens, drawn by `seed`, or among all
    if there are fewer.

    Raises:
        CheckpointError: no head, quantised tables, maps between a table and the body, a tokenizer that cannot be read.
        DataError: words that are no tokens, values that are no numbers.
    """
    path = open_path(folder)
    ids = path_matrix.find_pairs(folder, words, path.rows)
    if path.rows < 2:
        raise CheckpointError(f"{folder.path}: a vocabulary of {path.rows}", "give two tokens or more")
    with progress_of("direct path", path.rows):
        applied = linear = path_matrix.grams(path)
    if path.norm.kind != NONE:
        with progress_of("direct path without its norm", path.rows):
            linear = path_matrix.grams(path.linear)
    with progress_of("own tokens", path.output.rows):
        self_quantities = path_matrix.self_prediction(path, applied, SAMPLED_TOKENS, seed)
    versions = {APPLIED: applied, "by gain and scales alone": linear, CENTRED: applied.centred}
    orders = path_matrix.word_orders(path, words, ids)
    chosen = path_matrix.sampled(path.rows, samples, seed)
    pairs = path_matrix.asymmetric_pairs(path, chosen, top=MOST_ASYMMETRIC)
    report_progress("asymmetric pairs", len(chosen), len(chosen))
    title = f"Most asymmetric pairs among {count(len(chosen))} tokens"
    listing = Listing(title, ("pair", "there", "back"), tuple(_listed_pairs(folder, pairs)))
    return Measurement(
        answer=ONE_TABLE if path.tied else TWO_TABLES,
        quantities=(
            *_asymmetries(versions),
            *_eigenvalues(applied, ""),
            *_eigenvalues(versions[CENTRED], f", {CENTRED}"),
            *self_quantities,
            *_requested_pairs(orders),
        ),
        listings=(listing,),
        notes=(f"{count(path.rows)} tokens, {count(path.input.width)} wide", *path.notes),
    )


def _asymmetries(versions: dict[str, path_matrix.Grams]) -> Iterator[Quantity]:
    """Yield the asymmetry of each version of M, then its size."""
    asymmetries = {version: path_matrix.asymmetry(grams) for version, grams in versions.items()}
    for version, (_, asymmetry) in asymmetries.items():
        yield Quantity(
            f"asymmetry {version}", asymmetry, chance=2.0, unit=ASYMMETRY, main=version == APPLIED,
            figure="Asymmetry of the direct path", why="0 symmetric, 2 unrelated tables, 4 antisymmetric",
        )  # fmt: skip
    for version, (energy, _) in asymmetries.items():
        yield Quantity(f"‖M‖² {version}", energy, unit="squared logits", main=False)


def _eigenvalues(grams: path_matrix.Grams, where: str) -> Iterator[Quantity]:
    """Yield signs, extremes and negative energy of the eigenvalues of M's symmetric part.

    `where` is the suffix of every name; it is empty for M as the model applies it, which is reported first.
    """
    values = path_matrix.eigenvalues(grams).tolist() or [0.0]
    positive = [value for value in values if value > 0]
    negative = [value for value in values if value < 0]
    energy = sum(value * value for value in values) or 1.0
    share = sum(value * value for value in negative) / energy
    why = "none in W Wᵀ, half in unrelated tables"
    yield Quantity(f"energy of eigenvalues below 0{where}", share, unit="%", main=not where, why=why)
    yield Quantity(f"eigenvalues above 0{where}", len(positive), main=False)
    yield Quantity(f"eigenvalues below 0{where}", len(negative), main=False)
    yield Quantity(f"largest eigenvalue{where}", values[-1], unit="logits", main=False)
    yield Quantity(f"smallest eigenvalue{where}", values[0], unit="logits", main=False)


def _requested_pairs(orders: path_matrix.WordOrders) -> Iterator[Quantity]:
    """Yield logits, then probabilities of the requested pairs, each in both orders."""
    figure, why = "Requested pairs: logits", "symmetric: one logit both ways"
    for order, (logit, _, _) in orders.items():
        yield Quantity(order, logit, unit="logit", main=False, figure=figure, why=why)
    figure = "Requested pairs: probabilities"
    for order, (_, log_probability, rank) in orders.items():
        probability, why = math.exp(log_probability), f"rank {count(rank + 1)}"
        yield Quantity(f"p({order})", probability, unit="probability", main=False, figure=figure, why=why)


def _listed_pairs(folder: Folder, pairs: Sequence[path_matrix.AsymmetricPair]) -> Iterator[tuple[str, str, str]]:
    """Yield each pair of tokens as text, with its logits in both orders."""
    tokens: list[int] = []
    for first, second, _, _ in pairs:
        tokens += [first, second]
    texts = [visible(text) for text in read_as(folder, tokens)]
    for before, after, (_, _, there, back) in zip(texts[::2], texts[1::2], pairs, strict=True):
        yield f"{before} → {after}", plain(there, 3), plain(back, 3)
