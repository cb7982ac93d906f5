"""Figures of docs/dev/details.md from two inspections, in the columns of the page.

python -m benchmarks.findings runs/wikitext-2 runs/war-and-peace

Each folder holds a comparison and, in `inspected`, the result of `tiewise inspect --only
which_end,gradients_over_training`; docs/dev/details.md has the commands. This script writes
benchmarks/results/findings.md, and the runs' losses on the tuning split to benchmarks/results/curves/two-texts.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import study_curves
from tiewise.training.folder import RESULTS as COMPARISON
from tiewise.training.folder import read_json
from tiewise.training.results import AT_LAST, Comparison, differences

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
    labelled_cells = list_losses(Comparison.from_dict(read_json(run / COMPARISON)))
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


def list_losses(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return (label, cells) of the differences of losses, the steps whose models are kept, and the learning rates."""
    found = differences(comparison, "untied", "tied")
    rows = []
    for label, metric in (
        ("loss, tied − untied", "heldout_nll"),
        ("the same at the last step", f"{AT_LAST}heldout_nll"),
    ):
        difference = found[metric]
        figures = {"value": difference.mean, "low": difference.low, "high": difference.high, "unit": "nats"}
        rows.append((label, [format_figure(figures), difference.sample]))
    for arm in ("untied", "tied"):
        runs = [run for run in comparison.runs if run.arm == arm]
        steps = ", ".join(str(run.selected_step) for run in runs)
        rows.append((f"{arm}: learning rate, and steps of the models", [f"{runs[0].learning_rate:g}", steps]))
    return rows


def main() -> None:
    """Write the table of the folders on the command line, and the curves of their runs."""
    curves = [curve for run in sys.argv[1:] for curve in study_curves.collect_cell(Path(run))]
    study_curves.write(curves, study_curves.CURVES / "two-texts.jsonl")
    body = [row for run in sys.argv[1:] for row in make_rows(Path(run))]
    head = f"# findings\n\n{__doc__.splitlines()[2]}\n\n"
    head += "| | with the input | with the output | difference, or the tied table |\n|---|---|---|---|\n"
    RESULTS.write_text(
        head.replace("python", "`python").replace("peace\n", "peace`\n") + "\n".join(body) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
