"""Share of a model's logits and loss that its direct path and first MLP explain.

It is measured for every seed of a sweep.

    python -m benchmarks.atlas_paths runs/size-text-vocabulary

It adds each model's measures to `benchmarks/results/atlas_paths.csv`, and prints the tables of docs/dev/atlas.md:
means over seeds with 95 % intervals. Held-out windows give two measures. The residual stream is h = e + (sum of all
layers' outputs), where e are the input rows:

logits  ⟨z_e, z⟩ / ‖z‖², both less their mean over V: the part of the logits z that comes from e at the scale that the
        final norm has for h. With the layers' part it adds up to 1; if negative, e opposes the model's prediction.
loss    loss of h − e minus loss of h, in nats: cost of removing the direct path; the final norm is computed again.

Pairs of the built-in text give the measures of `tiewise inspect --only first_mlp`: the loss of the direct path, alone
and with the first MLP, and the asymmetry of each.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.tables import write_table
from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import NATS, Quantity
from tiewise.inspection.running.loaded import Opened, open_model
from tiewise.inspection.running.stack import find_stack
from tiewise.inspection.sections.first_mlp import first_mlp_of
from tiewise.inspection.tables.bigram_counts import Chain
from tiewise.training.data.corpus import load_prepared
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison

CSV_FILE = Path(__file__).parent / "results" / "atlas_paths.csv"
WINDOWS, LENGTH = 64, 128
ARMS = ("untied", "tied")
ABLATION_COLUMNS = ["loss", "taken away", "logits"]
UNITS = {"logits": "%"}
FIRST_MLP_COLUMNS = {
    "direct": "loss on the text's pairs, direct",
    "with the first MLP": "loss on the text's pairs, with the first MLP",
    "asymmetry, direct": "asymmetry, direct, centred",
    "asymmetry, with the first MLP": "asymmetry, with the first MLP, centred",
}


@torch.no_grad()
def ablate_direct_path(opened: Opened, windows: torch.Tensor) -> dict[str, float]:
    """Return the direct path's share of logits and loss on held-out ids [n, T]."""
    stack, sums = find_stack(opened), np.zeros(4)
    for ids in windows.split(8):
        first, *_, last = (states[:, :-1].flatten(0, 1) for states in stack.states(ids))
        targets = ids[:, 1:].reshape(-1, 1)
        z_h, z_layers = stack.to_logits(last), stack.to_logits(last - first)
        rms = [
            (h.square().mean(-1, keepdim=True) + opened.model.config.rms_norm_eps).sqrt() for h in (last, last - first)
        ]
        direct = z_h - z_layers * rms[1] / rms[0]  # at the final norm's scale for h; Llama's norm has no shift
        centred, centred_direct = (x - x.mean(-1, keepdim=True) for x in (z_h, direct))
        losses = [float(-x.log_softmax(-1).gather(1, targets).double().sum()) for x in (z_h, z_layers)]
        sums += (*losses, float((centred_direct * centred).double().sum()), float(centred.double().square().sum()))
    count = windows[:, 1:].numel()
    return {"loss": sums[0] / count, "taken away": (sums[1] - sums[0]) / count, "logits": sums[2] / sums[3]}


def measure_cell(cell: Path) -> list[dict[str, str]]:
    """Return one row for each model of a cell."""
    comparison, text = Comparison.from_dict(read_json(cell / RESULTS)), load_prepared(cell / "data")
    windows = torch.from_numpy(np.array(text.split("heldout")[: WINDOWS * LENGTH], np.int64)).reshape(WINDOWS, LENGTH)
    chain = Chain.of(np.array(text.split("heldout")), text.vocab)
    rows = []
    for arm in ARMS:
        for run in comparison.of(arm):
            opened = open_model(cell / arm / f"seed-{run.seed}" / "final")
            first_mlp = {quantity.name: quantity.value for quantity in first_mlp_of(opened, chain=chain).quantities}
            measures = ablate_direct_path(opened, windows) | {
                name: float(first_mlp[quantity]) for name, quantity in FIRST_MLP_COLUMNS.items()
            }
            run_columns = {"study": cell.parent.name, "cell": cell.name, "width": str(comparison.setting["width"])}
            run_columns |= {
                "V": str(text.vocab),
                "tokens": str(len(text.split("train"))),
                "arm": arm,
                "seed": str(run.seed),
            }
            rows.append(run_columns | {name: f"{value:.5g}" for name, value in measures.items()})
    return rows


def render_table(rows: list[dict[str, str]], names: list[str]) -> str:
    """Return the table of means over seeds with intervals, by width, V and arm.

    It contains only cells with more than 390,000 tokens of text.
    """
    lines, groups = [["width, V", "model", *names], ["---", "---", *["---:"] * len(names)]], {}
    for row in rows:
        if int(row["tokens"]) > 390_000:
            groups.setdefault((int(row["width"]), int(row["V"]), row["arm"]), []).append(row)
    for (width, vocab, arm), group in sorted(groups.items(), key=lambda item: (*item[0][:2], ARMS.index(item[0][2]))):
        means = [mean_interval([float(row[name]) for row in group]) for name in names]
        cells = [str(Quantity.of_estimate("", m, unit=UNITS.get(n, NATS))) for n, m in zip(names, means, strict=True)]
        lines.append([f"{width}, {vocab:,}", arm, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(studies: list[Path]) -> None:
    """Measure the cells that the file lacks, and print both tables."""
    rows = list(csv.DictReader(CSV_FILE.open(newline="", encoding="utf-8"))) if CSV_FILE.exists() else []
    measured = {(row["study"], row["cell"]) for row in rows}
    for cell in sorted(path.parent for study in studies for path in study.glob(f"*/{RESULTS}")):
        if (cell.parent.name, cell.name) not in measured:
            rows += measure_cell(cell)
            write_table(CSV_FILE, rows)
    print(render_table(rows, ABLATION_COLUMNS), render_table(rows, list(FIRST_MLP_COLUMNS)), sep="\n\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
