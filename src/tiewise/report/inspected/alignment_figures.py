"""Input and output table of one model, as figures: every measure beside its chance, and both spectra."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from tiewise.analysis.align_tables import Alignment
from tiewise.analysis.end_alignment import AlignmentFound
from tiewise.analysis.estimates import Estimate
from tiewise.core.numerals import count, plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.alignment import held_out, measures
from tiewise.report.inspected.dots import QUIET, Dot, Series, dot_plot
from tiewise.report.sheet import Panel

READ = (
    "Maps are scored on rows that they have not seen; bars are 95 % intervals over tokens. Grey strokes are what "
    "unrelated tables give, grey crosses the same rows permuted and every map fitted again."
)
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # and their doublings: directions in a spectrum's table


def panels(found: Mapping[str, AlignmentFound]) -> list[Panel]:
    """Return all measures and both spectra of each model with two tables."""
    made = []
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        if one.alignment is not None:
            title = f"Input against output of {label}"
            figure = dot_plot(scored(one.alignment, position), title, "mean cosine, share or correlation")
            made.append(Panel(figure, READ, measures(one.alignment)))
            made.append(_spectra(label, one.alignment))
    return made


def scored(found: Alignment, position: int) -> list[Series]:
    """All measures of one alignment: the dots, what chance gives, what permuted rows gave; one row for each measure."""
    look = theme.style(position)
    dots, chance, permuted = [], [], []
    for score in held_out(found):
        dots.append(_dot(score.map, score.estimate))
        chance.append(Dot(score.map, score.chance))
        permuted += [Dot(score.map, value) for value in score.null.values] if score.null else []
    if found.neighbours is not None:
        near, row = found.neighbours, f"nearest {found.neighbours.k} in common"
        dots.append(_dot(row, near.estimate))
        chance.append(Dot(row, near.chance))
        permuted += [Dot(row, value) for value in near.permuted]
    alike = found.similarity.cka
    dots.append(Dot("CKA", alike.value))
    chance.append(Dot("CKA", alike.chance))
    dots.append(_dot("norms, by rank", found.norms.spearman))
    chance.append(Dot("norms, by rank", 0.0))
    return [
        Series("by chance", chance, QUIET, "line-ns-open", 16),
        Series("permuted", permuted, QUIET, "x-thin-open", 7),
        Series("measured", dots, look.colour, look.marker),
    ]


def _dot(row: str, value: Estimate) -> Dot:
    return Dot(row, value.value, value.low, value.high)


def _spectra(label: str, found: Alignment) -> Panel:
    spectra = {"input": found.similarity.spectrum_a, "output": found.similarity.spectrum_b}
    figure = go.Figure()
    for name, spectrum in spectra.items():
        look = theme.style(theme.ENDS[name])
        values = [value / (sum(v * v for v in spectrum.values) ** 0.5 or 1.0) for value in spectrum.values]
        figure.add_scatter(
            x=list(range(1, len(values) + 1)),
            y=[value if value > 0 else None for value in values],
            name=name,
            mode="lines",
            line={"color": look.colour, "dash": look.dash, "width": 2.2},
            hovertemplate="direction %{x}: %{y:.4f}",
        )
    figure = finish(figure, f"Spectra of {label}", "share of the table's norm")
    figure.update_xaxes(title="direction", type="log", dtick=1)
    figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    widest = max(len(spectrum.values) for spectrum in spectra.values())
    chosen = [k for k in (*_SHOWN, *(128 * 2**i for i in range(1, 8))) if k <= widest]
    rows = [
        [str(k), *(plain(s.values[k - 1], 4) if k <= len(s.values) else plain(None) for s in spectra.values())]
        for k in chosen
    ]
    even = " and ".join(f"{plain(s.participation, 1)} ({name})" for name, s in spectra.items())
    caption = (
        f"Singular values of both tables, each less its mean row, over {count(found.pairs)} tokens. A level line fills "
        f"all directions evenly, a steep one few: by (Σs²)²/Σs⁴ they fill {even} of {widest}."
    )
    return Panel(figure, caption, Table(["direction", *(f"{name}, singular value" for name in spectra)], rows))
