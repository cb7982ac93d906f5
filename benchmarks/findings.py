"""Figures of docs/dev/details.md from two inspections, in the columns of the page.

python -m benchmarks.findings runs/wikitext-2 runs/war-and-peace

Each folder holds a comparison and, in `inspected`, the result of `tiewise inspect --only
which_end,gradients_over_training`; docs/dev/details.md has the commands. So does the folder RUN-tables, in
which tables have their own tuned rate. This script writes benchmarks/results/findings.md, and the runs' losses on the
tuning split to benchmarks/results/curves/two-texts.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import study_curves
from benchmarks.cost_change import change
from tiewise.training.folder import RESULTS as COMPARISON
from tiewise.training.folder import read_json
from tiewise.training.results import AT_LAST, Comparison, Difference, differences

RESULTS = Path(__file__).parent / "results" / "findings.md"
CKA = ["by CKA above chance" + out for out in ("", ", a line in log frequency taken out", ", frequency taken out")]
MAPS = ["as they stand", "after the best rotation", "after the best linear map"]
BETWEEN_MODELS = ["tied – untied input", "tied – untied output"]
TWO_SEEDS = ["untied input, two seeds", "untied output, two seeds", "tied table, two seeds"]
TITLES = {"wikitext-2": "WikiText-2", "war-and-peace": "War and Peace"}
TITLES |= {f"{run}-tables": f"{title}, own rate of tables" for run, title in TITLES.items()}
ENDS = ["untied input", "untied output", "tied table"]


def format_figure(quantity: dict[str, Any]) -> str:
    """Return a figure and its interval with five decimals, and shares in per cent."""
    factor = 100 if quantity["unit"] == "%" else 1
    figures = [factor * quantity[key] for key in ("value", "low", "high") if quantity[key] is not None]
    return "{:.5f} [{:.5f}, {:.5f}]".format(*figures) if len(figures) == 3 else f"{figures[0]:.5f}"


def make_rows(run: Path) -> list[str]:
    """Return the table rows of one comparison."""
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
        labelled_cells += [(f"share of {arm}, by tenths", [*tenths[:3], tenths[4], tenths[9], change, total])]
        labelled_cells += [("cosine of the paths", cosines)] * bool(cosines)
    return [f"| {TITLES[run.name]}: {label} | {' | '.join(cells)} |" for label, cells in labelled_cells]


def list_losses(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return (label, cells) of the differences of losses, the steps whose models are kept, and the learning rates."""
    found = differences(comparison, "untied", "tied")
    rows = [
        ("loss, tied − untied", describe_difference(found["heldout_nll"])),
        ("the same at the last step", describe_difference(found[f"{AT_LAST}heldout_nll"])),
    ]
    for chosen in (trial for trial in comparison.tuning if trial["chosen"]):
        runs = comparison.of(chosen["arm"])
        rates = [f"{chosen[name]:g}" for name in ("learning_rate", "table_rate") if name in chosen]
        loss, steps = sum(run.heldout_nll for run in runs) / len(runs), {str(run.selected_step) for run in runs}
        rows.append((f"{chosen['arm']}: loss, rates, steps", [f"{loss:.5f}", *rates, ", ".join(sorted(steps))]))
    return rows


def describe_difference(difference: Difference) -> list[str]:
    """Return the cells of a difference: its interval, p, and what the interval covers."""
    figures = {"value": difference.mean, "low": difference.low, "high": difference.high, "unit": "nats"}
    return [format_figure(figures), f"p {difference.p:.2g}", difference.sample]


def make_change(one_rate: Path, own_rate: Path) -> str:
    """Return the table row of the change of the cost of tying between two comparisons."""
    old, new = (Comparison.from_dict(read_json(run / COMPARISON)) for run in (one_rate, own_rate))
    cells = describe_difference(change(old, new))
    return f"| {TITLES[own_rate.name]}: less the cost with one rate | {' | '.join(cells)} |"


def main() -> None:
    """Write the table of the folders on the command line, and the curves of their runs."""
    body, curves = [], []
    for one_rate in map(Path, sys.argv[1:]):
        own_rate = one_rate.with_name(f"{one_rate.name}-tables")
        body += [*make_rows(one_rate), *make_rows(own_rate), make_change(one_rate, own_rate)]
        curves += [curve for run in (one_rate, own_rate) for curve in study_curves.collect_cell(run)]
    study_curves.write(curves, study_curves.CURVES / "two-texts.jsonl")
    head = f"# findings\n\n`{__doc__.splitlines()[2]}`\n\n"
    head += "| | with the input | with the output | difference, or the tied table |\n|---|---|---|---|\n"
    RESULTS.write_text(head + "\n".join(body) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
