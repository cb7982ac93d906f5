"""The two gradients of one table on a text, separately, and Adam's step divided between them.

    lookups  →  leaf a  ┐  one storage, two leaves:    loss.backward gives ∂L/∂a = A, the lookup path [V, E]
    head     →  leaf b  ┘                                                  ∂L/∂b = B, the head path [V, E]

A tied table's gradient is A + B. Both leaves use the table's memory; nothing is copied. Afterwards the model gets its
parameters back, with their `.grad`. Norms are summed row by row.

Adam's step is linear in its first moment, and the moment of a sum is the sum of moments (Kingma & Ba, arXiv:1412.6980,
algorithm 1). Two tables have a v each:

    u = m̂ / (√v̂ + ε)      m of A + B = m_A + m_B      →      u = u_A + u_B, exactly, with the v of the sum

The loss is the one that the model's family is trained with. It follows from the model's behaviour, not from its name: a
model predicts the next token if no position sees a later one.

    next token    position i predicts token i + 1
    hidden        15 % of a window's tokens are replaced by the mask token and predicted (no random replacements)
    second half   the encoder reads the first half of a window, the decoder predicts the second
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.boundary.locate import ModelEnds
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.tokenizer_ids import read_tokenizer
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.estimates import ratio
from tiewise.inspection.running.loaded import Opened
from tiewise.training.data.tokenizer import Ids

NEXT, HIDDEN, HALF = "next token", "hidden", "second half"
HIDDEN_SHARE = 0.15  # of a window's tokens; BERT hides as many (arXiv:1810.04805, §3.1)
_MASKS = ("[MASK]", "<mask>")
_MOST_LOGITS = 1 << 26  # of one forward: 256 MB of fp32
_CHECKED_TOKENS = 8  # tokens that are used to test which positions a model sees
_ROWS = 4096  # of a table, converted to fp64 together
Floats = NDArray[np.float64]


class TextLoss:
    """Negative log-likelihood of windows of a text [n, T].

    `per_window` is the number of tokens that each window predicts.

    Raises:
        DataError: this model cannot run on the windows, or a masked model's tokenizer has no mask token.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """

    def __init__(self, opened: Opened, windows: Ids, seed: int = 0) -> None:
        self.model: Any = opened.model
        self.windows = opened.checked(windows)
        self.objective = _find_objective(opened, self.windows)
        length = self.windows.shape[1]
        hidden = max(1, round(HIDDEN_SHARE * length))
        self.per_window = {NEXT: length - 1, HIDDEN: hidden, HALF: length - length // 2}[self.objective]
        if self.objective == HIDDEN:
            self._mask = _mask_token(opened.folder)
            draws = np.random.default_rng(seed).random(windows.shape)  # the lowest draws of each window are hidden
            self._hidden = torch.from_numpy(draws.argsort(1).argsort(1) < hidden)
        self.at_once = max(1, _MOST_LOGITS // (length * len(opened.ends.head.weight)))  # windows in one forward

    def predicted(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [n, V], tokens [n]) that the windows `indices` [b] predict, in order.

        n = b·`per_window`.
        """
        ids = self.windows[indices]
        if self.objective == NEXT:
            logits, targets = self.model(input_ids=ids).logits[:, :-1], ids[:, 1:]
        elif self.objective == HIDDEN:
            hidden = self._hidden[indices]
            logits = self.model(input_ids=ids.masked_fill(hidden, self._mask)).logits[hidden]
            targets = ids[hidden]
        else:
            half = ids.shape[1] // 2
            first, targets = ids[:, :half], ids[:, half:]
            shifted = self.model.prepare_decoder_input_ids_from_labels(labels=targets)
            logits = self.model(input_ids=first, decoder_input_ids=shifted).logits
        return logits.flatten(0, -2), targets.flatten()

    def total(self, indices: Tensor) -> Tensor:
        """Return the sum of −ln p over all tokens that windows predict: a scalar, in nats.

        `indices` [b] are the numbers of the windows.
        """
        return F.cross_entropy(*self.predicted(indices), reduction="sum")


def _mask_token(folder: Folder) -> int:
    """Return the id of the mask token in a folder's tokenizer."""
    tokenizer = read_tokenizer(folder)
    if tokenizer is not None:
        added_ids = {text: number for number, text in tokenizer.added.items()}
        tokens = {**tokenizer.base, **added_ids}
        for text in _MASKS:
            if text in tokens:
                return tokens[text]
    problem = f"{folder.path}: the model predicts hidden tokens, and its tokenizer has no "
    raise DataError(problem + " or ".join(_MASKS), "put the model's own tokenizer into its folder")


def _find_objective(opened: Opened, windows: Tensor) -> str:
    """Return the objective, measured by gradients on the first tokens of one window.

    The upstream gradients are random.
    """
    model: Any = opened.model
    if model.config.is_encoder_decoder:
        if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            problem = f"{type(model).__name__} does not say how its decoder's input is made from labels"
            raise UnsupportedError(problem, "give a decoder-only or an encoder-only model")
        return HALF
    looked_up: list[Tensor] = []

    def record_rows(module: nn.Module, arguments: object, rows: Tensor) -> Tensor:
        """Record the looked-up rows as a leaf, and pass on a copy."""
        looked_up.append(rows.detach().requires_grad_())
        return looked_up[-1].clone()

    with torch.enable_grad(), model.get_input_embeddings().register_forward_hook(record_rows):
        logits = model(input_ids=windows[:1, :_CHECKED_TOKENS]).logits
    if not logits.isfinite().all():
        raise DataError(f"{opened.folder.path}: logits that are no numbers", "`tiewise check --deep` names the rows")
    # if no position sees a later one, the last token's gradient from the logits before it is exactly 0
    earlier = logits[:, :-1]
    upstream = torch.randn(earlier.shape, generator=torch.Generator().manual_seed(0)).to(earlier)
    (gradient,) = torch.autograd.grad(earlier, looked_up[0], upstream)
    return HIDDEN if gradient[:, -1].any() else NEXT


@dataclass(frozen=True)
class BatchGradient:
    """Gradients of the mean loss of some windows."""

    a: Tensor  # of the input table, through the lookups [V_in, E]
    b: Tensor  # of the output table, through the head [V_out, E]
    nll: float  # the mean loss, nats per predicted token
    rows_l2: float  # L2 norm of the gradient at the lookups' outputs [b, T, D], before the rows of one token are summed
    rows_l1: float  # L1 norm of the same gradient


@dataclass(frozen=True)
class TwoLeaves:
    """Separate leaves of the input table and the output table, as `separate_leaves` yields them."""

    a: nn.Parameter
    b: nn.Parameter
    looked_up: list[Tensor]  # the lookups' outputs in the current forward

    def gradient(self, loss: TextLoss, indices: Tensor) -> BatchGradient:
        """Differentiate the mean loss per predicted token of the windows `indices` [b].

        A few windows are run at a time.
        """
        a, b = torch.zeros_like(self.a), torch.zeros_like(self.b)
        nll = squares = absolute = 0.0
        tokens = loss.per_window * len(indices)
        for piece in torch.split(indices, loss.at_once):
            self.looked_up.clear()
            part = loss.total(piece) / tokens
            of_a, of_b, *of_rows = torch.autograd.grad(part, [self.a, self.b, *self.looked_up])
            a += of_a
            b += of_b
            nll += float(part.detach())
            squares += sum(float(torch.linalg.vector_norm(x)) ** 2 for x in of_rows)
            absolute += sum(float(torch.linalg.vector_norm(x, 1)) for x in of_rows)
        self.looked_up.clear()
        return BatchGradient(a, b, nll, squares**0.5, absolute)


@contextmanager
def separate_leaves(ends: ModelEnds) -> Iterator[TwoLeaves]:
    """Give lookups and head separate leaves within this context, then restore the model."""
    table, output = ends.main_lookup.weight, ends.head.weight
    lookups = list({id(module): module for _, module in ends.lookups if module.weight is table}.values())
    leaves = TwoLeaves(nn.Parameter(table.detach()), nn.Parameter(output.detach()), [])

    def store_rows(module: nn.Module, arguments: object, rows: Tensor) -> None:
        """Store the output of a lookup."""
        if rows.requires_grad:
            leaves.looked_up.append(rows)

    with ExitStack() as undo:
        for module in lookups:
            undo.callback(module.register_forward_hook(store_rows).remove)
        for module in lookups:
            undo.callback(setattr, module, "weight", table)
            module.weight = leaves.a
        undo.callback(setattr, ends.head, "weight", output)
        ends.head.weight = leaves.b
        yield leaves


@dataclass(frozen=True)
class PathSplit:
    """Norms of two parts A and B, gradients or steps, and the shares of B.

    A value is NaN where it is not defined.
    """

    a: float  # ‖A‖, Frobenius
    b: float
    total: float  # ‖A + B‖ for one table; √(‖A‖² + ‖B‖²) for two
    cosine: float  # between A and B; NaN for two tables
    b_l1: float  # sum of |B|
    share_b: float  # ‖B‖ / (‖A‖ + ‖B‖)
    energy_b: float  # ‖B‖² / (‖A‖² + ‖B‖²)
    share_b_l1: float  # the share of norms by L1


@dataclass(frozen=True)
class RowSums:
    """Sums over each row of A and B, [V] each."""

    a2: Floats  # ‖A_r‖²
    b2: Floats
    ab: Floats  # A_r·B_r; NaN for two tables
    a1: Floats  # sum of |A_r|
    b1: Floats

    @property
    def rows(self) -> int:
        """Return V, of the longer table."""
        return len(self.a2)

    def longest(self, top: int) -> list[int]:
        """Return the rows with the largest ‖A_r‖² + ‖B_r‖², falling."""
        order: list[int] = np.argsort(-(self.a2 + self.b2), kind="stable").tolist()
        return order[:top]

    @property
    def share_b(self) -> Floats:
        """Return ‖B_r‖ / (‖A_r‖ + ‖B_r‖) of every row [V]; NaN where both are zero."""
        a, b = np.sqrt(self.a2), np.sqrt(self.b2)
        both = a + b
        shares: Floats = np.divide(b, both, out=np.full_like(b, np.nan), where=both > 0)
        return shares

    def split(self, rows: NDArray[np.bool_] | slice = slice(None)) -> PathSplit:
        """Sum over all rows, or over some."""
        a2, b2, ab = float(self.a2[rows].sum()), float(self.b2[rows].sum()), float(self.ab[rows].sum())
        a1, b1 = float(self.a1[rows].sum()), float(self.b1[rows].sum())
        a, b = math.sqrt(a2), math.sqrt(b2)
        if math.isnan(ab):  # two tables
            total, cosine = math.sqrt(a2 + b2), math.nan
        else:
            total, cosine = math.sqrt(max(0.0, a2 + b2 + 2 * ab)), ratio(ab, a * b)
        return PathSplit(
            a,
            b,
            total,
            cosine,
            b_l1=b1,
            share_b=ratio(b, a + b),
            energy_b=ratio(b2, a2 + b2),
            share_b_l1=ratio(b1, a1 + b1),
        )


def row_sums(a: Tensor, b: Tensor, one_table: bool) -> RowSums:
    """Sum A [V, E] and B [V', E'] row by row in fp64.

    Missing rows of the shorter table count as zero.
    """
    rows = max(len(a), len(b))
    sums = RowSums(*np.zeros((5, rows)))
    if not one_table:
        sums.ab[:] = np.nan
    for start in range(0, rows, _ROWS):
        x, y = a[start : start + _ROWS].double(), b[start : start + _ROWS].double()
        _add_rows(sums.a2, start, x.square())
        _add_rows(sums.b2, start, y.square())
        _add_rows(sums.a1, start, x.abs())
        _add_rows(sums.b1, start, y.abs())
        if one_table:
            _add_rows(sums.ab, start, x * y)
    return sums


def _add_rows(sums: Floats, start: int, values: Tensor) -> None:
    """Write the row sums of `values` [n, E] into `sums` from index `start` on."""
    sums[start : start + len(values)] = values.sum(1).numpy()


def cosine_null(a: Tensor, b: Tensor, rows: Tensor, seed: int, permutations: int) -> tuple[float, float]:
    """Return (lowest, highest) cosine of A and B over permutations of A's rows.

    The rows `rows` [U] are permuted; all other rows of A must be zero.
    """
    source = torch.Generator().manual_seed(seed)
    of_a, of_b = F.embedding(rows, a), F.embedding(rows, b)
    norms = float(torch.linalg.vector_norm(of_a)) * float(torch.linalg.vector_norm(b))
    if not norms:
        return math.nan, math.nan
    cosines = []
    for _ in range(permutations):
        order = torch.randperm(len(rows), generator=source)
        pieces = zip(torch.split(order, _ROWS), torch.split(of_b, _ROWS), strict=True)
        cosines.append(sum(float((of_a[piece] * part).sum()) for piece, part in pieces) / norms)
    return min(cosines), max(cosines)


class AdamPaths:
    """First and second moments of both paths under Adam.

    `add` takes the gradients of a step; `step` returns the update per unit of learning rate.
    """

    def __init__(self, a: Tensor, b: Tensor, one_table: bool, betas: tuple[float, float], eps: float) -> None:
        self.betas, self.eps, self.one_table, self.steps = betas, eps, one_table, 0
        self._m = torch.zeros_like(a), torch.zeros_like(b)
        self._v = (torch.zeros_like(a),) if one_table else (torch.zeros_like(a), torch.zeros_like(b))

    def add(self, a: Tensor, b: Tensor) -> None:
        """Update the moments by the gradients of one step."""
        self.steps += 1
        for moment, gradient in zip(self._m, (a, b), strict=True):
            moment.lerp_(gradient, 1 - self.betas[0])
        for square, gradient in zip(self._v, (a + b,) if self.one_table else (a, b), strict=True):
            square.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def step(self) -> tuple[Tensor, Tensor]:
        """Return (u_A, u_B), the bias-corrected decrease of the weights per unit of learning rate.

        The moments are overwritten, so the object cannot be used afterwards.
        """
        first, second = (1 - beta**self.steps for beta in self.betas)
        below = [v.div_(second).sqrt_().add_(self.eps) for v in self._v]
        a, b = (m.div_(first) for m in self._m)
        return a.div_(below[0]), b.div_(below[-1])
