"""Accuracy of fine-tuning pretrained and untrained bodies: `python -m benchmarks.transfer CELL …`.

CELL is a cell of a finished sweep; the atlas uses runs/rank/tokenizer=bpe-1024 (decoders) and
runs/sharing-by-depth/layers=6 (ALBERTs). The script fine-tunes all parameters of an arm's saved model, with a new
linear head on the mean of its last states. It does the same with the untrained body from which that training started.
Training uses passages of the training split. Every 25 steps the loss on passages of the tuning split is measured, and
the accuracy is that of the step with the lowest one, on passages of the held-out split. These two splits have few
topics, so for `source` the three are parts of each training document: its first seven tenths, the next tenth and its
last fifth. Each task has two classes of equal size:

    source     a topic of the language reference, or a module's docstrings (decoders only)
    swapped    unchanged, or with the two tokens exchanged in half of the pairs of neighbours
    order      unchanged, or with the two segments of an ALBERT's row (halves of a decoder's passage) exchanged

Two kinds of rows were added after the others had been seen: ALBERTs that share only attention or only the feed-forward
part and, last, the order of a decoder's passages. A trial of the latter with one seed had been at chance.

`benchmarks/results/transfer.csv` receives each accuracy at once, with the chosen step and the accuracy of the last
step. Later calls read it from there.
"""

from __future__ import annotations

import copy
import csv
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import tiewise.models  # noqa: F401  (registers the ALBERT class for `load`)
from benchmarks.tables import write_table
from tiewise.boundary.hf import load
from tiewise.training.compare import make_jobs, open_run, with_seed
from tiewise.training.data.corpus import load_prepared
from tiewise.training.data.documents import paragraphs
from tiewise.training.data.sentence_pairs import MARKS
from tiewise.training.data.sources import builtin_texts
from tiewise.training.data.training_rows import Masking, PairRows, split_sentences
from tiewise.training.run import kind_of
from tiewise.training.trainer import Job

CSV_FILE = Path(__file__).parent / "results" / "transfer.csv"
ARMS = (
    *("tied", "factored:4", "factored:16", "factored:64"),
    *(f"factored:32+share={shared}" for shared in ("none", "attention", "ffn", "all")),
)
SEEDS, STEPS, BATCH, RATE = 5, 200, 16, 2e-3
EVERY = 25  # steps between two measurements of the tuning loss
TUNING, HELD_OUT = 500, 1000  # passages
SOURCE_PARTS = {"train": (0.0, 0.7), "tune": (0.7, 0.8), "heldout": (0.8, 1.0)}  # of each training document
_HEAD = 16  # first tokens that identify a document
KEY = ("study", "cell", "arm", "task", "start", "seed")  # columns that tell the rows apart
Row = dict[str, Tensor]


class Classifier(nn.Module):
    """Body with a linear head of two classes on the mean of its last states."""

    def __init__(self, body: nn.Module, width: int):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits [B, 2] of passages [B, T]."""
        hidden = self.body(input_ids=input_ids, output_hidden_states=True, **inputs).hidden_states[-1]
        is_token = inputs.get("attention_mask", torch.ones_like(input_ids)).unsqueeze(-1)
        logits = self.head((hidden * is_token).sum(1) / is_token.sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class KeepLowest(TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types
    """Callback that keeps the step with the lowest tuning loss, and a copy of its weights."""

    def __init__(self) -> None:
        self.loss, self.step = math.inf, 0
        self.weights: dict[str, Tensor] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kw: Any) -> None:
        """Keep this step if its loss is the lowest so far."""
        if metrics["eval_loss"] < self.loss:
            self.loss, self.step = metrics["eval_loss"], state.global_step
            self.weights = copy.deepcopy(kw["model"].state_dict())


@dataclass(frozen=True)
class Measured:
    """Accuracy on the held-out passages at the chosen step and at the last one."""

    best: float
    last: float
    step: int  # the chosen one

    def columns(self) -> dict[str, str]:
        """Return the columns of a row."""
        return {"accuracy": f"{self.best:.3f}", "last": f"{self.last:.3f}", "step": str(self.step)}


def exchange_neighbours(ids: np.ndarray, positions: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Exchange the two tokens in half of the pairs that consecutive `positions` form."""
    chosen = 2 * generator.choice(len(positions) // 2, max(1, len(positions) // 4), replace=False)
    result, first, second = ids.copy(), positions[chosen], positions[chosen + 1]
    result[first], result[second] = ids[second], ids[first]
    return result


def make_passages(job: Job, task: str, split: str, count: int, generator: np.random.Generator) -> Iterator[Row]:
    """Yield passages of a decoder's text, each within one document."""
    tokens, length = np.array(job.text.split("train" if task == "source" else split), np.int64), job.settings.length
    ends = np.flatnonzero(tokens == job.text.eos_id)
    starts = np.append(0, ends[:-1] + 1)
    if task == "source":
        class_of = document_classes(job.text.folder)
        classes = np.array([class_of.get(tuple(tokens[start : start + _HEAD].tolist()), -1) for start in starts])
        first, last = SOURCE_PARTS[split]
        sizes = ends - starts
        starts, ends = starts + (sizes * first).astype(int), starts + (sizes * last).astype(int)
    passage_counts = np.maximum(ends - starts - length + 1, 0)  # number of passages in each document
    for number in range(count):
        label = number % 2
        weights = passage_counts * (classes == label) if task == "source" else passage_counts
        document = generator.choice(len(starts), p=weights / weights.sum())
        start = int(generator.integers(starts[document], starts[document] + passage_counts[document]))
        ids = tokens[start : start + length]
        if label and task == "swapped":
            ids = exchange_neighbours(ids, np.arange(length), generator)
        if label and task == "order":
            ids = np.roll(ids, length // 2)
        yield {"input_ids": torch.from_numpy(ids), "labels": torch.tensor(label)}


@lru_cache(1)
def document_classes(data: Path) -> dict[tuple[int, ...], int]:
    """Return the class of each built-in document by its first tokens.

    0 is a topic of the language reference, 1 is a module.
    """
    encode = load_prepared(data).tokenizer.encode
    documents = ((name, "\n\n".join(paragraphs(text))[:400]) for name, text in builtin_texts())
    return {tuple(encode(text)[:_HEAD]): int(name.startswith("module")) for name, text in documents}


def make_albert_rows(job: Job, task: str, split: str, count: int, generator: np.random.Generator) -> Iterator[Row]:
    """Yield an ALBERT's rows without masks."""
    objective = "sop" if task == "order" else "none"
    marks = [getattr(job.text.tokenizer, f"{name}_id") for name in MARKS]
    rows = PairRows(
        split_sentences(job.text, split), job.settings.kind_options.packing(job.settings.length, objective),
        Masking(masked=0, random=0), seed=int(generator.integers(1 << 30)), count=count,
    )  # fmt: skip
    for number, row in enumerate(rows):
        ids, label = row["input_ids"].numpy(), number % 2
        if task == "order":
            label = 1 - int(row["pair_labels"])
        elif label:
            ids = exchange_neighbours(ids, np.flatnonzero(~np.isin(ids, marks)), generator)  # [SEP] keeps its position
        inputs = {name: row[name] for name in ("token_type_ids", "attention_mask")}
        yield {"input_ids": torch.from_numpy(ids), "labels": torch.tensor(label), **inputs}


def measure_accuracy(job: Job, task: str, start: str) -> Measured:
    """Fine-tune an arm's model of one seed and return its accuracies."""
    make_rows = make_albert_rows if job.settings.kind == "albert" else make_passages
    counts = {"train": STEPS * BATCH, "heldout": HELD_OUT, "tune": TUNING}
    rows = {
        split: list(make_rows(job, task, split, count, np.random.default_rng([number, job.seed])))
        for number, (split, count) in enumerate(counts.items(), 1)
    }
    body = load(job.folder / "final") if start == "pretrained" else kind_of(job.settings).build(job).model
    torch.manual_seed(job.seed)
    model, kept = Classifier(body, job.settings.width), KeepLowest()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, learning_rate=RATE, warmup_steps=STEPS // 10, seed=job.seed, use_cpu=True,
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=100,
            eval_strategy="steps", eval_steps=EVERY,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows["train"], eval_dataset=rows["tune"], callbacks=[kept])
        trainer.remove_callback(PrinterCallback)  # one line per accuracy is enough
        trainer.train()
        last = heldout_accuracy(trainer, rows["heldout"])
        model.load_state_dict(kept.weights)
        return Measured(heldout_accuracy(trainer, rows["heldout"]), last, kept.step)


def heldout_accuracy(trainer: Trainer, rows: list[Row]) -> float:
    """Return the share of rows that the model classifies right."""
    prediction = trainer.predict(rows)
    return float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())


def main(cells: list[Path]) -> None:
    """Fine-tune the models that the file lacks, seed by seed."""
    rows = list(csv.DictReader(CSV_FILE.open(newline="", encoding="utf-8"))) if CSV_FILE.exists() else []
    measured = {tuple(row[name] for name in KEY) for row in rows}
    for cell in cells:
        settings, text = open_run(cell, single=False)
        tasks = ("swapped", "order") if settings.kind == "albert" else ("source", "swapped", "order")
        jobs = [job for job in make_jobs(settings, text, cell) if job.arm in ARMS]
        cases = [
            (seed, job, task, start)
            for seed in range(1, SEEDS + 1)
            for job in jobs
            for task in tasks
            for start in ("untrained", "pretrained")
        ]
        for seed, job, task, start in cases:
            values = cell.parent.name, cell.name, job.arm, task, start, str(seed)
            if values in measured:
                continue
            accuracies = measure_accuracy(with_seed(job, seed, ""), task, start)
            rows.append(dict(zip(KEY, values, strict=True)) | accuracies.columns())
            write_table(CSV_FILE, rows)
            print(*rows[-1].values(), file=sys.stderr)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
