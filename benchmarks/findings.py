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

import numpy as np
from numpy.typing import NDArray

from benchmarks import study_curves
from benchmarks.cost_change import change
from tiewise.core.estimates import mean_interval
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
CHECKED_STEPS = (150, 300, 480, 600)
STEPS_NAMED = f"steps {', '.join(map(str, CHECKED_STEPS))}"


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
            for label in MAPS + CKA
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
        labelled_cells.append((f"windows of {arm}: first, second, last tenth, least, peaks", list_windows(run / arm)))
    labelled_cells += list_tuning_costs(run)
    return [f"| {TITLES[run.name]}: {label} | {' | '.join(cells)} |" for label, cells in labelled_cells]


def list_windows(arm: Path) -> list[str]:
    """Return the head path's share in windows of 30 steps.

    The cells are the means over seeds in the first and second window and in the last tenth, the least share of all
    windows and seeds, and the steps at which the seeds' shares are highest.
    """
    shares, steps, peaks = [], [0], []
    for path in sorted(arm.glob("seed-*/metrics.jsonl")):
        points = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        shares.append([point["path_b"] / (point["path_a"] + point["path_b"]) for point in points])
        steps = [0, *(point["step"] for point in points)]
        peaks.append(int(np.argmax(shares[-1])))
    means = np.mean(shares, axis=0)
    figures = [means[0], means[1], means[-2:].mean(), np.min(shares)]
    spans = [f"{steps[window] + 1} to {steps[window + 1]}" for window in sorted(set(peaks))]
    return [*(f"{100 * figure:.2f} %" for figure in figures), ", ".join(spans)]


def tuning_costs(run: Path) -> dict[int, NDArray[np.float64]]:
    """Return tied − untied on the tuning split for each seed, by step."""
    curves = study_curves.collect_cell(run)
    losses = {(curve.arm, curve.seed): dict(zip(curve.steps, curve.tune_nll, strict=True)) for curve in curves}
    seeds = sorted({curve.seed for curve in curves})
    return {
        step: np.array([losses["tied", seed][step] - losses["untied", seed][step] for seed in seeds])
        for step in CHECKED_STEPS
    }


def list_tuning_costs(run: Path) -> list[tuple[str, list[str]]]:
    """Return (label, cells) of tied − untied on the tuning split at some steps, and of its growth between the last two.

    Intervals are over seeds.
    """
    costs = tuning_costs(run)
    *_, before, last = CHECKED_STEPS
    growth = costs[last] - costs[before]
    return [
        (f"tuning loss at {STEPS_NAMED}, tied − untied", format_estimates(costs)),
        (f"growth of this cost from step {before} to {last}", format_estimates({last: growth})),
    ]


def format_estimates(values: dict[int, NDArray[np.float64]]) -> list[str]:
    """Return the mean over seeds at each step and its interval, with five decimals."""
    estimates = map(mean_interval, values.values())
    return [f"{estimate.value:.5f} [{estimate.low:.5f}, {estimate.high:.5f}]" for estimate in estimates]


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


def make_changes(one_rate: Path, own_rate: Path) -> list[str]:
    """Return the table rows of the change of the cost of tying between two comparisons.

    The first is of the held-out loss, the others are of the tuning loss at some steps.
    """
    old, new = (Comparison.from_dict(read_json(run / COMPARISON)) for run in (one_rate, own_rate))
    title = f"| {TITLES[own_rate.name]}"
    rows = [f"{title}: less the cost with one rate | {' | '.join(describe_difference(change(old, new)))} |"]
    before, after = tuning_costs(one_rate), tuning_costs(own_rate)
    figures = format_estimates({step: after[step] - before[step] for step in CHECKED_STEPS})
    rows.append(f"{title}: tuning loss at {STEPS_NAMED}, less the cost with one rate | {' | '.join(figures)} |")
    return rows


def main() -> None:
    """Write the table of the folders on the command line, and the curves of their runs."""
    body, curves = [], []
    for one_rate in map(Path, sys.argv[1:]):
        own_rate = one_rate.with_name(f"{one_rate.name}-tables")
        body += [*make_rows(one_rate), *make_rows(own_rate), *make_changes(one_rate, own_rate)]
        curves += [curve for run in (one_rate, own_rate) for curve in study_curves.collect_cell(run)]
    study_curves.write(curves, study_curves.CURVES / "two-texts.jsonl")
    head = f"# findings\n\n`{__doc__.splitlines()[2]}`\n\n"
    head += "| | with the input | with the output | difference, or the tied table |\n|---|---|---|---|\n"
    RESULTS.write_text(head + "\n".join(body) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
