"""What a choice costs: bytes on disk, in training, per decoded token and per rank; operations; the first loss.

Exact but for the activations, which are an estimate. Collectives are counted as rings send them, per rank: an
all-reduce of n bytes over p ranks sends 2(p−1)/p·n, an all-gather or reduce-scatter (p−1)/p·n.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from tiewise.core.backends import chunk_rows
from tiewise.core.errors import PlanError
from tiewise.core.files import packaged_json
from tiewise.core.first_loss import POSITIONS, Computed, FirstStep, first_step
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import Architecture, Budget

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Numbers kept per trained parameter, in the weights' dtype: torch's optimizers keep state as the parameter is.
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}
MASTER = "adamw-bf16-master"  # bf16 weights and gradients, an fp32 master copy and both moments in fp32


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number, or that its type is unknown."""
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
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.weights + self.gradients + self.state)


def training_bytes(stored: int, trainable: int, dtype: str) -> dict[str, TrainingBytes]:
    """Weights, gradients and optimizer state, by optimizer; frozen parameters have weights alone."""
    size = dtype_bytes(dtype)
    found = {name: TrainingBytes(stored * size, trainable * size, trainable * size * n) for name, n in STATE.items()}
    return {**found, MASTER: TrainingBytes(stored * 2, trainable * 2, trainable * 12)}


@dataclass(frozen=True)
class LogitsBytes:
    """Memory of logits and loss at their peak, beside weights and their gradient."""

    # the logits in the weights' dtype, and in fp32 log-probabilities, the gradient of the loss and that of the logits:
    # 16 bytes per element of (N, V) in fp32, 14 in bf16 (measured with PyTorch 2.13)
    plain: int
    # one chunk of fp32 logits (and its copy in a narrow dtype), the features' gradient in fp32, and where weights are
    # narrow the table's fp32 gradient buffer
    fused_cpu: int
    fused_cuda: int


def logits_bytes(tokens: int, vocab: int, width: int, dtype: str) -> LogitsBytes:
    """Count for N tokens over V words against tables of E columns."""
    size = dtype_bytes(dtype)
    narrow = size if size < 4 else 0
    whole = tokens * width * 4 + (vocab * width * 4 if narrow else 0)
    chunks = (chunk_rows(tokens, vocab, device) * vocab * (4 + narrow) for device in ("cpu", "cuda"))
    return LogitsBytes(tokens * vocab * (12 + size), *(chunk + whole for chunk in chunks))


@dataclass(frozen=True)
class ActivationBytes:
    """An estimate: values kept for the backward pass, without attention scores (fused attention) and dropout masks."""

    kept: int  # inputs of every product, norm and activation
    checkpointed: int  # one hidden state per layer


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
    scores = sum(4 * length * len(s.layers) * s.heads.count * s.heads.width for s in architecture.stacks)
    forward = 2 * budget.multiplied + scores
    return Flops(forward, 2 * forward)


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes moved to decode one token of one sequence."""

    weights: int  # once per application: one row of the lookup, the table once for the head, chosen experts alone
    cache_per_token: int  # keys and values that the token adds
    cache: int  # read at the full length (windows are not discounted; Mamba's state does not grow)


def decode_bytes(budget: Budget, architecture: Architecture, length: int, dtype: str) -> DecodeBytes | None:
    """Count at a context of T tokens; None where the model does not decode (encoders)."""
    stack = next((s for s in architecture.stacks if s.name == "decoder"), None)
    if stack is None or budget.read is None:
        return None
    size, layers = dtype_bytes(dtype), len(stack.layers)
    across = 2 if len(architecture.stacks) > 1 else 1  # cross-attention keeps the source's keys and values too
    per_token, fixed = layers * stack.heads.kept_per_token * size, layers * stack.heads.state * size
    return DecodeBytes(budget.read * size, per_token + fixed, per_token * length * across + fixed)


@dataclass(frozen=True)
class World:
    """`size` ranks, of which groups of `tp` split the vocabulary."""

    size: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.tp < 1:
            raise PlanError(f"world {self.size}, tp {self.tp}", "both must be 1 or more")
        if self.size % self.tp:
            raise PlanError(f"tp {self.tp} does not divide the world of {self.size}", "choose a tp that divides it")


@dataclass(frozen=True)
class Rank:
    """What one rank holds and sends, in bytes."""

    layout: str
    memory: int  # weights, gradients and AdamW's state (with an fp32 master copy where weights are narrow)
    tables: int
    sent: int  # in a whole step
    sent_for_tables: int  # the part of it that the tables cause


def all_reduce(count: int, over: int) -> int:
    """Bytes that one of `over` ranks sends."""
    return 2 * (over - 1) * count // over


def pipeline_tie_bytes(budget: Budget, dtype: str) -> int:
    """Bytes that each of a pipeline's two ends sends per step to keep its copies of a tied table equal; 0 untied.

    Both ends also hold the table, so tying saves no memory there.
    """
    return all_reduce(budget.tables * dtype_bytes(dtype), 2) if budget.boundary.tables == 1 else 0


def ranks(budget: Budget, world: World, tokens: Tokens, dtype: str, vocab: int) -> tuple[Rank, ...]:
    """Return one rank of data parallel, of FSDP and, where tp > 1, of vocabulary-parallel training."""
    size, p, trained_tables = dtype_bytes(dtype), world.size, budget.tables - budget.frozen_tables

    def adamw(stored: int, trainable: int) -> int:
        return training_bytes(stored, trainable, dtype)["adamw" if dtype == "float32" else MASTER].total

    def sent_sharded(weights: int, gradients: int) -> int:
        """Weights gathered for the forward and again for the backward pass, gradients reduced and scattered."""
        return (p - 1) * (2 * weights + gradients) * size // p

    replicated = Rank(
        "data parallel",
        adamw(budget.total, budget.trainable),
        budget.tables * size,
        all_reduce(budget.trainable * size, p),
        all_reduce(trained_tables * size, p),
    )
    sharded = Rank(
        "fsdp",
        adamw(-(-budget.total // p), -(-budget.trainable // p)),
        -(-budget.tables // p) * size,
        sent_sharded(budget.total, budget.trainable),
        sent_sharded(budget.tables, trained_tables),
    )
    if world.tp == 1:
        return replicated, sharded
    # Each rank of a group holds ⌈V/tp⌉ rows of every table; the body is replicated. Per step and group: the looked-up
    # rows [N, D] are summed forward, the hidden gradient [N, D] backward, and three numbers per token (largest logit,
    # sum of exponentials, target logit) forward. The groups then average gradients.
    tp, groups, width = world.tp, p // world.tp, budget.tables // vocab  # columns of all tables together
    rows = -(-vocab // tp)
    tables, still = rows * width, rows * (budget.frozen_tables // vocab)
    body, still_body = budget.total - budget.tables, budget.frozen - budget.frozen_tables
    hidden = all_reduce(tokens.count * width // budget.boundary.tables * size, tp)
    for_tables = 2 * hidden + all_reduce(3 * tokens.count * 4, tp) + all_reduce((tables - still) * size, groups)
    split = Rank(
        "vocabulary parallel",
        adamw(body + tables, body + tables - still - still_body),
        tables * size,
        for_tables + all_reduce((body - still_body) * size, groups),
        for_tables,
    )
    return replicated, sharded, split


@cache
def kept_losses() -> dict[str, Computed]:
    """First losses of the catalogue's models, tied and untied as they are drawn by default, computed before.

    They are kept under all that they depend on, so that anything else is computed; `tools/make_first_losses.py` writes
    the file.
    """
    rows = packaged_json("catalogue/first_losses.json")
    return {depends_on: (nll, own) for depends_on, nll, own in rows}


@dataclass(frozen=True)
class FirstLoss:
    """The expected loss of a freshly drawn model's first step."""

    nll: float  # in nats
    own: float | None = None  # mean cosine between hidden state and the token's own row, of tied tables
    assumed: str = ""  # what the prediction takes for granted; empty where the family has been measured


def first_loss(
    architecture: Architecture,
    spec: BoundarySpec,
    sharing: SharingSpec | None = None,
    std: float | None = None,
    length: int = POSITIONS,
) -> FirstLoss | None:
    """Expected nll of a uniformly random target at step 0; None where the model has no head over words.

    `std` is of tables (unless the boundary's `init` says otherwise) and body, None the config's. `length` is T: early
    positions average fewer others.
    """
    if not architecture.ends.head:
        return None
    step = first_step_of(architecture, spec, std, length)
    assumed = ""
    if architecture.fresh is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
    elif step.own and sharing and sharing.kind != "none":
        assumed = "shared layers followed as if they were independent"
    return FirstLoss(*(kept_losses().get(repr(step)) or step.computed()), assumed)


def first_step_of(
    architecture: Architecture, spec: BoundarySpec, std: float | None = None, length: int = POSITIONS
) -> FirstStep:
    """Return what the first loss depends on; arguments as of `first_loss`."""
    ends, fresh = architecture.ends, architecture.fresh
    body_std = std if std is not None else fresh.std if fresh else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    scale = architecture.output_scale
    return first_step(spec, ends.vocab, ends.width, table_std, fresh, body_std=body_std, scale=scale, positions=length)
