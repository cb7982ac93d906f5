"""Is what pretraining taught of use for a task? `python -m benchmarks.transfer CELL …`: cells of finished sweeps.

The atlas has those of runs/rank/tokenizer=bpe-1024 (decoders) and runs/sharing-by-depth/layers=6 (ALBERTs). An arm's
kept model is fine-tuned whole, with a new linear head on the mean of its last states; and so is the model that its
training began with, the same body untrained. Half of the passages are of either class. They are learnt from in the
training split and judged in the held-out split; of sources, in the first four fifths and in the last of each document
of the training split, for the other has two topics.

    source     from a topic of the language reference, or from a module's docstrings (decoders)
    swapped    as they were, or in half of the pairs of neighbours the two have changed places
    order      as they were, or the two segments of an ALBERT's row, the two halves of a decoder's, have changed places

ALBERTs that share only attention or only the feed-forward part were added after the other rows had been seen, and last
the order of a decoder's passages, which a trial of one seed had found at chance.

Accuracies go into `benchmarks/results/transfer.csv` as they are found, and are taken from there by a later call.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import tiewise.models  # noqa: F401  (an ALBERT is loaded by its name)
from tiewise.boundary.hf import load
from tiewise.training.compare import make_jobs, open_run, with_seed
from tiewise.training.data.corpus import load_prepared
from tiewise.training.data.documents import paragraphs
from tiewise.training.data.sentence_pairs import MARKS
from tiewise.training.data.sources import builtin_texts
from tiewise.training.data.training_rows import Masking, PairRows, split_sentences
from tiewise.training.run import kind_of
from tiewise.training.trainer import Job

KEPT = Path(__file__).parent / "results" / "transfer.csv"
ARMS = (
    *("tied", "factored:4", "factored:16", "factored:64"),
    *(f"factored:32+share={shared}" for shared in ("none", "attention", "ffn", "all")),
)
SEEDS, STEPS, BATCH, RATE, JUDGED = 3, 200, 16, 2e-3, 1000
_HEAD = 16  # tokens that a document is known by
Row = dict[str, Tensor]


class Judge(nn.Module):
    """A body with a linear head of two classes on the mean of its last states."""

    def __init__(self, body: nn.Module, width: int):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, labels: Tensor, **given: Tensor) -> dict[str, Tensor]:
        """Judge passages [B, T]."""
        hidden = self.body(input_ids=input_ids, output_hidden_states=True, **given).hidden_states[-1]
        there = given.get("attention_mask", torch.ones_like(input_ids)).unsqueeze(-1)
        logits = self.head((hidden * there).sum(1) / there.sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def swapped(ids: np.ndarray, places: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Exchange neighbours in half of the pairs that these places in a row make."""
    chosen = 2 * draw.choice(len(places) // 2, max(1, len(places) // 4), replace=False)
    made, first, second = ids.copy(), places[chosen], places[chosen + 1]
    made[first], made[second] = ids[second], ids[first]
    return made


def passages(job: Job, task: str, split: str, count: int, draw: np.random.Generator) -> Iterator[Row]:
    """Yield passages of a decoder's text, each from within a document."""
    tokens, length = np.array(job.text.split("train" if task == "source" else split), np.int64), job.settings.length
    ends = np.flatnonzero(tokens == job.text.eos_id)
    begins = np.append(0, ends[:-1] + 1)
    if task == "source":
        known = sources(job.text.folder)
        source = np.array([known.get(tuple(tokens[at : at + _HEAD].tolist()), -1) for at in begins])
        middle = begins + (ends - begins) * 4 // 5
        begins, ends = (begins, middle) if split == "train" else (middle, ends)
    room = np.maximum(ends - begins - length + 1, 0)  # passages that a document has
    for number in range(count):
        label = number % 2
        weights = room * (source == label) if task == "source" else room
        document = draw.choice(len(begins), p=weights / weights.sum())
        at = int(draw.integers(begins[document], begins[document] + room[document]))
        ids = tokens[at : at + length]
        if label and task == "swapped":
            ids = swapped(ids, np.arange(length), draw)
        if label and task == "order":
            ids = np.roll(ids, length // 2)
        yield {"input_ids": torch.from_numpy(ids), "labels": torch.tensor(label)}


@lru_cache(1)
def sources(data: Path) -> dict[tuple[int, ...], int]:
    """A built-in document's first tokens → 0 for a topic of the language reference, 1 for a module."""
    encode = load_prepared(data).tokenizer.encode
    begins = ((name, "\n\n".join(paragraphs(said))[:400]) for name, said in builtin_texts())
    return {tuple(encode(said)[:_HEAD]): int(name.startswith("module")) for name, said in begins}


def pairs(job: Job, task: str, split: str, count: int, draw: np.random.Generator) -> Iterator[Row]:
    """Yield an ALBERT's rows, with nothing masked."""
    objective = "sop" if task == "order" else "none"
    marks = [getattr(job.text.tokenizer, f"{name}_id") for name in MARKS]
    rows = PairRows(
        split_sentences(job.text, split), job.settings.kind_options.packing(job.settings.length, objective),
        Masking(masked=0, random=0), seed=int(draw.integers(1 << 30)), count=count,
    )  # fmt: skip
    for number, row in enumerate(rows):
        ids, label = row["input_ids"].numpy(), number % 2
        if task == "order":
            label = 1 - int(row["pair_labels"])
        elif label:
            ids = swapped(ids, np.flatnonzero(~np.isin(ids, marks)), draw)  # [SEP] stays where it is
        given = {name: row[name] for name in ("token_type_ids", "attention_mask")}
        yield {"input_ids": torch.from_numpy(ids), "labels": torch.tensor(label), **given}


def accuracy(job: Job, task: str, start: str) -> float:
    """Fine-tune an arm's model of one seed, and judge."""
    make = pairs if job.settings.kind == "albert" else passages
    learnt = list(make(job, task, "train", STEPS * BATCH, np.random.default_rng([1, job.seed])))
    judged = list(make(job, task, "heldout", JUDGED, np.random.default_rng([2, job.seed])))
    body = load(job.folder / "final") if start == "pretrained" else kind_of(job.settings).build(job).model
    torch.manual_seed(job.seed)
    model = Judge(body, job.settings.width)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, learning_rate=RATE, warmup_steps=STEPS // 10, seed=job.seed, use_cpu=True,
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=100,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=learnt)
        trainer.train()
        found = trainer.predict(judged)
    return float((found.predictions.argmax(-1) == found.label_ids).mean())


def main(cells: list[Path]) -> None:
    """Fine-tune what is not yet known, seed by seed."""
    rows = list(csv.DictReader(KEPT.open(newline="", encoding="utf-8"))) if KEPT.exists() else []
    known = {tuple(list(row.values())[:-1]) for row in rows}
    for cell in cells:
        settings, text = open_run(cell, single=False)
        tasks = ("swapped", "order") if settings.kind == "albert" else ("source", "swapped", "order")
        jobs = [job for job in make_jobs(settings, text, cell) if job.arm in ARMS]
        every = [
            (s, job, t, b)
            for s in range(1, SEEDS + 1)
            for job in jobs
            for t in tasks
            for b in ("untrained", "pretrained")
        ]
        for seed, job, task, start in every:
            at = {
                "study": cell.parent.name,
                "cell": cell.name,
                "arm": job.arm,
                "task": task,
                "start": start,
                "seed": str(seed),
            }
            if tuple(at.values()) not in known:
                rows.append({**at, "accuracy": f"{accuracy(with_seed(job, seed, ''), task, start):.3f}"})
                with KEPT.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(*rows[-1].values(), file=sys.stderr)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
