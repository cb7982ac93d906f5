"""Value embeddings in place of a free head: `python -m benchmarks.value_embeddings runs/untie-late FOLDER`.

Study 21. An untied head costs one more table [V, D]. The speed runs of modded-nanogpt spend tables elsewhere: as value
embeddings, rows that are looked up by the input token and added to the values of attention. Here one table serves all
layers of a tied model, so it has exactly the parameters of the untied one:

    values_l = W_V h + λ_l·T[token],   λ_l = 1 at first, T ~ N(0, 1/D)

The settings, cells and seeds are those of the study `untie-late`, whose tied and untied runs are the references. Each
run keeps its best step. Fixed before any run: value embeddings less tied and less untied in each cell, with intervals
over seeds and documents, and Holm's correction over the four. Sixteen runs take ten minutes of one core; a second call
continues. The table is printed and written to `benchmarks/results/value_embeddings.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import study_curves
from benchmarks.contrasts import Contrast, contrast_rows, read_cells
from benchmarks.study_runs import train_comparison
from benchmarks.tables import write_table
from tiewise.boundary.installation import Installed
from tiewise.training.kinds.decoder import KIND
from tiewise.training.results import Comparison
from tiewise.training.study.grid import GRID, StudyGrid
from tiewise.training.trainer import Job

CSV_FILE = Path(__file__).parent / "results" / "value_embeddings.csv"
NAME = "value-embeddings"
ARM = "tied, value embeddings"
REFERENCES = ("tied", "untied")
TABLE_SEED = 2_000_003  # added to a run's seed for that of its value table


class ValueEmbeddings(nn.Module):
    """A table [V, D] whose rows are added to the values of each layer's attention, times a learned factor."""

    def __init__(self, vocab: int, width: int, layers: int, seed: int) -> None:
        super().__init__()
        rows = torch.empty(vocab, width).normal_(0, width**-0.5, generator=torch.Generator().manual_seed(seed))
        self.table = nn.Embedding(vocab, width, _weight=rows)
        self.factors = nn.Parameter(torch.ones(layers))
        self.ids: Tensor | None = None  # [B, T] of the present forward pass

    def note_ids(self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the tokens of a forward pass of the body."""
        self.ids = kwargs["input_ids"]

    def add_values(self, layer: int, projection: nn.Module, args: tuple[Any, ...], values: Tensor) -> Tensor:
        """Add rows of the table to the values [B, T, D] of a layer."""
        assert self.ids is not None, "the body has no tokens"
        added: Tensor = values + self.factors[layer] * self.table(self.ids)
        return added


def add_value_embeddings(model: Any, seed: int) -> ValueEmbeddings:
    """Give a Llama value embeddings, as its module `value_embeddings`."""
    config, body = model.config, model.model
    added = ValueEmbeddings(config.vocab_size, config.hidden_size, config.num_hidden_layers, seed)
    model.value_embeddings = added
    body.register_forward_pre_hook(added.note_ids, with_kwargs=True)
    for layer, block in enumerate(body.layers):
        block.self_attn.v_proj.register_forward_hook(partial(added.add_values, layer))
    return added


def build(plain: Callable[[Job], Installed], job: Job) -> Installed:
    """Build the model of a run, with value embeddings."""
    installed = plain(job)
    add_value_embeddings(installed.model, job.seed + TABLE_SEED)
    return installed


def train(study: Path, folder: Path) -> dict[str, Comparison]:
    """Train the runs that the folder lacks; return each cell's comparison with the study's references.

    FileNotFoundError: a cell of the study is not finished.
    """
    cells = StudyGrid.named(str(study / GRID)).cells()
    comparisons = {}
    for cell, references in read_cells(study).items():
        settings = replace(cells[cell], arms=("tied",))
        with patch.object(KIND, "build", partial(build, KIND.build)):
            values = train_comparison(settings, folder / cell, "benchmarks.value_embeddings")
        runs = [run for arm in REFERENCES for run in references.of(arm)]
        runs += [replace(run, arm=ARM) for run in values.runs]
        comparisons[cell] = replace(references, arms=[*REFERENCES, ARM], runs=runs)
    return comparisons


def main(arguments: Sequence[str]) -> None:
    """Train beside a finished study, and write table and curves."""
    study, folder = map(Path, arguments)
    comparisons = train(study, folder)
    contrasts = [Contrast(cell, ARM, reference) for cell in comparisons for reference in REFERENCES]
    write_table(CSV_FILE, contrast_rows(comparisons, contrasts))
    print(CSV_FILE.read_text(encoding="utf-8"))
    study_curves.write(study_curves.collect(folder), study_curves.CURVES / f"{NAME}.jsonl")


if __name__ == "__main__":
    main(sys.argv[1:])
