"""Would applying the shared block more or less often predict better?"""

from __future__ import annotations

from dataclasses import replace

from tiewise.analysis.estimates import Estimate
from tiewise.core.found import Curve, Found, Quantity
from tiewise.core.numerals import size
from tiewise.inspection.section import section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench
from tiewise.internals.application_sweep import Sweep, application_sweep

TRAINING = 16  # bytes of fp32 training by parameter: weight, gradient, AdamW's two moments
NATS = "nats per token"
FREQUENCIES = "the tokens' frequencies alone"


@section(asks="Would applying the shared block more or less often predict better?", place=120, text=True)
def applications(subject: Subject, bench: Workbench) -> Found:
    """Apply the one block that a model repeats 1 to 24 times, and measure its nll each time."""
    effort = bench.request.effort
    opened, ids = bench.opened(subject), bench.ids(subject)
    return found_of(application_sweep(opened, ids, effort.length, effort.windows, bench.request.seed))


def found_of(sweep: Sweep) -> Found:
    """Say what other numbers of applications give, beside that of training."""
    own, best, unigram = sweep.own, sweep.best, sweep.unigram
    mark = {"along": "applications of the block", "mark": sweep.trained}
    saved = (
        f"{size(TRAINING * sweep.parameters)} of weights, gradients and AdamW's moments in fp32, "
        f"{size(TRAINING * sweep.separate)} if none were shared"
    )
    return Found(
        answer=_answer(sweep),
        quantities=(
            replace(_nll("nll as trained", own.nll), chance=unigram.value, why=f"beside it: {FREQUENCIES}"),
            Quantity("best number", best.times, why=f"of 1 to {len(sweep.applied)}; in training {own.times}"),
            replace(_nll("nll there", best.nll), chance=unigram.value),
            replace(_nll("there − as trained", best.more), chance=0.0, why="window by window; a best of many flatters"),
            Quantity("parameters", sweep.parameters, why=saved),
            Quantity("parameters if each application had its own", sweep.separate, main=False),
        ),
        curves=(
            Curve.through(
                "Loss by how often the block is applied",
                ((one.times, one.nll) for one in sweep.applied),
                unit=NATS, level=unigram.value, level_name="token frequencies", **mark,
                why="The large open marker is the number of training. Bands are 95 % intervals over windows.",
            ),
            Curve.through(
                "Loss less that of the model as trained",
                ((one.times, one.more) for one in sweep.applied),
                unit=NATS, level=0.0, **mark,
                why="Window by window, so that how hard a text is takes no part; above 0 is worse than as trained.",
            ),
            Curve.through(
                "Change by one more application",
                ((one.times, one.change) for one in sweep.applied),
                unit="relative change", log=True, **mark,
                why="‖h after − h before‖ / ‖h before‖ of the last of n applications, mean over tokens.",
            ),
        ),
        notes=(
            f"nll of {sweep.predicted:,} {'next' if sweep.objective == 'next token' else 'hidden'} tokens "
            f"in {sweep.windows} windows",
        ),
    )  # fmt: skip


def _nll(name: str, found: Estimate | None) -> Quantity:
    return Quantity.of_estimate(name, found, unit=NATS)


def _answer(sweep: Sweep) -> str:
    own, best, block = sweep.own, sweep.best, "layer" if sweep.layers == 1 else f"block of {sweep.layers} layers"
    if best is own:
        return f"no: the {block} is applied {own.times} times, and no other number up to {len(sweep.applied)} is better"
    if _nll("", best.more).high < 0:
        return (
            f"yes: the loss is lower after {best.times} applications of the {block} than after {own.times}, as trained"
        )
    return f"not told apart: {best.times} applications of the {block} from the {own.times} of training"
