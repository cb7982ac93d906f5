"""Bytes: on disk, in training, and moved per decoded token. Exact but for the activations, which are an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.core.backends import chunk_rows
from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture
from tiewise.planning.budget import Budget

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Numbers kept per trained parameter, in the weights' dtype: torch's optimizers keep state as the parameter is.
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}
MASTER = "adamw-bf16-master"  # bf16 weights and gradients, an fp32 master copy and both moments in fp32
OPTIMIZERS = (*STATE, MASTER)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises:
        PlanError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise PlanError(f"unknown dtype {dtype[:40]!r}", f"choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank in one step: B sequences of T."""

    batch: int = 8
    length: int = 1024

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 1:
            raise PlanError(f"tokens {self.batch} × {self.length}", "batch and length must be 1 or more")

    @property
    def count(self) -> int:
        """N."""
        return self.batch * self.length


@dataclass(frozen=True)
class TrainingBytes:
    """What an optimizer needs, in bytes."""

    weights: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """Sum."""
        return self.weights + self.gradients + self.state


def checkpoint_bytes(parameters: int) -> dict[str, int]:
    """Bytes of the tensors of a checkpoint, by dtype, a tied table written once (its header is not counted)."""
    return {dtype: parameters * size for dtype, size in DTYPES.items()}


def training_bytes(stored: int, trainable: int, dtype: str) -> dict[str, TrainingBytes]:
    """Weights, gradients and optimizer state, by optimizer; frozen parameters have weights alone.

    Args:
        stored: unique parameters held.
        trainable: those that get a gradient.
        dtype: of weights, gradients and (but for the row with a master copy) state.
    """
    size = dtype_bytes(dtype)
    found = {
        name: TrainingBytes(stored * size, trainable * size, trainable * size * numbers)
        for name, numbers in STATE.items()
    }
    found[MASTER] = TrainingBytes(stored * 2, trainable * 2, trainable * 12)
    return found


@dataclass(frozen=True)
class LogitsBytes:
    """Memory of logits and loss at their peak, beside weights and their gradient.

    `plain`: the logits in the weights' dtype, and in fp32 log-probabilities, the gradient of the loss and that of the
    logits: 16 bytes per element of (N, V) in fp32, 14 in bf16 (measured with PyTorch 2.13).
    `fused_cpu`, `fused_cuda`: one chunk of fp32 logits (and its copy in a narrow dtype), the features' gradient in
    fp32, and where weights are narrow the table's fp32 gradient buffer.
    """

    plain: int
    fused_cpu: int
    fused_cuda: int


def logits_bytes(tokens: int, vocab: int, width: int, dtype: str) -> LogitsBytes:
    """Count for N tokens over V words against tables of E columns."""
    size = dtype_bytes(dtype)
    narrow = size if size < 4 else 0
    fused = {
        device: chunk_rows(tokens, vocab, device) * vocab * (4 + narrow)
        + tokens * width * 4
        + (vocab * width * 4 if narrow else 0)
        for device in ("cpu", "cuda")
    }
    return LogitsBytes(tokens * vocab * (12 + size), fused["cpu"], fused["cuda"])


@dataclass(frozen=True)
class ActivationBytes:
    """An estimate: values kept for the backward pass, without attention scores (fused attention) and dropout masks.

    `kept`: inputs of every product, norm and activation. `checkpointed`: one hidden state per layer.
    """

    kept: int
    checkpointed: int


def activation_bytes(architecture: Architecture, tokens: int, dtype: str) -> ActivationBytes:
    """Estimate for N tokens; sharing does not change it, since every application keeps its own."""
    size = dtype_bytes(dtype)
    kept = sum(len(stack.layers) * stack.saved_per_token for stack in architecture.stacks)
    return ActivationBytes(tokens * kept * size, tokens * architecture.layers * architecture.width * size)


@dataclass(frozen=True)
class Flops:
    """Per token: 2 per multiplied weight forward and 4 backward, the head counted whether or not it is tied.

    Attention scores and their products add 4·T·heads·head width per layer forward and twice that backward, over the
    whole length T (no discount for the causal half). Tying, norms, biases and lookups do not change it.
    """

    forward: int
    backward: int


def flops_per_token(budget: Budget, architecture: Architecture, length: int) -> Flops:
    """Count for sequences of T tokens; in an encoder-decoder for one source and one target token together."""
    scores = sum(4 * length * len(s.layers) * s.cache.heads * s.cache.head_dim for s in architecture.stacks)
    forward = 2 * budget.multiplied + scores
    return Flops(forward, 2 * forward)


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes moved to decode one token of one sequence.

    `weights`: every weight it needs, once per application (one row of the lookup, the table once for the head, chosen
    experts alone). `cache_per_token`: keys and values that the token adds; `cache`: read at the full length (windows
    are not discounted; Mamba's state does not grow).
    """

    weights: int
    cache_per_token: int
    cache: int


def decode_bytes(budget: Budget, architecture: Architecture, length: int, dtype: str) -> DecodeBytes | None:
    """Count at a context of T tokens; None where the model does not decode (encoders)."""
    stack = next((s for s in architecture.stacks if s.name == "decoder"), None)
    if stack is None or budget.read is None:
        return None
    size, layers = dtype_bytes(dtype), len(stack.layers)
    across = 2 if len(architecture.stacks) > 1 else 1  # cross-attention keeps the source's keys and values too
    per_token = layers * stack.cache.values_per_token * size
    fixed = layers * stack.cache.state * size
    return DecodeBytes(budget.read * size, per_token + fixed, per_token * length * across + fixed)
