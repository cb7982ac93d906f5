"""Does the direct path, from the input table straight to the output table, know the order of words?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiewise.analysis.open_path import open_path
from tiewise.analysis.path_matrix import NONE, DirectPath, Grams, asymmetry, definiteness, grams
from tiewise.analysis.path_tokens import (
    OwnToken,
    Transition,
    asymmetric_pairs,
    find_pairs,
    own_token,
    sampled,
    word_pairs,
)
from tiewise.analysis.token_texts import read_as
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.found import Found, Listing, Quantity, visible
from tiewise.core.numerals import count, plain
from tiewise.core.progress import doing, progress
from tiewise.inspection.request import Subject
from tiewise.inspection.section import Bench, section

OWN_TOKENS = 2000  # whose whole row of logits is looked at
ASYMMETRY = "‖M − Mᵀ‖²/‖M‖²"
APPLIED, CENTRED = "as the model applies it", "less row and column means"
WHY = "0 symmetric, 2 as two unrelated tables, 4 antisymmetric"


@section(asks="Does the direct path know the order of words?", place=10)
def direct_path(subject: Subject, bench: Bench) -> Found:
    """Measure M = A Bᵀ [V, V] of input rows and output rows, and what it makes of the requested pairs."""
    request = bench.request
    return direct_path_of(subject.folder, request.pairs, request.effort.samples, request.seed)


def direct_path_of(folder: Folder, words: Sequence[tuple[str, str]] = (), samples: int = 4000, seed: int = 0) -> Found:
    """Measure the direct path of a checkpoint.

    Args:
        folder: the checkpoint.
        words: pairs of words to ask of both ways; each word must be one token.
        samples: tokens among which the most asymmetric pairs are searched; all where there are fewer.
        seed: of the samples.

    Raises:
        CheckpointError: no head, quantised tables, or maps between a table and the body.
        DataError: words that are no tokens, a tokenizer that cannot be read, values that are no numbers.
    """
    path = open_path(folder)
    ids = find_pairs(folder, words, path.rows)
    if path.rows < 2:
        raise CheckpointError(f"{folder.path}: a vocabulary of {path.rows}", "give a model of two tokens or more")
    with doing("direct path", path.rows):
        linear = whole = grams(path)
    if path.norm.kind != NONE:
        with doing("direct path without its norm", path.rows):
            linear = grams(path.linear)
    with doing("own tokens", path.output.rows):
        own = own_token(path, whole, OWN_TOKENS, seed)
    ways = [
        (f"{visible(before)} → {visible(after)}", said)
        for pair in word_pairs(path, words, ids)
        for before, after, said in ((pair.first, pair.second, pair.there), (pair.second, pair.first, pair.back))
    ]
    kinds = {APPLIED: whole, "by gain and scales alone": linear, CENTRED: whole.centred}
    return Found(
        answer="by row lengths alone" if path.tied else "by two different ends",
        quantities=(*_energies(kinds), *_signs(kinds), *_own(own), *_asked(ways)),
        listings=(_most_asymmetric(folder, path, samples, seed),),
        notes=(f"{count(path.rows)} tokens, {count(path.input.width)} wide", *path.notes),
    )


def _energies(kinds: dict[str, Grams]) -> Iterator[Quantity]:
    for kind, g in kinds.items():
        yield Quantity(
            f"asymmetry {kind}", asymmetry(g).ratio, chance=2.0, unit=ASYMMETRY, main=kind == APPLIED,
            figure="Asymmetry of the direct path", why=WHY,
        )  # fmt: skip
    for kind, g in kinds.items():
        yield Quantity(f"‖M‖² {kind}", asymmetry(g).energy, unit="squared logits", main=False)


def _signs(kinds: dict[str, Grams]) -> Iterator[Quantity]:
    """Eigenvalues of the symmetric part: none is below 0 in W Wᵀ."""
    for kind in (APPLIED, CENTRED):
        signs, first = definiteness(kinds[kind]), kind == APPLIED
        where = "" if first else f", {kind}"
        why = "of the symmetric part's energy: none in W Wᵀ, half in two unrelated tables"
        yield Quantity(f"energy of eigenvalues below 0{where}", signs.negative_energy, unit="%", main=first, why=why)
        yield Quantity(f"eigenvalues above 0{where}", signs.positive, main=False)
        yield Quantity(f"eigenvalues below 0{where}", signs.negative, main=False)
        yield Quantity(f"largest eigenvalue{where}", signs.largest, unit="logits", main=False)
        yield Quantity(f"smallest eigenvalue{where}", signs.smallest, unit="logits", main=False)


def _own(own: OwnToken) -> Iterator[Quantity]:
    why = "tokens that have no likelier successor than themselves"
    yield Quantity("own token first", own.first, own.low, own.high, own.sampled, own.chance, unit="%", why=why)
    yield Quantity("mean of the diagonal", own.diagonal, chance=own.elsewhere, unit="logits", main=False)
    yield Quantity("diagonal less the rest", own.excess, unit="standard deviations of M", main=False)


def _asked(ways: list[tuple[str, Transition]]) -> Iterator[Quantity]:
    logits = (
        "the same both ways on a symmetric path; each row has its own normaliser, so that probabilities still differ"
    )
    for order, said in ways:
        yield Quantity(order, said.logit, unit="logit", main=False, figure="Requested pairs: logits", why=logits)
    for order, said in ways:
        yield Quantity(
            f"p({order})", said.probability, unit="probability", main=False, figure="Requested pairs: probabilities",
            why=f"rank {count(said.rank + 1)}",
        )  # fmt: skip


def _most_asymmetric(folder: Folder, path: DirectPath, samples: int, seed: int) -> Listing:
    found = asymmetric_pairs(path, sampled(path.rows, samples, seed), top=20)
    progress("asymmetric pairs", found.tokens, found.tokens)
    texts = read_as(folder, [number for pair in found.pairs for number in pair[:2]])
    rows = tuple(
        (f"{visible(first)} → {visible(second)}", plain(there, 3), plain(back, 3))
        for first, second, (_, _, there, back) in zip(texts[::2], texts[1::2], found.pairs, strict=True)
    )
    return Listing(f"Most asymmetric pairs among {count(found.tokens)} tokens", ("pair", "there", "back"), rows)
