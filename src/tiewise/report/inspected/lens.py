"""Logit lens and tuned lens, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.ledger import results
from tiewise.internals.lens_results import BITS, CONVERGED, Layer, Lenses, Read
from tiewise.numerals import NONE, plain
from tiewise.report.grid import Table
from tiewise.report.inspected.refinement import shown

TITLE = "Logit lens and tuned lens"
PUBLISHED = "tuned lens: KL at the first layers, bits"  # as the ledger calls it
FIXED = {
    "uniform": "the uniform distribution",
    "unigram": "the text's token frequencies",
    "constant": "the model's mean distribution",
}


def lines(found: Mapping[str, Lenses]) -> list[str]:
    """Say how near each model's first places are to its final distribution, and whether training went far enough."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, Lenses]) -> list[tuple[str, Table]]:
    """Every place of every model, the chance levels, and published figures."""
    made = [
        (f"Both lenses at each place, {label}: KL to the final distribution", _places(one))
        for label, one in found.items()
    ]
    chance = [[FIXED[name], *(shown(getattr(one, name)) for one in found.values())] for name in FIXED]
    made.append(
        (
            "KL in nats from the final distribution to one that is the same everywhere",
            Table(["distribution", *found], chance),
        )
    )
    made.append(("Published: KL of tuned lenses at the first layers (other models and texts)", _published()))
    return made


def place(layer: Layer) -> str:
    """`input`, or the layer behind which the stream is read."""
    return layer.name if not layer.depth else f"{layer.depth} · {layer.name}"


def _lines(label: str, found: Lenses) -> Iterator[str]:
    first = found.layers[0]
    if first.tuned is not None:
        yield (
            f"Before any layer, {label} ({_kind(found)}) has a tuned lens {_kl(first.tuned)} from its final "
            f"distribution after {found.steps} steps of training; the logit lens there is {_kl(first.logit)} away, and "
            f"the model's mean distribution {shown(found.constant)} nats."
        )
    yield _trained(label, found)
    inner = [layer for layer in found.layers if layer.tuned is not None]
    worse = sum(layer.logit.kl.low > found.constant.high for layer in inner)
    yield (
        f"At {worse} of {len(inner)} places of {label} the logit lens is further from the final distribution, by "
        "intervals that do not touch, than the model's mean distribution, which is the same everywhere."
    )
    half = next((layer for layer in inner if layer.tuned is not None and layer.tuned.agreement.low > 0.5), None)
    if half is not None and half.tuned is not None:
        where = "before any layer" if not half.depth else f"after layer {half.depth} of {len(inner)}"
        yield (
            f"{label}'s tuned lens names the model's first choice at more than half of the positions {where} "
            f"({shown(half.tuned.agreement)}), the logit lens there at {shown(half.logit.agreement)}."
        )
    yield from _fitted(label, found)


def _trained(label: str, found: Lenses) -> str:
    moved = {layer.depth: layer.improvement for layer in found.layers if layer.improvement is not None}
    open_ones = [layer.depth for layer in found.layers if layer.converged is False]
    if not open_ones:
        return (
            f"Each of {label}'s {len(moved)} tuned lenses changed its held-out KL by less than {CONVERGED:.0%} in the "
            f"last tenth of {found.steps} steps."
        )
    worst = max(open_ones, key=lambda depth: abs(moved[depth]))
    return (
        f"{len(open_ones)} of {len(moved)} tuned lenses of {label} had not converged after {found.steps} steps: in the "
        f"last tenth the held-out KL at depth {worst} still {_way(moved[worst])}. Their KL says how far they were "
        "trained, not what the layer holds; give more steps."
    )


def _way(improvement: float) -> str:
    return f"fell by {improvement:.1%}" if improvement > 0 else f"rose by {-improvement:.1%}"


def _fitted(label: str, found: Lenses) -> Iterator[str]:
    """Say where training windows were fitted clearly better than held-out ones."""
    over = [
        layer
        for layer in found.layers
        if layer.tuned is not None and layer.fitted is not None and layer.fitted < 0.9 * layer.tuned.kl.low
    ]
    if over:
        one = max(over, key=lambda layer: layer.tuned.kl.value / max(layer.fitted, 1e-9))  # type: ignore[union-attr, type-var, operator]
        assert one.tuned is not None
        yield (
            f"At {len(over)} places of {label} the tuned lens fits its training windows better than held-out ones, at "
            f"depth {one.depth} {plain(one.fitted, 3)} nats against {shown(one.tuned.kl)}, and went over them "
            f"{plain(found.passes, 1)} times: with more text the held-out figure may be lower."
        )


def _kind(found: Lenses) -> str:
    return "tied" if found.tied else "untied"


def _kl(read: Read) -> str:
    return f"{shown(read.kl)} nats ({plain(read.bits, 2)} bits)"


def _places(found: Lenses) -> Table:
    header = ["place", "logit lens, nats", "tuned lens, nats", "logit, bits", "tuned, bits"]
    header += ["nll, logit", "nll, tuned", "same token, logit", "same token, tuned", "last tenth", "converged"]
    return Table(header, [_row(layer) for layer in found.layers])


def _row(layer: Layer) -> list[str]:
    logit, tuned = layer.logit, layer.tuned
    moved = NONE if layer.improvement is None else f"{-layer.improvement:+.2%}".replace("-", "−")
    return [
        place(layer),
        shown(logit.kl),
        shown(tuned.kl if tuned else None),
        plain(logit.bits, 2),
        plain(tuned.bits if tuned else None, 2),
        shown(logit.nll),
        shown(tuned.nll if tuned else None),
        shown(logit.agreement),
        shown(tuned.agreement if tuned else None),
        moved,
        NONE if layer.converged is None else "yes" if layer.converged else "no",
    ]


def _published() -> Table:
    rows = [[r.model, r.choice, f"{r.value:g}", plain(r.value / BITS, 1), r.source] for r in results(PUBLISHED)]
    return Table(["model", "table, training", "bits", "nats", "source"], rows)
