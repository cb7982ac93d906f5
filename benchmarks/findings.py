"""Figures of docs/dev/details.md from two inspections, in the columns of the page.

python -m benchmarks.findings runs/wikitext-2 runs/war-and-peace

Each folder holds a comparison and, in `inspected`, the result of `tiewise inspect --only
which_end,gradients_over_training`; docs/dev/details.md has the commands. They took eight minutes on one core. This
script writes benchmarks/results/findings.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "findings.md"
CKA = ["by CKA above chance" + out for out in ("", ", a line in log frequency taken out", ", frequency taken out")]
MAPS = ["as they stand", "after the best rotation", "after the best linear map"]
BETWEEN_MODELS = ["tied – untied input", "tied – untied output"]
TWO_SEEDS = ["untied input, two seeds", "untied output, two seeds", "tied table, two seeds"]
TITLES = {"wikitext-2": "WikiText-2", "war-and-peace": "War and Peace"}
ENDS = ["untied input", "untied output", "tied table"]


def format_figure(quantity: dict[str, Any]) -> str:
    """Return a figure and its interval with five decimals, and shares in per cent."""
    factor = 100 if quantity["unit"] == "%" else 1
    figures = [factor * quantity[key] for key in ("value", "low", "high") if quantity[key] is not None]
    return "{:.5f} [{:.5f}, {:.5f}]".format(*figures) if len(figures) == 3 else f"{figures[0]:.5f}"


def make_rows(run: Path) -> list[str]:
    """Return the table rows of one text."""
    sections = json.loads((run / "inspected" / "inspection.json").read_text(encoding="utf-8"))["sections"]
    which_end, paths = sections["which_end"]["found"]["tied"], sections["gradients_over_training"]["found"]
    figures = {(quantity["name"], quantity["of"]): format_figure(quantity) for quantity in which_end["quantities"]}
    (evidence,) = sections["evidence"]["found"].values()
    loss = evidence["rows"][0]
    difference = {"value": -loss["value"], "low": -loss["high"], "high": -loss["low"], "unit": "nats"}
    labelled_cells = [("loss, tied − untied", [format_figure(difference)])]
    labelled_cells += [
        (
            f"corrected, {cka}",
            [figures["corrected, " + cka, end] for end in BETWEEN_MODELS]
            + [figures[f"corrected output − input, {cka}", "tied"]],
        )
        for cka in CKA
    ]
    for seed, suffix in (("other", ""), ("same", ", models of the same seed")):
        labelled_cells += [
            (
                f"{label}, {seed} seed",
                [figures[label + suffix, end] for end in BETWEEN_MODELS]
                + [figures[f"output − input, {label}", f"tied, models of the {seed} seed"]],
            )
            for label in MAPS
        ]
    labelled_cells += [
        (f"{label}, trained again", [figures[label, pair] for pair in TWO_SEEDS]) for label in MAPS + CKA
    ]
    curve = "variance that is a curve in log frequency"
    labelled_cells += [(curve, [figures[curve, end] for end in ENDS])]
    for arm in ("tied", "untied"):
        total, change, *cosines = map(format_figure, paths[arm]["quantities"])
        tenths = [share for _, share in paths[arm]["listings"][0]["rows"]]
        labelled_cells += [(f"share of {arm}", [tenths[0], tenths[9], change, total])]
        labelled_cells += [("cosine of the paths", cosines)] * bool(cosines)
    return [f"| {TITLES[run.name]}: {label} | {' | '.join(cells)} |" for label, cells in labelled_cells]


def main() -> None:
    """Write the table of the folders on the command line."""
    body = [row for run in sys.argv[1:] for row in make_rows(Path(run))]
    head = f"# findings\n\n{__doc__.splitlines()[2]}\n\n"
    head += "| | with the input | with the output | difference, or the tied table |\n|---|---|---|---|\n"
    RESULTS.write_text(
        head.replace("python", "`python").replace("peace\n", "peace`\n") + "\n".join(body) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
