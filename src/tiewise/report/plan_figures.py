"""A plan in plotly figures: the model's own choices, how they grow with width, and models that others built."""

from __future__ import annotations

import html
from collections.abc import Mapping

import plotly.graph_objects as go

from tiewise.core.ledger import ALBERT_AVERAGE, Result, results
from tiewise.core.numerals import count, size
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.budget import budget
from tiewise.planning.parts import COMPONENTS
from tiewise.planning.plan import Plan
from tiewise.planning.read_config import Sizes, from_sizes, read
from tiewise.report import theme
from tiewise.report.bars import finish, stacked
from tiewise.report.plan_rows import columns

Curve = Mapping[int, int]  # parameters by width
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


def names(plan: Plan) -> list[str]:
    """Name every choice in one line."""
    return [name.replace("\n", ", ") for name in columns(plan)]


def shares(plan: Plan) -> dict[str, dict[str, float]]:
    """Share of every group of components in the whole, by choice."""
    found: dict[str, dict[str, float]] = {}
    for name, choice in zip(names(plan), plan.choices, strict=True):
        parts = found.setdefault(name, {})
        for group, held in GROUPS.items():
            total = sum(choice.budget.parameters.get(part, 0) for part in held)
            if total:
                parts[group] = total / choice.budget.total
    return found


def memory(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes of a training step by choice, with AdamW, the fused loss and an estimate of activations."""
    found: dict[str, dict[str, float]] = {}
    for name, choice in zip(names(plan), plan.choices, strict=True):
        row = choice.training["adamw" if plan.setting.dtype == "float32" else "adamw-bf16-master"]
        parts = {"weights": row.weights, "gradients": row.gradients, "optimizer state": row.state}
        logits = choice.logits.fused_cuda if choice.logits else 0
        found[name] = {**parts, "fused loss": logits}
        if plan.activations.kept:
            found[name]["activations (estimate)"] = plan.activations.kept
    return found


def sharing(plan: Plan) -> dict[str, int]:
    """Total parameters of the model's own boundary under every sharing; empty where layers are not told apart."""
    if not plan.architecture.layers:
        return {}
    own, _ = plan.as_it_is
    kinds = ("none", "attention", "ffn", "all")
    return {f"share {kind}": budget(plan.architecture, own, SharingSpec(kind)).total for kind in kinds}


def tables_by_width(plan: Plan) -> dict[str, Curve]:
    """Parameters of tables and their maps by width, for the model's vocabulary."""
    specs = ("untied", "tied", f"factored:{RANK}")
    return {spec: {d: _ends(plan, spec, d) for d in WIDTHS if d >= RANK} for spec in specs}


def growth(plan: Plan) -> dict[str, Curve]:
    """Parameters of a whole model by width, for the model's vocabulary and depth."""
    styles = {
        "tied, share none": ("tied", "none"),
        f"factored:{RANK}, share all": (f"factored:{RANK}", "all"),
    }
    return {name: {d: _whole(plan, *style, d) for d in WIDTHS} for name, style in styles.items()}


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


def published() -> dict[str, list[Result]]:
    """ALBERT's own results on its average, by what its layers share."""
    found: dict[str, list[Result]] = {}
    for result in results(ALBERT_AVERAGE):
        found.setdefault(result.choice.rpartition(", ")[2], []).append(result)
    return found


def shares_figure(plan: Plan) -> go.Figure:
    """Draw `shares`."""
    figure = stacked(shares(plan), "Shares of the whole", "share of all parameters", lambda value: f"{value:.1%}")
    return figure.update_xaxes(range=[0, 1], tickformat=".0%")


def memory_figure(plan: Plan) -> go.Figure:
    """Draw `memory`."""
    return stacked(memory(plan), "Memory of a training step", "bytes", size).update_xaxes(
        tickformat="~s", ticksuffix="B"
    )


def sharing_figure(plan: Plan) -> go.Figure:
    """Draw `sharing`."""
    values = {name: {"parameters": total} for name, total in sharing(plan).items()}
    figure = stacked(values, "What sharing layers leaves", "unique parameters", count)
    return figure.update_traces(showlegend=False, text=[count(total) for total in sharing(plan).values()])


def tables_figure(plan: Plan) -> go.Figure:
    """Draw `tables_by_width`."""
    title = f"Tables of {plan.architecture.ends.vocab:,} tokens by model width"
    return _by_width(tables_by_width(plan), title, "parameters of tables and maps", plan.architecture.width)


def growth_figure(plan: Plan) -> go.Figure:
    """Draw `growth`."""
    title = f"Whole models of {plan.architecture.layers} layers by width"
    return _by_width(growth(plan), title, "unique parameters", plan.architecture.width)


def presets_figure() -> go.Figure:
    """Draw `presets`."""
    return stacked(presets(), "BERT and ALBERT as published", "unique parameters", count, first="body")


def published_figure() -> go.Figure:
    """Draw `published`: the higher and the further left, the more quality per parameter."""
    figure = go.Figure()
    for (kind, found), place in zip(published().items(), theme.places(list(published())), strict=True):
        look = theme.style(place)
        points = [r for n, r in enumerate(found) if r.value not in {earlier.value for earlier in found[:n]}]
        figure.add_scatter(
            x=[r.parameters_printed for r in points],
            y=[r.value for r in points],
            name=html.escape(kind),
            mode="markers+text",
            marker={"color": look.colour, "size": 11, "symbol": look.marker},
            text=[_size_name(r.model) for r in points],
            textposition="top center",
            textfont={"size": 11},
            cliponaxis=False,
            customdata=[[html.escape(r.model), f"{r.per_million:.3g}", r.source] for r in points],
            hovertemplate="%{customdata[0]}: %{y}, %{customdata[1]} per million<extra>%{customdata[2]}</extra>",
        )
    figure.update_xaxes(type="log", title="parameters, as printed", exponentformat="B", dtick="D2", range=[6.9, 8.6])
    figure.update_yaxes(range=[78.5, 89.8])
    return finish(figure, "Quality and parameters in the ALBERT paper", "score")


def _size_name(model: str) -> str:
    """Name a published size; the paper's variations of the base size lie too close for names, and have the hover's."""
    return "" if "," in model else model.removeprefix("ALBERT-")


def _by_width(curves: Mapping[str, Curve], title: str, unit: str, here: int) -> go.Figure:
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
    figure.update_xaxes(
        type="log", title="model width D", tickvals=WIDTHS[::2], ticktext=[f"{d:,}" for d in WIDTHS[::2]]
    )
    figure.update_yaxes(type="log", exponentformat="B", dtick=1)
    if WIDTHS[0] <= here <= WIDTHS[-1]:
        figure.add_vline(x=here, line={"width": 1, "color": "#8a8f99", "dash": "dot"})
    return finish(figure, title, unit)


def _sized(plan: Plan, width: int) -> Sizes:
    return Sizes(plan.architecture.ends.vocab, width, max(plan.architecture.layers, 1))


def _whole(plan: Plan, boundary: str, share: str, width: int) -> int:
    return budget(from_sizes(_sized(plan, width)), BoundarySpec.parse(boundary), SharingSpec(share)).total


def _ends(plan: Plan, boundary: str, width: int) -> int:
    found = budget(from_sizes(_sized(plan, width)), BoundarySpec.parse(boundary), SharingSpec())
    return found.tables + found.parameters.get("maps", 0)


def steps(curves: Mapping[str, Curve]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of curves by width."""
    rows = [[f"{d:,}", *(count(curve[d]) for curve in curves.values())] for d in next(iter(curves.values()))]
    return ["D", *curves], rows
