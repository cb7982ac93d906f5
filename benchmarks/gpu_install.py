"""Twelve families of models, installed and plain, over 20 steps in fp32: a phase of `benchmarks.gpu`.

Both train from the same weights on the same batches with SGD. The figures are the largest relative distance of a step's
loss, and that of all weights after the last step. Every step must use the fused loss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tiewise
from benchmarks.gpu_checks import Figure, Outcome, Setup, describe_outcome, format_outcome, make_batch, run_check
from benchmarks.gpu_record import PhaseResult, describe_card, read_record, write_record

LIMIT = 1e-5
STEPS = 20
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "gemma": DECODER,
    "gemma2": DECODER,
    "phi": DECODER,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": DECODER,
    "opt": DECODER | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
VOCABULARY = {"vocab_size": 503, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
WITHOUT_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout", "dropout_rate")


@dataclass(frozen=True)
class Run:
    """Losses of the steps, and all weights after the last."""

    losses: Tensor
    weights: Tensor


def build_model(name: str) -> Any:
    """Build a small random tied model of a family, without dropout."""
    import transformers as tr

    torch.manual_seed(1)
    config = tr.AutoConfig.for_model(name, **FAMILIES[name], **VOCABULARY)
    for option in WITHOUT_DROPOUT:
        if hasattr(config, option):
            setattr(config, option, 0.0)
    auto = tr.AutoModelForSeq2SeqLM if config.is_encoder_decoder else tr.AutoModelForCausalLM
    return auto.from_config(config)


def train(model: Any, device: str) -> Run:
    """Train with SGD on the same batch in every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch, losses = make_batch(device), []
    model.train()
    for _ in range(STEPS):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    weights = [parameter.detach().double().reshape(-1) for parameter in model.parameters()]
    return Run(torch.stack(losses), torch.cat(weights))


def compare_family(name: str, setup: Setup) -> list[Figure]:
    """Return the distances of an installed model from the plain one."""
    plain = train(build_model(name).to(setup.device), setup.device)
    model = build_model(name).to(setup.device)
    handle = tiewise.install(model)
    installed = train(model, setup.device)
    by_step = (installed.losses / plain.losses - 1).abs().max().item()
    by_weight = ((installed.weights - plain.weights).norm() / plain.weights.norm()).item()
    return [
        Figure("fused losses missing", STEPS - handle.counts.fused, 0),
        Figure("loss of a step", by_step, LIMIT),
        Figure("weights", by_weight, LIMIT),
    ]


def run_family(name: str, setup: Setup) -> Outcome:
    """Return the outcome of one family under its name."""
    return run_check(lambda setup: compare_family(name, setup), setup, name)


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Compare the families that the file does not have as right, until the deadline."""
    record = read_record(path, describe_card(setup.device))
    families = record.setdefault("families", {})
    result = PhaseResult()
    for name in FAMILIES:
        is_right = name in families and families[name]["state"] == "right"
        if not is_right and time.monotonic() > deadline:
            result.missing += 1
            continue
        if not is_right:
            outcome = run_family(name, setup)
            print(format_outcome(outcome), flush=True)
            families[name] = describe_outcome(outcome)
            write_record(path, record)
        result.add(name, families[name]["state"], families[name]["why"])
    return result
