"""The fused loss in portable PyTorch: token chunks, gradients beside the loss, one [V, E] buffer.

For a chunk of n tokens with features h [n, E], P = softmax(z) [n, V]:

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − v_i u_j        c_i = (1−ε)w_t + ε mean(w) + 2ζ lse_i     (0 where ignored)
                                                             q_i = (1−ε)w_t,  u_j = ε w_j / V,  v_i = 1 or 0
    R = P − (q / c at column t)
    dfeatures = c ∘ (R W) − v ⊗ uW                           dweight = Rᵀ(c ∘ h) − u ⊗ Σ v h

so the row coefficients act on [n, E] factors, and [n, V] is passed over twice: by the product and by its softmax.
With a soft-cap the elementwise derivative 1 − tanh² stands between, and P is multiplied out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.core.backends import LossOptions, chunk_rows

SMALLEST = 1e-30  # a probability whose fp32 logarithm is still good; fp32 ends near 1e-38


class Gradients(NamedTuple):
    """Accumulators in fp32 (fp64 for fp64 inputs); None where not wanted."""

    features: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def compute_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """Type of the matrix products: autocast's where it is on, which leaves fp64 alone, else the wider input."""
    device, kind = features.device.type, torch.promote_types(features.dtype, weight.dtype)
    return torch.get_autocast_dtype(device) if kind != torch.float64 and torch.is_autocast_enabled(device) else kind


def accumulator(kind: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for products in fp64."""
    return torch.float64 if kind == torch.float64 else torch.float32


def sweep(
    options: LossOptions, tensors: Any, kind: torch.dtype, wanted: tuple[bool, ...], row_weight: Tensor | None
) -> tuple[Tensor, Gradients]:
    """Run over all chunks of `tensors`: features [N, E], weight [V, E], bias [V] or None, targets [N].

    Returns:
        the loss of each token [N], and the gradients `wanted` (of features, weight, bias) of Σ row_weight_i · loss_i
        (row_weight [] or [N]; None: all 1), multiplied in `kind` and accumulated in `accumulator(kind)`.
    """
    features, weight, bias, targets = tensors
    wide = accumulator(kind)
    with torch.autocast(features.device.type, enabled=False), torch.no_grad():
        chunk = _Chunk(weight.to(kind), bias, options, wide)
        n, v = len(targets), weight.shape[0]
        each = torch.empty(n, dtype=wide, device=features.device)
        out = Gradients(
            features.new_empty(features.shape, dtype=wide) if wanted[0] else None,
            weight.new_empty(weight.shape, dtype=wide) if wanted[1] else None,
            weight.new_zeros(v, dtype=wide) if wanted[2] else None,
        )
        rows = chunk_rows(n, v, features.device.type, options.chunk)
        buffer = torch.empty(min(rows, n), v, dtype=wide, device=features.device)
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            weights = row_weight if row_weight is None or row_weight.dim() == 0 else row_weight[part]
            each[part] = chunk.run(features[part].to(kind), targets[part], buffer, weights, out, part)
        if n == 0 and out.weight is not None:
            out.weight.zero_()
    return each, out


class _Chunk:
    """One chunk's arithmetic, with what all chunks share."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: LossOptions, wide: torch.dtype) -> None:
        self.weight, self.options, self.wide = weight, options, wide
        self.bias = None if bias is None else bias.to(wide)
        self.class_weight = None if options.class_weight is None else options.class_weight.to(wide)
        mean_weight = 1.0 if self.class_weight is None else self.class_weight.mean()
        self.spread_coefficient = options.label_smoothing * mean_weight  # ε mean(w)

    def run(
        self, h: Tensor, t: Tensor, buffer: Tensor, row_weight: Tensor | None, out: Gradients, part: slice
    ) -> Tensor:
        """Loss of each token [n]; adds this chunk's gradients into `out`."""
        o, differentiates = self.options, any(x is not None for x in out)
        valid = t != o.ignore_index
        at = t.where(valid, 0)
        z = self._logits(h, buffer[: len(t)])
        target_logit = z.gather(1, at[:, None])[:, 0]
        # before z becomes its softmax: the soft-cap's derivative [n, V], and (1/V) Σ_j w_j z_j [n]
        slope = (z / o.softcap).square_().neg_().add_(1) if differentiates and o.softcap is not None else None
        w = self.class_weight
        spread = (z.mean(1) if w is None else z @ w / z.shape[1]) if o.label_smoothing else None
        nll, lse, p = self._softmax(z, h, at, target_logit)
        hit = (1 - o.label_smoothing) * (1.0 if w is None else w[at])
        each = hit * nll
        if o.z_loss:
            each += o.z_loss * lse.square()
        if spread is not None:
            each += self.spread_coefficient * lse - o.label_smoothing * spread
        if differentiates:
            on = valid.to(self.wide) if row_weight is None else valid * row_weight
            c = on * (hit + self.spread_coefficient + (2 * o.z_loss * lse if o.z_loss else 0.0))
            self._gradients(h, at, p, (c, on * hit, on), slope, out, part)
        return each.masked_fill_(~valid, 0)

    def _logits(self, h: Tensor, z: Tensor) -> Tensor:
        h = h if self.options.scale == 1.0 else h * self.options.scale
        if h.dtype == self.wide:
            torch.mm(h, self.weight.T, out=z)
        elif h.device.type == "cuda":
            torch.mm(h, self.weight.T, out_dtype=self.wide, out=z)
        else:
            z.copy_(torch.mm(h, self.weight.T))
        if self.bias is not None:
            z.add_(self.bias)
        if self.options.softcap is not None:
            z.div_(self.options.softcap).tanh_().mul_(self.options.softcap)
        return z

    def _softmax(self, z: Tensor, h: Tensor, at: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(nll of the targets [n], lse [n], softmax in place of z [n, V]); the nll of a target at −inf is inf.

        On a CPU the softmax is one pass over memory and its logarithm a second, so the nll is taken from the target's
        probability; the few rows where that is too small to have a good logarithm are computed again. Elsewhere the lse
        is right where smoothing or the z-loss need it: only then is it worth a pass to find a logit that is finite.
        """
        if z.device.type != "cpu":
            finite = z.argmax(1, keepdim=True) if self.options.label_smoothing or self.options.z_loss else at[:, None]
            logit = z.gather(1, finite)
            log_p = torch.log_softmax(z, 1, out=z)
            lse = (logit - log_p.gather(1, finite))[:, 0]
            return -log_p.gather(1, at[:, None])[:, 0], lse, log_p.exp_()
        p = torch.softmax(z, 1, out=z)
        at_target = p.gather(1, at[:, None])[:, 0]
        nll = at_target.log().neg_()
        lse = target_logit + nll
        lost = (at_target < SMALLEST).nonzero()[:, 0]
        if len(lost):
            again = self._logits(h[lost], p.new_empty(len(lost), p.shape[1]))
            lse[lost] = again.logsumexp(1)
            nll[lost] = lse[lost] - target_logit[lost]
        return nll, lse, p

    def _gradients(
        self,
        h: Tensor,
        at: Tensor,
        p: Tensor,
        coefficients: tuple[Tensor, Tensor, Tensor],
        slope: Tensor | None,
        out: Gradients,
        part: slice,
    ) -> None:
        """Turn P into R (in place), and multiply it into the gradients; `coefficients` are c, q and v [n]."""
        c, q, on = coefficients
        o, u = self.options, None
        if o.label_smoothing:
            w = self.class_weight if self.class_weight is not None else torch.ones_like(p[0])
            u = w * (o.label_smoothing / p.shape[1])
        if slope is None and not o.z_loss:
            p.scatter_add_(1, at[:, None], -(q / c.where(c != 0, 1))[:, None])
        else:  # c may vanish, or the soft-cap's slope stands between P and the product: multiply out
            p.mul_(c[:, None]).scatter_add_(1, at[:, None], -q[:, None])
            c = torch.ones_like(c)
        if slope is not None:
            if u is not None:
                p.sub_(on[:, None] * u)
            p.mul_(slope)
            u = None
        narrow, same = p.to(self.weight.dtype), self.weight.dtype == self.wide
        if out.bias is not None:
            out.bias.addmv_(p.T, c)
            if u is not None:
                out.bias.sub_(on.sum() * u)
        if out.features is not None:
            mine = out.features[part]
            torch.mm(narrow, self.weight, out=mine) if same else mine.copy_(torch.mm(narrow, self.weight))
            mine.mul_(c[:, None] * o.scale)
            if u is not None:
                mine.addr_(on, (u.to(self.weight.dtype) @ self.weight).to(self.wide), alpha=-o.scale)
        if out.weight is not None:
            h = h.to(self.wide) * o.scale
            weighted = (h * c[:, None]).to(narrow.dtype)
            if same:
                out.weight.addmm_(narrow.T, weighted, beta=int(part.start > 0))  # the first chunk overwrites
            else:
                product = torch.mm(narrow.T, weighted)
                out.weight.copy_(product) if part.start == 0 else out.weight.add_(product)
            if u is not None:
                out.weight.addr_(u, on @ h, alpha=-1)
