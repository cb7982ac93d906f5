from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import transfer

LENGTH = 8


@pytest.fixture
def job(monkeypatch):
    """Return a job whose training split has two documents of 400 and 200 tokens, one of each class."""
    tokens = np.append(np.arange(1, 400), 0), np.append(np.arange(1001, 1200), 0)
    starts = [tuple(document[: transfer._HEAD].tolist()) for document in tokens]
    monkeypatch.setattr(transfer, "document_classes", lambda folder: dict(zip(starts, (0, 1), strict=True)))
    text = SimpleNamespace(split={"train": np.concatenate(tokens)}.__getitem__, eos_id=0, folder=None)
    return SimpleNamespace(text=text, settings=SimpleNamespace(length=LENGTH))


def read_tokens(job, split):
    rows = list(transfer.make_passages(job, "source", split, 400, np.random.default_rng(0)))
    return {label: {int(id) for row in rows if row["labels"] == label for id in row["input_ids"]} for label in (0, 1)}


@pytest.mark.parametrize(
    ("split", "first", "second"),
    [("train", (1, 279), (1001, 1139)), ("tune", (280, 319), (1140, 1159)), ("heldout", (320, 399), (1160, 1199))],
)
def test_source_split_is_its_part_of_each_document(job, split, first, second):
    read = read_tokens(job, split)
    assert read[0] <= set(range(first[0], first[1] + 1))
    assert read[1] <= set(range(second[0], second[1] + 1))
    assert {first[0], first[1]} <= read[0] or split == "train"  # 400 draws reach both ends of a short part
    assert {second[0], second[1]} <= read[1] or split == "train"


def test_lowest_tuning_loss_keeps_the_weights_of_its_step():
    model, kept = nn.Linear(1, 1, bias=False), transfer.KeepLowest()
    for step, loss in ((25, 0.9), (50, 0.4), (75, 0.6), (100, 0.4)):
        torch.nn.init.constant_(model.weight, step)
        state = SimpleNamespace(global_step=step)
        kept.on_evaluate(None, state, None, {"eval_loss": loss}, model=model)
    assert kept.step == 50
    assert kept.weights["weight"].item() == 50
