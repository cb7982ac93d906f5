"""`write_plan`: a plan as one HTML file (see `tiewise.report.report_page`), with its rows and figures.

A plan of a published BERT or ALBERT also has the published figures.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import plotly.graph_objects as go

from tiewise.core.files import format_bytes, write_result
from tiewise.core.measurement import Curve, Listing, count, rounded
from tiewise.core.sharing_spec import KINDS, SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning import plan_rows
from tiewise.planning.architecture import COMPONENTS, Budget, budget
from tiewise.planning.catalogue import BETTER
from tiewise.planning.ledger import ALBERT_AVERAGE, Result, results
from tiewise.planning.plan import Plan
from tiewise.planning.plan_rows import Record
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.report.drawing import QUIET, Style, finish, styles
from tiewise.report.line_plot import lines
from tiewise.report.report_page import PageSection, Panel, ReportPage
from tiewise.report.stacked_plot import stacked

WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
RANK = 128  # ALBERT's table width
UNIQUE = "unique parameters"
TABLES = {"input table": ("input_table",), "output table": ("output_table",), "maps at the ends": ("maps",)}
BODY = {
    "attention": ("attention", "cross_attention", "mixer"),
    "feed-forward": ("ffn", "experts", "shared_experts", "router"),
}
IN_GROUPS = set(chain.from_iterable((TABLES | BODY).values()))
GROUPS = {**TABLES, **BODY, "all else": tuple(part for part in COMPONENTS if part not in IN_GROUPS)}
PRESETS = {
    "BERT-base": ("bert", 768, 12),
    "BERT-large": ("bert", 1024, 24),
    "ALBERT-base": ("albert", 768, 12),
    "ALBERT-large": ("albert", 1024, 24),
    "ALBERT-xlarge": ("albert", 2048, 24),
    "ALBERT-xxlarge": ("albert", 4096, 12),
}


def write_plan(plan: Plan, path: str | os.PathLike[str], command: str) -> Path:
    """Write the page to `path`, complete or not at all, and return the path.

    Raises:
        RunError: the file cannot be written.
    """
    return write_result(render(plan, command), path, "plot")


def render(plan: Plan, command: str) -> str:
    """Return the page as text."""
    record = plan.record()
    names = [name.replace("\n", " · ") for name in plan_rows.columns(record)]
    costs = Listing("Costs by choice", ["", *names], plan_rows.rows(record))
    return ReportPage(
        command_name="plan",
        title=f"{plan.name}: tiewise plan",
        subject=plan_rows.model_in_words(record),
        heading="What each choice costs",
        answer=_answer(record),
        results=PageSection(
            "Results", tables=[costs, *plan_rows.lookup_tables(record)], notes=[BETTER, *record["notes"]]
        ),
        sections=[
            PageSection("This model", model_panels(plan)),
            PageSection("As models grow", growth_panels(plan)),
            PageSection("What others built", _published_panels(plan)),
        ],
        command=command,
    ).render()


def _answer(record: Record) -> list[str]:
    """Return the sentences at the top: the recommendation and its reasons, every choice, certainty."""
    sentences = list(record["recommendation"]["sentences"])
    sentences += [f"{name}: {_outcome(choice)}." for name, choice in _choices(record).items()]
    sentences.append(plan_rows.certainty_sentence(record))
    return [sentence for sentence in sentences if sentence]


def _published_panels(plan: Plan) -> list[Panel]:
    """Return figures of BERT and ALBERT for a plan of one of their published sizes."""
    model = plan.architecture
    if (model.family, model.width, model.layers) not in PRESETS.values():
        return []
    return [preset_panel(), score_panel()]


def _choices(record: Record) -> dict[str, Record]:
    """Return every choice by its name in one line."""
    names = [name.replace("\n", ", ") for name in plan_rows.columns(record)]
    return dict(zip(names, record["choices"], strict=True))


def _outcome(choice: Record) -> str:
    """Return a choice's parameters, and the saving against the untied model without sharing."""
    total, saved, share = choice["parameters"]["total"], choice["saved"], choice["saved_share"]
    if total is None:
        outcome = "the total is not counted"
        if saved:
            outcome += f", {count(saved)} fewer than untied and unshared"
        return outcome
    is_estimated = "parameters.total" in choice["estimated"]
    show: Callable[[float], str] = count
    if is_estimated:
        show = _about(plan_rows.short)
    outcome = f"{show(total)} parameters"
    if saved > 0:
        show_share = _about_if(is_estimated, plan_rows.percent_to_tenths)
        outcome += f", {show_share(share)} fewer than untied and unshared"
    return outcome


def model_panels(plan: Plan) -> list[Panel]:
    """Return the figures of this model; empty if its total is not known."""
    if plan.architecture.not_counted:
        return []
    record = plan.record()
    return [share_panel(record), memory_panel(record), *sharing_panels(plan)]


def share_panel(record: Record) -> Panel:
    """Draw the share of every group of components in the total, by choice."""
    shares = {name: _shares_of_groups(choice["parameters"]) for name, choice in _choices(record).items()}
    show = _about_if(record["model"]["estimated"], plan_rows.percent_to_tenths)
    why = "A table at both ends is counted once."
    panel = stacked(shares, "Shares of the whole", "share of all parameters", show, why)
    panel.figure.update_xaxes(range=[0, 1], tickformat=".0%")
    return panel


def _shares_of_groups(parameters: Mapping[str, int]) -> dict[str, float]:
    """Return the share of every group of components that has parameters."""
    total = sum(number for part, number in parameters.items() if part in COMPONENTS)
    shares = {}
    for group, parts in GROUPS.items():
        number = sum(parameters.get(part, 0) for part in parts)
        if number:
            shares[group] = number / total
    return shares


def memory_panel(record: Record) -> Panel:
    """Draw the bytes of a training step by choice: AdamW, the fused loss, estimated activations."""
    optimizer = "adamw-bf16-master"
    if record["setting"]["dtype"] == "float32":
        optimizer = "adamw"
    activations = record["activation_bytes"]["kept"]
    bars = {}
    for name, choice in _choices(record).items():
        of_training, logits = choice["training_bytes"][optimizer], choice["logits_bytes"]
        loss_bytes = 0
        if logits:
            loss_bytes = logits["fused_cuda"]
        parts = {
            "weights": of_training["weights"],
            "gradients": of_training["gradients"],
            "optimizer state": of_training["state"],
            "fused loss": loss_bytes,
        }
        if activations:
            parts["activations (estimate)"] = activations
        bars[name] = parts
    why = "With AdamW and the fused loss."
    panel = stacked(
        bars, "Memory of a training step", "bytes", _about_if(record["model"]["estimated"], format_bytes), why
    )
    panel.figure.update_xaxes(tickformat="~s", ticksuffix="B")
    return panel


def sharing_panels(plan: Plan) -> list[Panel]:
    """Draw total parameters of the unchanged boundary under every sharing.

    Empty if layers are not counted one by one.
    """
    model = plan.architecture
    if not model.layers:
        return []
    show: Callable[[float], str] = count
    totals: dict[str, float] = {kind: budget(model, model.boundary, SharingSpec(kind)).total for kind in KINDS}
    if model.estimated:
        show = _about(plan_rows.short)
        totals = {kind: rounded(total) for kind, total in totals.items()}
    bars = {f"share {kind}": {"parameters": total} for kind, total in totals.items()}
    panel = stacked(bars, "What sharing layers leaves", UNIQUE, show, "The work stays the same.")
    panel.figure.update_traces(showlegend=False, text=[show(total) for total in totals.values()])
    return [panel]


def _about_if(estimated: bool, show: Callable[[float], str]) -> Callable[[float], str]:
    """Return `show`, or for estimated numbers a function that marks them ≈."""
    if estimated:
        return _about(show)
    return show


def _about(show: Callable[[float], str]) -> Callable[[float], str]:
    """Return a function that formats a number as `show` does, marked ≈ as an estimate."""
    return lambda value: f"≈ {show(value)}"


def growth_panels(plan: Plan) -> list[Panel]:
    """Draw tables and total parameters of generic decoders with this vocabulary and depth, by width."""
    model, factored = plan.architecture, f"factored:{RANK}"
    vocab, layers = model.ends.vocab, max(model.layers, 1)
    tables = {}
    for boundary in ("untied", "tied", factored):
        budgets = _budgets_by_width(vocab, layers, boundary, "none")
        tables[boundary] = [each.tables + each.parameters.get("maps", 0) for each in budgets]
    why = f"Plain: V·D; factored, with both maps: k·V + 2·k·D, k = {RANK}."
    title = f"Tables of {vocab:,} tokens by model width"
    panels = [_width_panel(tables, title, "parameters of tables and maps", why, model.width)]
    if model.layers and not model.not_counted:
        totals = {}
        for boundary, share in (("tied", "none"), (factored, "all")):
            budgets = _budgets_by_width(vocab, layers, boundary, share)
            totals[f"{boundary}, share {share}"] = [each.total for each in budgets]
        why = "12·D² per layer, or in all where one is shared."
        panels.append(_width_panel(totals, f"Whole models of {layers} layers by width", UNIQUE, why, model.width))
    return panels


def _budgets_by_width(vocab: int, layers: int, boundary: str, share: str) -> list[Budget]:
    """Return the budget of a generic decoder at every width under one choice."""
    choice = BoundarySpec.parse(boundary), SharingSpec(share)
    return [budget(from_sizes(Sizes(vocab, width, layers)), *choice) for width in WIDTHS]


def _width_panel(counts: Mapping[str, Sequence[int]], title: str, unit: str, why: str, width: int) -> Panel:
    """Draw counts by name at every width of WIDTHS.

    The model's `width` is a dotted line if it is among them.
    """
    has_width = WIDTHS[0] <= width <= WIDTHS[-1]
    if has_width:
        why = f"{why} Dotted: this model's width."
    template = Curve(title, WIDTHS, (), along="model width D", unit=unit, log=True, log_x=True, why=why)
    curves = [replace(template, y=tuple(y), of=name) for name, y in counts.items()]
    panel = lines(curves, styles(counts), digits=0)
    panel.figure.update_yaxes(tickformat=None, exponentformat="B")  # ticks as 10M and 1B, not the format of `lines`
    if has_width:
        panel.figure.add_vline(x=width, line_width=1, line_color=QUIET, line_dash="dot")
    return panel


def preset_panel() -> Panel:
    """Draw parameters of BERT's and ALBERT's encoders with their pooler: tables with maps, and the body."""
    bars = {}
    for name, (family, width, layers) in PRESETS.items():
        config = {
            "model_type": family,
            "architectures": [f"{family.title()}Model"],
            "intermediate_size": 4 * width,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
        }
        parts = read(config).parameters()
        ends = parts["input_table"] + parts.get("maps", 0)
        bars[name] = {"body": sum(parts.values()) - ends, "table and map": ends}
    why = "With pooler, counted from their sizes."
    return stacked(bars, "BERT and ALBERT as published", UNIQUE, count, why, first="body")


def score_panel() -> Panel:
    """Draw ALBERT's published scores by parameters, a marker for each kind of sharing."""
    figure = go.Figure()
    published = results(ALBERT_AVERAGE)
    for kind, look in styles(_sharing_of(result) for result in published).items():
        first_by_score: dict[float, Result] = {}
        for result in reversed(published):
            if _sharing_of(result) == kind:
                first_by_score[result.value] = result
        _add_scores(figure, kind, look, list(first_by_score.values()))
    figure.update_xaxes(type="log", title="parameters, as printed", exponentformat="B", dtick="D2", range=[6.9, 8.6])
    figure.update_yaxes(range=[78.5, 89.8])
    rows = []
    for result in published:
        row = [result.model, result.choice, count(result.parameters_printed or 0), f"{result.value:g}"]
        rows.append([*row, f"{result.per_million:.3g}", result.source])
    return Panel(
        finish(figure, "Quality and parameters in the ALBERT paper", "score"),
        "arXiv:1909.11942; mean of SQuAD, MNLI, SST-2, RACE. Up and left: more per parameter.",
        Listing("", ["model", "choice", "parameters", "score", "points per million", "source"], rows),
    )


def _sharing_of(result: Result) -> str:
    """Return the kind of sharing of a published result."""
    return result.choice.rpartition(", ")[2]


def _add_scores(figure: go.Figure, kind: str, look: Style, scores: Sequence[Result]) -> None:
    """Add the published results of one kind of sharing."""
    names, hover_texts = [], []
    for result in scores:
        # variations of the base size are too close to each other for labels; their names are in the hover text
        is_variation = "," in result.model
        names.append("" if is_variation else result.model.removeprefix("ALBERT-"))
        hover_texts.append([html.escape(result.model), f"{result.per_million:.3g}", result.source])
    figure.add_scatter(
        x=[result.parameters_printed for result in scores],
        y=[result.value for result in scores],
        name=html.escape(kind),
        mode="markers+text",
        marker=go.scatter.Marker(color=look.colour, size=11, symbol=look.marker),
        text=names,
        textposition="top center",
        textfont_size=11,
        cliponaxis=False,
        customdata=hover_texts,
        hovertemplate="%{customdata[0]}: %{y}, %{customdata[1]} per million<extra>%{customdata[2]}</extra>",
    )
