"""`write_report`: a comparison as one HTML file that opens from disk, offline, for as long as browsers exist.

    Comparison → panels (figure, caption, table) → templates/report.html + .css + .js + plotly.js → one file

Whatever a user wrote is escaped: as HTML in the page, as plotly text in figures, and `<` in the embedded JSON. A
content security policy forbids every request, so a slip could not reach the network either.
"""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import count as numbers
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from tiewise.errors import RunError
from tiewise.report import panels, theme
from tiewise.report.panels import Panel, Table
from tiewise.report.rows import header, rows
from tiewise.report.table import DEMO
from tiewise.training.results import Comparison
from tiewise.training.wording import plain


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    target = Path(path)
    page = render(comparison)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o644)
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror}", "choose another place with --out") from None
    return target


def render(comparison: Comparison) -> str:
    """Return the page as text."""
    sections, shown = _sections(comparison)
    themes = {name: look.to_plotly_json() for name, look in (("light", theme.LIGHT), ("dark", theme.DARK))}
    return Template(_resource("report.html")).substitute(
        title=html.escape(f"{', '.join(comparison.arms)}: tiewise comparison"),
        style=_resource("report.css"),
        script=_resource("report.js"),
        plotly=get_plotlyjs(),
        figures=_json({"figures": [_figure(panel) for panel in shown], "themes": themes}),
        subject=html.escape(_subject(comparison)),
        banner=f'<p class="banner" role="note">{html.escape(DEMO.capitalize())}</p>' if comparison.demo else "",
        finding=_finding(comparison),
        results=_table(Table(header(comparison), rows(comparison)), "Results by arm, mean ± deviation over seeds"),
        sections=sections,
        tuning=_tuning(comparison),
        command=html.escape(comparison.command),
        setting=_facts(comparison.setting),
        data=_facts(comparison.data),
        versions=_facts({"tiewise": comparison.version, **comparison.env}),
    )


def _resource(name: str) -> str:
    return (files("tiewise.report") / "templates" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can stand inside a script element whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _subject(comparison: Comparison) -> str:
    seeds = len(comparison.seeds)
    return f"{', '.join(comparison.arms)} · {seeds} seed{'' if seeds == 1 else 's'}"


def _finding(comparison: Comparison) -> str:
    lines = html.escape(comparison.finding).replace(" %", "&nbsp;%").splitlines()
    return "".join(f"<p>{line}</p>" for line in lines)


def _sections(comparison: Comparison) -> tuple[str, list[Panel]]:
    groups = {
        "Loss": list(panels.loss_panels(comparison)),
        "Gradient paths": list(panels.path_panels(comparison)),
        "Parameters": list(panels.parameter_panels(comparison)),
        "Direct path": list(panels.direct_path_panels(comparison)),
    }
    index = numbers()
    parts = []
    for name, group in groups.items():
        if group:
            extra = _bigrams(comparison) if name == "Direct path" else ""
            kind = "panels maps" if name == "Direct path" else "panels"
            body = "".join(_panel(panel, next(index)) for panel in group)
            parts.append(f'<section><h2>{name}</h2><div class="{kind}">{body}</div>{extra}</section>')
    return "\n".join(parts), [panel for group in groups.values() for panel in group]


def _panel(panel: Panel, index: int) -> str:
    caption = html.escape(panel.caption)
    height = panel.figure.layout.height - theme.MARGIN["t"] + _margin(panel)["t"]
    return (
        f'<figure class="panel"><h3>{panel.title}</h3>'
        f'<div class="plot" id="plot-{index}" role="img" aria-label="{panel.title}. {caption}" '
        f'style="height:{height}px"></div>'
        f"<figcaption>{caption}</figcaption>"
        f'<details><summary>Data<span class="hidden"> of: {panel.title}</span></summary>'
        f"{_table(panel.table, f'Data of: {html.unescape(panel.title)}')}</details></figure>"
    )


def _margin(panel: Panel) -> dict[str, int]:
    """Margins in the page, which writes the title itself: only a legend or a colour bar still needs room above."""
    bare = not any(trace.showlegend is not False or trace.type == "heatmap" for trace in panel.figure.data)
    return {"l": 6, "r": 12, "t": 10 if bare else 40, "b": 6}


def _figure(panel: Panel) -> dict[str, Any]:
    """Return a figure as plotly.js takes it, without what the page gives: title, template and outer margins."""
    record, dropped = json.loads(panel.figure.to_json()), ("title", "template", "height")
    layout = {key: value for key, value in record["layout"].items() if key not in dropped}
    return {"data": record["data"], "layout": {**layout, "margin": _margin(panel)}}


def _table(table: Table, caption: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in table.header)
    body = "".join(_table_row(row) for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _table_row(row: Iterable[str]) -> str:
    first, *rest = map(html.escape, row)
    cells = "".join(f"<td>{cell}</td>" for cell in rest)
    return f'<tr><th scope="row">{first}</th>{cells}</tr>'


def _bigrams(comparison: Comparison) -> str:
    if not comparison.bigrams:
        return ""
    return (
        "<h3>Most asymmetric bigrams</h3>"
        "<p>The last columns are each arm’s direct-path logit of “right after left” minus that of “left after right”. "
        "One shared table without a map cannot tell the two orders apart: its difference is zero.</p>"
        f"{_table(panels.bigrams(comparison), 'Most asymmetric bigrams')}"
    )


def _tuning(comparison: Comparison) -> str:
    chosen = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    rows = [
        [arm, f"{r.init_std:g}", f"{r.learning_rate:g}", plain(r.predicted_initial_nll), plain(r.initial_nll)]
        for arm, r in chosen.items()
    ]
    names = ["arm", "init std", "learning rate", "predicted first loss", "measured first loss"]
    text = _table(Table(names, rows), "Initialisation and learning rate by arm")
    if not comparison.tuning:
        return text
    trials = [
        [t["arm"], _fact(t["init"]), _fact(t["learning_rate"]), plain(t["nll"]), "chosen" if t["chosen"] else ""]
        for t in comparison.tuning
    ]
    names = ["arm", "init std", "learning rate", "nll of the tuning split", ""]
    return (
        f"{text}<details><summary>All tuning trials</summary>{_table(Table(names, trials), 'Tuning trials')}</details>"
    )


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
