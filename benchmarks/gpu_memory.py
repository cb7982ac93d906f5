"""Peak memory of a training step, as torch measures it and as `plan` predicts it: a phase of `benchmarks.gpu`.

A step is forward, backward and a fused AdamW of an installed model, without dropout. The figure is the relative
distance of the prediction; it is wrong above a tenth. Another check compares a tied step with one gradient buffer,
which saves one [V, D], with a step whose paths have separate ones. On a CPU, torch's profiler measures small models
that take the code path of a GPU without its kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tiewise
from benchmarks.gpu_bars import ONE_BUFFER, list_memory_bars
from benchmarks.gpu_checks import Figure, Setup, run_checks
from benchmarks.gpu_record import PhaseResult
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import tied_lookup
from tiewise.core.backends import LARGE_CHUNKS_IN_MEMORY
from tiewise.planning.costs import DTYPES, Setting, activation_bytes, row_loss_bytes, step_bytes
from tiewise.planning.read_config import read

LIMIT = 0.1
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Case:
    """A model, its type, and the tokens of a step."""

    family: str
    dtype: str
    batch: int
    length: int
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """The conditions of a plan."""
        return Setting(batch=self.batch, length=self.length, dtype=self.dtype)


def make_llama(width: int, layers: int, vocab: int) -> dict[str, Any]:
    """Return sizes of a Llama with two heads for each of keys and values."""
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    return heads | {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }


LARGE = {
    "llama, fp32": Case("llama", "float32", 16, 512, make_llama(512, 8, 32_000)),
    "llama, bf16": Case("llama", "bfloat16", 16, 512, make_llama(1024, 12, 128_256)),
    "gpt2, fp32": Case("gpt2", "float32", 8, 1024, WITHOUT_DROPOUT),
}
SMALL = {"llama, fp32": Case("llama", "float32", 8, 128, make_llama(128, 4, 2000))}


def predict_peak(case: Case, config: dict[str, Any], loss: int) -> int:
    """Return the bytes that `plan` predicts for a step with AdamW, given those of the loss."""
    choice = tiewise.plan(config, arms="tied", setting=case.setting).choices[0]
    architecture = read(config)
    table = DTYPES[case.dtype] * architecture.ends.vocab * architecture.ends.width
    activations = activation_bytes(architecture, case.setting)
    return step_bytes(choice["training_bytes"]["adamw"], loss, table, activations)


def predict_loss(case: Case, config: dict[str, Any], setup: Setup) -> int:
    """Return the bytes that `plan` predicts for the loss that runs here."""
    ends = read(config).ends
    if not setup.on_gpu:
        choice = tiewise.plan(config, arms="tied", setting=case.setting).choices[0]
        return int(choice["logits_bytes"]["chunked_cuda"])
    chunk = torch.cuda.get_device_properties(setup.device).total_memory // LARGE_CHUNKS_IN_MEMORY
    return row_loss_bytes(case.setting.tokens, ends.vocab, ends.width, case.dtype, chunk)


def measure_peak(setup: Setup, step: Callable[[], None]) -> int:
    """Return the peak of the bytes that torch allocates during a step, without those allocated before."""
    if not setup.on_gpu:
        return measure_peak_on_cpu(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_peak_on_cpu(step: Callable[[], None]) -> int:
    """Return the same of a CPU, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    results: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most


def count_bytes(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a model's weights and of its optimizer's state."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def compare_step(setup: Setup, case: Case) -> list[Figure]:
    """Return the relative distance of the predicted peak of a step from the measured one."""
    import transformers as tr

    ids_of_tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = tr.AutoConfig.for_model(case.family, **ids_of_tokens, **case.sizes)
    model = tr.AutoModelForCausalLM.from_config(config).to(setup.device, getattr(torch, case.dtype)).train()
    tiewise.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(3, config.vocab_size, (case.batch, case.length), device=setup.device)

    def step() -> None:
        """Take one step."""
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # make the optimizer's state, compile kernels
        step()
    measured = count_bytes(model, optimizer) + measure_peak(setup, step)
    predicted = predict_peak(case, config.to_dict(), predict_loss(case, config.to_dict(), setup))
    name = f"predicted {predicted / 1e6:,.1f} MB, measured {measured / 1e6:,.1f} MB: distance"
    return [Figure(name, abs(predicted / measured - 1), LIMIT)]


def one_buffer(setup: Setup) -> list[Figure]:
    """Return the share of one [V, D] that `tied_lookup` does not save of a step in fp32.

    There are few tokens, so that logits are small next to the table.
    """
    vocab, width, tokens = (128_256, 2048, 64) if setup.on_gpu else (3000, 1024, 16)
    table = (torch.randn(vocab, width, device=setup.device) * width**-0.5).requires_grad_()
    ids = torch.randint(0, vocab, (tokens,), device=setup.device)

    def separate() -> None:
        """Take a step whose lookup has a gradient of its own."""
        linear_cross_entropy(F.embedding(ids, table), table, ids).backward()
        table.grad = None

    def shared() -> None:
        """Take a step whose lookup adds to the gradient of the head."""
        rows, handed = tied_lookup(table, ids)
        linear_cross_entropy(rows, handed, ids).backward()
        table.grad = None

    peaks = []
    for step in (separate, shared):
        step()  # compile kernels
        peaks.append(measure_peak(setup, step))
    name = f"separate {peaks[0] / 1e6:,.1f} MB, one buffer {peaks[1] / 1e6:,.1f} MB: share of [V, D] not saved"
    return [Figure(name, 1 - (peaks[0] - peaks[1]) / table.nbytes, LIMIT)]


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the comparisons that the file does not have as right, until the deadline, and print the bars."""
    cases = LARGE if setup.on_gpu else SMALL
    steps = {name: partial(compare_step, case=case) for name, case in cases.items()}
    result = run_checks(steps | {ONE_BUFFER: one_buffer}, setup, path, deadline)
    if path.exists():
        bars = list_memory_bars(json.loads(path.read_text(encoding="utf-8")))
        print("".join(f"  {bar}\n" for bar in bars), end="", flush=True)
    return result
