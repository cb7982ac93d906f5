"""`write_plan`: a plan as one HTML file (see `tiewise.report.sheet`): its rows, and figures of choices and of growth.

What others published stands beside a plan of just such a model.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import plotly.graph_objects as go

from tiewise.core.ledger import ALBERT_AVERAGE, Result, results
from tiewise.core.numerals import NONE, count, plain, size
from tiewise.core.sharing_spec import KINDS, SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning import plan_rows
from tiewise.planning.architecture import COMPONENTS, Budget, budget
from tiewise.planning.catalogue import BETTER
from tiewise.planning.plan import Plan
from tiewise.planning.plan_rows import Record
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.report import sheet, theme
from tiewise.report.grid import Table
from tiewise.report.sheet import PageSection, Panel, Sheet

Curves = Mapping[str, Mapping[int, int]]  # parameters by width, by what grows
Bars = Mapping[str, Mapping[str, float]]  # parts of every bar
WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
RANK = 128  # ALBERT's table width
TABLES = {"input table": ("input_table",), "output table": ("output_table",), "maps at the ends": ("maps",)}
BODY = {
    "attention": ("attention", "cross_attention", "mixer"),
    "feed-forward": ("ffn", "experts", "shared_experts", "router"),
}
NAMED = {part for held in (TABLES | BODY).values() for part in held}
GROUPS = {**TABLES, **BODY, "all else": tuple(part for part in COMPONENTS if part not in NAMED)}
PRESETS = {
    "BERT-base": ("bert", 768, 12),
    "BERT-large": ("bert", 1024, 24),
    "ALBERT-base": ("albert", 768, 12),
    "ALBERT-large": ("albert", 1024, 24),
    "ALBERT-xlarge": ("albert", 2048, 24),
    "ALBERT-xxlarge": ("albert", 4096, 12),
}


def write_plan(plan: Plan, path: str | os.PathLike[str], command: str) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(plan, command), path, "--plot")


def render(plan: Plan, command: str) -> str:
    """Return the page as text."""
    record, architecture = plan.record(), plan.architecture
    costs = Table(["", *(name.replace("\n", " · ") for name in plan_rows.columns(record))], plan_rows.rows(record))
    limits = Table([f"threshold; {plan_rows.scale(record)}", "value", "formula"], plan_rows.thresholds(record))
    others = Table(plan_rows.NEIGHBOUR_HEADER, plan_rows.neighbours(record))
    is_published = (architecture.family, architecture.width, architecture.layers) in PRESETS.values()
    return Sheet(
        command_name="plan",
        title=f"{plan.name}: tiewise plan",
        subject=plan_rows.subject(record),
        heading="What each choice costs",
        answer=list(_lead(record)),
        results=PageSection(
            "Results",
            tables=[("Costs by choice", costs), ("Thresholds", limits), ("Nearest in V, D and L", others)],
            notes=[BETTER, *record["notes"]],
        ),
        sections=[
            PageSection("This model", list(_own(plan, record))),
            PageSection("As models grow", list(_growing(plan))),
            PageSection("What others built", list(_published()) if is_published else []),
        ],
        command=command,
    ).render()


def _lead(record: Record) -> Iterator[str]:
    yield plan_rows.nearest(record)
    for name, choice in _named(record).items():
        total = f"{name}: {count(choice['parameters']['total'])} parameters"
        fewer = f", {plain(100 * choice['saved_share'], 1)} % fewer than untied with nothing shared"
        yield f"{total}{fewer if choice['saved'] > 0 else ''}."


def _named(record: Record) -> dict[str, Record]:
    """Every choice by its name in one line."""
    names = (name.replace("\n", ", ") for name in plan_rows.columns(record))
    return dict(zip(names, record["choices"], strict=True))


def _bars(bars: Bars, title: str, unit: str, show: Callable[[float], str], caption: str, first: str = "") -> Panel:
    """Stacked bars, and the numbers under them."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    rows = [[bar, *(show(found[p]) if p in found else NONE for p in parts)] for bar, found in bars.items()]
    return Panel(theme.stacked(bars, title, unit, show, first), caption, Table(["", *parts], rows))


def shares(record: Record) -> dict[str, dict[str, float]]:
    """Share of every group of components in the whole, by choice."""
    found: dict[str, dict[str, float]] = {}
    for name, choice in _named(record).items():
        counted = choice["parameters"]
        parts = {group: sum(counted.get(part, 0) for part in held) for group, held in GROUPS.items()}
        found[name] = {group: part / counted["total"] for group, part in parts.items() if part}
    return found


def memory(record: Record) -> dict[str, dict[str, float]]:
    """Bytes of a training step by choice, with AdamW, the fused loss and an estimate of activations."""
    optimizer = "adamw" if record["setting"]["dtype"] == "float32" else "adamw-bf16-master"
    kept = record["activation_bytes"]["kept"]
    found = {}
    for name, choice in _named(record).items():
        row, logits = choice["training_bytes"][optimizer], choice["logits_bytes"]
        parts = {"weights": row["weights"], "gradients": row["gradients"], "optimizer state": row["state"]}
        parts["fused loss"] = logits["fused_cuda"] if logits else 0
        found[name] = {**parts, **({"activations (estimate)": kept} if kept else {})}
    return found


def sharing(plan: Plan) -> dict[str, int]:
    """Total parameters of the model's own boundary under every sharing; empty where layers are not told apart."""
    a = plan.architecture
    return {f"share {kind}": budget(a, a.boundary, SharingSpec(kind)).total for kind in KINDS if a.layers}


def _own(plan: Plan, record: Record) -> Iterator[Panel]:
    panel = _bars(
        shares(record),
        "Shares of the whole",
        "share of all parameters",
        lambda value: f"{plain(100 * value, 1)} %",
        "A table used at both ends is counted once; every bar is the whole of its own choice.",
    )
    panel.figure.update_xaxes(range=[0, 1], tickformat=".0%")
    yield panel
    panel = _bars(
        memory(record),
        "Memory of a training step",
        "bytes",
        size,
        "AdamW and the fused loss. Weights, gradients, state and loss are counted; activations are an estimate, "
        "and the same for every choice.",
    )
    panel.figure.update_xaxes(tickformat="~s", ticksuffix="B")
    yield panel
    totals = sharing(plan)
    if totals:
        panel = _bars(
            {name: {"parameters": total} for name, total in totals.items()},
            "What sharing layers leaves",
            "unique parameters",
            count,
            "Norms go with their sublayer. Every layer is still applied, so the work per token stays the same.",
        )
        panel.figure.update_traces(showlegend=False, text=[count(total) for total in totals.values()])
        yield panel


def _at_widths(plan: Plan, boundary: str, share: str = "none") -> dict[int, Budget]:
    """Count plain decoders of the model's vocabulary and depth."""
    vocab, layers = plan.architecture.ends.vocab, max(plan.architecture.layers, 1)
    choice = BoundarySpec.parse(boundary), SharingSpec(share)
    return {d: budget(from_sizes(Sizes(vocab, d, layers)), *choice) for d in WIDTHS}


def tables_by_width(plan: Plan) -> Curves:
    """Parameters of tables and their maps by width, for the model's vocabulary."""
    return {
        spec: {d: b.tables + b.parameters.get("maps", 0) for d, b in _at_widths(plan, spec).items()}
        for spec in ("untied", "tied", f"factored:{RANK}")
    }


def growth(plan: Plan) -> Curves:
    """Parameters of a whole model by width, for the model's vocabulary and depth."""
    return {
        f"{spec}, share {share}": {d: b.total for d, b in _at_widths(plan, spec, share).items()}
        for spec, share in (("tied", "none"), (f"factored:{RANK}", "all"))
    }


def _growing(plan: Plan) -> Iterator[Panel]:
    a, here = plan.architecture, "The dotted line is this model's width."
    yield _by_width(
        tables_by_width(plan),
        f"Tables of {a.ends.vocab:,} tokens by model width",
        "parameters of tables and maps",
        a.width,
        f"Plain tables grow as V·D; a factored one as k·V + 2·k·D, k = {RANK}, with maps at both ends. {here}",
    )
    if a.layers:
        yield _by_width(
            growth(plan),
            f"Whole models of {a.layers} layers by width",
            "unique parameters",
            a.width,
            "Plain decoders of 12·D² per layer with this model's vocabulary and depth. With one shared layer the body "
            f"grows as 12·D² instead of 12·L·D². {here}",
        )


def _by_width(curves: Curves, title: str, unit: str, here: int, caption: str) -> Panel:
    figure = go.Figure()
    for (name, curve), place in zip(curves.items(), theme.places(list(curves)), strict=True):
        look = theme.style(place)
        figure.add_scatter(
            x=list(curve),
            y=list(curve.values()),
            name=html.escape(name),
            mode="lines+markers",
            line={"color": look.colour, "width": 2.2, "dash": look.dash},
            marker={"symbol": look.marker, "size": 7},
            customdata=[count(value) for value in curve.values()],
            hovertemplate="%{customdata}",
        )
    figure.update_layout(hovermode="x unified")
    ticks = {"tickvals": WIDTHS[::2], "ticktext": [f"{d:,}" for d in WIDTHS[::2]]}
    figure.update_xaxes(type="log", title="model width D", **ticks)
    figure.update_yaxes(type="log", exponentformat="B", dtick=1)
    if WIDTHS[0] <= here <= WIDTHS[-1]:
        figure.add_vline(x=here, line={"width": 1, "color": "#8a8f99", "dash": "dot"})
    rows = [[f"{d:,}", *(count(curve[d]) for curve in curves.values())] for d in WIDTHS]
    return Panel(theme.finish(figure, title, unit), caption, Table(["D", *curves], rows))


def presets() -> dict[str, dict[str, int]]:
    """Parameters of BERT's and ALBERT's encoders with their pooler: tables with maps, and the body."""
    found = {}
    for name, (family, width, layers) in PRESETS.items():
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
        kind = {"model_type": family, "architectures": [f"{family.title()}Model"], "intermediate_size": 4 * width}
        parts = read({**kind, **sizes}).parameters()
        ends = parts["input_table"] + parts.get("maps", 0)
        found[name] = {"body": sum(parts.values()) - ends, "table and map": ends}
    return found


def _published() -> Iterator[Panel]:
    """BERTs and ALBERTs by size, and ALBERT's own scores by what its layers share."""
    caption = "Encoders with their pooler, counted from their sizes with the vocabularies of transformers' defaults."
    yield _bars(presets(), "BERT and ALBERT as published", "unique parameters", count, caption, "body")
    by_sharing: dict[str, list[Result]] = {}
    for result in results(ALBERT_AVERAGE):
        by_sharing.setdefault(result.choice.rpartition(", ")[2], []).append(result)
    figure = go.Figure()
    for (kind, found), place in zip(by_sharing.items(), theme.places(list(by_sharing)), strict=True):
        look = theme.style(place)
        points = [r for n, r in enumerate(found) if r.value not in {earlier.value for earlier in found[:n]}]
        figure.add_scatter(
            x=[r.parameters_printed for r in points],
            y=[r.value for r in points],
            name=html.escape(kind),
            mode="markers+text",
            marker={"color": look.colour, "size": 11, "symbol": look.marker},
            # variations of the base size lie too close for names, and have the hover's
            text=["" if "," in r.model else r.model.removeprefix("ALBERT-") for r in points],
            textposition="top center",
            textfont={"size": 11},
            cliponaxis=False,
            customdata=[[html.escape(r.model), f"{r.per_million:.3g}", r.source] for r in points],
            hovertemplate="%{customdata[0]}: %{y}, %{customdata[1]} per million<extra>%{customdata[2]}</extra>",
        )
    figure.update_xaxes(type="log", title="parameters, as printed", exponentformat="B", dtick="D2", range=[6.9, 8.6])
    figure.update_yaxes(range=[78.5, 89.8])
    rows = [
        [r.model, r.choice, count(r.parameters_printed or 0), f"{r.value:g}", f"{r.per_million:.3g}", r.source]
        for found in by_sharing.values()
        for r in found
    ]
    yield Panel(
        theme.finish(figure, "Quality and parameters in the ALBERT paper", "score"),
        "Scores and parameters as the paper (arXiv:1909.11942) prints them, an average over SQuAD, MNLI, SST-2 and "
        "RACE: the higher and the further left, the more quality per parameter.",
        Table(["model", "choice", "parameters", "score", "points per million", "source"], rows),
    )
