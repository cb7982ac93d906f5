"""Run `check` and `plan` of the package on PYTHONPATH on many paths; the child process of `tools/ecosystem.py`.

It reads {name: path} as JSON from standard input and writes {name: outcome} as JSON. It uses public names alone, so
that it runs with any revision. An error of the package is a finding: it is recorded, and the next path follows.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiewise

MODEL_KEYS = ("width", "layers", "vocab", "table_width", "boundary", "estimated")
CHOICE_KEYS = ("saved", "saved_share", "flops_per_token")


def main() -> None:
    """Write the outcomes of all paths of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports the interrupt
    outcomes = {name: outcome_of(Path(path)) for name, path in json.load(sys.stdin).items()}
    json.dump({"file": tiewise.__file__, "outcomes": outcomes}, sys.stdout)


def outcome_of(path: Path) -> dict[str, Any]:
    """Return the findings of `check` and the figures of `plan` for a path."""
    return {"findings": _outcome(findings_of, path), "figures": _outcome(figures_of, path)}


def _outcome(question: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return an answer; for an error, its type and its message without the path."""
    try:
        return question(path)
    except Exception as error:  # any error of any revision is an outcome
        message = str(error).replace(str(path), "PATH")
        return {type(error).__name__: message[:200]}


def findings_of(path: Path) -> dict[str, Any]:
    """Return the findings of `check` by rule and place, and the outcome for each loader."""
    audit = tiewise.check(path)
    findings: dict[str, Any] = {}
    for finding in audit.findings:
        place = str(finding.where).replace(str(path), "PATH")
        findings[f"{finding.rule} {place}"] = finding.severity
    for row in audit.record()["loaders"]:
        findings[f"{row['loader']} {row.get('versions') or ''}".strip()] = row["outcome"]
    return findings


def figures_of(path: Path) -> dict[str, Any]:
    """Return the figures of `plan`: the model as it is, and each choice."""
    record = tiewise.plan(path).record()
    model = record["model"]
    figures = {key: model.get(key) for key in MODEL_KEYS}
    figures["not_counted"] = "; ".join(model.get("not_counted", ()))
    figures |= _with_prefix("parameters", model["parameters"])
    for choice in record["choices"]:
        chosen = {key: choice.get(key) for key in CHOICE_KEYS}
        figures |= _with_prefix(choice["boundary"], chosen)
    return figures


def _with_prefix(prefix: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with a prefix before each name. Figures that are not one number or text become JSON."""
    named: dict[str, Any] = {}
    for name, figure in figures.items():
        named[f"{prefix}.{name}"] = json.dumps(figure) if isinstance(figure, dict | list) else figure
    return named


if __name__ == "__main__":
    main()
