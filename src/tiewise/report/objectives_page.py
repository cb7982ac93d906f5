"""SOP beside NSP: one page of ALBERTs pretrained on one objective each and judged on both, beside the paper's.

runs = [Comparison.from_dict(json.loads(Path(f"runs/{name}/results.json").read_text())) for name in ("sop", "nsp")]
write_objectives(runs, "objectives.html")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tiewise.report import faces
from tiewise.report.albert_paper import PAPER, objectives
from tiewise.report.comparison_found import SHARES_NOTE
from tiewise.report.figures_of_found import panels
from tiewise.report.sheet import PageSection, Sheet, write
from tiewise.training.results import Comparison


def write_objectives(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> Path:
    """Write `objectives` as one HTML file, whole or not at all, and return it.

    Raises:
        RunError: as `objectives`, or a file that cannot be written.
    """
    found = objectives(comparisons)
    rows = faces.summary(found)
    told = "Told from chance means by that interval and by Wilson’s over the rows."
    note = f"{SHARES_NOTE} {told} The paper: {PAPER}, Table 5, on other texts."
    return write(
        Sheet(
            command_name="objectives",
            title="SOP beside NSP: tiewise",
            subject=", ".join(found),
            heading="SOP beside NSP",
            answer=[f"Pretrained {label}: {one.answer}." for label, one in found.items()],
            results=PageSection(
                "Judged as both",
                panels(found),
                tables=[("Judged right by objective of pretraining", rows)] if rows else [],
                notes=[note],
            ),
            sections=[],
            command="\n".join(one.command for one in comparisons),
        ).render(),
        path,
        "path",
    )
