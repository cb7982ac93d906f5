"""`write_plan`: a plan as one HTML file (see `tiewise.report.sheet`): its rows, and figures of choices and of growth.

What others published stands beside a plan of just such a model.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go

from tiewise.core.files import size, write_result
from tiewise.core.found import Curve, Listing, count, rounded
from tiewise.core.sharing_spec import KINDS, SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning import plan_rows
from tiewise.planning.architecture import COMPONENTS, Budget, budget
from tiewise.planning.catalogue import BETTER
from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.planning.plan import Plan
from tiewise.planning.plan_rows import Record
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.report.drawing import QUIET, finish, styles
from tiewise.report.figures import stacked
from tiewise.report.line_plot import lines
from tiewise.report.sheet import PageSection, Panel, Sheet

WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
RANK = 128  # ALBERT's table width
UNIQUE = "unique parameters"
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
    return write_result(render(plan, command), path, "--plot")


def render(plan: Plan, command: str) -> str:
    """Return the page as text."""
    record, a = plan.record(), plan.architecture
    names = [name.replace("\n", " · ") for name in plan_rows.columns(record)]
    answer = [*filter(None, [plan_rows.how_to_be_exact(record)]), plan_rows.nearest(record)]
    answer += [f"{name}: {_outcome(choice)}." for name, choice in _choices(record).items()]
    answer += filter(None, [plan_rows.evidence(record)])
    tables = [Listing("Costs by choice", ["", *names], plan_rows.rows(record)), *plan_rows.lookups(record)]
    is_published = (a.family, a.width, a.layers) in PRESETS.values()
    return Sheet(
        command_name="plan",
        title=f"{plan.name}: tiewise plan",
        subject=plan_rows.subject(record),
        heading="What each choice costs",
        answer=answer,
        results=PageSection("Results", tables=tables, notes=[BETTER, *record["notes"]]),
        sections=[
            PageSection("This model", model_panels(plan)),
            PageSection("As models grow", growth_panels(plan)),
            PageSection("What others built", [preset_panel(), score_panel()] if is_published else []),
        ],
        command=command,
    ).render()


def _choices(record: Record) -> dict[str, Record]:
    """Every choice by its name in one line."""
    names = (name.replace("\n", ", ") for name in plan_rows.columns(record))
    return dict(zip(names, record["choices"], strict=True))


def _outcome(choice: Record) -> str:
    """Say how many parameters a choice has, and how many fewer than the model untied and unshared."""
    total, saved, share = choice["parameters"]["total"], choice["saved"], choice["saved_share"]
    if total is None:
        fewer = f", {count(saved)} fewer than untied and unshared" if saved else ""
        return f"the total is not counted{fewer}"
    about = "≈ " if "parameters.total" in choice["estimated"] else ""
    fewer = f", {about}{plan_rows.percent(share)} fewer than untied and unshared" if saved > 0 else ""
    return f"{about}{plan_rows.short(total) if about else count(total)} parameters{fewer}"


def model_panels(plan: Plan) -> list[Panel]:
    """Return the figures of this model; none where its total is not known."""
    if plan.architecture.not_counted:
        return []
    record = plan.record()
    return [share_panel(record), memory_panel(record), *sharing_panels(plan)]


def share_panel(record: Record) -> Panel:
    """Share of every group of components in the whole, by choice."""
    found: dict[str, dict[str, float]] = {}
    for name, choice in _choices(record).items():
        counted = {part: number for part, number in choice["parameters"].items() if part in COMPONENTS}
        parts = {group: sum(counted.get(part, 0) for part in held) for group, held in GROUPS.items()}
        found[name] = {group: part / sum(counted.values()) for group, part in parts.items() if part}
    why = "A table at both ends is counted once."
    unit = "share of all parameters"
    show = _about(record["model"]["estimated"], plan_rows.percent)
    panel = stacked(found, "Shares of the whole", unit, show, why)
    panel.figure.update_xaxes(range=[0, 1], tickformat=".0%")
    return panel


def memory_panel(record: Record) -> Panel:
    """Bytes of a training step by choice, with AdamW, the fused loss and an estimate of activations."""
    optimizer = "adamw" if record["setting"]["dtype"] == "float32" else "adamw-bf16-master"
    kept = record["activation_bytes"]["kept"]
    found = {}
    for name, choice in _choices(record).items():
        row, logits = choice["training_bytes"][optimizer], choice["logits_bytes"]
        parts = {"weights": row["weights"], "gradients": row["gradients"], "optimizer state": row["state"]}
        parts["fused loss"] = logits["fused_cuda"] if logits else 0
        found[name] = {**parts, **({"activations (estimate)": kept} if kept else {})}
    why = "With AdamW and the fused loss."
    panel = stacked(found, "Memory of a training step", "bytes", _about(record["model"]["estimated"], size), why)
    panel.figure.update_xaxes(tickformat="~s", ticksuffix="B")
    return panel


def sharing_panels(plan: Plan) -> list[Panel]:
    """Total parameters of the model's own boundary under every sharing; none where layers are not told apart."""
    a = plan.architecture
    if not a.layers:
        return []
    totals: dict[str, float] = {kind: budget(a, a.boundary, SharingSpec(kind)).total for kind in KINDS}
    if a.estimated:
        totals = {kind: rounded(total) for kind, total in totals.items()}
    bars = {f"share {kind}": {"parameters": total} for kind, total in totals.items()}
    why = "The work stays the same."
    show = _about(True, plan_rows.short) if a.estimated else count
    panel = stacked(bars, "What sharing layers leaves", UNIQUE, show, why)
    panel.figure.update_traces(showlegend=False, text=list(map(show, totals.values())))
    return [panel]


def _about(estimated: bool, show: Callable[[float], str]) -> Callable[[float], str]:
    """Return `show`, which marks its numbers ≈ where they are estimates."""
    return (lambda value: f"≈ {show(value)}") if estimated else show


def growth_panels(plan: Plan) -> list[Panel]:
    """Tables and whole plain decoders of the model's vocabulary and depth, by width."""
    a, factored, here = plan.architecture, f"factored:{RANK}", "Dotted: this model's width."
    vocab, layers = a.ends.vocab, max(a.layers, 1)

    def at_widths(boundary: str, share: str = "none") -> list[Budget]:
        choice = BoundarySpec.parse(boundary), SharingSpec(share)
        return [budget(from_sizes(Sizes(vocab, d, layers)), *choice) for d in WIDTHS]

    def panel(found: Mapping[str, Sequence[int]], title: str, unit: str, why: str) -> Panel:
        of = Curve(title, WIDTHS, (), along="model width D", unit=unit, log=True, log_x=True, why=f"{why} {here}")
        curves = [replace(of, y=tuple(y), of=name) for name, y in found.items()]
        made = lines(curves, styles(found), digits=0)
        made.figure.update_yaxes(tickformat=None, exponentformat="B")
        if WIDTHS[0] <= a.width <= WIDTHS[-1]:
            made.figure.add_vline(x=a.width, line_width=1, line_color=QUIET, line_dash="dot")
        return made

    specs = ("untied", "tied", factored)
    tables = {spec: [b.tables + b.parameters.get("maps", 0) for b in at_widths(spec)] for spec in specs}
    why = f"Plain: V·D; factored, with both maps: k·V + 2·k·D, k = {RANK}."
    panels = [panel(tables, f"Tables of {vocab:,} tokens by model width", "parameters of tables and maps", why)]
    if a.layers and not a.not_counted:
        whole = (("tied", "none"), (factored, "all"))
        models = {f"{spec}, share {share}": [b.total for b in at_widths(spec, share)] for spec, share in whole}
        why = "12·D² per layer, or in all where one is shared."
        panels.append(panel(models, f"Whole models of {layers} layers by width", UNIQUE, why))
    return panels


def preset_panel() -> Panel:
    """Parameters of BERT's and ALBERT's encoders with their pooler: tables with maps, and the body."""
    found = {}
    for name, (family, width, layers) in PRESETS.items():
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
        kind = {"model_type": family, "architectures": [f"{family.title()}Model"], "intermediate_size": 4 * width}
        parts = read({**kind, **sizes}).parameters()
        ends = parts["input_table"] + parts.get("maps", 0)
        found[name] = {"body": sum(parts.values()) - ends, "table and map": ends}
    why = "With pooler, counted from their sizes."
    return stacked(found, "BERT and ALBERT as published", UNIQUE, count, why, first="body")


def score_panel() -> Panel:
    """ALBERT's own scores by parameters, a marker for what its layers share."""
    published = [(result.choice.rpartition(", ")[2], result) for result in results(ALBERT_AVERAGE)]
    figure = go.Figure()
    for kind, look in styles(kind for kind, _ in published).items():
        points = list({r.value: r for of, r in reversed(published) if of == kind}.values())
        figure.add_scatter(
            x=[r.parameters_printed for r in points],
            y=[r.value for r in points],
            name=html.escape(kind),
            mode="markers+text",
            marker=go.scatter.Marker(color=look.colour, size=11, symbol=look.marker),
            # variations of the base size lie too close for names, and have the hover's
            text=["" if "," in r.model else r.model.removeprefix("ALBERT-") for r in points],
            textposition="top center",
            textfont_size=11,
            cliponaxis=False,
            customdata=[[html.escape(r.model), f"{r.per_million:.3g}", r.source] for r in points],
            hovertemplate="%{customdata[0]}: %{y}, %{customdata[1]} per million<extra>%{customdata[2]}</extra>",
        )
    figure.update_xaxes(type="log", title="parameters, as printed", exponentformat="B", dtick="D2", range=[6.9, 8.6])
    figure.update_yaxes(range=[78.5, 89.8])
    rows = [
        [r.model, r.choice, count(r.parameters_printed or 0), f"{r.value:g}", f"{r.per_million:.3g}", r.source]
        for _, r in published
    ]
    return Panel(
        finish(figure, "Quality and parameters in the ALBERT paper", "score"),
        "arXiv:1909.11942; mean of SQuAD, MNLI, SST-2, RACE. Up and left: more per parameter.",
        Listing("", ["model", "choice", "parameters", "score", "points per million", "source"], rows),
    )
