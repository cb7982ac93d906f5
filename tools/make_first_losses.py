"""Write src/tiewise/planning/data/first_losses.json: first losses of the catalogue's models, tied and untied.

    .venv/bin/python tools/make_first_losses.py

A loss depends on the numbers in its key, on `costs.first_step_inputs` and on `core.first_loss`. Run the tool after a
change of any of these or of the catalogue. A test computes every loss again and checks that every model has one.
"""

from __future__ import annotations

import json
from pathlib import Path

from tiewise.core.errors import PlanError
from tiewise.core.spec import BoundarySpec
from tiewise.planning.catalogue import models
from tiewise.planning.costs import first_step_inputs
from tiewise.planning.first_loss import FirstStep
from tiewise.planning.plan import resolve_model

TARGET = Path(__file__).parents[1] / "src" / "tiewise" / "planning" / "data" / "first_losses.json"


def first_steps() -> list[FirstStep]:
    """Return the distinct first steps that plans of the catalogue's models need by default."""
    steps: dict[FirstStep, None] = {}
    for row in models():
        try:
            _, architecture = resolve_model(row)
        except PlanError:
            continue  # a row without a vocabulary cannot be planned
        if architecture.ends.head:
            steps.update((first_step_inputs(architecture, BoundarySpec(kind)), None) for kind in ("tied", "untied"))
    return list(steps)


def main() -> None:
    """Write the file, one loss per line."""
    lines = [json.dumps([repr(step), *step.compute()]) for step in first_steps()]
    TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(lines)} losses in {TARGET}")


if __name__ == "__main__":
    main()
