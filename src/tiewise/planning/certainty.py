"""Certainty of a plan's figures: estimates are rounded, and those that are not counted are left out.

The token tables are always exact, and so is what follows from them: their bytes, logits, what ranks send for them, and
what tying saves. Everything else follows from the body, which the generic formula estimates, or from the whole, which
is not known if a part of the model is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiewise.core.measurement import rounded
from tiewise.planning.architecture import Architecture, Budget

AT_TABLES = ("input_table", "output_table", "other_tables", "maps", "head_bias")  # components, exact in every plan
SUMS = ("total", "trainable")
OF_WHOLE = ("checkpoint_bytes", "training_bytes", "ranks.memory", "ranks.sent")
OF_BODY = ("flops_per_token", "decode_bytes")


def marked(choice: dict[str, Any], architecture: Architecture, budget: Budget) -> dict[str, Any]:
    """Return a choice with its estimates rounded, None for what is not counted, and the paths of both in two lists.

    Args:
        choice: its figures as they were computed, named as in a plan's record.
        architecture: the model, which says what of it is estimated or missing.
        budget: the choice's counts.
    """
    estimated, missing = _uncertain_paths(choice, architecture, budget)
    for path in estimated:
        choice = _changed(choice, path.split("."), rounded)
    for path in missing:
        choice = _changed(choice, path.split("."), _not_counted)
    return {**choice, "estimated": estimated, "not_counted": missing}


def _not_counted(_value: float) -> None:
    """Return None for any figure."""


def _uncertain_paths(choice: dict[str, Any], architecture: Architecture, budget: Budget) -> tuple[list[str], list[str]]:
    """Return the paths of estimates in a choice, and those of figures that are not counted."""
    estimated_parts, missing_parts = _uncertain_parameters(choice["parameters"], architecture)
    estimated = [f"parameters.{name}" for name in estimated_parts]
    missing = [f"parameters.{name}" for name in missing_parts]
    of_body, of_whole = _uncertain_costs(choice, budget)
    if architecture.estimated:
        if architecture.tables_alone:
            missing += of_body
        else:
            estimated += of_body
        estimated.append("first_loss")
    elif not architecture.layers:
        # built: neither attention scores nor the share of experts that a token uses are known
        missing.append("flops_per_token")
    if architecture.not_counted:
        missing += of_whole
    elif architecture.estimated:
        estimated += of_whole
    return estimated, missing


def marked_parameters(parameters: Mapping[str, int], architecture: Architecture) -> dict[str, float | None]:
    """Return counts by component, and their sums, with estimates rounded and None for what is not counted."""
    estimated, missing = _uncertain_parameters(parameters, architecture)
    counts: dict[str, float | None] = {}
    for name, count in parameters.items():
        if name in missing:
            counts[name] = None
        elif name in estimated:
            counts[name] = rounded(count)
        else:
            counts[name] = count
    return counts


def _uncertain_parameters(names: Iterable[str], a: Architecture) -> tuple[list[str], list[str]]:
    """Return the components and sums that are estimated, and those that are not counted."""
    sums = [name for name in names if name in SUMS]
    body = [name for name in names if name not in (*AT_TABLES, *SUMS)]
    if a.tables_alone:
        return [], [*body, *sums]
    estimated = []
    if a.estimated:
        estimated = body
    if a.not_counted:
        return estimated, sums
    if a.estimated:
        estimated = [*body, *sums]
    return estimated, []


def _uncertain_costs(choice: dict[str, Any], budget: Budget) -> tuple[list[str], list[str]]:
    """Return the paths of costs that follow from the body, and of those that follow from the whole model."""
    of_body, of_whole = list(OF_BODY), list(OF_WHOLE)
    # The saving is a difference of two models with one body, if both share alike and none adds a bias at the head,
    # which a family without a reader may have already.
    saved_at_tables = budget.sharing.kind == "none" and not budget.boundary.bias
    if not saved_at_tables:
        of_body.append("saved")
    if not saved_at_tables or choice["saved"] != 0:
        of_whole.append("saved_share")
    return of_body, of_whole


def _changed(value: Any, path: Sequence[str], change: Callable[[float], Any]) -> Any:
    """Return `value` with `change` made to every number at or below `path`. A list is entered item by item."""
    if isinstance(value, list):
        return [_changed(item, path, change) for item in value]
    if path:
        return {**value, path[0]: _changed(value[path[0]], path[1:], change)}
    if isinstance(value, dict):
        return {name: _changed(item, (), change) for name, item in value.items()}
    if isinstance(value, int | float):
        return change(value)
    return value
