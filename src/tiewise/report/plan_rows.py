"""A plan in words and figures, once: the terminal and the page show these same rows.

Counts are exact to the parameter; bytes are of counts, but for activations, which are an estimate and say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiewise.core.errors import PlanError
from tiewise.core.numerals import NONE, count, plain, signed, size
from tiewise.planning.catalogue import Model, find, neighbours
from tiewise.planning.parts import COMPONENTS
from tiewise.planning.plan import Choice, Plan

Cell = Callable[[Choice], str]
SHOWN_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adamw": "AdamW",
    "adamw-bf16-master": "AdamW, bf16, fp32 master",
}
NAMES = {"maps": "maps at the ends"}


@dataclass(frozen=True)
class Row:
    """One quantity of every choice; a row without cells heads those that follow."""

    name: str
    cells: tuple[str, ...] = ()


def columns(plan: Plan) -> list[str]:
    """Name every choice, in two lines; the sharing is left out where all share alike."""
    alike = len({choice.budget.sharing for choice in plan.choices}) == 1
    return [str(c.budget.boundary) if alike else f"{c.budget.boundary}\nshare {c.budget.sharing}" for c in plan.choices]


def rows(plan: Plan) -> list[Row]:
    """All quantities, under headings."""
    return [row for part in (_parameters, _bytes, _work, _ranks) for row in part(plan)]


def subject(plan: Plan) -> str:
    """Say in one line what is planned."""
    a = plan.architecture
    boundary, sharing = plan.as_it_is
    narrow = f", tables of width {a.ends.width:,}" if a.ends.width != a.width else ""
    shares = "" if sharing.kind == "none" else f", sharing {sharing}"
    name = plan.name if a.family in plan.name else f"{plan.name} ({a.family})"
    own = boundary if a.ends.head else "one table and no head"
    return f"{name}: V {a.ends.vocab:,}, D {a.width:,}{narrow}, L {a.layers or NONE}; as it is {own}{shares}"


def remarks(plan: Plan) -> list[str]:
    """What a reader should know before believing a number."""
    found = [*plan.notes]
    if plan.architecture.estimated and not found:
        found.append("planned from sizes: matrices alone are counted, 12·D² per layer where no size says otherwise")
    found += _beside_the_catalogue(plan)
    tokens = plan.setting.tokens
    found += [
        "saved: against the same model untied, nothing shared",
        f"a step: {tokens.batch} × {tokens.length:,} tokens of one rank; training: weights, gradients, optimizer state",
        "tying changes no FLOPs: the head multiplies by its table, whoever else reads it"
        if plan.architecture.ends.head
        else "this class has no token head: with one table there is nothing to tie, and tying saves nothing",
    ]
    if any(spec.plainly() != spec for spec in (choice.budget.boundary for choice in plan.choices)):
        found.append("a boundary that changes at a step is counted as it starts")
    if assumed := sorted({c.first_loss.assumed for c in plan.choices if c.first_loss and c.first_loss.assumed}):
        found.append(f"first loss assumes {'; '.join(assumed)}")
    return found


def thresholds(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, its value, its formula) of every threshold; `scale` says what the formulas stand on."""
    return [
        (t.name.replace("%", " %").replace("still ", ""), _threshold(t.value), t.formula.partition(", ")[0])
        for t in plan.thresholds
    ]


def scale(plan: Plan) -> str:
    """Return V/d and the body's parameters per d²."""
    ends = plan.architecture.ends
    found = plan.thresholds[0].formula.rpartition(", ")[2]
    return f"V/d = {ends.vocab / ends.width:,.4g}, {found} with B the parameters beside the tables"


def near(plan: Plan, many: int = 6) -> list[Model]:
    """Models of the catalogue nearest in V, D and L, without the model itself."""
    a = plan.architecture
    return neighbours(a.ends.vocab, a.width, a.layers or None, many, but=(plan.name,))


def nearest(plan: Plan) -> str:
    """Say how many of those tie."""
    found = near(plan)
    return f"Of the {len(found)} models of the catalogue nearest in size, {sum(bool(m.tied) for m in found)} tie."


def neighbour_cells(model: Model) -> list[str]:
    """Name, V, D, L, V/D and whether it ties."""
    tied = {True: "tied", False: "untied", None: "not known"}[model.tied]
    ratio = plain(model.ratio, 1)
    return [model.name, f"{model.vocab or 0:,}", f"{model.width:,}", str(model.layers), ratio, tied, model.checked]


NEIGHBOUR_HEADER = ["model", "V", "D", "L", "V/D", "ties", "checked"]


def operations(value: float) -> str:
    """15.5 GFLOP."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    return f"{value:,.3g} PFLOP"


def _parameters(plan: Plan) -> Iterator[Row]:
    yield Row("parameters")
    held = {name for choice in plan.choices for name in choice.budget.parameters}
    for name in filter(held.__contains__, COMPONENTS):
        yield _row_of(plan, NAMES.get(name, name.replace("_", " ")), _counted(name))
    yield _row_of(plan, "total", lambda c: count(c.budget.total))
    if any(c.budget.frozen for c in plan.choices):
        yield _row_of(plan, "of it trained", lambda c: count(c.budget.trainable))
    yield _row_of(plan, "saved", lambda c: signed(c.saved, 0).removeprefix("+"))
    yield _row_of(plan, "saved, share", lambda c: f"{plain(100 * c.saved_share, 1)} %")


def _bytes(plan: Plan) -> Iterator[Row]:
    yield Row("checkpoint")
    for dtype in SHOWN_DTYPES:
        yield _row_of(plan, dtype, _on_disk(dtype))
    yield Row(f"training, {plan.setting.dtype}")
    for name, label in OPTIMIZERS.items():
        yield _row_of(plan, label, _in_training(name))
    yield Row("beside them")
    yield _row_of(plan, "logits, plain loss", lambda c: size(c.logits.plain) if c.logits else NONE)
    yield _row_of(plan, "logits, fused loss (GPU)", lambda c: size(c.logits.fused_cuda) if c.logits else NONE)
    if not plan.architecture.layers:
        return  # built without telling layers apart: nothing to estimate activations from
    yield _row_of(plan, "activations, an estimate", lambda c: f"≈ {size(plan.activations.kept)}")
    yield _row_of(plan, "with checkpointing", lambda c: f"≈ {size(plan.activations.checkpointed)}")


def _work(plan: Plan) -> Iterator[Row]:
    yield Row("work and loss")
    yield _row_of(plan, "forward, per token", lambda c: operations(c.flops.forward))
    yield _row_of(plan, "backward, per token", lambda c: operations(c.flops.backward))
    if any(c.decode for c in plan.choices):
        yield _row_of(plan, "read per decoded token", lambda c: size(c.decode.weights) if c.decode else NONE)
        yield _row_of(plan, "cache added per token", lambda c: size(c.decode.cache_per_token) if c.decode else NONE)
    log = math.log(plan.architecture.ends.vocab)
    yield _row_of(
        plan, f"first loss (ln V = {log:.2f})", lambda c: plain(c.first_loss.nll, 2) if c.first_loss else NONE
    )


def _ranks(plan: Plan) -> Iterator[Row]:
    world = plan.setting.world
    if world.size == 1:
        return
    for position, rank in enumerate(plan.choices[0].ranks):
        yield Row(
            f"{rank.layout}, {f'tp {world.tp}' if rank.layout.startswith('vocabulary') else f'1 of {world.size}'}"
        )
        yield _row_of(plan, "weights, gradients, AdamW", _of_rank(position, "memory"))
        yield _row_of(plan, "sent per step", _of_rank(position, "sent"))
        yield _row_of(plan, "of it for tables", _of_rank(position, "sent_for_tables"))


def _row_of(plan: Plan, name: str, cell: Cell) -> Row:
    return Row(name, tuple(cell(choice) for choice in plan.choices))


def _counted(component: str) -> Cell:
    return lambda c: count(c.budget.parameters[component]) if component in c.budget.parameters else NONE


def _on_disk(dtype: str) -> Cell:
    return lambda c: size(c.checkpoint[dtype])


def _in_training(optimizer: str) -> Cell:
    return lambda c: size(c.training[optimizer].total)


def _of_rank(position: int, name: str) -> Cell:
    return lambda c: size(getattr(c.ranks[position], name))


def _threshold(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _beside_the_catalogue(plan: Plan) -> Iterator[str]:
    try:
        row = find(plan.name)
    except PlanError:
        return
    counted = f"{plan.architecture.total:,} are counted here"
    if row.tied is None:
        yield f"nobody was seen to say whether {row.name} ties: its class's default is taken"
    if row.parameters is not None and row.parameters != plan.architecture.total:
        yield f"{row.name} has {row.parameters:,} parameters by the catalogue; {counted}"
    elif row.parameters is None and row.size is not None and plan.architecture.estimated:
        yield f"{row.name} has about {row.size / 1e9:g} billion parameters by its name; {counted}"
