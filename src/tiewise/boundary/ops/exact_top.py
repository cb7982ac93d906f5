"""The largest logits and their tokens, exactly, from an int8 copy of the table.

One token's logits take one pass over the table [V, E], whose time is that of reading the memory. `ExactTop` reads a
quarter of fp32's bytes, bounds the error of each logit, and computes exactly only the logits that can be among the
largest.

**Meaning of exact.** The logit of token v is z_v = Σ_j h_j W_vj, the real number, rounded once to fp64: `math.fsum` of
the products, each of which fp64 represents exactly. So it does not depend on the order of the sum, the processor or the
number of threads. Logits are ordered by y_v = scale · z_v + bias_v, in fp64; equal ones by the lower token. A score is
y_v, or c · tanh(y_v / c), in fp32. A product in fp32, as a plain head computes it, may order two logits differently if
they differ by less than its rounding.

**Selecting.** With steps s_v and σ, int8 rows q_v and two int8 digits a, b of the query, ĥ = σ (a + b / 256):

    W_v = s_v q_v + r_v            W_v·h = s_v q_v·ĥ  +  r_v·h  +  s_v q_v·(h − ĥ)
                                           estimate       ≤ ‖r_v‖‖h‖   ≤ s_v max‖q‖ ‖h − ĥ‖         (Cauchy–Schwarz)

q_v·a and q_v·b are integers below 2³¹, computed exactly. Converting them to fp32 adds the relative error u = 2⁻²⁴, and
so does each of the few operations after it: `INFLATED` is sixteen times that. The `top_k` tokens with the largest
estimate minus bound are computed in fp64. A token whose estimate plus bound is below the least of those cannot be among
the `top_k` largest. ‖r_v‖ is computed from the actual r_v, so nothing depends on how well q_v was rounded.

**Deciding.** The remaining tokens are computed in fp64, with an error below (E + 8) 2⁻⁵² ‖W_v‖‖h‖, and selected again.
The few tokens that then remain are rounded correctly (`exact_dots`). fp64 reads the full table in three cases: the
first bound excludes too few rows (rows that differ by less than int8 resolves), a number is not finite or too large for
fp32, or this machine has no int8 products. That takes about three times as long as a plain product, and is always
correct. `counts` has the number of such queries.

Memory: V · E + 8 · V bytes in addition to the table.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops.compiled_kernels import kernels
from tiewise.core.errors import UnsupportedError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # fp64 represents the product of any two of their numbers exactly
DIGIT = 127  # largest int8 whose negative is an int8
WIDEST = 65_536  # largest E for which a sum of products of a byte and an int8 stays below 2³¹
INFLATED = 2.0**-20  # relative error that bounds are inflated by, see above
TINY = 1e-37  # more than the sum of everything that underflows in fp32
LARGEST = 1e36  # largest logit that is bounded in fp32
AT_ONCE = 1 << 22  # elements of a block of logits
ROWS = 128  # rows that fp64 processes at a time: with 2,048 columns they stay in the cache


@dataclass
class TopCounts:
    """Numbers of queries and of rows that fp64 read.

    Attributes:
        queries: number of queries.
        full_scans: number of queries for which fp64 read all rows.
        rows: number of rows that fp64 read for the other queries.
    """

    queries: int = 0
    full_scans: int = 0
    rows: int = 0


class _Affine(NamedTuple):
    """Step y = scale · z + bias after a product z.

    The bias [V] is in fp64.
    """

    scale: float
    bias: Tensor | None

    def largest_bias(self) -> float:
        """Return the largest absolute value of the bias."""
        if self.bias is None:
            return 0.0
        least, most = (float(x) for x in self.bias.aminmax())
        return max(-least, most)

    def apply_with_bound(self, z: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
        """Return y of all tokens and its error bound, from the products z and their bound.

        Both are in fp64 unless y = z.
        """
        if self.scale == 1.0 and self.bias is None:
            return z, slack
        y, slack = z.double() * self.scale, slack.double() * abs(self.scale)
        if self.bias is None:
            return y, slack.add_(y.abs() * INFLATED)
        y = y + self.bias
        return y, slack.add_((y.abs() + self.bias.abs()) * INFLATED)

    def apply(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Return y [C] of the products z of `tokens`."""
        y = z * self.scale
        return y if self.bias is None else y + self.bias[tokens]


class _Query(NamedTuple):
    """Hidden state h [E] in fp64, its norm, and the requested `top_k` and affine step."""

    h: Tensor
    norm: float
    top_k: int
    affine: _Affine


class ExactTop:
    """Exact largest logits over a table [V, E], from a copy of it in int8.

    The table is fp32, bf16 or fp16, on the CPU. If torch's version counter says that the table changed, the copy is
    made again. The counter misses some changes (`table.data.mul_(2)`, changes under `inference_mode`); call `refresh()`
    after them.

    >>> import torch
    >>> exact = ExactTop(torch.eye(8))
    >>> exact.argmax(torch.eye(8)[5])
    tensor(5)

    Args:
        table: [V, E].

    Attributes:
        table: the table, detached.
        counts: numbers of queries and of rows that fp64 read.

    Raises:
        UnsupportedError: the table is not [V, E], or has another type or device.
    """

    def __init__(self, table: Tensor) -> None:
        """Copy the table to int8."""
        if not torch.is_tensor(table):
            raise UnsupportedError(f"exact decoding from a {type(table).__name__}", "give it the head's table [V, E]")
        if table.dim() != 2 or table.device.type != "cpu" or table.dtype not in DTYPES or not table.numel():
            what = f"exact decoding from a {table.dtype} table {tuple(table.shape)} on {table.device}"
            raise UnsupportedError(what, "give it a table [V, E] in fp32, bf16 or fp16 on the CPU")
        self.table = table.detach()
        self.counts = TopCounts()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the table again."""
        v, e = self.table.shape
        self._copied = self._version()
        self.rows = _allocate_large_pages(v * e).view(v, e)  # int8 rows q of the module's header
        self.steps, self.rests = torch.empty(v, device="cpu"), torch.empty(v, device="cpu")  # steps s; bounds of ‖r‖
        longest = 0.0
        for part in _slices(v):
            w = self.table[part].double()
            step = (w.abs().amax(1, keepdim=True) / DIGIT).float()
            q = (w / step).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-DIGIT, DIGIT)
            self.rows[part], self.steps[part] = q, step[:, 0]
            rest = torch.linalg.vector_norm(w - step * q, dim=1) * (1 + INFLATED)
            # rounding to fp32 may make the smallest numbers too small
            self.rests[part] = rest.float().nextafter(rest.new_tensor(math.inf, dtype=torch.float32))
            longest = max(longest, float(torch.linalg.vector_norm(q, dim=1).max()))
        self.longest = longest * (1 + INFLATED)  # upper bound of all ‖q‖
        self.largest = float((self.steps.double() * self.longest + self.rests).max())  # upper bound of all ‖W‖

    def argmax(self, hidden: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return the tokens [...] of the largest logits of hidden states [..., E].

        Arguments and errors are those of `top`.
        """
        return self.top(hidden, 1, bias, scale)[1][..., 0]

    @torch.no_grad()
    def top(
        self, hidden: Tensor, top_k: int, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the `top_k` largest logits of each hidden state and their tokens.

        The largest come first, equal ones by token. Logits that are nan come first, as in `torch.topk`.

        Args:
            hidden: [..., E], fp32, bf16 or fp16.
            top_k: number of logits; all if the table has fewer.
            bias: [V].
            scale: factor on the product, before the bias.
            softcap: c of c · tanh(y / c). Logits are ordered by y, so that logits that reach the cap stay in order.

        Returns:
            Scores [..., top_k] in fp32 and tokens [..., top_k].

        Raises:
            ValueError: the shapes do not fit together, or an option is out of range.
            UnsupportedError: the hidden states have another type or device.
        """
        v, e = self.table.shape
        self._check(hidden, bias)
        if top_k < 1 or not math.isfinite(scale) or not (softcap is None or 0 < softcap < math.inf):
            values = f"{top_k}, {scale}, {softcap}"
            raise ValueError(f"need top_k ≥ 1, a finite scale and a finite softcap > 0, not {values}")
        if self._version() != self._copied:
            self.refresh()
        flat, top_k = hidden.detach().reshape(-1, e), min(top_k, v)
        y = torch.empty(len(flat), top_k, dtype=torch.float64, device="cpu")
        tokens = torch.empty(len(flat), top_k, dtype=torch.long, device="cpu")
        if len(flat):
            wide_bias = None if bias is None else bias.double()
            for part in _slices(len(flat), max(1, AT_ONCE // v)):
                y[part], tokens[part] = self._top(flat[part].double(), top_k, _Affine(scale, wide_bias))
        scores = y if softcap is None else softcap * torch.tanh(y / softcap)
        shape = (*hidden.shape[:-1], top_k)
        return scores.float().view(shape), tokens.view(shape)

    def _check(self, hidden: Tensor, bias: Tensor | None) -> None:
        """Refuse hidden states of another type or device, and shapes that do not fit the table."""
        v, e = self.table.shape
        if hidden.dtype not in DTYPES or hidden.device.type != "cpu":
            what = f"exact decoding of {hidden.dtype} hidden states on {hidden.device}"
            raise UnsupportedError(what, "give them in fp32, bf16 or fp16 on the CPU")
        if hidden.shape[-1:] != (e,) or (bias is not None and bias.shape != (v,)):
            shapes = f"hidden states {tuple(hidden.shape)}"
            if bias is not None:
                shapes += f", a bias {tuple(bias.shape)}"
            raise ValueError(f"{shapes} do not meet a table [V, E] = {[v, e]}")

    def _top(self, hidden: Tensor, top_k: int, affine: _Affine) -> tuple[Tensor, Tensor]:
        """Return y and tokens [n, top_k] of `hidden` [n, E] in fp64."""
        norms = torch.linalg.vector_norm(hidden, dim=1)
        highest = norms * self.largest * abs(affine.scale) + affine.largest_bias()
        digits, sigma, lost = split_digits(hidden)
        estimates = self._estimate(digits, sigma)
        top_y, top_tokens = [], []
        for i, h in enumerate(hidden):
            query = _Query(h, float(norms[i]), top_k, affine)
            tokens = None
            is_bounded = query.norm < LARGEST and bool(highest[i] < LARGEST)  # False for nan
            if estimates is not None and top_k <= len(self.table) // 4 and is_bounded:
                tokens = self._find_candidates(query, estimates[i], float(lost[i]))
            y, chosen = self._select(query, tokens)
            top_y.append(y)
            top_tokens.append(chosen)
        return torch.stack(top_y), torch.stack(top_tokens)

    def _find_candidates(self, query: _Query, estimates: Tensor, lost: float) -> Tensor | None:
        """Return the tokens that can be among the `top_k` largest by their estimated products [V].

        It is None if they are so many that fp64 reads all rows in order faster than these rows.
        """
        over_rest = query.norm * (1 + 4 * INFLATED)
        over_step = self.longest * (lost + 4 * INFLATED * query.norm)
        slack = (self.rests * over_rest).add_(self.steps, alpha=over_step).add_(TINY)
        y, slack = query.affine.apply_with_bound(estimates, slack)
        low = y - slack
        if query.top_k == 1:
            best = low.max(0, keepdim=True).indices
        else:
            best = low.topk(query.top_k, sorted=False).indices
        z, unsure = self._compute_fp64(query, best)
        needed = (z - unsure).min().to(y.dtype).nextafter(y.new_tensor(-math.inf))
        tokens = (slack.add_(y) >= needed).nonzero()[:, 0]
        if len(tokens) > len(self.table) // 4:
            return None
        self.counts.rows += query.top_k
        return tokens

    def _estimate(self, digits: Tensor, sigma: Tensor) -> Tensor | None:
        """Return the estimated products [n, V] of int8 `digits` [n, 2, E]; None if not available.

        They are s σ q·(a + b / 256), exact except for the rounding to fp32.
        """
        e = self.rows.shape[1]
        if e > WIDEST:
            return None
        compiled = kernels("avx512_vnni")
        if compiled is not None:
            products: Tensor = compiled.seen_in_int8(self.rows, self.steps, digits, sigma)
            return products
        if not has_exact_int8() or e == 1:  # torch's product of one column is wrong
            return None
        dots = torch._int_mm(digits.view(-1, e), self.rows.T).view(*digits.shape[:2], len(self.rows)).double()
        return (self.steps * (sigma[:, None] * (dots[:, 0] + dots[:, 1] / 256))).float()

    def _select(self, query: _Query, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y and tokens of the `top_k` largest among `tokens`, in order; None: among all tokens."""
        self.counts.queries += 1
        if tokens is None:
            self.counts.full_scans += 1
        else:
            self.counts.rows += len(tokens)
        # a sum that is not finite is so in any order; the other tokens are separated by their bounds, then exactly
        y, unsure = self._compute_fp64(query, tokens)
        finite = y.isfinite()
        low, unsure = (y - unsure).where(finite, -math.inf), unsure.where(finite, 0.0)
        close = (y + unsure >= low.topk(query.top_k).values[-1]).nonzero()[:, 0]
        close = torch.cat((close[finite[close]], (~finite).nonzero()[:, 0])).sort().values
        tokens, y, finite = close if tokens is None else tokens[close], y[close], finite[close]
        sure = tokens[finite]
        dots = torch.cat([exact_dots(self.table[sure[part]], query.h) for part in _slices(len(sure))])
        y[finite] = query.affine.apply(dots, sure)
        y, order = y.sort(descending=True, stable=True)
        return y[: query.top_k], tokens[order[: query.top_k]]

    def _compute_fp64(self, query: _Query, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y [C] of `tokens` (None: all) in fp64, and its error bound."""
        selection = slice(None) if tokens is None else tokens
        sizes = self.steps[selection].double() * self.longest + self.rests[selection]
        parts = _slices(len(sizes)) if tokens is None else torch.split(tokens, ROWS)
        scale, bias = query.affine.scale, query.affine.bias
        products = torch.cat([self.table[part].double() @ query.h for part in parts])
        added = torch.zeros_like(products) if bias is None else bias[selection]
        y = products * scale + added
        lost = (self.table.shape[1] + 8) * 2.0**-52 * query.norm * abs(scale)
        return y, sizes * lost + (y.abs() + added.abs()) * 2.0**-50

    def _version(self) -> tuple[int, int]:
        """Return a value that differs after the table changed, as far as torch records it."""
        return self.table.data_ptr(), 0 if self.table.is_inference() else self.table._version


def split_digits(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 digits (a, b) [n, 2, E] of `hidden`, σ [n], and the remainder's norm.

    `hidden` [n, E] is in fp64; the remainder is h − σ (a + b / 256).
    """
    sigma = hidden.abs().amax(1, keepdim=True) / DIGIT
    a = (hidden / sigma).nan_to_num_(0.0, 0.0, 0.0).round_()
    b = ((hidden - sigma * a) * (256 / sigma)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-DIGIT, DIGIT)
    lost = torch.linalg.vector_norm(hidden - sigma * (a + b / 256), dim=1)
    return torch.stack((a, b), 1).to(torch.int8), sigma[:, 0], lost


def exact_dots(rows: Tensor, h: Tensor) -> Tensor:
    """Return the products rows @ h [C], each rounded once, as `math.fsum` would.

    `rows` [C, E] and `h` [E] are finite. Numbers are added in pairs, together with each pair's rounding error (Knuth's
    TwoSum, which is exact). The error of the sum of these errors is bounded. If it could change a result, `math.fsum`
    computes that result.
    """
    x = rows.double() * h.double()  # exact: 24 + 24 bits
    if len(x) < 4:  # fewer operations than the sums below
        return x.new_tensor([math.fsum(row) for row in x.tolist()])
    products, sizes, errors = x, x.abs().sum(1), x.new_zeros(len(x))
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        one, two, last = torch.split(x, [half, half, x.shape[1] % 2], 1)
        x = one + two
        rounded = x - one
        errors += ((one - (x - rounded)) + (two - rounded)).sum(1)
        x = torch.cat((x, last), 1)
    lost = sizes * ((rows.shape[1] + 64) * 32 * 2.0**-106)
    low, high = x[:, 0] + (errors - lost), x[:, 0] + (errors + lost)
    for i in (low != high).nonzero()[:, 0].tolist():
        low[i] = math.fsum(products[i].tolist())
    return low


def _allocate_large_pages(size: int) -> Tensor:
    """Return an int8 tensor, on pages of 2 MB if Linux has them.

    On small pages a pass takes a fifth longer.
    """
    if size < 1 << 22 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.int8, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel lacks large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)


def _slices(n: int, size: int = ROWS) -> list[slice]:
    """Return slices that cut n rows into parts of `size`; without rows, an empty one."""
    return [slice(start, start + size) for start in range(0, max(n, 1), size)]


@cache
def has_exact_int8() -> bool:
    """Return whether torch multiplies int8 exactly on this machine.

    Without VNNI, pairs of products may saturate at 16 bits.
    """
    a, b = (torch.full((rows, 256), DIGIT, dtype=torch.int8, device="cpu") for rows in (2, 64))
    a[1], b[::2] = -DIGIT, -DIGIT
    try:
        return torch.equal(torch._int_mm(a, b.T).long(), a.long() @ b.T.long())
    except (AttributeError, RuntimeError):
        return False
