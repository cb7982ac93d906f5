"""`write_report`: a comparison as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiewise.core.numerals import plain
from tiewise.report import albert_paper, heat_map, published, sheet
from tiewise.report import comparison_figures as figures
from tiewise.report.comparison_found import DEMO, SHARES_NOTE, results, verdict
from tiewise.report.grid import Table
from tiewise.report.sheet import PageSection, Panel, Sheet
from tiewise.training.results import Comparison

NOTE = (
    "Losses are in nats per token: mean over seeds ± standard deviation. A difference is paired by seed; behind it "
    "stands its 95 % interval (Student’s t). Perplexity is exp of the mean held-out nll. Training memory is counted: "
    "fp32 weights, their gradients and the optimizer’s moments; activations come on top. Tokens per second hold "
    "whatever else the machine was doing."
)
BIGRAMS = (
    "Asymmetric bigrams: the last columns are each arm’s direct-path logit of “right after left” minus that of “left "
    "after right”. One shared table without a map cannot tell the two orders apart: its difference is zero."
)


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(comparison), path, "--out")


def render(comparison: Comparison) -> str:
    """Return the page as text: the verdict, one table, one figure, then the rest."""
    seeds = len(comparison.seeds)
    notes = (*comparison.finding.splitlines(), NOTE)
    table = ("Results by arm, mean ± deviation over seeds", results(comparison))
    return Sheet(
        command_name="compare",
        title=f"{', '.join(comparison.arms)}: tiewise comparison",
        subject=f"{', '.join(comparison.arms)} · {seeds} seed{'' if seeds == 1 else 's'}",
        heading="What was found",
        answer=[verdict(comparison)],
        results=PageSection("Results", _there(figures.paired_differences(comparison)), tables=[table], notes=notes),
        sections=list(_sections(comparison)),
        command=comparison.command,
        made=[PageSection("Starting point of each arm", folded=_trials(comparison), tables=[_starts(comparison)])],
        facts=[
            ("Setting", list(_flat(comparison.setting))),
            ("Data", list(_flat(comparison.data))),
            ("Versions", list(_flat({"tiewise": comparison.version, **comparison.env}))),
        ],
        banner=DEMO.capitalize() if comparison.demo else "",
    ).render()


def _sections(comparison: Comparison) -> Iterator[PageSection]:
    """Those that have nothing to show are left out of the page."""

    def lines(*measured: figures.Measured) -> list[Panel]:
        return _there(*(figures.line_panel(comparison, one) for one in measured))

    beside = published.of_comparison(comparison)
    if beside is not None:
        made = published.table(beside)
        tables = [("Beside this run", made)] if made else []
        yield PageSection("Published figures", said=published.lines(beside), tables=tables)
    orders = albert_paper.orders(comparison)
    tables = [("What layers share, here and in the paper", albert_paper.order_table(orders))] if orders else []
    yield PageSection("What layers share", said=albert_paper.order_lines(orders), tables=tables)
    by_frequency = _there(figures.frequency_panel(comparison))
    yield PageSection("Loss", [*by_frequency, *lines(figures.AHEAD, figures.HELD_OUT, figures.TRAINING)])
    if shares := list(figures.share_panels(comparison)):
        yield PageSection("Masked tokens and pairs", shares, notes=list(_of_shares(comparison)))
    yield PageSection("Gradient paths", lines(figures.OUTPUT_SHARE, figures.COSINE))
    counted = figures.parameter_panel(comparison), figures.memory_panel(comparison)
    yield PageSection("Parameters", _there(*counted))
    bigrams = [("Most asymmetric bigrams", heat_map.bigrams(comparison))] if comparison.bigrams else []
    maps = list(heat_map.direct_path_panels(comparison))
    notes = [BIGRAMS] if bigrams else []
    yield PageSection("Direct path", maps, folded=bigrams, notes=notes, kind="panels maps")


def _there(*panels: Panel | None) -> list[Panel]:
    return [panel for panel in panels if panel is not None]


def _of_shares(comparison: Comparison) -> Iterator[str]:
    """What the shares are, and what knowing nothing but frequencies gives on the same masked tokens."""
    yield SHARES_NOTE
    unigram = next((run.unigram_nll for run in comparison.runs if run.unigram_nll is not None), None)
    if unigram is not None:
        yield (
            f"The same masked tokens have an nll of {plain(unigram)} by the training text’s frequencies alone, which a "
            "model that reads nothing reaches."
        )


def _starts(comparison: Comparison) -> sheet.Captioned:
    first = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    rows = [
        [arm, f"{r.init_std:g}", f"{r.learning_rate:g}", plain(r.predicted_initial_nll), plain(r.initial_nll)]
        for arm, r in first.items()
    ]
    names = ["arm", "init std", "learning rate", "predicted first loss", "measured first loss"]
    return "Initialisation and learning rate by arm", Table(names, rows)


def _trials(comparison: Comparison) -> list[sheet.Captioned]:
    rows = [
        [t["arm"], _fact(t["init"]), _fact(t["learning_rate"]), plain(t["nll"]), "chosen" if t["chosen"] else ""]
        for t in comparison.tuning
    ]
    names = ["arm", "init std", "learning rate", "nll of the tuning split", ""]
    return [("All tuning trials", Table(names, rows))] if rows else []


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}, ")
        else:
            yield name, _fact(value)


def _fact(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
