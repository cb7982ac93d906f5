"""`write_report`: a comparison as one HTML file (see `tiewise.report.sheet`).

Comparison → panels (figure, caption, table) → sheet
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiewise.core.numerals import plain
from tiewise.report import albert_paper, panels, pretraining, published, sheet
from tiewise.report.albert_paper import SharingOrder
from tiewise.report.grid import Table
from tiewise.report.published import Beside
from tiewise.report.rows import header, rows
from tiewise.report.sheet import Section, Sheet
from tiewise.report.table import DEMO
from tiewise.training.results import Comparison

NOTE = (
    '<p class="note">Losses are in nats per token: mean over seeds ± standard deviation. A difference is paired by '
    "seed; its interval has 95 % confidence (Student’s t). Perplexity is exp of the mean held-out nll. Training memory "
    "is counted: fp32 weights, their gradients and the optimizer’s moments; activations come on top. Tokens per second "
    "hold whatever else the machine was doing.</p>"
)


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(comparison), path, "--out")


def render(comparison: Comparison) -> str:
    """Return the page as text."""
    made = (
        f"<h3>Starting point of each arm</h3>{_tuning(comparison)}"
        f'<div class="facts"><div><h3>Setting</h3>{_facts(comparison.setting)}</div>'
        f"<div><h3>Data</h3>{_facts(comparison.data)}</div>"
        f"<div><h3>Versions</h3>{_facts({'tiewise': comparison.version, **comparison.env})}</div></div>"
    )
    results = Table(header(comparison), rows(comparison))
    return Sheet(
        command_name="compare",
        title=f"{', '.join(comparison.arms)}: tiewise comparison",
        subject=_subject(comparison),
        heading="What was found",
        lead=sheet.paragraphs(comparison.finding),
        results=sheet.table(results, "Results by arm, mean ± deviation over seeds"),
        note=NOTE,
        sections=_sections(comparison),
        command=comparison.command,
        made=made,
        banner=DEMO.capitalize() if comparison.demo else "",
    ).render()


def _subject(comparison: Comparison) -> str:
    seeds = len(comparison.seeds)
    return f"{', '.join(comparison.arms)} · {seeds} seed{'' if seeds == 1 else 's'}"


def _sections(comparison: Comparison) -> list[Section]:
    maps = list(panels.direct_path_panels(comparison))
    beside = published.of_comparison(comparison)
    judged, bytes_ = list(pretraining.share_panels(comparison)), pretraining.memory_panel(comparison)
    return [
        *([_published(beside)] if beside is not None else []),
        _sharing(albert_paper.orders(comparison)),
        Section("Loss", list(panels.loss_panels(comparison))),
        Section("Masked tokens and pairs", judged, lead=pretraining.share_lead(comparison) if judged else ""),
        Section("Gradient paths", list(panels.path_panels(comparison))),
        Section("Parameters", [*panels.parameter_panels(comparison), *([bytes_] if bytes_ is not None else [])]),
        Section("Direct path", maps, _bigrams(comparison), "panels maps"),
    ]


def _published(beside: Beside) -> Section:
    found = published.table(beside)
    said = "".join(f"<p>{html.escape(line)}</p>" for line in published.lines(beside))
    return Section("Published figures", [], "" if found is None else sheet.table(found, "Beside this run"), lead=said)


def _sharing(found: Sequence[SharingOrder]) -> Section:
    said = "".join(f"<p>{html.escape(line)}</p>" for line in albert_paper.order_lines(found))
    rows = sheet.table(albert_paper.order_table(found), "What layers share, here and in the paper") if found else ""
    return Section("What layers share", [], rows, lead=said)


def _bigrams(comparison: Comparison) -> str:
    if not comparison.bigrams:
        return ""
    return (
        "<h3>Most asymmetric bigrams</h3>"
        "<p>The last columns are each arm’s direct-path logit of “right after left” minus that of “left after right”. "
        "One shared table without a map cannot tell the two orders apart: its difference is zero.</p>"
        f"{sheet.table(panels.bigrams(comparison), 'Most asymmetric bigrams')}"
    )


def _tuning(comparison: Comparison) -> str:
    chosen = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    rows = [
        [arm, f"{r.init_std:g}", f"{r.learning_rate:g}", plain(r.predicted_initial_nll), plain(r.initial_nll)]
        for arm, r in chosen.items()
    ]
    names = ["arm", "init std", "learning rate", "predicted first loss", "measured first loss"]
    text = sheet.table(Table(names, rows), "Initialisation and learning rate by arm")
    if not comparison.tuning:
        return text
    trials = [
        [t["arm"], _fact(t["init"]), _fact(t["learning_rate"]), plain(t["nll"]), "chosen" if t["chosen"] else ""]
        for t in comparison.tuning
    ]
    names = ["arm", "init std", "learning rate", "nll of the tuning split", ""]
    all_trials = sheet.table(Table(names, trials), "Tuning trials")
    return f"{text}<details><summary>All tuning trials</summary>{all_trials}</details>"


def _facts(facts: Mapping[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>" for key, value in _flat(facts)
    )
    return f"<dl>{items}</dl>"


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
