"""One page of every command, from synthetic results: nothing is trained and no checkpoint is read."""

import math
from pathlib import Path
from types import SimpleNamespace

from tests.report.comparison_sample import albert_comparison, sample_comparison
from tests.training.study.planted_study import planted

from tiewise.core.measurement import ONE, Curve, Grid, Listing, Measurement, Points, Quantity, Stack, visible
from tiewise.inspection.inspection import ALL, EVIDENCE, Inspection, SectionMeasurement, TieOrNot
from tiewise.inspection.workspace import InspectedModel, Request
from tiewise.planning.plan import plan
from tiewise.report import comparison_page, plan_page, sweep_page
from tiewise.report.inspection_page import inspection_page

MODELS = ("tied", "untied", "factored:64")
TOKENS = (" the", "of", "\n", "<b>", "2024", "internationalisation", " and", "(", ")", ".", *tuple("abcdefghij"))


def quantities(model, place):
    """Return quantities of a dot plot with long names, and evidence about one model."""
    names = ("as the model applies it", "identity map, mean cosine of held-out rows", "after the best rotation")
    rows = []
    for index, name in enumerate(names):
        value = (index + place) / 5
        rows.append(
            Quantity(
                name,
                value,
                value - 0.1,
                value + 0.1,
                9,
                0.0,
                (-0.02, 0.03),
                model,
                "cosine",
                figure="Asymmetry of the direct path",
            )
        )
    return tuple(rows)


def section(model, place, repeats):
    """Return a measurement that has a figure of every kind, and a table with `repeats` times 20 rows."""
    steps = tuple(range(1, 40))
    groups = ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")
    losses = tuple(4 / step + place for step in steps)
    grid = tuple(tuple(math.nan if (i + j) % 7 == 0 else math.sin(i * j + place) for j in range(20)) for i in range(20))
    spread = tuple((math.cos(i * i), math.sin(i * 1.7)) for i in range(200))
    return Measurement(
        "hardly",
        quantities(model, place),
        (
            Curve("Loss", steps, losses, tuple(y - 0.1 for y in losses), tuple(y + 0.1 for y in losses), of=model),
            Curve("By frequency", tuple(range(6)), (0.5, 0.4, 0.3, -0.1, -0.2, place), of=model, ticks=groups),
            Curve("Change", (1.0, 2.0, 3.0), (1.0, 0.01, 1e-5), of=model, log=True, level=0.1, level_name="chance"),
        ),
        (Grid("Direct path", TOKENS, TOKENS, grid, of=model, why="A map."),),
        (Stack("Cost", "", (("entropy", 3.0), ("rank", 0.5 + place)), "nats", model),),
        (Points("Tokens", spread, TOKENS * 10, (0, 1) * 100, ("rare", "frequent"), tuple(range(30)), of=model),),
        (Listing("Every token", ["token", "n"], [[visible(token), "1"] for token in TOKENS * repeats], model),),
        ("a note",),
    )


def sample_inspection(sections=2, repeats=1):
    """Return an inspection of three models with as many equal sections; `repeats` lengthens its tables."""
    folder = SimpleNamespace(path=Path("runs/sample"))
    models = tuple(InspectedModel(name, folder) for name in MODELS)
    evidence = []
    for place, name in enumerate(MODELS):
        evidence.append(
            ("one", Quantity("q", 0.2, 0.1, 0.3, 9, 0.0, of=name, question=f"Question {place}?", above=ONE, p=0.01))
        )
    results = {name: section(name, place, repeats) for place, name in enumerate(MODELS)}
    parts = [SectionMeasurement(EVIDENCE, {ALL: TieOrNot(tuple(evidence), "no verdict")}, {})]
    parts += [SectionMeasurement(f"section {k}", results, {}) for k in range(sections)]
    return Inspection(models, Request(), tuple(parts))


def sample_pages():
    """Return {name: page as text} of every report."""
    return {
        "compare": comparison_page.render(sample_comparison()),
        "albert": comparison_page.render(albert_comparison()),
        "plan": plan_page.render(plan("albert-base-v2", ("tied", "untied"), ("none", "all")), "tiewise plan"),
        "sweep": sweep_page.render(planted(), "tiewise sweep"),
        "inspect": inspection_page(sample_inspection(), "tiewise inspect runs/sample"),
    }
