"""`Boundary`: the module that owns a model's input and output tables and its maps.

    boundary = Boundary("factored:64+bias", vocab=10_000, width=256)

    rows = boundary.embed(ids)              # [..] -> [.., D]
    logits = boundary.logits(hidden)        # [.., D] -> [.., V]
    loss = boundary.loss(hidden, targets)   # cross-entropy of these logits, fused: no logits are computed

    loss = boundary(ids, body, targets)     # lookup, body [.., D] -> [.., D], and loss in one call

The last form passes the table from the lookup to the head, so that a tied table has one gradient buffer (see
`tiewise.boundary.ops.path_gradient`). The separate methods give the same gradient and use a second buffer. Tied means
that `table_out` is `table_in`: one Parameter, once in `parameters()` and in the optimizer, under both names in the
state dict.

Both tables are [V, E], one row per token. The head multiplies by the transpose; no table is stored transposed.

Maps may connect a table and the body: in_map [.., E] -> [.., D] after the lookup and out_map [.., D] -> [.., E]
before the head. None is the identity and costs nothing. All maps are linear, so a boundary can be exported as two
dense tables. The exception is `out_bias`, which no table can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.free_rows import FreeRows
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, tied_lookup, without_row
from tiewise.boundary.vectors import start_from_rows
from tiewise.core.backends import LossOptions
from tiewise.core.errors import SpecError
from tiewise.core.frequent_tokens import most_frequent
from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.core.spec_options import BOUNDARY
from tiewise.planning.first_loss import sound_std, starting_nll

Body = Callable[[Tensor], Tensor]


def draw(table: Tensor, std: float, pad: int | None = None) -> None:
    """Fill `table` [V, E] with N(0, std²) from torch's global generator, and zero the padding row."""
    with torch.no_grad():
        nn.init.normal_(table, std=std)
        if pad is not None:
            table[pad].zero_()


# maps


def make_maps(spec: BoundarySpec, width: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the initialised (in_map, out_map) of `spec` in a model of this `width` D.

    A map is None where the spec has the identity.
    """
    if spec.kind == "residual":
        assert spec.rank is not None
        return None, LowRankCorrection(width, spec.rank, spec.strength)
    if spec.kind == "spd":
        definite = PositiveDefinite(width)
        return Inverse(definite), definite
    has_in, has_out = spec.maps(width)
    in_width, out_width = spec.table_widths(width)
    in_map = out_map = None
    if has_in:
        in_map = LinearMap(in_width, width, bias=False)
    if has_out:
        out_map = LinearMap(width, out_width, bias=spec.out_bias)
    return in_map, out_map


def apply_map(module: nn.Module | None, x: Tensor) -> Tensor:
    """Return `module(x)`, or `x` itself if the map is None (the identity)."""
    if module is None:
        return x
    image: Tensor = module(x)
    return image


def soft_cap(z: Tensor, cap: float | None) -> Tensor:
    """Return c · tanh(z / c) for a cap c, or `z` without a cap."""
    if cap is None:
        return z
    return cap * torch.tanh(z / cap)


class LinearMap(nn.Linear):
    """Linear layer `x @ weightᵀ` with weight [to, from] from N(0, 1/from).

    This variance preserves the mean square of x. A bias [to] starts at zero.
    """

    def reset_parameters(self) -> None:
        """Draw the weight and set the bias to zero."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LowRankCorrection(nn.Module):
    """Map `x + s · (x Qᵀ) Pᵀ` with P [D, r] and Q [r, D].

    It adds the correction W s P Q to the table W at the output only. P starts at zero, so the boundary starts exactly
    tied. Source: the output-side correction W(I + s·PQ) of the Press & Wolf reproductions (r = 32, s = 0.03 on PTB,
    200k parameters for D = 1500 at most).
    """

    def __init__(self, width: int, rank: int, strength: float) -> None:
        super().__init__()
        self.strength = strength
        self.p = nn.Parameter(torch.empty(width, rank))
        self.q = nn.Parameter(torch.empty(rank, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set P to zero and draw Q from N(0, 1/D)."""
        nn.init.zeros_(self.p)
        nn.init.normal_(self.q, std=self.q.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + s · (x Qᵀ) Pᵀ, [.., D] like `x`."""
        return x + self.strength * F.linear(F.linear(x, self.q), self.p)


class PositiveDefinite(nn.Module):
    """Map `x S` with a symmetric positive definite S = C Cᵀ [D, D].

    C is lower triangular with a positive diagonal. S starts at the identity. `factor` holds C below the diagonal and
    log C on the diagonal, so every value of the parameter gives a positive definite S. Source: pseudo-inverse tying,
    arXiv:2602.04556, with a learned symmetric positive definite (SPD) map at the output and its inverse at the input.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set S to the identity."""
        nn.init.zeros_(self.factor)

    def cholesky(self) -> Tensor:
        """Return the Cholesky factor C [D, D] of S."""
        return self.factor.tril(-1) + torch.diag_embed(self.factor.diagonal().exp())

    def forward(self, x: Tensor) -> Tensor:
        """Return x S, [.., D] like `x`."""
        c = self.cholesky()
        return F.linear(F.linear(x, c.T), c)


class Inverse(nn.Module):
    """Map `x S⁻¹` for the S of a `PositiveDefinite` map.

    Two triangular solves compute it without forming S⁻¹. The map adds no parameter.
    """

    def __init__(self, definite: PositiveDefinite) -> None:
        super().__init__()
        # not a submodule: as one, the factor would be saved and counted at both ends
        object.__setattr__(self, "definite", definite)

    def forward(self, x: Tensor) -> Tensor:
        """Return x S⁻¹, [.., D] like `x`.

        It solves in fp32 or wider, since torch has no triangular solve in half precision.
        """
        definite: PositiveDefinite = self.definite  # type: ignore[assignment]
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            c = definite.cholesky().to(wide)
            columns = x.reshape(-1, x.shape[-1]).T.to(wide)
            half = torch.linalg.solve_triangular(c, columns, upper=False)
            solved: Tensor = torch.linalg.solve_triangular(c.T, half, upper=True)
        # a copy: CTRL scales its rows in place, and autograd needs the unscaled result for the solve's gradient
        return solved.T.clone().reshape(x.shape).to(x.dtype)


def penalty_of(spec: BoundarySpec, out_map: nn.Module) -> Tensor | None:
    """Return the penalty of a projection P on the loss, λ‖P‖₂ + c/2 ‖P‖²_F.

    Return None if the spec has neither λ nor c. Press & Wolf 2017, §3, prints the first term with λ = 0.15. Their code
    adds ½‖P‖²_F / 130 to a loss that is summed over 20 time steps.
    """
    if not (spec.penalty or spec.decay):
        return None
    norm: Tensor = torch.linalg.vector_norm(out_map.weight)
    squared = spec.decay / 2 * norm.square()
    if not spec.penalty:  # leave the norm out: it has no gradient at P = 0
        return squared
    return spec.penalty * norm + squared


@torch.no_grad()
def dense_output(table: Tensor, out_map: nn.Module | None, width: int) -> Tensor:
    """Return the table [V, D] that replaces `out_map` and `table` [V, E], without the map's bias."""
    if out_map is None:
        return table
    # row i of out_map(I) is the image of the i-th unit vector, so out_map(h) = h @ out_map(I)
    images: Tensor = out_map(torch.eye(width, dtype=table.dtype, device=table.device))
    bias = getattr(out_map, "bias", None)
    if bias is not None:
        images = images - bias
    return table @ images.T


# tables


class Boundary(nn.Module):
    """Module with the tables, maps, bias and scales of one spec.

    `embed` is the input embedding, `logits` and `loss` are the output head. Calling the boundary with a body computes
    the loss in one pass. The letters V, E and D are those of `tiewise.core`.

    Args:
        spec: the boundary to build, a `BoundarySpec` or its text, such as `"factored:64+bias"`.
        vocab: vocabulary size V, or `Vocabularies` if input and output differ.
        width: width D of the body.
        counts: [V_out], how often each token occurs, by which `+free=K` chooses its tokens.

    Attributes:
        table_in, table_out: [V, E] Parameters; the same object if tied.
        in_map, out_map: modules, or None where the spec has the identity.
        bias: [V_out] Parameter, or None.
        free: `FreeRows` of `+free=K`, or None.
        record: `PathRecord` that stores the lookup path's gradient rows for `path_norms`; None (the default) stores
            nothing.

    Raises:
        SpecError: these sizes cannot have the spec, the spec has a schedule (which belongs to a training run), or
            `+free=K` has no counts.

    >>> boundary = Boundary("factored:4+bias", vocab=10, width=8)
    >>> boundary.embed(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 8])
    >>> boundary.logits(torch.zeros(2, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, spec: BoundarySpec | str, vocab: int | Vocabularies, width: int, *, counts: Any = None) -> None:
        super().__init__()
        self.spec = BoundarySpec.parse(spec)
        if not isinstance(vocab, Vocabularies):
            vocab = Vocabularies.same(vocab)
        self.vocab = vocab
        self.width = width
        self._check_sizes()
        self._make_tables()
        self.in_map, self.out_map = make_maps(self.spec, width)
        self.bias: nn.Parameter | None = None
        if self.spec.bias:
            self.bias = nn.Parameter(torch.empty(self.vocab.outputs))
        self.free: FreeRows | None = None
        if self.spec.free is not None:
            self.free = FreeRows(most_frequent(self.spec, counts, self.vocab), width)
        self.input_scale, self.output_scale = self.spec.scales(width)
        self.output_index: Tensor | None
        self.register_buffer("output_index", self._make_output_index(), persistent=False)
        self.record: PathRecord | None = None
        self.reset_parameters()

    def _check_sizes(self) -> None:
        """Refuse a width below 1 or of another type, and an impossible spec."""
        if not hasattr(self.width, "__index__") or self.width < 1:
            raise SpecError(f"a width of {self.width!r}", "give D, a whole number")
        self.spec.require(BOUNDARY)
        pad, rows = self.spec.pad, self.vocab.rows(self.tied)
        if pad is not None and pad >= rows:
            raise SpecError(f"pad={pad} is outside the table of {rows} rows", "lower it")

    def _make_tables(self) -> None:
        """Allocate the tables: one Parameter under both names if tied."""
        in_width, out_width = self.spec.table_widths(self.width)
        rows = self.vocab.rows(self.tied)
        self.table_in = nn.Parameter(torch.empty(rows, in_width), requires_grad=not self.spec.freeze)
        if self.tied:
            self.table_out = self.table_in
        else:
            self.table_out = nn.Parameter(torch.empty(self.vocab.outputs, out_width))

    def _make_output_index(self) -> Tensor | None:
        """Return the row of a tied table that each output token has.

        Return None if output token i has row i, or if the tables are untied.
        """
        if not self.tied:
            return None
        rows = self.vocab.output_index()
        if rows is None:
            return None
        return torch.tensor(rows)

    @property
    def tied(self) -> bool:
        """True if both ends use one table."""
        return self.spec.tables == 1

    def reset_parameters(self) -> None:
        """Draw tables from N(0, σ²) and reset the maps.

        σ is `init` of the spec, or else `sound_std(width)`. Bias, padding row and the free rows' Δ become zero.
        """
        std = self.spec.init or sound_std(self.width)
        for table in dict.fromkeys((self.table_in, self.table_out)):
            draw(table, std, self.spec.pad)
        for module in (self.in_map, self.out_map, self.free):
            if isinstance(module, LinearMap | LowRankCorrection | PositiveDefinite | FreeRows):
                module.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def load_rows(self, rows: Tensor, freeze: bool = False) -> None:
        """Copy pretrained rows into the input table, which is also the output table if tied.

        Args:
            rows: [V, E], in the table's order. A row of nan leaves the random values of that token.
            freeze: whether to stop the table's gradient, as `+freeze` in the spec does.

        Raises:
            SpecError: `rows` has another shape than the table.
        """
        start_from_rows(self.table_in, rows, freeze or self.spec.freeze, self.spec)

    def predicted_nll(self) -> float:
        """Return the expected loss (nats per token) of the first training step.

        It assumes a body of two Llama layers and uniformly random targets.
        """
        return starting_nll(self.spec, self.vocab, self.width)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the rows of token ids [..] as the body's input [.., D].

        Without an input map the width is the table's E, which then equals D.
        """
        return self._embed(ids)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits [.., V_out] of hidden states [.., D]."""
        hidden = apply_map(self.out_map, hidden)
        z = F.linear(hidden, self._output_rows(self._head_table()))
        if self.free is not None:
            z = self.free.add_logits(z, hidden)
        z = z * self.output_scale
        if self.bias is not None:
            z = z + self.bias
        return soft_cap(z, self.spec.softcap)

    def loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Return the fused cross-entropy of `logits(hidden)` against `targets`.

        Args:
            hidden: hidden states [.., D].
            targets: token ids [..].
            **options: those of `linear_cross_entropy`, such as `reduction` and `ignore_index`.

        Returns:
            Loss in nats without `penalty()`: an fp32 scalar, or the shape of `targets` for `reduction="none"`.
        """
        return self._loss(hidden, self._head_table(), targets, options)

    def forward(
        self, ids: Tensor, body: Body, targets: Tensor, *, into: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return the loss of a model: lookup, body, fused cross-entropy.

        The table passes from the lookup to the head, so a tied table has one gradient buffer.

        Args:
            ids: input token ids [..].
            body: function that maps [.., D] to [.., D].
            targets: token ids [..].
            into: gradient buffer of `table_out`, as in `linear_cross_entropy`. If tied, both paths are added to it.
            **options: those of `linear_cross_entropy`.

        Returns:
            Loss in nats, as from `loss`.

        Raises:
            SpecError: `into` with a padding row, whose gradient must be zero and would be written, or with free rows,
                whose gradient it lacks.
        """
        if into is not None and self.spec.pad is not None:
            raise SpecError(f"into with pad={self.spec.pad}", "leave into out, and autograd has the gradient")
        options = options | {"into": into}
        if self.tied:
            rows, table = self._embed(ids, into)
            return self._loss(body(rows), table, targets, options)
        hidden = body(self.embed(ids))
        return self._loss(hidden, self._head_table(), targets, options)

    def penalty(self) -> Tensor:
        """Return the penalty of a `projected` spec, λ‖P‖₂ + c/2 ‖P‖²_F.

        Add it to the loss. Other specs return 0.
        """
        penalty = None
        if self.out_map is not None:
            penalty = penalty_of(self.spec, self.out_map)
        if penalty is None:
            return self.table_out.new_zeros(())
        return penalty

    @torch.no_grad()
    def dense(self) -> tuple[Tensor, Tensor]:
        """Return two dense tables [V_in, D] and [V_out, D] that compute the same function.

        They include maps and scales, and belong to a plain untied boundary.

        Raises:
            SpecError: the spec has a soft-cap or `out_bias`, which no table can hold.
        """
        self.spec.require_tables_alone()
        table_in = apply_map(self.in_map, self.table_in[: self.vocab.inputs])
        table_out = dense_output(self._free_rows(self._output_rows(self.table_out)), self.out_map, self.width)
        return table_in * self.input_scale, table_out * self.output_scale

    def extra_repr(self) -> str:
        """Return spec, sizes and number of tables."""
        return f"{self.spec}, vocab={self.vocab}, width={self.width}, tables={self.spec.tables}"

    def _embed(self, ids: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the body's input, and the table that the head must use."""
        self._check_ids(ids)
        options = LookupOptions(stop_both=self.spec.pad, alpha=self.spec.alpha, record=self.record, into=into)
        rows, table = tied_lookup(self.table_in, ids, options)
        rows = apply_map(self.in_map, rows)
        if self.input_scale != 1.0:
            rows = rows * self.input_scale
        return rows, table

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse ids that are not integers and, on a CPU, ids outside the vocabulary."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise SpecError(f"token ids of type {ids.dtype}", "cast them to an integer type")
        # on other devices the lookup itself asserts, without a synchronisation
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        lowest, highest = (int(v) for v in ids.aminmax())
        extreme = highest
        if lowest < 0:
            extreme = lowest
        if not 0 <= extreme < self.vocab.inputs:
            raise IndexError(f"token {extreme} is outside the input vocabulary of {self.vocab.inputs}")

    def _head_table(self) -> Tensor:
        """Return the output table, whose padding row gets no gradient."""
        return without_row(self.table_out, self.spec.pad)

    def _output_rows(self, table: Tensor) -> Tensor:
        """Return the rows [V_out, E] of the output tokens, in the order of their ids.

        The result is a view of `table` unless `output_index` reorders the rows.
        """
        if self.output_index is None:
            return table[: self.vocab.outputs]
        return table[self.output_index]

    def _free_rows(self, rows: Tensor) -> Tensor:
        """Return output rows [V_out, E] with the separate rows of the free tokens."""
        if self.free is None:
            return rows
        return self.free.table(rows)

    def _loss(self, hidden: Tensor, table: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the fused loss of `hidden` with the output rows of `table`."""
        if self.free is not None and options.get("into") is not None:
            raise SpecError(f"into with free={self.spec.free}", "leave into out, and autograd has the gradients")
        loss_options = LossOptions(scale=self.output_scale, softcap=self.spec.softcap)
        hidden = apply_map(self.out_map, hidden)
        rows = self._free_rows(self._output_rows(table))
        return linear_cross_entropy(hidden, rows, targets, self.bias, loss_options, **options)
