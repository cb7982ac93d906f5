"""Certainty of a plan's figures: rounds estimates and removes figures that are not counted.

The token tables are always exact. So is everything that follows from them: their bytes, the logits, the bytes that
ranks send for them, and the saving of tying. All other figures follow from the body or from the total. The generic
formula estimates the body. The total is unknown if a part of the model is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiewise.core.measurement import rounded
from tiewise.planning.architecture import Architecture, Budget

AT_TABLES = ("input_table", "output_table", "other_tables", "maps", "head_bias")  # components, exact in every plan
SUMS = ("total", "trainable", "active")
FROM_TOTAL = ("checkpoint_bytes", "training_bytes", "ranks.memory", "ranks.sent")
FROM_BODY = ("flops_per_token", "decode_bytes")


def mark_uncertain(choice: dict[str, Any], architecture: Architecture, budget: Budget) -> dict[str, Any]:
    """Return a choice with its estimates rounded and uncounted figures set to None.

    The result also lists the paths of both, as `estimated` and `not_counted`.

    Args:
        choice: computed figures, with the keys of a plan's record.
        architecture: the model, which knows which parts are estimated or missing.
        budget: the choice's counts.
    """
    estimated, missing = _uncertain_paths(choice, architecture, budget)
    for path in estimated:
        choice = _change_at(choice, path.split("."), rounded)
    for path in missing:
        choice = _change_at(choice, path.split("."), _not_counted)
    return {**choice, "estimated": estimated, "not_counted": missing}


def _not_counted(_value: float) -> None:
    """Return None for any figure."""


def _uncertain_paths(choice: dict[str, Any], architecture: Architecture, budget: Budget) -> tuple[list[str], list[str]]:
    """Return the paths of estimates in a choice, and those of figures that are not counted."""
    estimated_parts, missing_parts = _uncertain_parameters(choice["parameters"], architecture)
    if not architecture.counts_active:
        missing_parts.append("active")
    estimated = [f"parameters.{name}" for name in estimated_parts]
    missing = [f"parameters.{name}" for name in missing_parts]
    from_body, from_total = _uncertain_costs(choice, budget)
    if architecture.estimated:
        if architecture.tables_alone:
            missing += from_body
        else:
            estimated += from_body
        estimated.append("first_loss")
    elif not architecture.layers:
        # built on the meta device: attention scores and the experts of one token are not known
        missing.append("flops_per_token")
    if architecture.not_counted:
        missing += from_total
    elif architecture.estimated:
        estimated += from_total
    return estimated, missing


def mark_parameters(parameters: Mapping[str, int], architecture: Architecture) -> dict[str, float | None]:
    """Return counts by component and their sums, with estimates rounded.

    A count is None if it is not counted.
    """
    estimated, missing = _uncertain_parameters(parameters, architecture)
    if not architecture.counts_active:
        missing.append("active")
    counts: dict[str, float | None] = {}
    for name, count in parameters.items():
        if name in missing:
            counts[name] = None
        elif name in estimated:
            counts[name] = rounded(count)
        else:
            counts[name] = count
    return counts


def _uncertain_parameters(names: Iterable[str], architecture: Architecture) -> tuple[list[str], list[str]]:
    """Return the components and sums that are estimated, and those that are not counted."""
    sums = [name for name in names if name in SUMS]
    body = [name for name in names if name not in (*AT_TABLES, *SUMS)]
    if architecture.tables_alone:
        return [], [*body, *sums]
    estimated = []
    if architecture.estimated:
        estimated = body
    if architecture.not_counted:
        return estimated, sums
    if architecture.estimated:
        estimated = [*body, *sums]
    return estimated, []


def _uncertain_costs(choice: dict[str, Any], budget: Budget) -> tuple[list[str], list[str]]:
    """Return the paths of costs that follow from the body, then from the full model."""
    from_body, from_total = list(FROM_BODY), list(FROM_TOTAL)
    # The saving is a difference of two models with the same body if both share alike and neither adds a bias at the
    # head; a family without a reader may already have such a bias.
    saved_at_tables = budget.sharing.kind == "none" and not budget.boundary.bias
    if not saved_at_tables:
        from_body.append("saved")
    if not saved_at_tables or choice["saved"] != 0:
        from_total.append("saved_share")
    return from_body, from_total


def _change_at(value: Any, path: Sequence[str], change: Callable[[float], Any]) -> Any:
    """Return `value` with `change` applied to every number at or below `path`.

    The items of a list are changed one by one.
    """
    if isinstance(value, list):
        return [_change_at(item, path, change) for item in value]
    if path:
        return {**value, path[0]: _change_at(value[path[0]], path[1:], change)}
    if isinstance(value, dict):
        return {name: _change_at(item, (), change) for name, item in value.items()}
    if isinstance(value, int | float):
        return change(value)
    return value
