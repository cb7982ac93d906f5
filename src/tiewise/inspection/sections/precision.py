"""KL of the output if lookup, head or both are rounded, and the rest is unchanged.

    8 bits    one scale per row: x ≈ s·q, s = max|x| / 127, q an integer of −127 … 127
    4 bits    GGUF's Q4_0, value by value: blocks of 32 of a row, x ≈ d·q, q of −8 … 7, d in fp16 (ggml-quants.c,
              quantize_row_q4_0_ref); a last block may be shorter, which a GGUF file does not allow

Nothing is fitted, so no text is held out. The rounded tables are used in fp32, as if they were unpacked; the further
error of kernels that round activations too is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import NATS, Listing, Measurement, Quantity
from tiewise.core.progress import report_progress
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.two_paths import TextLoss, TwoLeaves, separate_leaves
from tiewise.inspection.workspace import InspectedModel, Workspace, section
from tiewise.training.data.tokenizer import Ids

BLOCK = 32  # values of Q4_0 that share a scale
LOOKUP, HEAD, BOTH = ENDS = ("lookup", "head", "both")
FIGURE = "KL of the output once an end is rounded"
Choice = tuple[str, int]  # (rounded end, bits)
_AT_ONCE = 1 << 22  # values of a table that are rounded together


@section(question="Which table should be quantised first?", order=75, text=True, weight=4)
def precision(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Round the lookup's table, the head's and both to 8 and to 4 bits."""
    return precision_of(workspace.opened(model), workspace.windows(model)[0], workspace.request.seed)


def int8_by_row(table: Tensor) -> Tensor:
    """Round a table [V, E] to symmetric int8 with one scale per row.

    A row of zeros is unchanged.
    """
    scale = table.abs().amax(1, keepdim=True) / 127
    divisor = scale.clamp_min(torch.finfo(table.dtype).tiny)
    return (table / divisor).round() * scale


def q4_0(table: Tensor) -> Tensor:
    """Round a table [V, E] to GGUF's Q4_0."""
    rows, width = table.shape
    blocks = F.pad(table, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8  # the largest value becomes −8, whatever its sign
    inverse = torch.where(scale == 0, scale, 1 / scale)
    steps = (blocks * inverse + 8.5).floor().clamp(max=15) - 8
    stored_scale = scale.half().to(table.dtype)
    return (steps * stored_scale).view(rows, -1)[:, :width]


ROUNDED = {8: int8_by_row, 4: q4_0}


@leaves_model
def precision_of(opened: Opened, windows: Ids, seed: int = 0) -> Measurement:
    """Measure KL(model ‖ model with rounded ends) on predicted tokens of windows [n, T].

    The model is not changed. `seed` draws hidden tokens if the model predicts those. Memory: two more tables for each
    of the model's, and the logits of a few windows, six times.

    Raises:
        DataError: windows that this model cannot run on.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss, tied = TextLoss(opened, windows, seed), opened.ends.tied
    measured: dict[Choice, list[Tensor]] = {(end, bits): [] for bits, end in product(ROUNDED, ENDS)}
    with separate_leaves(opened.ends) as leaves, torch.no_grad():
        ends = _EndsToRound.of(leaves)
        for indices in torch.split(torch.arange(len(windows)), max(1, loss.at_once // 4)):
            ends.restore()
            logits, targets = loss.predicted(indices)
            p = logits.softmax(-1)
            for choice, means in measured.items():
                ends.round(*choice)
                changed, _ = loss.predicted(indices)
                both = _kl_and_loss(logits, p, changed, targets)
                means.append(both.view(2, len(indices), -1).mean(2))
            report_progress("rounding the ends", int(indices[-1]) + 1, len(windows))
    return measurement_of({choice: torch.cat(parts, 1) for choice, parts in measured.items()}, tied)


@dataclass(frozen=True)
class _EndsToRound:
    """Both ends of a model, original and rounded."""

    leaves: TwoLeaves
    table: Tensor  # the lookup's original table
    head: Tensor  # the head's original table
    rounded: Mapping[int, tuple[Tensor, Tensor]]  # bits → both tables rounded; the same tensor if they are tied

    @classmethod
    def of(cls, leaves: TwoLeaves) -> _EndsToRound:
        """Round both ends to every number of bits."""
        table, head = leaves.a.data, leaves.b.data
        rounded: dict[int, tuple[Tensor, Tensor]] = {}
        for bits, to in ROUNDED.items():
            rounded_table = rounded_head = _in_pieces(to, table)
            if head.data_ptr() != table.data_ptr():
                rounded_head = _in_pieces(to, head)
            rounded[bits] = rounded_table, rounded_head
        return cls(leaves, table, head, rounded)

    def restore(self) -> None:
        """Restore both ends."""
        self.leaves.a.data, self.leaves.b.data = self.table, self.head

    def round(self, end: str, bits: int) -> None:
        """Round one end or both; restore the other one."""
        self.restore()
        table, head = self.rounded[bits]
        if end != HEAD:
            self.leaves.a.data = table
        if end != LOOKUP:
            self.leaves.b.data = head


def _in_pieces(to: Callable[[Tensor], Tensor], table: Tensor) -> Tensor:
    """Round a table a few rows at a time."""
    return torch.cat([to(part) for part in torch.split(table, 1 + _AT_ONCE // table.shape[1])])


def _kl_and_loss(logits: Tensor, p: Tensor, changed: Tensor, targets: Tensor) -> Tensor:
    """Return KL(p ‖ softmax(changed)) and the increase of the loss of targets [n]: [2, n] fp64.

    p [n, V] is that of `logits`. With d = logits − changed and m = E_p d, KL = log E_p e^(m − d): a small KL keeps its
    digits in fp32, where the difference of two log-softmaxes loses them.
    """
    moved = logits - changed
    mean = (p * moved).sum(-1, dtype=torch.float64)
    kl = (p * torch.expm1(mean[:, None].to(p) - moved)).sum(-1, dtype=torch.float64).log1p()
    far = ~kl.isfinite()  # e^(m − d) overflows: here KL is large and its digits do not matter
    log_p, log_q = (x[far].double().log_softmax(-1) for x in (logits, changed))
    mean[far] = (log_p.exp() * moved[far]).sum(-1)
    kl[far] = (log_p.exp() * (log_p - log_q)).sum(-1)
    of_targets = moved.gather(1, targets[:, None])[:, 0]
    return torch.stack([kl, of_targets - mean + kl])


def measurement_of(measured: Mapping[Choice, Tensor], tied: bool) -> Measurement:
    """Report which end changes the output less at 4 bits.

    `measured` has [2, n] by choice: means over each window of KL, and of the increase of the loss.
    """
    quantities = []
    rows = {end: [end] for end in ENDS}
    for (end, bits), (kl, loss) in measured.items():
        name, why = f"{end}, {bits} bits", "KL(model ‖ rounded)"
        kl_interval, loss_interval = mean_interval(kl.numpy()), mean_interval(loss.numpy())
        moved = Quantity.of_estimate(name, kl_interval, unit=NATS, main=end != BOTH, figure=FIGURE, why=why)
        more = Quantity.of_estimate(f"loss more, {name}", loss_interval, unit=NATS, chance=0.0, main=False)
        quantities += [moved, more]
        rows[end] += [str(moved), str(more)]
    header = ["rounded"]
    for bits in ROUNDED:
        header += [f"KL, {bits} bits", f"loss more, {bits} bits"]
    notes = ["8 bits: int8, a scale per row; 4 bits: Q4_0, one per 32 values"]
    if tied:
        notes.append("one end rounded alone needs a second table")
    return Measurement(
        answer=_answer(measured),
        quantities=tuple(quantities),
        listings=(Listing(f"Output and loss, {NATS}", header, tuple(rows.values())),),
        notes=tuple(notes),
    )


def _answer(measured: Mapping[Choice, Tensor]) -> str:
    """Return which end changes the output less at the fewest bits."""
    bits = min(ROUNDED)
    lookup, head = measured[LOOKUP, bits][0], measured[HEAD, bits][0]
    difference = mean_interval((head - lookup).numpy())
    costs = f"{bits} bits cost {lookup.mean():.2g} nats in the input table and {head.mean():.2g} in the head"
    if difference.low > 0:
        return f"quantise the input table first: {costs}"
    if difference.high < 0:
        return f"quantise the head first: {costs}"
    return f"no difference detected: {costs}"
