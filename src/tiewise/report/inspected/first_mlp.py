"""The direct path with the first MLP in it, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.heat import Likeness
from tiewise.numerals import NONE, count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.inspected.asked_pairs import Asked, logit_table, probability_table
from tiewise.report.inspected.direct_path import pair_line

if TYPE_CHECKING:
    from tiewise.internals.first_mlp import FirstMlp

TITLE = "Direct path with the first MLP"


def lines(found: Mapping[str, FirstMlp]) -> list[str]:
    """Say what the first MLP does to the path's asymmetry, what it costs, and how the path then follows the text."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, FirstMlp]) -> list[tuple[str, Table]]:
    """Return both paths of every model side by side, and the requested pairs."""
    header = ["measure", *(f"{label}, {name}" for label in found for name in ("direct", "with MLP₀"))]
    made = [("Without and with the first MLP", Table(header, list(_measures(found))))]
    if any(one.without.pairs for one in found.values()):
        paths = asked(found)
        text = next(iter(found.values())).text
        made.append(("Requested pairs: logits", logit_table(paths)))
        made.append(("Requested pairs: probabilities", probability_table(paths, text)))
    return made


def asked(found: Mapping[str, FirstMlp]) -> list[Asked]:
    """Return the requested pairs on both paths of every model."""
    return [
        Asked(f"{label}, with MLP₀" if within else label, position, within, view.pairs)
        for position, (label, one) in enumerate(found.items())
        for within, view in ((False, one.without), (True, one.within))
    ]


def shown(value: Estimate, sign: bool = False) -> str:
    """1.002 [0.976, 1.028]."""
    text = signed if sign else plain
    return f"{text(value.value, 3)} [{text(value.low, 3)}, {text(value.high, 3)}]"


def _lines(label: str, one: FirstMlp) -> Iterator[str]:
    before, after = one.without.asymmetry, one.within.asymmetry
    yield (
        f"With the first MLP in its path, {label}'s ‖S − Sᵀ‖²/‖S‖² goes from {shown(before.ratio)} to "
        f"{shown(after.ratio)} on the same {count(one.samples)} tokens, a change of {shown(one.change.ratio, True)} "
        "(0 symmetric, 2 unrelated)."
    )
    yield (
        f"Without what the normaliser and a bias can take up (less row and column means), {label}'s ratio goes from "
        f"{shown(before.centred)} to {shown(after.centred)}."
    )
    yield (
        f"That map in {label}, {one.composition}, has {count(one.parameters)} parameters: "
        f"{one.parameters / one.table_parameters:.0%} of one table, {one.parameters / one.model_parameters:.0%} of the "
        "model."
    )
    if one.without.loss is not None and one.within.loss is not None:
        yield (
            f"On the text's pairs {label}'s direct path pays {_loss(one.without.loss.nll)}, with the first MLP "
            f"{_loss(one.within.loss.nll)} nats per token."
        )
    if one.without.likeness is not None and one.within.likeness is not None:
        yield from _likeness_lines(label, one.without.likeness, one.within.likeness)
    for without, within in zip(one.without.pairs, one.within.pairs, strict=True):
        yield pair_line(f"The direct path of {label}", without)
        yield pair_line(f"With its first MLP, {label}", within)


def _likeness_lines(label: str, before: Likeness, after: Likeness) -> Iterator[str]:
    if before.all is not None and after.all is not None:
        yield (
            f"The map of the most frequent tokens in {label} correlates with the text's by "
            f"{_tested(before.all, before.all_p)} without and {_tested(after.all, after.all_p)} with the first MLP."
        )
    if before.direction is not None and after.direction is not None:
        yield (
            f"Of which order is likelier, {label}'s path follows the text with a correlation of "
            f"{_tested(before.direction, before.direction_p)} without and "
            f"{_tested(after.direction, after.direction_p)} with the first MLP, over {count(after.both)} pairs "
            "seen both ways."
        )


def _tested(value: float, p: float | None) -> str:
    return plain(value, 2) if p is None else f"{plain(value, 2)} (p = {p:.2g})"


def _loss(value: float) -> str:
    return plain(value, 2)


def _measures(found: Mapping[str, FirstMlp]) -> Iterator[list[str]]:
    views = [view for one in found.values() for view in (one.without, one.within)]
    yield ["‖S − Sᵀ‖²/‖S‖²", *(shown(view.asymmetry.ratio) for view in views)]
    yield ["… centred", *(shown(view.asymmetry.centred) for view in views)]
    yield ["tokens sampled", *_twice([count(one.samples) for one in found.values()])]
    yield ["parameters of the MLP", *(cell for one in found.values() for cell in (NONE, count(one.parameters)))]
    if any(view.loss for view in views):
        yield ["nll on the text's pairs", *(NONE if v.loss is None else plain(v.loss.nll) for v in views)]
        cells = (NONE if v.loss is None else f"{plain(v.loss.low)} to {plain(v.loss.high)}" for v in views)
        yield ["… 95 % interval", *cells]
        yield ["correlation with the text", *(_correlation(v.likeness, "all") for v in views)]
        yield ["… of the order", *(_correlation(v.likeness, "direction") for v in views)]


def _correlation(found: Likeness | None, kind: str) -> str:
    value = None if found is None else getattr(found, kind)
    return NONE if value is None else _tested(value, getattr(found, f"{kind}_p"))


def _twice(cells: Sequence[str]) -> list[str]:
    return [cell for cell in cells for _ in range(2)]
