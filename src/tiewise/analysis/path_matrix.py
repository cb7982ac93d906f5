"""The direct path: what a model would say of the next token from its two tables alone, M = A Bᵀ [V, V].

A's rows are the input rows as they reach the head (scaled, normalised, times the norm's gain), B's rows the output
rows. M is never built. Every figure here follows from three products of width E, which are summed over the rows once:

    ‖M‖² = tr(AᵀA · BᵀB)        ⟨M, Mᵀ⟩ = tr(BᵀA · BᵀA)        ‖M − Mᵀ‖² = 2‖M‖² − 2⟨M, Mᵀ⟩

The nonzero eigenvalues of (M + Mᵀ)/2 = X J Xᵀ, with X = [A B] and J = ½[[0, I], [I, 0]], are those of R J Rᵀ where
XᵀX = RᵀR: a problem of 2E × 2E.

Probabilities do not see all of M. The normaliser takes away what is constant along a row, and a bias what is constant
along a column, so `centred` figures are of M without its row means and column means: A and B without their mean rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiewise.analysis.model_tables import Array, TokenTable
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate
from tiewise.core.long_work import advance

COUNTED = 1e-10  # of ‖M‖; smaller eigenvalues are taken for zeros
NONE, RMS, LAYER = "none", "rms", "layer"


def no_numbers() -> DataError:
    """Say that a path's values are NaN or infinite."""
    return DataError("a table or a norm holds values that are no numbers", "`tiewise check --deep` names the rows")


@dataclass(frozen=True)
class Norm:
    """What stands between the body and the head."""

    kind: str = NONE  # "none"; "rms", x / √(mean x² + eps); "layer", (x − mean x) / √(var x + eps)
    eps: float = 0.0  # as above
    gain: Array | None = None  # multiplied by element [E]; None for ones. Without a kind it is applied all the same
    shift: Array | None = None  # added by element [E], after the gain; None for zeros

    def normalised(self, rows: Array) -> Array:
        """Return rows [n, E] divided by their size, without gain and shift."""
        if self.kind == NONE:
            return rows
        if self.kind == LAYER:
            rows = rows - rows.mean(1, keepdims=True)
        return rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + self.eps)


@dataclass(frozen=True)
class DirectPath:
    """Both tables and everything that acts between them."""

    input: TokenTable  # input table [V, E]
    output: TokenTable  # output table [V', E]; the same object where the model is tied
    norm: Norm = Norm()  # the model's final norm, applied to the scaled input row
    input_scale: float = 1.0  # times every input row
    output_scale: float = 1.0  # times every logit
    bias: Array | None = None  # added to the logits, after the scale [V']
    softcap: float | None = None  # c · tanh(logit / c); None without
    notes: tuple[str, ...] = ()  # what was applied, what the model does besides and is left out

    def __post_init__(self) -> None:
        if self.input.width != self.output.width:
            what = f"the input table is {self.input.width} wide, the output table {self.output.width}"
            raise DataError(what, "only tables of one width have a direct path")
        for vector in (self.norm.gain, self.norm.shift):
            if vector is not None and vector.shape != (self.input.width,):
                raise DataError(f"a norm of shape {vector.shape}", f"the tables are {self.input.width} wide")
        if self.bias is not None and self.bias.shape != (self.output.rows,):
            raise DataError(f"a bias of shape {self.bias.shape}", f"the output table has {self.output.rows:,} rows")

    @property
    def tied(self) -> bool:
        """Whether both ends are one table."""
        return self.input is self.output

    @property
    def rows(self) -> int:
        """Tokens that both tables have: the first ones, where one table is longer."""
        return min(self.input.rows, self.output.rows)

    @property
    def linear(self) -> DirectPath:
        """The path without the division by each row's size: gain and scales alone, as W_E diag(g) W_Uᵀ."""
        return replace(self, norm=replace(self.norm, kind=NONE))

    @property
    def weights(self) -> Array:
        """What multiplies element by element between `base` rows and output rows [E]."""
        scale = self.output_scale * (self.input_scale if self.norm.kind == NONE else 1.0)
        return np.full(self.input.width, scale) * (1.0 if self.norm.gain is None else self.norm.gain)

    def base(self, rows: Array) -> Array:
        """Return input rows [n, E] as they are before `weights`: raw in a linear path, else scaled and normalised."""
        return rows if self.norm.kind == NONE else self.norm.normalised(rows * self.input_scale)

    def left(self, rows: Array) -> Array:
        """Return the A of input rows [n, E]; the norm's shift, the same for every token, is left out."""
        return self.base(rows) * self.weights

    def constant(self, output_rows: Array) -> Array | float:
        """Return what the norm's shift adds to the logits of these output rows, whatever the input token is."""
        return 0.0 if self.norm.shift is None else output_rows @ self.norm.shift * self.output_scale


@dataclass(frozen=True)
class Grams:
    """Products of width E, summed over the rows of both tables."""

    left: Array  # of base rows, NᵀN [E, E]
    right: Array  # of output rows, UᵀU
    cross: Array  # UᵀN
    weights: Array  # elementwise between them [E]
    left_sum: Array  # sum of base rows [E]
    right_sum: Array  # sum of output rows
    diagonal: float  # sum of M's diagonal
    rows: int  # V

    @property
    def shared(self) -> bool:
        """Whether all three products are one: base rows and output rows are the same."""
        return self.left is self.right

    @property
    def centred(self) -> Grams:
        """The same of tables without their mean rows, for `asymmetry` and `definiteness`."""

        def without(product: Array, a: Array, b: Array) -> Array:
            return product - np.outer(a, b) / self.rows

        left = without(self.left, self.left_sum, self.left_sum)
        right = left if self.shared else without(self.right, self.right_sum, self.right_sum)
        cross = left if self.shared else without(self.cross, self.right_sum, self.left_sum)
        zero = np.zeros_like(self.left_sum)
        diagonal = float(np.trace(cross * self.weights))
        return replace(self, left=left, right=right, cross=cross, left_sum=zero, right_sum=zero, diagonal=diagonal)


@dataclass(frozen=True)
class Asymmetry:
    """How M's energy ‖M‖² divides, exactly."""

    energy: float  # ‖M‖²
    symmetric: float  # ‖(M + Mᵀ)/2‖²
    antisymmetric: float  # ‖(M − Mᵀ)/2‖²
    ratio: float  # ‖M − Mᵀ‖² / ‖M‖², from 0 (symmetric) over 2 (no relation between M and Mᵀ) to 4 (antisymmetric)


@dataclass(frozen=True)
class Definiteness:
    """Nonzero eigenvalues of M's symmetric part."""

    smallest: float  # the lowest of those above 1e-10·‖M‖ in size; below zero where the path is indefinite
    largest: float  # the highest
    positive: int  # how many are above zero
    negative: int  # how many are below
    negative_energy: float  # their share of the sum of squares; 0 for any S = W Wᵀ


def grams(path: DirectPath) -> Grams:
    """Sum the three products in fp64, a few rows at a time; a tied linear path needs one of them."""
    shared = path.tied and path.norm.kind == NONE
    width, weights = path.input.width, path.weights
    left, right, cross = (np.zeros((width, width)) for _ in range(3))
    left_sum, right_sum, diagonal = np.zeros(width), np.zeros(width), 0.0
    for start, stop in path.input.spans(path.rows):
        raw = path.input.read(start, stop)
        base, out = path.base(raw), raw if path.tied else path.output.read(start, stop)
        left += base.T @ base
        if not shared:
            right += out.T @ out
            cross += out.T @ base
        left_sum += base.sum(0)
        right_sum += out.sum(0)
        diagonal += float(np.einsum("ne,ne,e->", base, out, weights))
        advance(stop)
    if not path.rows or not (np.isfinite(left).all() and np.isfinite(cross).all() and np.isfinite(right).all()):
        raise no_numbers() if path.rows else DataError("a table without rows", "give a model that has some")
    left = (left + left.T) / 2
    if shared:
        right = cross = left
    return Grams(left, right, cross, weights, left_sum, right_sum, diagonal, path.rows)


def asymmetry(g: Grams) -> Asymmetry:
    """Divide the energy. Of a tied linear path the antisymmetric part is 0 exactly, with or without a gain."""
    weights = np.outer(g.weights, g.weights)
    straight, turned = g.left * g.right, g.cross * g.cross.T
    energy = float((weights * straight).sum())
    antisymmetric = max(0.0, float((weights * (straight - turned)).sum()) / 2)
    ratio = 4 * antisymmetric / energy if energy > 0 else 0.0
    return Asymmetry(energy, max(0.0, energy - antisymmetric), antisymmetric, ratio)


def definiteness(g: Grams) -> Definiteness:
    """Find the nonzero eigenvalues of the symmetric part: of E × E for a tied linear path, else of 2E × 2E."""
    if g.shared:
        root = _root(g.left)
        values = np.linalg.eigvalsh(root * g.weights @ root.T)
    else:
        mixed = g.cross * g.weights
        left = g.left * np.outer(g.weights, g.weights)
        root = _root(np.block([[left, mixed.T], [mixed, g.right]]))
        half = len(g.weights)
        product = root[:, :half] @ root[:, half:].T
        values = np.linalg.eigvalsh((product + product.T) / 2)
    size = np.sqrt(asymmetry(g).energy)
    values = values[np.abs(values) > COUNTED * size]
    if not len(values):
        return Definiteness(0.0, 0.0, 0, 0, 0.0)
    below = values[values < 0]
    share = float(np.square(below).sum() / np.square(values).sum())
    return Definiteness(float(values[0]), float(values[-1]), len(values) - len(below), len(below), share)


def _root(product: Array) -> Array:
    """R [r, n] with RᵀR = product, without directions that are nothing but rounding."""
    values, vectors = np.linalg.eigh(product)
    kept = values > values[-1] * len(values) * np.finfo(float).eps
    return np.sqrt(values[kept])[:, None] * vectors[:, kept].T


BLOCK = 1024
RESAMPLES = 200


def sampled_asymmetry(
    lefts: Sequence[Array], right: Array, seed: int = 0, resamples: int = RESAMPLES
) -> list[tuple[Estimate, Estimate]]:
    """Measure each path on sampled tokens, and how much the last differs from the first, draw by draw.

    The interval is of the bootstrap over tokens (Efron 1979), with the same draws for every path. A token drawn twice
    is no pair with itself: entries off the diagonal count by the product of both tokens' draws, those on it by the
    token's draws.

    Args:
        lefts: each path's A of the sampled tokens [n, E].
        right: output rows of the same tokens [n, E].
        seed: of the resamples.
        resamples: at least 40.

    Returns:
        for each path, and last for the difference, ‖S − Sᵀ‖² / ‖S‖² (0 symmetric, 2 for unrelated tables, 4
        antisymmetric) and the same of S less its row means and column means, which the normaliser and a bias can take
        up; the means are those of the sample in every resample.
    """
    n = len(right)
    if n < 8 or resamples < 40:
        raise DataError(f"{n} tokens, {resamples} resamples", "sample 8 tokens or more, 40 times or more")
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples)
    weights = np.concatenate([np.ones((n, 1)), drawn.T], axis=1)  # the sample itself comes first
    if not all(np.isfinite(rows).all() for rows in (*lefts, right)):
        raise no_numbers()
    ratios = [_ratios(left, right, weights, place * n) for place, left in enumerate(lefts)]
    found = []
    for one in (*ratios, ratios[-1] - ratios[0]):
        low, high = np.quantile(one[:, 1:], [0.025, 0.975], axis=1)
        raw, centred = (Estimate(float(one[k, 0]), float(low[k]), float(high[k]), n) for k in (0, 1))
        found.append((raw, centred))
    return found


def _ratios(left: Array, right: Array, weights: Array, before: int = 0) -> Array:
    """Ratios [2, draws] of S = A Uᵀ and of the centred S, for each column of weights [n, draws]; block by block."""
    rows, columns, mean = left @ right.mean(0), right @ left.mean(0), float(left.mean(0) @ right.mean(0))
    energy, turned = np.zeros((2, 2, weights.shape[1]))
    n = len(right)
    for one in range(0, n, BLOCK):
        first = slice(one, min(one + BLOCK, n))
        for other in range(one, n, BLOCK):
            second = slice(other, min(other + BLOCK, n))
            there, back = left[first] @ right[second].T, (left[second] @ right[first].T).T
            s = there - rows[first, None] - columns[None, second] + mean
            t = back - columns[first, None] - rows[None, second] + mean
            for kind, (a, b) in enumerate(((there, back), (s, t))):
                # this block and its mirror image in ‖S‖² and in ⟨S, Sᵀ⟩
                squares, products = (a * a, a * b) if one == other else (a * a + b * b, 2 * a * b)
                if one == other:
                    own = squares.diagonal() @ weights[first]
                    np.fill_diagonal(squares, 0.0)
                    np.fill_diagonal(products, 0.0)
                    energy[kind] += own
                    turned[kind] += own
                energy[kind] += np.einsum("nb,nb->b", weights[first], squares @ weights[second])
                turned[kind] += np.einsum("nb,nb->b", weights[first], products @ weights[second])
        advance(before + first.stop)
    return np.divide(2 * energy - 2 * turned, energy, out=np.zeros_like(energy), where=energy > 0)
