"""Share of a model's logits and loss that its direct path and first MLP explain.

It is measured for every seed of a sweep.

    python -m benchmarks.atlas_paths runs/size-text-vocabulary

Adds what it finds of each model to `benchmarks/results/atlas_paths.csv`, takes from there what it knows, and prints the
tables of docs/atlas.md: means over seeds with 95 % intervals. Of held-out windows, by the residual stream's sum
h = e + (what all layers wrote), e being the input rows:

logits  ⟨z_e, z⟩ / ‖z‖², both less their mean over V: what e adds to the logits z while the final norm keeps its scale;
        with the layers' share it is 1, so that below zero e speaks against the model's own prediction
loss    of h − e less that of h, in nats: what taking the direct path away costs, the norm taken anew

Of pairs of the built-in text, as `tiewise inspect --only first_mlp` has it: the loss of the direct path alone and with
the first MLP between, and how far each is from symmetry.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import torch

from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import NATS, Quantity
from tiewise.inspection.running.loaded import Opened, open_model
from tiewise.inspection.running.stack import find_stack
from tiewise.inspection.sections.first_mlp import first_mlp_of
from tiewise.inspection.tables.bigram_counts import Chain
from tiewise.training.data.corpus import load_prepared
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison

KEPT = Path(__file__).parent / "results" / "atlas_paths.csv"
WINDOWS, LENGTH = 64, 128
ARMS = ("untied", "tied")
ABLATED = ["loss", "taken away", "logits"]
UNITS = {"logits": "%"}
FIRST = {
    "direct": "loss on the text's pairs, direct",
    "with the first MLP": "loss on the text's pairs, with the first MLP",
    "asymmetry, direct": "asymmetry, direct, centred",
    "asymmetry, with the first MLP": "asymmetry, with the first MLP, centred",
}


@torch.no_grad()
def taken_away(opened: Opened, windows: torch.Tensor) -> dict[str, float]:
    """The direct path's share of logits and of loss, on windows of ids [n, T] held out."""
    stack, sums = find_stack(opened), np.zeros(4)
    for ids in windows.split(8):
        first, *_, last = (states[:, :-1].flatten(0, 1) for states in stack.states(ids))
        targets = ids[:, 1:].reshape(-1, 1)
        whole, without = stack.to_logits(last), stack.to_logits(last - first)
        rms = [
            (h.square().mean(-1, keepdim=True) + opened.model.config.rms_norm_eps).sqrt() for h in (last, last - first)
        ]
        direct = whole - without * rms[1] / rms[0]  # with the final norm's scale as it was; Llama's has no shift
        z, z_direct = (x - x.mean(-1, keepdim=True) for x in (whole, direct))
        losses = [float(-x.log_softmax(-1).gather(1, targets).double().sum()) for x in (whole, without)]
        sums += (*losses, float((z_direct * z).double().sum()), float(z.double().square().sum()))
    count = windows[:, 1:].numel()
    return {"loss": sums[0] / count, "taken away": (sums[1] - sums[0]) / count, "logits": sums[2] / sums[3]}


def seen(cell: Path) -> list[dict[str, str]]:
    """A row for every model of a cell."""
    comparison, text = Comparison.from_dict(read_json(cell / RESULTS)), load_prepared(cell / "data")
    windows = torch.from_numpy(np.array(text.split("heldout")[: WINDOWS * LENGTH], np.int64)).reshape(WINDOWS, LENGTH)
    chain = Chain.of(np.array(text.split("heldout")), text.vocab)
    rows = []
    for arm in ARMS:
        for run in comparison.of(arm):
            opened = open_model(cell / arm / f"seed-{run.seed}" / "final")
            held = {one.name: one.value for one in first_mlp_of(opened, chain=chain).quantities}
            found = taken_away(opened, windows) | {name: float(held[theirs]) for name, theirs in FIRST.items()}
            place = {"study": cell.parent.name, "cell": cell.name, "width": str(comparison.setting["width"])}
            place |= {"V": str(text.vocab), "tokens": str(len(text.split("train"))), "arm": arm, "seed": str(run.seed)}
            rows.append(place | {name: f"{value:.5g}" for name, value in found.items()})
    return rows


def table(rows: list[dict[str, str]], names: list[str]) -> str:
    """By width, vocabulary and boundary, where there is much text: means over seeds with their intervals."""
    lines, found = [["width, V", "model", *names], ["---", "---", *["---:"] * len(names)]], {}
    for row in rows:
        if int(row["tokens"]) > 390_000:
            found.setdefault((int(row["width"]), int(row["V"]), row["arm"]), []).append(row)
    for (width, vocab, arm), here in sorted(found.items(), key=lambda item: (*item[0][:2], ARMS.index(item[0][2]))):
        means = [mean_interval([float(row[name]) for row in here]) for name in names]
        cells = [str(Quantity.of_estimate("", m, unit=UNITS.get(n, NATS))) for n, m in zip(names, means, strict=True)]
        lines.append([f"{width}, {vocab:,}", arm, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(studies: list[Path]) -> None:
    """Look into what is not yet known, and print both tables."""
    rows = list(csv.DictReader(KEPT.open(newline="", encoding="utf-8"))) if KEPT.exists() else []
    known = {(row["study"], row["cell"]) for row in rows}
    for cell in sorted(path.parent for study in studies for path in study.glob(f"*/{RESULTS}")):
        if (cell.parent.name, cell.name) not in known:
            rows += seen(cell)
            with KEPT.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    print(table(rows, ABLATED), table(rows, list(FIRST)), sep="\n\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
