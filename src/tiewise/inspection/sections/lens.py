"""How much of the final prediction can be read off before the last layer?"""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.core.found import Curve, Found, Listing, Quantity
from tiewise.core.numerals import NONE, plain
from tiewise.inspection.section import section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench
from tiewise.internals.lens import BITS, CONVERGED, Lenses, LensLayer, LensRead, lenses

KL = "nats to the final distribution"


@section(
    asks="How much of the final prediction can be read off before the last layer?", place=100, text=True, weight=20
)
def lens(subject: Subject, bench: Workbench) -> Found:
    """LensRead every layer's states by the head itself (logit lens) and after a trained map (tuned lens)."""
    (run_on, held_out), steps = bench.windows(subject), bench.request.effort.lens_steps
    return found_of(lenses(bench.opened(subject), run_on, held_out, steps, bench.request.seed))


def found_of(found: Lenses) -> Found:
    """Say how near the first states are to the final prediction, where half of it stands, and if training sufficed."""
    inner = [layer for layer in found.layers if layer.tuned is not None]
    return Found(
        answer=_answer(inner),
        quantities=(*_quantities(found), *_fixed(found)),
        curves=tuple(_curves(found, inner)),
        listings=(_listing(found),),
        notes=tuple(_notes(found, inner)),
    )


def _answer(inner: list[LensLayer]) -> str:
    half = next((layer for layer in inner if layer.tuned is not None and layer.tuned.agreement.low > 0.5), None)
    if half is None:
        return "not the first choice at half of the positions"
    where = "before any layer" if not half.depth else f"after layer {half.depth} of {len(inner)}"
    return f"the first choice at most positions, {where}"


def _quantities(found: Lenses) -> Iterator[Quantity]:
    first = found.layers[0]
    for name, read in (("tuned lens, before any layer", first.tuned), ("logit lens there", first.logit)):
        if read is not None:
            why = f"{plain(read.kl.value * BITS, 2)} bits; beside it: the model's mean distribution"
            yield Quantity.of_estimate(name, read.kl, unit=KL, chance=found.constant.value, why=why)
            yield Quantity.of_estimate(f"same first choice, {name}", read.agreement, unit="%", main=False)
    yield Quantity.of_estimate("the model's own nll", found.nll, unit="nats per token", main=False)


def _fixed(found: Lenses) -> Iterator[Quantity]:
    for name, value in (
        ("uniform distribution", found.uniform),
        ("text's token frequencies", found.unigram),
        ("model's mean distribution", found.constant),
    ):
        yield Quantity.of_estimate(
            name, value, unit=KL, main=False, why="the same at every position: what no lens gives"
        )


def _curves(found: Lenses, inner: list[LensLayer]) -> Iterator[Curve]:
    for which, read in (("tuned lens", lambda one: one.tuned), ("logit lens", lambda one: one.logit)):
        reads: list[tuple[int, LensRead]] = [(one.depth, read(one)) for one in inner]
        yield Curve.through(
            "How far is each layer from the final distribution?", ((depth, one.kl) for depth, one in reads),
            which=which, along="layers applied", unit=KL, log=True,
            level=found.constant.value, level_name="the model's mean distribution",
            why="KL(final ‖ lens) on held-out windows; bands are 95 % intervals over windows. Above the dotted line a "
            "lens says less of the final prediction than one distribution that is the same everywhere.",
        )  # fmt: skip
    for which, read in (("tuned lens", lambda one: one.tuned), ("logit lens", lambda one: one.logit)):
        yield Curve.through(
            "Does a layer already name the model's first choice?", ((one.depth, read(one).agreement) for one in inner),
            which=which, along="layers applied", unit="share of positions",
            why="Held-out positions at which lens and model name the same token first.",
        )  # fmt: skip
    for layer in inner[:: max(1, (len(inner) - 1) // 2)]:  # the first, one in the middle, the last
        yield Curve(
            "Were the tuned lenses trained long enough?", found.marks, layer.curve, which=f"depth {layer.depth}",
            along="step of training", unit=KL, log=True,
            why=f"Held-out KL. A lens has converged if the last tenth of steps changes it by under {CONVERGED:.0%}.",
        )  # fmt: skip


def _notes(found: Lenses, inner: list[LensLayer]) -> Iterator[str]:
    worse = sum(layer.logit.kl.low > found.constant.high for layer in inner)
    yield f"at {worse} of {len(inner)} places the logit lens is clearly further off than the model's mean distribution"
    unfinished = [layer for layer in inner if layer.converged is False]
    if unfinished:
        yield (
            f"{len(unfinished)} of {len(inner)} tuned lenses still moved in the last tenth of {found.steps} steps: "
            "their KL says how far they were trained, not what the layer holds; give more --lens-steps"
        )
    over = [
        one for one in inner if one.tuned is not None and one.fitted is not None and one.fitted < 0.9 * one.tuned.kl.low
    ]
    if over:
        yield (
            f"at {len(over)} place{'s' if len(over) > 1 else ''} the tuned lens fits the windows better that it was "
            f"trained on, {plain(found.passes, 1)} times each: with more text the held-out figure may be lower"
        )


def _listing(found: Lenses) -> Listing:
    header = ("place", "logit lens, nats", "tuned lens, nats", "logit, bits", "tuned, bits", "nll, logit", "nll, tuned")
    ends = ("same token, logit", "same token, tuned", "last tenth", "converged")
    return Listing("Both lenses at each place", header + ends, tuple(map(_row, found.layers)))


def _row(layer: LensLayer) -> tuple[str, ...]:
    place = layer.name if not layer.depth else f"{layer.depth} · {layer.name}"
    logit, tuned = layer.logit, layer.tuned
    moved = NONE if layer.improvement is None else plain(-100 * layer.improvement, 2) + " %"
    cells = [
        _shown(logit.kl),
        _shown(tuned and tuned.kl),
        plain(logit.bits, 2),
        plain(tuned.bits if tuned else None, 2),
    ]
    cells += [
        _shown(logit.nll),
        _shown(tuned and tuned.nll),
        _shown(logit.agreement),
        _shown(tuned and tuned.agreement),
    ]
    return (place, *cells, moved, NONE if layer.converged is None else "yes" if layer.converged else "no")


def _shown(value: object) -> str:
    return str(Quantity.of_estimate("", value, unit="value"))
