"""Figures of results by name, for `result.figure(name)` in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tiewise.core.measurement import Measurement
from tiewise.core.result import PrintedResult
from tiewise.inspection.inspection import Inspection
from tiewise.planning.plan import Plan
from tiewise.report import comparison_panels, plan_page, sweep_page
from tiewise.report.figures import panels
from tiewise.report.heat_map import heat_map
from tiewise.report.report_page import Panel
from tiewise.report.training_curves import AHEAD, COSINE, OUTPUT_SHARE, TRAINING, TUNING
from tiewise.training.results import Comparison
from tiewise.training.study.study import Study

Groups = Mapping[str, Iterable[Panel]]  # name → figures


def figures_of(result: PrintedResult) -> dict[str, Any]:
    """Return the figures of a result by name.

    If a name has several figures, the others are `name_2`, `name_3` and so on.
    """
    for kind, group in _GROUPS.items():
        if isinstance(result, kind):
            return _numbered(group(result))
    return {}


def _numbered(groups: Groups) -> dict[str, Any]:
    """Return the plotly figures of groups of panels."""
    figures: dict[str, Any] = {}
    for name, group in groups.items():
        for number, panel in enumerate(group, 1):
            suffix = "" if number == 1 else f"_{number}"
            figures[name + suffix] = panel.figure
    return figures


def _of_comparison(comparison: Comparison) -> Groups:
    """Return the figures of a comparison: those of its page."""
    return {
        "differences": comparison_panels.paired_differences(comparison),
        "frequency": comparison_panels.frequency_panels(comparison),
        "ahead": comparison_panels.training_panels(comparison, AHEAD),
        "curves": comparison_panels.training_panels(comparison, TUNING),
        "training_curves": comparison_panels.training_panels(comparison, TRAINING),
        "gradient_share": comparison_panels.training_panels(comparison, OUTPUT_SHARE),
        "gradient_cosine": comparison_panels.training_panels(comparison, COSINE),
        "shares": comparison_panels.share_panels(comparison),
        "parameters": comparison_panels.parameter_panels(comparison),
        "direct_path": comparison_panels.direct_path_panels(comparison),
    }


def _of_study(study: Study) -> Groups:
    """Return the figures of a study: maps of signs, curves, and curves of ranks."""
    if not study.results:
        return {}
    maps = [heat_map(grid) for grid in sweep_page.sign_maps(study)]
    return {"map": maps, "curves": sweep_page.curves(study), "ranks": sweep_page.by_rank(study)}


def _of_plan(plan: Plan) -> Groups:
    """Return the figures of a plan: this model, and models of other sizes."""
    of_model = plan_page.model_panels(plan)
    names = ("shares", "memory")
    groups: dict[str, Iterable[Panel]] = {name: [panel] for name, panel in zip(names, of_model, strict=False)}
    return {**groups, "sharing": of_model[len(names) :], "growth": plan_page.growth_panels(plan)}


def _of_inspection(inspection: Inspection) -> Groups:
    """Return the figures of an inspection by section."""
    return {section.name: panels(section.measured) for section in inspection.sections if section.measured}


def _of_measurement(measurement: Measurement) -> Groups:
    """Return the figures of one measurement, such as that of `diff`."""
    return {"figure": panels({"": measurement})}


_GROUPS: dict[type, Callable[[Any], Groups]] = {
    Comparison: _of_comparison,
    Study: _of_study,
    Plan: _of_plan,
    Inspection: _of_inspection,
    Measurement: _of_measurement,
}
