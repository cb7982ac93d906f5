"""Tests of value embeddings: logits against a formula by hand, and a small study to its end."""

import csv

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import study_curves, value_embeddings
from tiewise.lab import sweep

GRID = """
asks: Does it run?
settings: {arms: [tied, untied], seeds: 2, steps: 8, width: 16, heads: 2, length: 8, batch: 2, layers: 2, measured: 64,
  tokenizer: bytes}
axes:
  text: ["synthetic:words=4000"]
"""


def tiny_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **sizes))


def test_factor_zero_changes_nothing_and_other_factors_do():
    ids = torch.arange(12).reshape(2, 6)
    model = tiny_model()
    plain = model(input_ids=ids).logits
    added = value_embeddings.add_value_embeddings(model, seed=3)
    assert not torch.allclose(model(input_ids=ids).logits, plain)
    added.factors.data.zero_()
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_first_token_gets_its_own_row_through_the_output_projection():
    """The first token attends to itself alone, so attention returns its value: W_O (W_V h + λ T[token])."""
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    outputs = []
    attention.o_proj.register_forward_hook(lambda projection, args, output: outputs.append(output[0, 0]))
    ids = torch.tensor([[7, 2, 5]])
    model(input_ids=ids)
    added = value_embeddings.add_value_embeddings(model, seed=3)
    added.factors.data.fill_(0.5)
    model(input_ids=ids)
    row = attention.o_proj.weight @ (0.5 * added.table.weight[7])
    torch.testing.assert_close(outputs[1] - outputs[0], row, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_small_study_compares_with_references_of_equal_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(value_embeddings, "CSV_FILE", tmp_path / "values.csv")
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    (tmp_path / "grid.yaml").write_text(GRID)
    study = tmp_path / "study"
    sweep(str(tmp_path / "grid.yaml"), out=study, quiet=True)
    value_embeddings.main([str(study), str(tmp_path / "runs")])
    value_embeddings.main([str(study), str(tmp_path / "runs")])  # a second call trains nothing and says the same
    rows = list(csv.DictReader((tmp_path / "values.csv").open(encoding="utf-8")))
    assert [row["reference"] for row in rows] == ["tied", "untied"]
    vocab, layers = 257, 2
    extra = {row["reference"]: int(row["parameters"]) - int(row["reference_parameters"]) for row in rows}
    assert extra == {"tied": vocab * 16 + layers, "untied": layers}
    for row in rows:
        assert float(row["loss"]) - float(row["reference_loss"]) == pytest.approx(float(row["difference"]), abs=2e-5)
    assert len(study_curves.read(tmp_path / "curves" / "value-embeddings.jsonl")) == 2
