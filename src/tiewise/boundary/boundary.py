"""`Boundary`: the one owner of a model's table or tables, with the two verbs that touch the vocabulary, and its maps.

    boundary = Boundary("factored:64+bias", vocab=10_000, width=256)

    rows = boundary.embed(ids)              # [..] -> [.., D]
    logits = boundary.logits(hidden)        # [.., D] -> [.., V]
    loss = boundary.loss(hidden, targets)   # the same, fused, without logits

    loss = boundary(ids, body, targets)     # all of it: body maps [.., D] to [.., D]

The last form threads the table from the lookup to the head, so that a tied table has one gradient buffer (see
`tiewise.boundary.ops.path_gradient`); the single verbs are as exact and use one more. Tied means that `table_out` is
`table_in`: one Parameter, once in `parameters()` and in the optimizer, under both names in the state dict.

A table is [V, E] at both ends, one row per token. The head multiplies by its transpose; nothing is ever stored
transposed.

Maps may connect a table and the body: in_map [.., E] -> [.., D] behind the lookup and out_map [.., D] -> [.., E]
before the head; None is the identity and costs nothing. All are linear, so that a boundary can be exported as two dense
tables, except for `out_bias`, which no table can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, tied_lookup, without_row
from tiewise.boundary.vectors import start_from_rows
from tiewise.core.backends import LossOptions
from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.core.spec_options import BOUNDARY
from tiewise.planning.first_loss import sound_std, starting_nll

Body = Callable[[Tensor], Tensor]


def draw(table: Tensor, std: float, pad: int | None = None) -> None:
    """Fill `table` [V, E] with N(0, std²) from torch's global generator; the padding row becomes zero."""
    with torch.no_grad():
        nn.init.normal_(table, std=std)
        if pad is not None:
            table[pad].zero_()


# maps


def make_maps(spec: BoundarySpec, d: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the initialised (in_map, out_map) of `spec` in a model of width `d`. None where it has the identity."""
    if spec.kind == "residual":
        assert spec.rank is not None
        return None, LowRankCorrection(d, spec.rank, spec.strength)
    if spec.kind == "spd":
        definite = PositiveDefinite(d)
        return Inverse(definite), definite
    has_in, has_out = spec.maps(d)
    in_width, out_width = spec.table_widths(d)
    in_map = out_map = None
    if has_in:
        in_map = LinearMap(in_width, d, bias=False)
    if has_out:
        out_map = LinearMap(d, out_width, bias=spec.out_bias)
    return in_map, out_map


def apply_map(module: nn.Module | None, x: Tensor) -> Tensor:
    """Return the image of `x` under a map; None is the identity."""
    if module is None:
        return x
    image: Tensor = module(x)
    return image


def soft_cap(z: Tensor, cap: float | None) -> Tensor:
    """Return c · tanh(z / c), or `z` itself without a cap."""
    if cap is None:
        return z
    return cap * torch.tanh(z / cap)


class LinearMap(nn.Linear):
    """`x @ weightᵀ`, weight [to, from] from N(0, 1/from), which keeps x's mean square. A bias [to] starts at zero."""

    def reset_parameters(self) -> None:
        """Draw the weight, and set the bias to zero."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LowRankCorrection(nn.Module):
    """`x + s · (x Qᵀ) Pᵀ` with P [D, r] and Q [r, D]: the table corrected on its output side by W s P Q.

    P starts at zero, so the boundary starts exactly tied. Source: the output-side correction W(I + s·PQ) of the
    Press & Wolf reproductions (r = 32, s = 0.03 on PTB, 200k parameters for D = 1500 at most).
    """

    def __init__(self, d: int, rank: int, strength: float) -> None:
        super().__init__()
        self.strength = strength
        self.p = nn.Parameter(torch.empty(d, rank))
        self.q = nn.Parameter(torch.empty(rank, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set P to zero and draw Q from N(0, 1/D)."""
        nn.init.zeros_(self.p)
        nn.init.normal_(self.q, std=self.q.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + s · (x Qᵀ) Pᵀ, [.., D] like `x`."""
        return x + self.strength * F.linear(F.linear(x, self.q), self.p)


class PositiveDefinite(nn.Module):
    """`x S` with S = C Cᵀ, C lower triangular with a positive diagonal [D, D]. It starts at the identity.

    `factor` holds C below its diagonal and log C on it, so that any value of the parameter is positive definite.
    Source: pseudo-inverse tying, arXiv:2602.04556: a learned SPD map at the output and its inverse at the input.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(d, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set S to the identity."""
        nn.init.zeros_(self.factor)

    def cholesky(self) -> Tensor:
        """Return C [D, D]."""
        return self.factor.tril(-1) + torch.diag_embed(self.factor.diagonal().exp())

    def forward(self, x: Tensor) -> Tensor:
        """Return x S, [.., D] like `x`."""
        c = self.cholesky()
        return F.linear(F.linear(x, c.T), c)


class Inverse(nn.Module):
    """`x S⁻¹` of a `PositiveDefinite` by two triangular solves, without forming S⁻¹; it adds no parameter."""

    def __init__(self, of: PositiveDefinite) -> None:
        super().__init__()
        # a plain attribute: registered as a child, the factor would be saved and counted at both ends
        object.__setattr__(self, "of", of)

    def forward(self, x: Tensor) -> Tensor:
        """Return x S⁻¹, [.., D] like `x`. It solves in fp32 at least, since triangular solves lack half precision."""
        of: PositiveDefinite = self.of  # type: ignore[assignment]
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            c = of.cholesky().to(wide)
            columns = x.reshape(-1, x.shape[-1]).T.to(wide)
            half = torch.linalg.solve_triangular(c, columns, upper=False)
            solved: Tensor = torch.linalg.solve_triangular(c.T, half, upper=True)
        # a copy: CTRL scales its rows in place, and the solve's result is kept for its gradient
        return solved.T.clone().reshape(x.shape).to(x.dtype)


def penalty_of(spec: BoundarySpec, out_map: nn.Module) -> Tensor | None:
    """Return λ‖P‖₂ + c/2 ‖P‖²_F of a projection P, to be added to the loss. None where the spec has neither.

    Press & Wolf 2017, §3, prints the first with λ = 0.15. Their code adds ½‖P‖²_F / 130 to a loss summed over 20 steps.
    """
    if not (spec.penalty or spec.decay):
        return None
    norm: Tensor = torch.linalg.vector_norm(out_map.weight)
    squared = spec.decay / 2 * norm.square()
    if not spec.penalty:  # the norm itself has no gradient at P = 0
        return squared
    return spec.penalty * norm + squared


@torch.no_grad()
def dense_output(table: Tensor, out_map: nn.Module | None, d: int) -> Tensor:
    """Return the table [V, D] that acts as `out_map` and `table` [V, E] do, bias excepted."""
    if out_map is None:
        return table
    # row i of out_map(I) is the image of the i-th unit vector, so out_map(h) = h @ out_map(I)
    images: Tensor = out_map(torch.eye(d, dtype=table.dtype, device=table.device))
    bias = getattr(out_map, "bias", None)
    if bias is not None:
        images = images - bias
    return table @ images.T


# tables


class Boundary(nn.Module):
    """Tables, maps, bias and scales of one spec; letters as in `tiewise.core`.

    Args:
        spec: what to build.
        vocab: V, or `Vocabularies` where input and output differ.
        width: D.

    Attributes:
        table_in, table_out: [V, E] Parameters; the same object where tied.
        in_map, out_map: modules, or None where the spec has the identity.
        bias: [V_out] Parameter, or None.
        record: where the lookup path is kept for `path_norms`; None (the default) records nothing.

    Raises:
        SpecError: a spec that these sizes cannot have, or a schedule (which belongs to a training run).
    """

    def __init__(self, spec: BoundarySpec | str, vocab: int | Vocabularies, width: int) -> None:
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
        self.input_scale, self.output_scale = self.spec.scales(width)
        self.output_index: Tensor | None
        self.register_buffer("output_index", self._make_output_index(), persistent=False)
        self.record: PathRecord | None = None
        self.reset_parameters()

    def _check_sizes(self) -> None:
        """Refuse a width that is no whole number, and a spec that these sizes cannot have."""
        if not hasattr(self.width, "__index__") or self.width < 1:
            raise SpecError(f"a width of {self.width!r}", "give D, a whole number")
        self.spec.require(BOUNDARY)
        pad, rows = self.spec.pad, self.vocab.rows(self.tied)
        if pad is not None and pad >= rows:
            raise SpecError(f"pad={pad} is outside the table of {rows} rows", "lower it")

    def _make_tables(self) -> None:
        """Allocate the tables: one Parameter under both names where tied."""
        in_width, out_width = self.spec.table_widths(self.width)
        rows = self.vocab.rows(self.tied)
        self.table_in = nn.Parameter(torch.empty(rows, in_width), requires_grad=not self.spec.freeze)
        if self.tied:
            self.table_out = self.table_in
        else:
            self.table_out = nn.Parameter(torch.empty(self.vocab.outputs, out_width))

    def _make_output_index(self) -> Tensor | None:
        """Return the rows of a tied table that are outputs, in their order. None where these are the first ones."""
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
        """Draw tables N(0, σ²), σ = `init` of the spec or `sound_std`, and maps. Bias and padding row become zero."""
        std = self.spec.init or sound_std(self.width)
        for table in dict.fromkeys((self.table_in, self.table_out)):
            draw(table, std, self.spec.pad)
        for module in (self.in_map, self.out_map):
            if isinstance(module, LinearMap | LowRankCorrection | PositiveDefinite):
                module.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def load_rows(self, rows: Tensor, freeze: bool = False) -> None:
        """Start the input table (and a tied output) from pretrained rows [V, E]. Rows of nan keep their drawn values.

        `freeze` stops its gradient, as `+freeze` in the spec does.

        Raises:
            SpecError: rows of another shape.
        """
        start_from_rows(self.table_in, rows, freeze or self.spec.freeze, self.spec)

    def predicted_nll(self) -> float:
        """Expected loss (nats) of the first step around a body of two Llama layers, on targets drawn uniformly."""
        return starting_nll(self.spec, self.vocab, self.width)

    def embed(self, ids: Tensor) -> Tensor:
        """Map tokens [..] to the body's input [.., D] ([.., E] where the spec has no input map)."""
        return self._embed(ids)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [.., D] to logits [.., V_out], all of them."""
        hidden = apply_map(self.out_map, hidden)
        z = F.linear(hidden, self._output_rows(self._head_table())) * self.output_scale
        if self.bias is not None:
            z = z + self.bias
        return soft_cap(z, self.spec.softcap)

    def loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Cross-entropy of `logits(hidden)` against `targets`, fused; options of `linear_cross_entropy`.

        Returns:
            fp32 scalar, or the shape of `targets` for `reduction="none"`. `penalty()` is not included.
        """
        return self._loss(hidden, self._head_table(), targets, options)

    def forward(
        self, ids: Tensor, body: Body, targets: Tensor, *, into: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Loss of `body` between lookup and head, the table threaded through: one gradient buffer where tied.

        `into` is that of `linear_cross_entropy`, for `table_out`; where tied both paths are added to it.

        Raises:
            SpecError: `into` with a padding row, to which it would give the gradient that the row must not have.
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
        """Penalty of a `projected` spec, to be added to the loss (`penalty_of`); 0 elsewhere."""
        penalty = None
        if self.out_map is not None:
            penalty = penalty_of(self.spec, self.out_map)
        if penalty is None:
            return self.table_out.new_zeros(())
        return penalty

    @torch.no_grad()
    def dense(self) -> tuple[Tensor, Tensor]:
        """Tables [V_in, D] and [V_out, D] of a plain untied boundary with the same function, scales included.

        Raises:
            SpecError: a soft-cap behind the product, or a bias before it, which no table can hold.
        """
        self.spec.require_tables_alone()
        table_in = apply_map(self.in_map, self.table_in[: self.vocab.inputs])
        table_out = dense_output(self._output_rows(self.table_out), self.out_map, self.width)
        return table_in * self.input_scale, table_out * self.output_scale

    def extra_repr(self) -> str:
        """Return spec, sizes and number of tables."""
        return f"{self.spec}, vocab={self.vocab}, width={self.width}, tables={self.spec.tables}"

    def _embed(self, ids: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return rows for the body, and the table to use from here on."""
        self._check_ids(ids)
        options = LookupOptions(stop_both=self.spec.pad, alpha=self.spec.alpha, record=self.record, into=into)
        rows, after = tied_lookup(self.table_in, ids, options)
        rows = apply_map(self.in_map, rows)
        if self.input_scale != 1.0:
            rows = rows * self.input_scale
        return rows, after

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse ids that are no integers or, on a CPU, outside the vocabulary."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise SpecError(f"token ids of type {ids.dtype}", "cast them to an integer type")
        # elsewhere than on a CPU the lookup itself asserts, without a synchronisation
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
            return
        lowest, highest = (int(v) for v in ids.aminmax())
        extreme = highest
        if lowest < 0:
            extreme = lowest
        if not 0 <= extreme < self.vocab.inputs:
            raise IndexError(f"token {extreme} is outside the input vocabulary of {self.vocab.inputs}")

    def _head_table(self) -> Tensor:
        """Return the output table, guarded where its padding row must get no gradient."""
        return without_row(self.table_out, self.spec.pad)

    def _output_rows(self, table: Tensor) -> Tensor:
        """Return the output tokens' rows [V_out, E] in their order. It is a view where no index map reorders them."""
        if self.output_index is None:
            return table[: self.vocab.outputs]
        return table[self.output_index]

    def _loss(self, hidden: Tensor, table: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the fused loss against the output rows of `table`, with `options` of `linear_cross_entropy`."""
        chosen = LossOptions(scale=self.output_scale, softcap=self.spec.softcap)
        hidden = apply_map(self.out_map, hidden)
        return linear_cross_entropy(hidden, self._output_rows(table), targets, self.bias, chosen, **options)
