"""Change of the cost of tying between two studies: `python -m benchmarks.cost_change OLD NEW FILE`.

Both studies have the same texts, seeds and arms, and cells of the same names; their settings differ otherwise. A row is
a cell that both have: tied less untied in the new study, less the same in the old one, in nats per token of held-out
text. It is paired over seeds and held-out documents, with Holm's correction over the rows. The table is written to
`benchmarks/results/FILE.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.contrasts import OUT, read_cells
from benchmarks.tables import write_table
from tiewise.training.document_losses import DocumentDifferences, document_differences
from tiewise.training.results import Comparison, Difference, correct_by_holm, paired

REFERENCE, ARM = "untied", "tied"


def cost_by_seed(comparison: Comparison) -> list[float]:
    """Return tied less untied of every seed, in nats per token."""
    pairs = zip(comparison.of(REFERENCE), comparison.of(ARM), strict=True)
    return [tied.heldout_nll - untied.heldout_nll for untied, tied in pairs]


def cost_by_document(comparison: Comparison) -> DocumentDifferences:
    """Return tied less untied by seed and held-out document.

    ValueError: the runs have no losses by document.
    """
    pairs = zip(comparison.of(REFERENCE), comparison.of(ARM), strict=True)
    costs = document_differences([(untied.documents, tied.documents) for untied, tied in pairs])
    if costs is None:
        raise ValueError("the runs have no losses by document")
    return costs


def change(old: Comparison, new: Comparison) -> Difference:
    """Return the cost in the new comparison less that in the old one.

    ValueError: the held-out documents or the seeds differ.
    """
    before, after = cost_by_document(old), cost_by_document(new)
    if before.tokens.tolist() != after.tokens.tolist() or old.seeds != new.seeds:
        raise ValueError("the comparisons differ in held-out documents or seeds")
    documents = replace(after, nats=after.nats - before.nats)
    return paired(cost_by_seed(old), cost_by_seed(new), documents=documents)


def table(old: Mapping[str, Comparison], new: Mapping[str, Comparison]) -> list[dict[str, str]]:
    """Return a row for each cell that both studies have."""
    cells = [cell for cell in new if cell in old]
    corrected = correct_by_holm([change(old[cell], new[cell]) for cell in cells])
    return [_row(cell, old[cell], new[cell], d) for cell, d in zip(cells, corrected, strict=True)]


def _row(cell: str, old: Comparison, new: Comparison, d: Difference) -> dict[str, str]:
    """Return the row of one cell."""
    costs = {name: sum(cost_by_seed(each)) / d.n for name, each in (("old", old), ("new", new))}
    numbers = costs | {"change": d.mean, "low": d.low, "high": d.high}
    row = {"cell": cell} | {name: f"{value:.5f}" for name, value in numbers.items()}
    return row | {"p_holm": f"{d.p:.3g}", "seeds": str(d.n), "documents": str(d.documents)}


def main(arguments: Sequence[str]) -> None:
    """Write the table of two studies."""
    old, new, name = arguments
    write_table(OUT / f"{name}.csv", table(read_cells(Path(old)), read_cells(Path(new))))
    print((OUT / f"{name}.csv").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
