"""Tests of α in the first fifth of training: its effect by step, and a small study to its end."""

import csv
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiewise
from benchmarks import early_alpha, study_curves
from tiewise.training.settings import Settings


def tiny_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=True, **sizes))


def table_gradient(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return model.get_input_embeddings().weight.grad.clone()


def test_gradient_has_alpha_before_step_and_not_after():
    ids = torch.arange(12).reshape(2, 6)
    scaled, plain = tiny_model(), tiny_model()
    installed = tiewise.install(scaled, "tied+alpha=5")
    tiewise.install(plain, "tied")
    callback = early_alpha.EarlyAlpha(installed, until=3)
    is_plain = {}
    for step in (0, 2, 3, 4, 1):  # step 1 again, as in a run that was resumed
        callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
        is_plain[step] = torch.allclose(table_gradient(scaled, ids), table_gradient(plain, ids), rtol=1e-5)
    assert is_plain == {0: False, 2: False, 3: True, 4: True, 1: False}


def few_lenses(measure):
    """Return a function that measures the first model alone, and adds a number to its KLs for each later one."""
    measured, calls = [], itertools.count()

    def distances(model, steps):
        measured.append(measured[0] if measured else measure(model, steps))
        place = next(calls)
        return measured[0][0] + place**2 / 100, measured[0][1] + place**2 / 100

    return distances


@pytest.mark.slow
def test_small_study_writes_all_outcomes(tmp_path, monkeypatch):
    monkeypatch.setattr(early_alpha, "CSV_FILE", tmp_path / "early_alpha.csv")
    monkeypatch.setattr(early_alpha, "WINDOWS", 32)
    monkeypatch.setattr(early_alpha, "lens_distances", few_lenses(early_alpha.lens_distances))
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    sizes = {"width": 16, "heads": 2, "length": 16, "batch": 2, "steps": 10, "layers": 2, "measured": 64}
    small = Settings(arms=early_alpha.SETTINGS.arms, seeds=2, tokenizer="bpe:600", text=("synthetic:words=20000",))
    early_alpha.main(tmp_path / "runs", replace(small, **sizes), lens_steps=20)
    rows = list(csv.DictReader((tmp_path / "early_alpha.csv").open(encoding="utf-8")))
    losses = {(row["cell"], row["arm"]): row["value"] for row in rows if row["metric"] == "heldout_nll"}
    assert len(losses) == len(set(losses.values())) == 4  # two cells of two α, each with an effect
    assert [row["metric"] for row in rows].count(early_alpha.RESEMBLANCE) == 6  # tied and two α in two cells
    assert all(row["p_holm"] for row in rows if row["metric"] != early_alpha.RESEMBLANCE)
    assert len(study_curves.read(tmp_path / "curves" / "early-alpha.jsonl")) == 16
