"""What may stand between a table and the body: a linear map, a low-rank correction, a positive definite map.

    in_map   behind the lookup    [.., E] -> [.., D]
    out_map  before the head      [.., D] -> [.., E]

A map of `None` is the identity and costs nothing. Every map is linear, so a boundary can be exported dense:
`dense_input` and `dense_output` multiply the maps into the two tables that any loader reads. The one exception is
`out_bias`, which no table can hold.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tiewise.core.spec import BoundarySpec


def make_maps(spec: BoundarySpec, d: int) -> tuple[nn.Module | None, nn.Module | None]:
    """(in_map, out_map) of `spec` in a model of width `d`, initialised; None where the spec has the identity."""
    if spec.kind == "residual":
        assert spec.rank is not None
        return None, LowRankCorrection(d, spec.rank, spec.strength)
    if spec.kind == "spd":
        definite = PositiveDefinite(d)
        return definite.inverse(), definite
    has_in, has_out = spec.maps(d)
    in_width, out_width = spec.table_widths(d)
    into = LinearMap(in_width, d) if has_in else None
    return into, LinearMap(d, out_width, bias=spec.out_bias) if has_out else None


class LinearMap(nn.Linear):
    """`x @ weightᵀ`, weight [to, from]. Entries start N(0, 1/from): the map keeps the mean square of its input.

    A bias [to], which only `out_bias` asks for, starts at zero.
    """

    def __init__(self, width_from: int, width_to: int, bias: bool = False) -> None:
        super().__init__(width_from, width_to, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
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
        """P to zero, Q to N(0, 1/D)."""
        nn.init.zeros_(self.p)
        nn.init.normal_(self.q, std=self.q.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        return x + self.strength * F.linear(F.linear(x, self.q), self.p)


class PositiveDefinite(nn.Module):
    """`x S` with S = C Cᵀ, C lower triangular with a positive diagonal [D, D]; starts at the identity.

    `factor` holds C below its diagonal and log C on it, so that any value of the parameter is positive definite.
    Source: pseudo-inverse tying, arXiv:2602.04556: a learned SPD map at the output and its inverse at the input.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(d, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """S to the identity."""
        nn.init.zeros_(self.factor)

    def cholesky(self) -> Tensor:
        """C [D, D]."""
        return self.factor.tril(-1) + torch.diag_embed(self.factor.diagonal().exp())

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        c = self.cholesky()
        return F.linear(F.linear(x, c.T), c)

    def inverse(self) -> Inverse:
        """Return the module of x S⁻¹; it holds no parameter of its own."""
        return Inverse(self)


class Inverse(nn.Module):
    """`x S⁻¹` of a `PositiveDefinite`, by two triangular solves; S⁻¹ is never formed."""

    def __init__(self, of: PositiveDefinite) -> None:
        super().__init__()
        # a plain attribute: registered as a child, the factor would be saved and counted at both ends
        object.__setattr__(self, "of", of)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]; solved in fp32 at least, since triangular solves know no half precision."""
        of: PositiveDefinite = self.of  # type: ignore[assignment]
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            c = of.cholesky().to(wide)
            columns = x.reshape(-1, x.shape[-1]).T.to(wide)
            half = torch.linalg.solve_triangular(c, columns, upper=False)
            solved = torch.linalg.solve_triangular(c.T, half, upper=True)
        # a copy: CTRL scales its rows in place, and the solve's result is kept for its gradient
        return solved.T.clone().reshape(x.shape).to(x.dtype)


def penalty_of(spec: BoundarySpec, out_map: nn.Module | None) -> Tensor | None:
    """λ‖P‖₂ + c/2 ‖P‖²_F of a projection P before the head, to be added to the loss; None where the spec has neither.

    Press & Wolf 2017, §3, prints the first with λ = 0.15. Their code adds ½‖P‖²_F / 130 to a loss summed over 20 steps.
    """
    if not (spec.penalty or spec.decay) or out_map is None:
        return None
    norm = torch.linalg.vector_norm(out_map.weight)
    printed = spec.penalty * norm if spec.penalty else 0.0  # its gradient is none at P = 0
    return printed + spec.decay / 2 * norm.square()


ParametricMap = LinearMap | LowRankCorrection | PositiveDefinite


@torch.no_grad()
def dense_input(table: Tensor, in_map: nn.Module | None) -> Tensor:
    """Table [V, D] that acts at the input as `table` [V, E] behind its map does."""
    return table if in_map is None else in_map(table)


@torch.no_grad()
def dense_output(table: Tensor, out_map: nn.Module | None, d: int) -> Tensor:
    """Table [V, D] that acts at the output as `out_map` before `table` [V, E] does, but for a bias."""
    if out_map is None:
        return table
    # row i of out_map(I) is the image of the i-th unit vector, so out_map(h) = h @ out_map(I)
    images = out_map(torch.eye(d, dtype=table.dtype, device=table.device))
    bias = getattr(out_map, "bias", None)
    return table @ (images if bias is None else images - bias).T
