"""The direct path in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.direct_path_found import DirectPathFound
from tiewise.analysis.path_tokens import WordPair
from tiewise.core.numerals import count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.labels import visible

TITLE = "Direct path"
MOST_SHOWN = 10


def lines(found: Mapping[str, DirectPathFound]) -> list[str]:
    """Say how asymmetric the path is, whether it asks for the token itself, and what it makes of requested pairs."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, DirectPathFound]) -> list[tuple[str, Table]]:
    """Return all measures of all models, and each model's most asymmetric pairs."""
    measures = Table(["measure", *found], [[name, *cells] for name, *cells in _measures(found)])
    made = [("Direct path M = A Bᵀ of input rows and output rows", measures)]
    for label, one in found.items():
        rows = [
            [f"{visible(pair.first)} → {visible(pair.second)}", plain(pair.there, 3), plain(pair.back, 3)]
            for pair in one.asymmetric[:MOST_SHOWN]
        ]
        caption = f"Most asymmetric pairs of {label}, among {count(one.searched)} tokens"
        made.append((caption, Table(["pair", "there", "back"], rows)))
    return made


def pair_line(label: str, pair: WordPair) -> str:
    """Say what a path makes of one pair in both orders."""
    first, second = visible(pair.first), visible(pair.second)
    return (
        f"{label} gives “{first}” → “{second}” the probability {pair.there.probability:.3g} (logit "
        f"{plain(pair.there.logit, 2)}, rank {count(pair.there.rank + 1)}) and “{second}” → “{first}” "
        f"{pair.back.probability:.3g} (logit {plain(pair.back.logit, 2)}, rank {count(pair.back.rank + 1)})."
    )


def _lines(label: str, one: DirectPathFound) -> Iterator[str]:
    ratio, centred = plain(one.asymmetry.ratio, 3), plain(one.centred.ratio, 3)
    if one.tied:
        yield (
            f"{label} holds one table at both ends: its direct path has ‖M − Mᵀ‖²/‖M‖² = {ratio} (0 symmetric, 2 as "
            f"two unrelated tables), all of it from normalising each row; with the norm's gain and scales alone it is "
            f"{plain(one.linear.ratio, 3)}."
        )
    else:
        yield (
            f"{label} has different rows at its two ends: its direct path has ‖M − Mᵀ‖²/‖M‖² = {ratio} (0 symmetric, "
            f"2 as two unrelated tables), {plain(one.linear.ratio, 3)} with the norm's gain and scales alone."
        )
    yield (
        "Without what the normaliser and a bias can take up (M less its row and column means), the ratio in "
        f"{label} is {centred}."
    )
    own = one.own_token
    yield (
        f"On the direct path of {label}, {own.first:.1%} [{own.low:.1%}, {own.high:.1%}] of {count(own.sampled)} "
        f"sampled tokens have no likelier successor than themselves (by chance {own.chance:.2g}); the diagonal's mean "
        f"is {signed(own.excess, 2)} standard deviations from the rest's."
    )
    signs = one.definiteness
    yield (
        f"The symmetric part of {label}'s path has {count(signs.positive)} positive and {count(signs.negative)} "
        f"negative eigenvalues; the negative ones hold {signs.negative_energy:.2%} of their energy (none in W Wᵀ, half "
        "in two unrelated tables)."
    )
    for pair in one.pairs:
        yield pair_line(f"The direct path of {label}", pair)
    if not one.normed:
        yield f"No final norm is applied in {label}: {one.notes[0]}."


def _measures(found: Mapping[str, DirectPathFound]) -> Iterator[list[str]]:
    all_ = list(found.values())
    yield ["same rows at both ends", *("yes" if one.tied else "no" for one in all_)]
    yield ["V × E", *(f"{count(one.rows)} × {count(one.width)}" for one in all_)]
    yield ["‖M − Mᵀ‖²/‖M‖², as applied", *(plain(one.asymmetry.ratio) for one in all_)]
    yield ["… gain and scales alone", *(plain(one.linear.ratio) for one in all_)]
    yield ["… centred", *(plain(one.centred.ratio) for one in all_)]
    yield ["‖M‖²", *(f"{one.asymmetry.energy:.4g}" for one in all_)]
    yield ["eigenvalues above 0", *(count(one.definiteness.positive) for one in all_)]
    yield ["eigenvalues below 0", *(count(one.definiteness.negative) for one in all_)]
    yield ["energy of those below 0", *(f"{one.definiteness.negative_energy:.2%}" for one in all_)]
    yield ["… centred", *(f"{one.definiteness_centred.negative_energy:.2%}" for one in all_)]
    yield ["mean of the diagonal", *(plain(one.own_token.diagonal, 3) for one in all_)]
    yield ["mean elsewhere", *(plain(one.own_token.elsewhere, 3) for one in all_)]
    yield ["own token first", *(f"{one.own_token.first:.1%}" for one in all_)]
    for pair in all_[0].pairs if all_ else ():
        yield from _pair_rows(pair, all_)
    yield ["applied", *("; ".join(one.notes) for one in all_)]


def _pair_rows(asked: WordPair, all_: list[DirectPathFound]) -> Iterator[list[str]]:
    same = [next(p for p in one.pairs if (p.first, p.second) == (asked.first, asked.second)) for one in all_]
    first, second = visible(asked.first), visible(asked.second)
    yield [f"p({second} | {first})", *(f"{pair.there.probability:.3g}" for pair in same)]
    yield [f"p({first} | {second})", *(f"{pair.back.probability:.3g}" for pair in same)]
