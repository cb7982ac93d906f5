"""Costs of a choice: bytes, operations and the first loss.

Bytes are on disk, in training, per token and per rank. All figures are exact except the activations, and the peak of a
step that follows from them: these are estimates. Collectives are counted as rings send them, per rank: an all-reduce of
n bytes over p ranks sends 2(p−1)/p·n, an all-gather or reduce-scatter (p−1)/p·n. n counts the full tensor with torch's
padding (`benchmarks/wire.py` counts the same in running ranks). Each function returns a part of a plan's record, with
the record's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from tiewise.core.backends import LARGE_CHUNKS_IN_MEMORY, ROW_MULTIPLE, chunk_rows
from tiewise.core.errors import PlanError
from tiewise.core.files import read_packaged_json
from tiewise.core.measurement import rounded
from tiewise.core.records import require, require_choice
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.written_options import written_option
from tiewise.planning.architecture import Architecture, Budget
from tiewise.planning.first_loss import POSITIONS, FirstStep, LossAndCosine, first_step, is_head_from_file

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Numbers of optimizer state per trained parameter. torch's optimizers store state in the parameter's dtype.
STATE = {"sgd": 0, "momentum": 1, "adamw": 2}
CARD = 80 << 30  # bytes of the GPU that a plan assumes: the chunks of the loss are a share of it
MASTER = "adamw-bf16-master"  # bf16 weights and gradients, an fp32 master copy and both moments in fp32
# fp32 numbers that ranks with parts of the vocabulary exchange per token: log-sum-exp and target logit.
# Label smoothing adds a third.
LOSS_NUMBERS = 2
INDEX = 8  # bytes of a token id
FSDP, FSDP_SHARDED, SPLIT = "fsdp", "fsdp, tables kept sharded", "vocabulary parallel"  # layouts
BOTH = f"{FSDP} × {SPLIT}"
# Causes whose bytes do not depend on the number of tokens.
BY_TABLE = ("table gather", "gradient reduce-scatter", "gradient all-reduce")


@dataclass(frozen=True)
class Setting:
    """Conditions under which a plan counts. One rank's step is B sequences of T tokens."""

    batch: int = 8  # B
    length: int = 1024  # T
    dtype: str = "float32"
    world: int = 1  # ranks
    tp: int = 1  # ranks of a group that splits the vocabulary
    std: float | None = None  # initial scale of body and tables; None: the config's
    fsdp: int | None = None  # ranks of a group that shards every parameter; None: the full world, and tp without fsdp

    def __post_init__(self) -> None:
        require(self, "batch length world tp fsdp", _is_count, "it must be a whole number, 1 or more", PlanError)
        require_choice(self, "dtype", DTYPES, PlanError)
        if self.std is not None and not _is_positive(self.std):
            raise PlanError(written_option("init", self.std), "give a positive number")
        if self.world % (self.tp * (self.fsdp or 1)):
            cut = f"tp {self.tp}" if self.fsdp is None else f"fsdp {self.fsdp} × tp {self.tp}"
            fix = "choose them so that world = fsdp × tp × replicas"
            raise PlanError(f"{cut} does not divide the world of {self.world}", fix)

    @property
    def tokens(self) -> int:
        """N, the tokens of one rank's step."""
        return self.batch * self.length

    def record(self) -> dict[str, Any]:
        """Return everything as a mapping that JSON can store."""
        tokens = {"batch": self.batch, "length": self.length, "count": self.tokens}
        world = {"size": self.world, "tp": self.tp, "fsdp": self.fsdp}
        return {"tokens": tokens, "dtype": self.dtype, "world": world, "std": self.std}


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number, 1 or more."""
    return isinstance(value, int) and value >= 1


def _is_positive(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, int | float) and 0 < value < float("inf")


def all_costs(architecture: Architecture, budget: Budget, setting: Setting) -> dict[str, Any]:
    """Return every cost of a choice. A cost that does not apply to the model is None."""
    size, vocab, head = DTYPES[setting.dtype], architecture.ends.vocab, architecture.ends.head
    out_width = budget.boundary.table_widths(architecture.ends.width)[1]
    # Per token: 2 per multiplied weight forward and 4 backward, the head counted whether or not it is tied. Attention
    # scores and their products add 4·T·heads·head width per layer forward and twice that backward, over the whole
    # length T (no discount for the causal half). In an encoder-decoder: of one source and one target token together.
    scores = 0
    for stack in architecture.stacks:
        scores += 4 * setting.length * sum(heads.count * heads.width for heads in stack.heads_by_layer)
    forward = 2 * budget.multiplied + scores
    training = training_bytes(budget.total, budget.trainable, setting.dtype)
    logits = logits_bytes(setting.tokens, vocab, out_width, setting.dtype) if head else None
    copied = vocab * out_width * size if budget.boundary.free else 0  # the head's rows E + Δ, during the loss
    return {
        # bytes of the tensors; a tied table is written once
        "checkpoint_bytes": {name: budget.total * each for name, each in DTYPES.items()},
        "table_bytes": table_bytes(budget, vocab, head),
        "training_bytes": training,
        "logits_bytes": logits,
        "step_bytes": _steps_of_losses(architecture, setting, training, logits, copied),
        "flops_per_token": {"forward": forward, "backward": 2 * forward},
        "decode_bytes": decode_bytes(architecture, budget, setting),
        "first_loss": first_loss(architecture, budget.boundary, budget.sharing, setting.std, setting.length),
        "ranks": ranks(budget, setting, vocab, head),
        # Bytes that the first and the last pipeline stage each send per step to keep their copies of a tied table
        # equal. Both stages store the table, so tying saves no memory there.
        "pipeline_tie_bytes": all_reduce(budget.tables * size, 2) if budget.boundary.tables == 1 else 0,
    }


def table_bytes(budget: Budget, vocab: int, head: bool) -> dict[str, int]:
    """Return bytes of the tables at 16, 8 and 4 bits.

    A shared table counts once. If only the head is packed, input and head need separate tables. 8 bits are int8 with an
    fp32 scale per row, 4 bits are GGUF's Q4_0. Maps at the ends are not counted. `inspect --only precision` measures
    the effect of both formats on the output.
    """
    columns = table_columns(budget, vocab)
    by_precision = {"16 bits": 2 * vocab * columns.stored}
    for name, row_bytes in (("8 bits", _int8_row), ("4 bits", _q4_row)):
        of_input, of_head = row_bytes(columns.input), row_bytes(columns.head)
        is_shared = columns.stored == columns.input
        by_precision[name] = vocab * (of_input if is_shared else of_input + of_head)
        if head:
            by_precision[f"{name}, head alone"] = vocab * (2 * columns.input + of_head)
    return by_precision


def _int8_row(width: int) -> int:
    """Return the bytes of a row in int8 with an fp32 scale."""
    return width + 4


def _q4_row(width: int) -> int:
    """Return the bytes of a row in Q4_0: 18 for each 32 values."""
    return -(-width // 32) * 18


def training_bytes(stored: int, trainable: int, dtype: str) -> dict[str, dict[str, int]]:
    """Return bytes of weights, gradients, optimizer state and their total, by optimizer.

    A frozen parameter needs memory for its weights only.
    """
    size = DTYPES[dtype]
    by_optimizer = {}
    for optimizer, numbers in STATE.items():
        by_optimizer[optimizer] = _training_parts(stored * size, trainable * size, trainable * size * numbers)
    by_optimizer[MASTER] = _training_parts(stored * 2, trainable * 2, trainable * 12)
    return by_optimizer


def _training_parts(weights: int, gradients: int, state: int) -> dict[str, int]:
    """Return the bytes of training by part, with their total."""
    total = weights + gradients + state
    return {"weights": weights, "gradients": gradients, "state": state, "total": total}


def logits_bytes(tokens: int, vocab: int, width: int, dtype: str) -> dict[str, int]:
    """Return the peak bytes of logits and loss, without weights and their gradient.

    N is `tokens`, V is `vocab`, and the tables are [V, E] with E = `width`. `fused_cuda` is the default loss on a GPU
    of 80 GB, `chunked_cuda` is `backend="chunked"`, which tables divided over ranks use too.
    """
    size = DTYPES[dtype]
    narrow = size if size < 4 else 0
    # one chunk of fp32 logits, its softmax (on a CPU it overwrites the logits) and a copy in a narrow dtype; the hidden
    # states' gradient in fp32; for narrow weights also the table's fp32 gradient buffer
    features = (tokens + (vocab if narrow else 0)) * width * 4
    chunked = {}
    for name, device, buffers in (("fused_cpu", "cpu", 1), ("chunked_cuda", "cuda", 2)):
        per_token = vocab * (4 * buffers + narrow)
        rows = chunk_rows(tokens, -(-per_token // 4), device)
        chunked[name] = rows * per_token + features
    # the logits in the weights' dtype; in fp32 the log-probabilities and the gradients of loss and logits: 16 bytes per
    # element of (N, V) in fp32, 14 in bf16 (measured with PyTorch 2.13)
    fused_cuda = row_loss_bytes(tokens, vocab, width, dtype)
    return {"plain": tokens * vocab * (12 + size), "fused_cuda": fused_cuda, **chunked}


def row_loss_bytes(
    tokens: int, vocab: int, width: int, dtype: str, chunk_bytes: int = CARD // LARGE_CHUNKS_IN_MEMORY
) -> int:
    """Return the peak bytes of the default loss on a GPU, without the table's gradient.

    The slopes overwrite a chunk of fp32 logits. Of bf16 tables the gradient is summed in fp32 if there are several
    chunks, and a single chunk may use the memory of this sum. Of fp16 tables it is always summed in fp32.
    """
    columns = -(-vocab // ROW_MULTIPLE) * ROW_MULTIPLE
    is_bf16 = DTYPES[dtype] < 4 and dtype != "float16"
    most = chunk_bytes // 4
    rows = tokens
    if tokens * columns > most + vocab * width * is_bf16:
        rows = chunk_rows(tokens, columns, "cuda", most=most, budget=most)
    has_sum = dtype == "float16" or (is_bf16 and rows < tokens)
    gradient_size = 2 if is_bf16 else 4  # of the hidden states
    return 4 * rows * columns + tokens * width * gradient_size + 4 * vocab * width * has_sum


def activation_bytes(architecture: Architecture, setting: Setting) -> int:
    """Return the bytes that the layers of transformers keep for the backward pass, an estimate.

    They are inputs of products and activations. Of each input, an RMS norm keeps an fp32 copy and the normed values.
    Attention scores and dropout masks are not counted.
    """
    size, per_token = DTYPES[setting.dtype], 0
    for stack in architecture.stacks:
        per_layer = size * stack.saved_per_token + (4 + size) * stack.normed_per_token
        per_token += len(stack.layers) * per_layer
    if per_token:
        per_token += 2 * architecture.width * size  # the final norm
    return setting.tokens * per_token


def step_bytes(training: dict[str, int], loss: int, table_gradient: int, activations: int) -> int:
    """Return the peak bytes of a training step, an estimate.

    The peak is either at the loss, when all activations exist and no gradient but that of the head's table, or at the
    end of the backward pass, when all gradients exist. An optimizer step without copies, as torch's fused ones, adds
    nothing.

    Args:
        training: weights, gradients and state, as `training_bytes` has them for one optimizer.
        loss: bytes of logits and loss.
        table_gradient: bytes of the gradient of the head's table, if the loss computes it together with the loss.
        activations: bytes that the backward pass needs.
    """
    at_loss = activations + loss + table_gradient
    return training["weights"] + training["state"] + max(at_loss, training["gradients"])


def _steps_of_losses(
    architecture: Architecture,
    setting: Setting,
    training: dict[str, dict[str, int]],
    logits: dict[str, int] | None,
    copied: int,
) -> dict[str, int] | None:
    """Return the peak bytes of a step with AdamW by loss.

    `copied` are the bytes of rows that the forward pass computes.

    None if the class has no head, or if its layers are not counted.
    """
    activations = activation_bytes(architecture, setting)
    if logits is None or not activations or architecture.not_counted:
        return None
    of_optimizer = training["adamw" if setting.dtype == "float32" else MASTER]
    table = architecture.ends.vocab * architecture.ends.width * DTYPES[setting.dtype]
    return {
        "plain": round(rounded(step_bytes(of_optimizer, logits["plain"] + copied, 0, activations))),
        "fused_cuda": round(rounded(step_bytes(of_optimizer, logits["fused_cuda"] + copied, table, activations))),
    }


def decode_bytes(architecture: Architecture, budget: Budget, setting: Setting) -> dict[str, int] | None:
    """Return bytes moved to decode one token of one sequence at a context of T.

    None for a model without a decoder.
    """
    stack = next((s for s in architecture.stacks if s.name == "decoder"), None)
    if stack is None or budget.read is None:
        return None
    size = DTYPES[setting.dtype]
    across = 2 if len(architecture.stacks) > 1 else 1  # cross-attention also caches the source's keys and values
    per_token = size * sum(heads.latent or 2 * heads.kv * heads.width for heads in stack.heads_by_layer)
    fixed = size * sum(heads.state for heads in stack.heads_by_layer)
    return {
        # one row of the lookup, the head's table, the chosen experts, all else; shared layers count per application
        "weights": budget.read * size,
        "cache_per_token": per_token + fixed,  # keys and values of the new token
        # read at the full length: attention windows are not discounted, and Mamba's state does not grow
        "cache": per_token * setting.length * across + fixed,
    }


def all_reduce(count: int, over: int) -> int:
    """Return the bytes that one of `over` ranks sends to all-reduce `count` bytes."""
    return 2 * (over - 1) * count // over


@dataclass(frozen=True)
class WorldLayout:
    """Division of a world into groups of ranks. tp divides the tables only; each tp rank has the full body."""

    name: str
    replicas: int = 1  # groups that average their gradients; world = replicas × fsdp × tp
    fsdp: int = 1  # ranks that shard every parameter, each with different tokens
    tp: int = 1  # ranks that divide the rows of every table and have the same tokens
    # under fsdp: tables are never gathered; hidden states are sent to the ranks that store the rows
    keeps_shards: bool = False
    is_stock: bool = False  # under tp: logits are gathered, because the loss does not support shards

    def rows(self, vocab: int) -> int:
        """Return rows of a table on the fullest rank.

        torch gives each tp rank ⌈V/tp⌉ rows, and divides those among the fsdp ranks in the same way.
        """
        split = -(-vocab // self.tp)
        return -(-split // self.fsdp)


def layouts(setting: Setting) -> list[WorldLayout]:
    """Return every layout that a plan shows, in the order of its record."""
    world, tp, shards = setting.world, setting.tp, setting.fsdp or setting.world
    fsdp, split = WorldLayout(FSDP, world // shards, shards), WorldLayout(SPLIT, world // tp, tp=tp)
    both = WorldLayout(BOTH, world // (shards * tp), shards, tp)
    splits_rows, shards_parameters = tp > 1, shards > 1
    does_both = splits_rows and shards_parameters and setting.fsdp is not None
    candidates = [
        (WorldLayout("data parallel", world), True),
        (fsdp, setting.fsdp != 1),
        (split, splits_rows),
        (replace(fsdp, name=FSDP_SHARDED, keeps_shards=True), shards_parameters),
        (replace(split, name="stock tensor parallel", is_stock=True), splits_rows),
        (both, does_both),
    ]
    return [layout for layout, is_listed in candidates if is_listed]


def sent_at_ends(
    layout: WorldLayout, budget: Budget, setting: Setting, vocab: int, head: bool = True
) -> dict[str, int]:
    """Return bytes that one rank sends in a step because of the tables, by cause.

    FSDP2 keeps the unit that contains the tables gathered between forward and backward: one gather instead of two. N is
    the count of one rank. All ranks of a tp group have the same tokens; with sharded tables, each rank of an fsdp group
    multiplies its rows by the hidden states of all ranks of the group.
    """
    size, n, shards, tp = DTYPES[setting.dtype], setting.tokens, layout.fsdp, layout.tp
    rows, columns = layout.rows(vocab), table_columns(budget, vocab)
    sent = dict.fromkeys(BY_TABLE, 0)
    if layout.keeps_shards:
        # at both ends: states go to all ranks of the group; their gradients (or looked-up rows) are reduced on the way
        # back
        sent["lookup"] = (shards - 1) * n * columns.input * size * (1 if budget.boundary.freeze else 2)
        sent["hidden states"] = (shards - 1) * n * columns.head * size * 2 * head
        sent["ids and targets"] = (shards - 1) * n * INDEX * (1 + head)
        sent["loss"] = (shards - 1) * shards * n * LOSS_NUMBERS * 4 * head
    else:
        sent["table gather"] = (shards - 1) * rows * columns.stored * size
        sent["gradient reduce-scatter"] = (shards - 1) * rows * columns.trained * size
    if tp > 1:
        sent["lookup"] = all_reduce(n * columns.input * size, tp)  # forward only; the gradient needs no collective
        sent["hidden gradient"] = all_reduce(n * columns.head * size, tp) * head
        if layout.is_stock:
            sent["logits"] = (tp - 1) * n * -(-vocab // tp) * size * head
        else:
            sent["loss"] = (tp - 1) * n * LOSS_NUMBERS * 4 * head
    sent["gradient all-reduce"] = all_reduce(rows * columns.trained * size, layout.replicas)
    return sent


class TableColumns(NamedTuple):
    """Columns of the tables of a budget."""

    input: int
    head: int  # columns of the table that the head reads
    stored: int  # sum over all stored tables
    trained: int  # sum over the trained tables


def table_columns(budget: Budget, vocab: int) -> TableColumns:
    """Return the columns of the tables."""
    of_input, stored = budget.parameters["input_table"] // vocab, budget.tables // vocab
    of_output = stored - of_input  # 0 if one table serves both ends
    return TableColumns(of_input, of_output or of_input, stored, stored - of_input * budget.boundary.freeze)


def ranks(budget: Budget, setting: Setting, vocab: int, head: bool = True) -> list[dict[str, Any]]:
    """Return memory and traffic of the fullest rank in every layout, in bytes per step.

    `sent_for_tables` is the part of `sent` that `wire` divides by cause. `gathered` is memory for data of other ranks:
    full tables and their gradient, or the group's hidden states. `loss` is the peak of logits and loss, in addition to
    `gathered`. `break_even_tokens` is an N of one rank. Below it, a layout that sends hidden states sends less for the
    tables than a layout of the same world that averages or gathers them. `taken` is true for the one layout that
    `tiewise train` chooses for this world.
    """
    records = [_rank_record(layout, budget, setting, vocab, head) for layout in layouts(setting)]
    taken = _layout_of_train({record["layout"]: record for record in records}, setting)
    return [{**record, "taken": record["layout"] == taken} for record in records]


def _rank_record(layout: WorldLayout, budget: Budget, setting: Setting, vocab: int, head: bool) -> dict[str, Any]:
    """Return the record of the fullest rank in one layout; see `ranks`."""
    optimizer = "adamw" if setting.dtype == "float32" else MASTER
    size, shards, rows = DTYPES[setting.dtype], layout.fsdp, layout.rows(vocab)
    columns = table_columns(budget, vocab)
    body, trained_body = budget.total - columns.stored * vocab, budget.trainable - columns.trained * vocab
    body_shard, trained_shard = -(-body // shards), -(-trained_body // shards)
    stored_rows, trained_rows = rows * columns.stored, rows * columns.trained
    state_of_rank = training_bytes(body_shard + stored_rows, trained_shard + trained_rows, setting.dtype)[optimizer]
    tables = training_bytes(stored_rows, trained_rows, setting.dtype)[optimizer]
    wire = sent_at_ends(layout, budget, setting, vocab, head)
    sent_for_tables = sum(wire.values())
    # weights gathered for the forward and again for the backward pass, gradients reduced and scattered
    sent_for_body = (shards - 1) * (2 * body + trained_body) * size // shards
    sent_for_body += all_reduce(trained_shard * size, layout.replicas)
    return {
        "layout": layout.name,
        "memory": state_of_rank["total"],
        "tables": tables["weights"],
        "sent": sent_for_tables + sent_for_body,
        "sent_for_tables": sent_for_tables,
        "axes": {"replicas": layout.replicas, "fsdp": shards, "tp": layout.tp},
        "table_memory": {**tables, "gathered": _gathered_bytes(layout, columns, setting, vocab)},
        "loss": _loss_bytes(layout, columns.head, setting, vocab) if head else None,
        "wire": {cause: sent for cause, sent in wire.items() if sent},
        "break_even_tokens": _break_even_tokens(layout, wire, budget, setting, vocab, head),
    }


def _gathered_bytes(layout: WorldLayout, columns: TableColumns, setting: Setting, vocab: int) -> int:
    """Return a rank's bytes for data of other ranks: tables and gradients, or hidden states."""
    size, shards = DTYPES[setting.dtype], layout.fsdp
    if layout.keeps_shards:
        return shards * setting.tokens * max(columns.input, columns.head) * size
    if shards == 1:
        return 0
    return shards * layout.rows(vocab) * (columns.stored + columns.trained) * size


def _loss_bytes(layout: WorldLayout, width: int, setting: Setting, vocab: int) -> int:
    """Return the peak bytes of logits and loss on one rank, with `backend="chunked"`.

    A stock loss needs the logits of all V words.
    """
    if layout.keeps_shards:
        shards = logits_bytes(layout.fsdp * setting.tokens, layout.rows(vocab), width, setting.dtype)
        return shards["chunked_cuda"]
    if layout.is_stock:
        return logits_bytes(setting.tokens, vocab, width, setting.dtype)["plain"]
    return logits_bytes(setting.tokens, -(-vocab // layout.tp), width, setting.dtype)["chunked_cuda"]


def _break_even_tokens(
    layout: WorldLayout, wire: dict[str, int], budget: Budget, setting: Setting, vocab: int, head: bool
) -> int | None:
    """Return N of one rank below which hidden states are fewer bytes than tables.

    None for a layout that sends no hidden states.
    """
    per_table = sum(wire[cause] for cause in BY_TABLE)
    per_token = sum(wire.values()) - per_table
    if not per_token:
        return None
    without_tp = WorldLayout("", layout.replicas * layout.tp, layout.fsdp)
    sent_without_tp = sum(sent_at_ends(without_tp, budget, setting, vocab, head).values())
    return max(0, sent_without_tp - per_table) * setting.tokens // per_token


def _layout_of_train(records: dict[str, dict[str, Any]], setting: Setting) -> str:
    """Return the name of the layout that `tiewise train` chooses, given the records by layout."""
    if setting.tp == 1 and FSDP_SHARDED in records:
        return FSDP_SHARDED if sharded_sends_less(records[FSDP_SHARDED], records[FSDP]) else FSDP
    for name in (BOTH, SPLIT):
        if name in records:
            return name
    return "data parallel"


def sharded_sends_less(sharded: dict[str, Any], gathered: dict[str, Any], micro_batches: int = 1) -> bool:
    """Return whether FSDP sends less with sharded tables than with gathered tables.

    `sharded` and `gathered` are records of `ranks`. Each accumulated micro-batch sends its own hidden states (sharded)
    or gathers the table again (gathered). The table's gradient is reduced once per step in both cases.
    """
    repeated_gathers = (micro_batches - 1) * gathered["wire"].get("table gather", 0)
    return bool(micro_batches * sharded["sent_for_tables"] < gathered["sent_for_tables"] + repeated_gathers)


@cache
def stored_first_losses() -> dict[str, LossAndCosine]:
    """Return stored first losses of the catalogue's models, tied and untied, at default initialisation.

    The key is the `repr` of the `FirstStep`, so it contains everything that the loss depends on; a loss with another
    key is computed. `tools/make_first_losses.py` writes the file.
    """
    return {
        depends_on: (nll, cosine) for depends_on, nll, cosine in read_packaged_json("planning/data/first_losses.json")
    }


def first_loss(
    architecture: Architecture,
    spec: BoundarySpec,
    sharing: SharingSpec | None = None,
    std: float | None = None,
    length: int = POSITIONS,
) -> dict[str, Any] | None:
    """Return {nll, own, assumed} of step 0. None without a token head, or if the head starts from a file's vectors.

    `nll` is the expected loss of a uniformly random target, in nats. `self_similarity` is the mean cosine between the
    hidden state and the token's input row. It is None unless the family's first loss has been measured and one table
    without maps serves both ends. `assumed` is the assumption behind the prediction, and "" for a measured family whose
    layers are not shared. `std` is the scale of the body and of the tables (a boundary's `init` overrides it for the
    tables); None is the config's. `length` is T: early positions average over fewer positions.
    """
    if not architecture.ends.head or is_head_from_file(spec):
        return None
    step = first_step_inputs(architecture, spec, std, length)
    assumed = ""
    if architecture.fresh is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
    elif step.self_similarity and sharing and sharing.kind != "none":
        assumed = "that shared layers act like independent ones"
    nll, self_cosine = stored_first_losses().get(repr(step)) or step.compute()
    return {"nll": nll, "own": self_cosine, "assumed": assumed}


def first_step_inputs(
    architecture: Architecture, spec: BoundarySpec, std: float | None = None, length: int = POSITIONS
) -> FirstStep:
    """Return the inputs of the first loss. The arguments are those of `first_loss`."""
    ends, fresh = architecture.ends, architecture.fresh
    if std is not None:
        body_std = std
    else:
        body_std = fresh.std if fresh else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    scale = architecture.output_scale
    return first_step(spec, ends.vocab, ends.width, table_std, fresh, body_std=body_std, scale=scale, positions=length)
