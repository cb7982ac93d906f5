"""SOP beside NSP: one page of ALBERTs pretrained on one objective each and judged on both, beside the paper's.

runs = [Comparison.from_dict(json.loads(Path(f"runs/{name}/results.json").read_text())) for name in ("sop", "nsp")]
write_objectives(runs, "objectives.html")
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from tiewise.report import faces, shares
from tiewise.report.albert_paper import PAPER, objectives
from tiewise.report.figures_of_found import panels
from tiewise.report.sheet import Section, Sheet, paragraphs, table, write
from tiewise.training.results import Comparison


def write_objectives(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> Path:
    """Write `objectives` as one HTML file, whole or not at all, and return it.

    Raises:
        RunError: as `objectives`, or a file that cannot be written.
    """
    found = objectives(comparisons)
    rows = faces.summary(found)
    told = "Told from chance means by that interval and by Wilson’s over the rows."
    note = f"{shares.NOTE} {told} The paper: {PAPER}, Table 5, on other texts."
    return write(
        Sheet(
            command_name="objectives",
            title="SOP beside NSP: tiewise",
            subject=", ".join(found),
            heading="SOP beside NSP",
            lead=paragraphs("\n".join(f"Pretrained {label}: {one.answer}." for label, one in found.items())),
            results=table(rows, "Judged right by objective of pretraining") if rows else "",
            note=f'<p class="note">{html.escape(note)}</p>',
            sections=[Section("Judged as both", panels(found))],
            command="\n".join(one.command for one in comparisons),
        ).render(),
        path,
        "path",
    )
