"""Share of the loss's gradient that passes the head.

Of g = ∂L/∂logits [N, V] the layers below receive g W, with W [V, E] the head. So only the part of g in the column space
of W reaches them, P g with P = W (WᵀW)⁺ Wᵀ (Godey & Artzi, arXiv:2603.10145).

    share = Σ ‖P g‖² / Σ ‖g‖²,    ‖P g‖² = g W (WᵀW)⁺ Wᵀ gᵀ = ‖g Q‖²,    Q = W (WᵀW)^(−½), from an E × E Gram matrix

A random direction passes rank(W) / V of its square.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.boundary.free_rows import output_table
from tiewise.core.errors import non_finite_error
from tiewise.core.estimates import ratio
from tiewise.core.measurement import Measurement, Quantity
from tiewise.core.progress import report_progress
from tiewise.core.text import BINS, frequency_bins, token_counts
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.two_paths import TextLoss
from tiewise.inspection.workspace import InspectedModel, Workspace, mean_of, section
from tiewise.training.data.tokenizer import Ids

_ROWS = 4096  # rows of a table that are converted to fp64 together


@section(question="How much of the loss's gradient passes through the head?", order=72, text=True)
def bottleneck(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Project the gradient at the logits on the head's columns, by frequency of the next token."""
    opened = workspace.opened(model)
    counts = workspace.counts(model, opened.vocab)
    measured_on, _ = workspace.windows(model)
    return bottleneck_of(opened, measured_on, counts, workspace.request.seed)


@leaves_model
def bottleneck_of(opened: Opened, windows: Ids, counts: NDArray[np.int64] | None = None, seed: int = 0) -> Measurement:
    """Measure the share of the gradient at the logits that passes the head.

    The gradient is that of windows of token ids [n, T]. The model is not changed. `counts` are the occurrences of each
    token in a longer text [V]; None counts the windows. `seed` draws hidden tokens if the model predicts those.

    Raises:
        DataError: windows that this model cannot run on, or a head with values that are no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss, head = TextLoss(opened, windows, seed), opened.ends.head
    basis = _basis(output_table(head).detach())
    if counts is None:
        counts = token_counts(windows.reshape(-1), opened.vocab)
    bands = frequency_bins(counts)
    passed, total = np.zeros((2, len(windows), len(BINS)))  # ‖P g‖² and ‖g‖², by window and band
    at_head = _HeadLogits()
    with head.register_forward_hook(at_head.store):
        at_once = max(1, loss.at_once // 4)  # less: gradients need memory
        for indices in torch.split(torch.arange(len(windows)), at_once):
            logits, targets = loss.predicted(indices)
            gradient = at_head.gradient(logits, targets)
            cells = np.repeat(indices.numpy(), loss.per_window), bands[targets.numpy()]
            np.add.at(passed, cells, _squares(gradient @ basis))
            np.add.at(total, cells, _squares(gradient))
            report_progress("gradients at the logits", int(indices[-1]) + 1, len(windows))
    return _report(passed, total, basis.shape[1] / len(basis))


class _HeadLogits:
    """Output of the head in the last forward, as a leaf of the logits."""

    def __init__(self) -> None:
        """Start with an empty output."""
        self.logits = torch.empty(0)

    def store(self, module: nn.Module, arguments: object, logits: Tensor) -> Tensor:
        """Store the head's output and pass on a copy, because some families write on it."""
        self.logits = logits.detach().requires_grad_()
        return self.logits.clone()

    def gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient [n, V] of the summed loss of targets [n] at their positions."""
        (of_sum,) = torch.autograd.grad(logits.sum(), self.logits, retain_graph=True)
        is_used = of_sum.flatten(0, -2).any(-1)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        (of_loss,) = torch.autograd.grad(loss, self.logits)
        return of_loss.flatten(0, -2)[is_used]


def _squares(rows: Tensor) -> NDArray[np.float64]:
    """Return the squared norm of each row [n], in fp64."""
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    squares: NDArray[np.float64] = norms.square().numpy()
    return squares


def _report(passed: NDArray[np.float64], total: NDArray[np.float64], chance: float) -> Measurement:
    """Report the share of the squared gradient that passes.

    `passed` and `total` are ‖P g‖² and ‖g‖² by window and band [n, bands].
    """
    shares, why = passed.sum(1) / total.sum(1), "‖P g‖² / ‖g‖²"
    share = mean_of("share of the squared gradient", shares, unit="%", chance=chance, why=why)
    lost, lost_by_chance = 1 - math.sqrt(share.value), 1 - math.sqrt(chance)
    quantities = [share, Quantity("norm that is lost", lost, unit="%", chance=lost_by_chance, main=False)]
    figure = "Share that passes, by the next token's frequency"
    for band, label in enumerate(BINS):
        if total[:, band].any():
            name = f"next token occurs {label} times"
            of_band = ratio(passed[:, band].sum(), total[:, band].sum())
            quantities.append(Quantity(name, of_band, unit="%", chance=chance, main=False, figure=figure))
    value, level = Quantity("", share.value, unit="%"), Quantity("", chance, unit="%")
    return Measurement(f"{value} of the squared gradient passes through the head, {level} by chance", tuple(quantities))


def _basis(table: Tensor) -> Tensor:
    """Return an orthonormal basis [V, r] of the columns of a table [V, E].

    r is the table's rank.
    """
    gram = torch.zeros((), dtype=torch.float64)
    for part in torch.split(table, _ROWS):
        wide = part.double()
        gram = gram + wide.T @ wide
    if not torch.isfinite(gram).all():
        raise non_finite_error("a head")
    values, vectors = torch.linalg.eigh(gram)
    # a singular value counts as zero below E·ε of the largest, or if the Gram matrix has only its rounding
    of_table = (len(values) * torch.finfo(table.dtype).eps) ** 2
    of_gram = len(values) * torch.finfo(torch.float64).eps
    is_filled = values > values[-1] * max(of_table, of_gram)
    projection = vectors[:, is_filled] / values[is_filled].sqrt()
    return torch.cat([(part.double() @ projection).to(table.dtype) for part in torch.split(table, _ROWS)])
