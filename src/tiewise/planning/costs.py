"""What a choice costs: bytes on disk, in training, per decoded token and per rank; operations; the first loss.

Exact but for the activations, which are an estimate. Collectives are counted as rings send them, per rank: an
all-reduce of n bytes over p ranks sends 2(p−1)/p·n, an all-gather or reduce-scatter (p−1)/p·n, n being the whole and
padded as torch pads it (`benchmarks/wire.py` counts the same in running ranks). Every cost is a part of a plan's
record, under the names that it has there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tiewise.core.backends import chunk_rows
from tiewise.core.errors import PlanError
from tiewise.core.files import packaged_json, require, require_one
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import Architecture, Budget
from tiewise.planning.first_loss import POSITIONS, Computed, FirstStep, first_step

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Numbers kept per trained parameter, in the weights' dtype: torch's optimizers keep state as the parameter is.
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}
MASTER = "adamw-bf16-master"  # bf16 weights and gradients, an fp32 master copy and both moments in fp32
# What ranks that hold parts of the vocabulary tell each other of one token, in fp32: log-sum-exp and target logit.
# Label smoothing adds a third.
LOSS_NUMBERS = 2
INDEX = 8  # bytes of a token id
FSDP, KEPT, SPLIT = "fsdp", "fsdp, tables kept sharded", "vocabulary parallel"  # layouts
BOTH = f"{FSDP} × {SPLIT}"
BY_TABLE = ("table gather", "gradient reduce-scatter", "gradient all-reduce")  # sent however few the tokens


@dataclass(frozen=True)
class Setting:
    """Under what a plan counts; one rank's step is B sequences of T tokens."""

    batch: int = 8  # B
    length: int = 1024  # T
    dtype: str = "float32"
    world: int = 1  # ranks
    tp: int = 1  # ranks of a group that splits the vocabulary
    std: float | None = None  # of body and tables at the start; None: the config's
    fsdp: int | None = None  # ranks of a group that shards every parameter; None: all of them, and tp by itself

    def __post_init__(self) -> None:
        require(self, "batch length world tp fsdp", lambda count: count >= 1, "it must be 1 or more", PlanError)
        require_one(self, "dtype", DTYPES, PlanError)
        require(self, "std", lambda std: 0 < std < float("inf"), "give a positive number", PlanError)
        if self.world % (self.tp * (self.fsdp or 1)):
            cut = f"tp {self.tp}" if self.fsdp is None else f"fsdp {self.fsdp} × tp {self.tp}"
            fix = "choose them so that world = fsdp × tp × replicas"
            raise PlanError(f"{cut} does not divide the world of {self.world}", fix)

    @property
    def tokens(self) -> int:
        """N of one rank."""
        return self.batch * self.length

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        tokens = {"batch": self.batch, "length": self.length, "count": self.tokens}
        world = {"size": self.world, "tp": self.tp, "fsdp": self.fsdp}
        return {"tokens": tokens, "dtype": self.dtype, "world": world, "std": self.std}


def all_costs(architecture: Architecture, budget: Budget, setting: Setting) -> dict[str, Any]:
    """Everything that a choice costs; None in place of what the model does not have."""
    size, vocab, head = DTYPES[setting.dtype], architecture.ends.vocab, architecture.ends.head
    out_width = budget.boundary.table_widths(architecture.ends.width)[1]
    # Per token: 2 per multiplied weight forward and 4 backward, the head counted whether or not it is tied. Attention
    # scores and their products add 4·T·heads·head width per layer forward and twice that backward, over the whole
    # length T (no discount for the causal half). In an encoder-decoder: of one source and one target token together.
    scores = sum(4 * setting.length * len(s.layers) * s.heads.count * s.heads.width for s in architecture.stacks)
    forward = 2 * budget.multiplied + scores
    return {
        # of the tensors, a tied table written once
        "checkpoint_bytes": {name: budget.total * each for name, each in DTYPES.items()},
        "table_bytes": table_bytes(budget, vocab, head),
        "training_bytes": training_bytes(budget.total, budget.trainable, setting.dtype),
        "logits_bytes": logits_bytes(setting.tokens, vocab, out_width, setting.dtype) if head else None,
        "flops_per_token": {"forward": forward, "backward": 2 * forward},
        "decode_bytes": decode_bytes(architecture, budget, setting),
        "first_loss": first_loss(architecture, budget.boundary, budget.sharing, setting.std, setting.length),
        "ranks": ranks(budget, setting, vocab, head),
        # What each of a pipeline's two ends sends per step to keep its copies of a tied table equal. Both ends also
        # hold the table, so tying saves no memory there.
        "pipeline_tie_bytes": all_reduce(budget.tables * size, 2) if budget.boundary.tables == 1 else 0,
    }


def table_bytes(budget: Budget, vocab: int, head: bool) -> dict[str, int]:
    """Bytes of the tables at 16, 8 and 4 bits; a shared one counts once, but where the head alone is packed it is two.

    8 bits are int8 with an fp32 scale per row, 4 bits GGUF's Q4_0: 18 bytes for each 32 values of a row. Maps at the
    ends are not counted. `inspect --only precision` measures what these two do to the output.
    """
    into, out, whole, _ = table_columns(budget, vocab)
    found = {"16 bits": 2 * vocab * whole}
    for name, row in (("8 bits", lambda width: width + 4), ("4 bits", lambda width: -(-width // 32) * 18)):
        found[name] = vocab * (row(into) + (row(out) if whole > into else 0))
        if head:
            found[f"{name}, head alone"] = vocab * (2 * into + row(out))
    return found


def training_bytes(stored: int, trainable: int, dtype: str) -> dict[str, dict[str, int]]:
    """Weights, gradients, optimizer state and their total, by optimizer; frozen parameters have weights alone."""
    size = DTYPES[dtype]
    parts = {name: (stored * size, trainable * size, trainable * size * kept) for name, kept in STATE.items()}
    parts[MASTER] = (stored * 2, trainable * 2, trainable * 12)
    names = ("weights", "gradients", "state", "total")
    return {optimizer: dict(zip(names, (*of, sum(of)), strict=True)) for optimizer, of in parts.items()}


def logits_bytes(tokens: int, vocab: int, width: int, dtype: str) -> dict[str, int]:
    """Memory of logits and loss at their peak, beside weights and their gradient: N tokens, V words, tables [V, E]."""
    size = DTYPES[dtype]
    narrow = size if size < 4 else 0
    # one chunk of fp32 logits, its softmax (on a CPU in its place) and a copy in a narrow dtype; the features' gradient
    # in fp32; and where weights are narrow the table's fp32 gradient buffer
    features = (tokens + (vocab if narrow else 0)) * width * 4
    fused = {}
    for device, buffers in (("cpu", 1), ("cuda", 2)):
        per_token = vocab * (4 * buffers + narrow)
        fused[f"fused_{device}"] = chunk_rows(tokens, -(-per_token // 4), device) * per_token + features
    # the logits in the weights' dtype, and in fp32 log-probabilities, the gradient of the loss and that of the logits:
    # 16 bytes per element of (N, V) in fp32, 14 in bf16 (measured with PyTorch 2.13)
    return {"plain": tokens * vocab * (12 + size), **fused}


def decode_bytes(architecture: Architecture, budget: Budget, setting: Setting) -> dict[str, int] | None:
    """Bytes moved to decode one token of one sequence at a context of T; None where the model does not (encoders)."""
    stack = next((s for s in architecture.stacks if s.name == "decoder"), None)
    if stack is None or budget.read is None:
        return None
    size, layers = DTYPES[setting.dtype], len(stack.layers)
    across = 2 if len(architecture.stacks) > 1 else 1  # cross-attention keeps the source's keys and values too
    kept = stack.heads.latent or 2 * stack.heads.kv * stack.heads.width  # values for one token of one layer
    per_token, fixed = layers * kept * size, layers * stack.heads.state * size
    return {
        "weights": budget.read * size,  # once per application: one row of the lookup, the head's table, chosen experts
        "cache_per_token": per_token + fixed,  # keys and values that the token adds
        # read at the full length: windows are not discounted, Mamba's state does not grow
        "cache": per_token * setting.length * across + fixed,
    }


def all_reduce(count: int, over: int) -> int:
    """Bytes that one of `over` ranks sends."""
    return 2 * (over - 1) * count // over


@dataclass(frozen=True)
class WorldLayout:
    """How a world is cut, and what the two vocabulary ends do in it; tp cuts the tables alone, the body is whole."""

    name: str
    replicas: int = 1  # groups that average their gradients; world = replicas × fsdp × tp
    fsdp: int = 1  # ranks that share every parameter, each with tokens of its own
    tp: int = 1  # ranks that share the rows of every table and have the same tokens
    kept: bool = False  # under fsdp tables are never gathered: hidden states travel to their rows
    stock: bool = False  # under tp logits are gathered, as without a loss that knows of shards

    def rows(self, vocab: int) -> int:
        """Rows of a table that the fullest rank holds: torch cuts into ⌈V/tp⌉ rows, and those again."""
        split = -(-vocab // self.tp)
        return -(-split // self.fsdp)


def layouts(setting: Setting) -> list[WorldLayout]:
    """Every layout that a plan shows, in the order of its record."""
    world, tp, shards = setting.world, setting.tp, setting.fsdp or setting.world
    fsdp, split = WorldLayout(FSDP, world // shards, shards), WorldLayout(SPLIT, world // tp, tp=tp)
    both = WorldLayout(BOTH, world // (shards * tp), shards, tp)
    found = [
        (WorldLayout("data parallel", world), True),
        (fsdp, setting.fsdp != 1),
        (split, tp > 1),
        (replace(fsdp, name=KEPT, kept=True), shards > 1),
        (replace(split, name="stock tensor parallel", stock=True), tp > 1),
        (both, tp > 1 and shards > 1 and setting.fsdp is not None),
    ]
    return [layout for layout, shown in found if shown]


def sent_at_ends(
    layout: WorldLayout, budget: Budget, setting: Setting, vocab: int, head: bool = True
) -> dict[str, int]:
    """Bytes that one rank sends in a step because of the tables, by cause.

    FSDP2 keeps the unit that holds the tables gathered between forward and backward: one gather, not two. N is of one
    rank, and tp ranks have the same; over fsdp ranks the kept table meets the tokens of all of them.
    """
    size, n, f, tp = DTYPES[setting.dtype], setting.tokens, layout.fsdp, layout.tp
    rows, into, out, whole, trained = layout.rows(vocab), *table_columns(budget, vocab)
    found = dict.fromkeys(BY_TABLE, 0)
    if layout.kept:
        # of both ends: states to all ranks of the group, their gradients (or looked-up rows) reduced on the way back
        found["lookup"] = (f - 1) * n * into * size * (1 if budget.boundary.freeze else 2)
        found["hidden states"] = (f - 1) * n * out * size * 2 * head
        found["ids and targets"] = (f - 1) * n * INDEX * (1 + head)
        found["loss"] = (f - 1) * f * n * LOSS_NUMBERS * 4 * head
    else:
        found["table gather"] = (f - 1) * rows * whole * size
        found["gradient reduce-scatter"] = (f - 1) * rows * trained * size
    if tp > 1:
        found["lookup"] = all_reduce(n * into * size, tp)  # forward; its gradient stays where it is
        found["hidden gradient"] = all_reduce(n * out * size, tp) * head
        if layout.stock:
            found["logits"] = (tp - 1) * n * -(-vocab // tp) * size * head
        else:
            found["loss"] = (tp - 1) * n * LOSS_NUMBERS * 4 * head
    found["gradient all-reduce"] = all_reduce(rows * trained * size, layout.replicas)
    return found


def table_columns(budget: Budget, vocab: int) -> tuple[int, int, int, int]:
    """Columns of the input table, of the table at the head, of all stored tables, and of those that are trained."""
    into, whole = budget.parameters["input_table"] // vocab, budget.tables // vocab
    return into, whole - into or into, whole, whole - into * budget.boundary.freeze


def ranks(budget: Budget, setting: Setting, vocab: int, head: bool = True) -> list[dict[str, Any]]:
    """What the fullest rank holds and sends per step, in bytes, in every layout.

    `sent_for_tables` is the part of `sent` that `wire` divides by cause. `gathered` is what is held of other ranks:
    whole tables and their gradient, or the group's hidden states; `loss` the peak of logits and loss beside them.
    `break_even_tokens` are N of one rank, below which a layout whose hidden states travel sends less for the tables
    than one that averages or gathers them in the same world. One layout is `taken` by `tiewise train` with this world.
    """
    optimizer = "adamw" if setting.dtype == "float32" else MASTER
    size, n = DTYPES[setting.dtype], setting.tokens
    into, out, whole, trained = table_columns(budget, vocab)
    body, trained_body = budget.total - whole * vocab, budget.trainable - trained * vocab
    found = []
    for layout in layouts(setting):
        f, rows = layout.fsdp, layout.rows(vocab)
        stored, learnt = -(-body // f), -(-trained_body // f)
        held = training_bytes(stored + rows * whole, learnt + rows * trained, setting.dtype)[optimizer]
        tables = training_bytes(rows * whole, rows * trained, setting.dtype)[optimizer]
        gathered = f * rows * (whole + trained) * size if f > 1 else 0
        loss = logits_bytes(n, vocab if layout.stock else -(-vocab // layout.tp), out, setting.dtype)
        if layout.kept:
            gathered = f * n * max(into, out) * size
            loss = logits_bytes(f * n, rows, out, setting.dtype)
        wire = sent_at_ends(layout, budget, setting, vocab, head)
        alike = WorldLayout("", layout.replicas * layout.tp, f)
        still = sum(wire[name] for name in BY_TABLE)
        moving, instead = sum(wire.values()) - still, sent_at_ends(alike, budget, setting, vocab, head)
        # weights gathered for the forward and again for the backward pass, gradients reduced and scattered
        of_body = (f - 1) * (2 * body + trained_body) * size // f + all_reduce(learnt * size, layout.replicas)
        found.append(
            {
                "layout": layout.name,
                "memory": held["total"],
                "tables": tables["weights"],
                "sent": sum(wire.values()) + of_body,
                "sent_for_tables": sum(wire.values()),
                "axes": {"replicas": layout.replicas, "fsdp": f, "tp": layout.tp},
                "table_memory": {**tables, "gathered": gathered},
                "loss": loss["plain" if layout.stock else "fused_cuda"] if head else None,
                "wire": {name: sent for name, sent in wire.items() if sent},
                "break_even_tokens": max(0, sum(instead.values()) - still) * n // moving if moving else None,
            }
        )
    of = {rank["layout"]: rank for rank in found}
    taken = next((name for name in (BOTH, SPLIT) if name in of), "data parallel")
    if setting.tp == 1 and KEPT in of:
        taken = KEPT if keeps(of[KEPT], of[FSDP]) else FSDP
    return [{**rank, "taken": rank["layout"] == taken} for rank in found]


def keeps(kept: dict[str, Any], gathered: dict[str, Any], micro_batches: int = 1) -> bool:
    """Whether FSDP sends less for tables that it keeps sharded than for those that it gathers, of what `ranks` counts.

    Micro-batches that are accumulated send their states each, and gather the table each; its gradient is reduced once.
    """
    again = (micro_batches - 1) * gathered["wire"].get("table gather", 0)
    return bool(micro_batches * kept["sent_for_tables"] < gathered["sent_for_tables"] + again)


@cache
def kept_losses() -> dict[str, Computed]:
    """First losses of the catalogue's models, tied and untied as they are drawn by default, computed before.

    They are kept under all that they depend on, so that anything else is computed; `tools/make_first_losses.py` writes
    the file.
    """
    return {depends_on: (nll, own) for depends_on, nll, own in packaged_json("planning/data/first_losses.json")}


def first_loss(
    architecture: Architecture,
    spec: BoundarySpec,
    sharing: SharingSpec | None = None,
    std: float | None = None,
    length: int = POSITIONS,
) -> dict[str, Any] | None:
    """Expected nll (nats) of a uniformly random target at step 0; None where the model has no head over words.

    `std` is of tables (unless the boundary's `init` says otherwise) and body, None the config's. `length` is T: early
    positions average fewer others. `own` is the mean cosine between hidden state and the token's own row where tables
    are tied, `assumed` what the prediction takes for granted: nothing where the family has been measured.
    """
    if not architecture.ends.head:
        return None
    step = first_step_of(architecture, spec, std, length)
    assumed = ""
    if architecture.fresh is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
    elif step.own and sharing and sharing.kind != "none":
        assumed = "shared layers followed as if they were independent"
    nll, own = kept_losses().get(repr(step)) or step.computed()
    return {"nll": nll, "own": own, "assumed": assumed}


def first_step_of(
    architecture: Architecture, spec: BoundarySpec, std: float | None = None, length: int = POSITIONS
) -> FirstStep:
    """Return what the first loss depends on; arguments as of `first_loss`."""
    ends, fresh = architecture.ends, architecture.fresh
    body_std = std if std is not None else fresh.std if fresh else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    scale = architecture.output_scale
    return first_step(spec, ends.vocab, ends.width, table_std, fresh, body_std=body_std, scale=scale, positions=length)
