"""How much of the loss's gradient passes the head? The gradient at the logits, projected on what the head can carry.

Of g = ∂L/∂logits [N, V] the layers below get g W, with W [V, E] the head: only the part of g that lies in the column
space of W, P g with P = W (WᵀW)⁺ Wᵀ, is not thrown away (Godey & Artzi, arXiv:2603.10145).

    share = Σ ‖P g‖² / Σ ‖g‖²,    ‖P g‖² = g W (WᵀW)⁺ Wᵀ gᵀ = ‖g Q‖²,    Q = W (WᵀW)^(−½), from an E × E Gram matrix

A direction drawn at random passes rank(W) / V of its square.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.core.errors import no_numbers, progress
from tiewise.core.estimates import ratio
from tiewise.core.found import Found, Quantity
from tiewise.core.text import BINS, bin_of, token_counts
from tiewise.inspection.bench import Bench, Subject, mean_of, section
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.two_paths import TextLoss
from tiewise.training.data.tokenizer import Ids

_ROWS = 4096  # of a table, taken to fp64 at once


@section(asks="How much of the loss's gradient passes the head?", place=72, text=True)
def bottleneck(subject: Subject, bench: Bench) -> Found:
    """Project the gradient at the logits on the head's columns, by how often the token occurs that is predicted."""
    opened = bench.opened(subject)
    counts = bench.counts(subject, opened.vocab)
    return bottleneck_of(opened, bench.windows(subject)[0], counts, bench.request.seed)


@leaves_model
def bottleneck_of(opened: Opened, windows: Ids, counts: NDArray[np.int64] | None = None, seed: int = 0) -> Found:
    """Measure the share of the gradient at the logits that the head lets through, on windows of token ids [n, T].

    The model is left as it was. `counts` say how often each token occurs in a longer text [V], None counts the windows;
    `seed` draws hidden tokens, where the model predicts those.

    Raises:
        DataError: windows that this model cannot be run on, or a head that is no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss, head, made = TextLoss(opened, windows, seed), opened.ends.head, list[Tensor]()
    basis = _basis(head.weight.detach())
    bands = bin_of(token_counts(windows.reshape(-1), opened.vocab) if counts is None else counts)
    sums = np.zeros((2, len(windows), len(BINS)))  # ‖P g‖² and ‖g‖², by window and band

    def keep(module: nn.Module, arguments: object, logits: Tensor) -> Tensor:
        made[:] = [logits.detach().requires_grad_()]
        return made[0].clone()  # some families write on it

    with head.register_forward_hook(keep):
        for which in torch.split(torch.arange(len(windows)), max(1, loss.at_once // 4)):  # their gradients are held too
            logits, targets = loss.predicted(which)
            used = torch.autograd.grad(logits.sum(), made, retain_graph=True)[0].flatten(0, -2).any(-1)
            gradient = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), made)[0]
            gradient = gradient.flatten(0, -2)[used]  # of the positions that predict something, in their order
            place = np.repeat(which.numpy(), loss.per_window), bands[targets.numpy()]
            for total, part in zip(sums, (gradient @ basis, gradient), strict=True):
                np.add.at(total, place, torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).square().numpy())
            progress("gradients at the logits", int(which[-1]) + 1, len(windows))
    return _report(sums[0], sums[1], basis.shape[1] / len(basis))


def _report(passed: NDArray[np.float64], total: NDArray[np.float64], chance: float) -> Found:
    """Say what share of the squared gradient passes, from ‖P g‖² and ‖g‖² by window and band [n, bands]."""
    shares, why = passed.sum(1) / total.sum(1), "‖P g‖² / ‖g‖²"
    share = mean_of("share of the squared gradient", shares, unit="%", chance=chance, why=why)
    lost, lost_by_chance = 1 - math.sqrt(share.value), 1 - math.sqrt(chance)
    quantities = [share, Quantity("norm that is lost", lost, unit="%", chance=lost_by_chance, main=False)]
    for band, label in enumerate(BINS):
        if total[:, band].any():
            quantities.append(Quantity(
                f"next token occurs {label} times", ratio(passed[:, band].sum(), total[:, band].sum()), unit="%",
                chance=chance, main=False, figure="Share that passes, by the next token's frequency",
            ))  # fmt: skip
    value, level = (str(Quantity("", part, unit="%")) for part in (share.value, chance))
    return Found(f"{value} of its square, {level} by chance", tuple(quantities))


def _basis(table: Tensor) -> Tensor:
    """Return an orthonormal basis [V, r] of the columns of a table [V, E], r its rank."""
    gram = torch.zeros((), dtype=torch.float64)
    for part in torch.split(table, _ROWS):
        wide = part.double()
        gram = gram + wide.T @ wide
    if not torch.isfinite(gram).all():
        raise no_numbers("a head")
    values, vectors = torch.linalg.eigh(gram)
    # a singular value is none below E·ε of the largest, or where the Gram matrix itself is rounding
    least = max((len(values) * torch.finfo(table.dtype).eps) ** 2, len(values) * torch.finfo(torch.float64).eps)
    is_filled = values > values[-1] * least
    turned = vectors[:, is_filled] / values[is_filled].sqrt()
    return torch.cat([(part.double() @ turned).to(table.dtype) for part in torch.split(table, _ROWS)])
