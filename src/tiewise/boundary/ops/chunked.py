"""The fused loss in chunks of tokens: gradients next to the loss, one [V, E] buffer.

For a chunk of n tokens with features h [n, E], P = softmax(z) [n, V]:

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − v_i u_j        c_i = (1−ε)w_t + ε mean(w) + 2ζ lse_i     (0 where ignored)
                                                             q_i = (1−ε)w_t,  u_j = ε w_j / V,  v_i = 1 or 0
    R = P − (q / c at column t)
    dfeatures = c ∘ (R W) − v ⊗ uW                           dweight = Rᵀ(c ∘ h) − u ⊗ Σ v h

So the row coefficients multiply [n, E] factors, and two steps read [n, V]: the product and its softmax. With a
soft-cap, P is multiplied by the elementwise derivative 1 − tanh² and by the coefficients.

Sums are fp32 (fp64 for products in fp64). `native_loss` computes the same with a compiled kernel where that is faster.

If a table is split over ranks, each rank does this with its columns (`vocabulary_shard`). V and w are then those of the
full vocabulary, only the rank that has t subtracts q, and the ranks' dfeatures must still be summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import (
    Gradients,
    accumulate_gradients,
    chunk_logits,
    gradient_buffers,
    softcap_slope,
)
from tiewise.boundary.ops.fast_products import pass_products
from tiewise.boundary.ops.problem import LossTensors, accumulator
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import LossOptions, chunk_rows

SMALLEST = 1e-30  # least probability whose fp32 logarithm is accurate; fp32 ends near 1e-38


def loss_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Gradients]:
    """Compute losses and gradients in one pass over all chunks of `tensors`.

    If the gradient of weight is needed and `into` is given, the gradient is added to `into`. With a `shard`, weight,
    bias and their gradients are its rows.

    Returns:
        the loss of each token [N], and the gradients of Σ row_weight_i · loss_i that `needs` requests (of features,
        weight, bias; otherwise None). `row_weight` is [] or [N]; None: all 1. Products are in `product_dtype` and sums
        in `accumulator(product_dtype)`.
    """
    features, weight, bias, targets = tensors
    wide = accumulator(product_dtype)
    losses = features.new_empty(len(targets), dtype=wide)
    adds_to_into = needs[1] and into is not None
    buffered = (needs[0], needs[1] and not adds_to_into, needs[2])
    gradients = gradient_buffers((features, weight, bias), buffered, wide)
    if adds_to_into:
        gradients[1] = into
    with pass_products(features, weight, product_dtype):
        loss = _ChunkedLoss(options, LossTensors(*tensors), product_dtype, any(needs), shard)
        for chunk in loss.chunks():
            softmax = loss.softmax(chunk)
            losses[chunk.part] = loss.token_losses(chunk, softmax)
            if any(needs):
                loss.add_gradients(gradients, chunk, softmax, row_weight, onto=into is not None)
    return losses, gradients


def shard_chunk_size(
    shard: VocabularyShard, n: int, like: Tensor, product_dtype: torch.dtype, options: LossOptions
) -> int:
    """Return how many of `n` tokens a chunk takes on every rank of a shard.

    Every rank needs the same number of chunks, whichever gradients it needs and however large its GPU is.
    """
    numbers = devices.numbers_per_token(shard.rows, _shard_buffers(options), product_dtype)
    return chunk_rows(n, numbers, like.device.type, options.chunk)


def _shard_buffers(options: LossOptions) -> int:
    """Return how many matrices [n, V_r] of a chunk coexist on each rank of a shard."""
    return 1 if options.softcap is None else 2


class _Chunk(NamedTuple):
    """Some of the tokens, with everything that is computed before their logits."""

    part: slice  # positions among all tokens
    h: Tensor  # [n, E] in the type of the products
    targets: Tensor  # [n]
    valid: Tensor  # [n] bool: not ignored
    hit: Tensor | float  # (1 − ε) w_t [n], or one number for all
    column: Tensor  # [n, 1] columns of the targets in the logits; [n, 0] on a rank without rows
    is_here: Tensor | None  # [n] bool: this rank has the target's column; None: it has all columns


class _ChunkSoftmax(NamedTuple):
    """Softmax of a chunk's logits, and the sums over the vocabulary that make up its losses."""

    p: Tensor  # [n, V]
    nll: Tensor  # [n] of the targets; inf where a logit is −inf
    lse: Tensor  # [n]
    spread: Tensor | None  # (1/V) Σ_j w_j z_j [n], for label smoothing
    slope: Tensor | None  # [n, V] derivative of the soft-cap, if gradients need it


class _ChunkedLoss:
    """Loss of the chunks of one pass, with memory for one of them."""

    def __init__(
        self,
        options: LossOptions,
        tensors: LossTensors,
        product_dtype: torch.dtype,
        needs_gradients: bool,
        shard: VocabularyShard | None,
    ) -> None:
        """Convert the tensors, and allocate the memory."""
        self.options, self.product_dtype, self.shard, self.wide = (
            options,
            product_dtype,
            shard,
            accumulator(product_dtype),
        )
        self.features, self.targets = tensors.features, tensors.targets
        self.weight = tensors.weight.to(product_dtype)
        self.bias = None if tensors.bias is None else tensors.bias.to(self.wide)
        self.softmax_is_in_place = shard is not None or devices.is_cpu(self.features)
        self.needs_slope = options.softcap is not None and needs_gradients
        self._set_class_weights()
        self._set_buffers()

    def _set_class_weights(self) -> None:
        """Set the class weights of all words, of the local columns, and of label smoothing."""
        options, v = self.options, len(self.weight)
        self.vocab = v if self.shard is None else self.shard.total
        self.mean_weight: Tensor | float = 1.0
        self.class_weight = self.column_weight = None
        if options.class_weight is not None:
            self.class_weight = options.class_weight.to(self.wide)
            self.mean_weight = self.class_weight.mean()
            columns = slice(None) if self.shard is None else slice(self.shard.start, self.shard.stop)
            self.column_weight = self.class_weight[columns]
        self.spread_weight = options.label_smoothing * self.mean_weight  # ε mean(w)
        self.smoothed: Tensor | None = None  # u [V] of the module's header
        if options.label_smoothing:
            w = self.column_weight
            if w is None:
                w = self.features.new_ones(v, dtype=self.wide)
            self.smoothed = w * (options.label_smoothing / self.vocab)

    def _set_buffers(self) -> None:
        """Allocate the logits of one chunk, and a second buffer if two matrices coexist."""
        options, shard, v, n = self.options, self.shard, len(self.weight), len(self.targets)
        if shard is None:
            buffers = 2 if self.needs_slope or not self.softmax_is_in_place else 1
            numbers = devices.numbers_per_token(v, buffers, self.product_dtype)
            self.rows = devices.chunk_size(n, numbers, self.features, options.chunk)
        else:
            buffers = _shard_buffers(options)
            self.rows = shard_chunk_size(shard, n, self.features, self.product_dtype, options)
        self.buffer = self.features.new_empty(min(self.rows, n), v, dtype=self.wide)
        self.spare = torch.empty_like(self.buffer) if buffers == 2 else self.buffer[:0]

    def chunks(self) -> Iterator[_Chunk]:
        """Yield the chunks in their order."""
        options = self.options
        for start in range(0, len(self.targets), self.rows):
            part = slice(start, start + self.rows)
            targets = self.targets[part]
            valid = targets != options.ignore_index
            at = targets.where(valid, 0)
            hit: Tensor | float = 1 - options.label_smoothing
            if self.class_weight is not None:
                hit = hit * self.class_weight[at]
            if self.shard is None:
                column, is_here = at[:, None], None
            else:
                column, is_here = self.shard.columns(targets)
            yield _Chunk(part, self.features[part].to(self.product_dtype), targets, valid, hit, column, is_here)

    def softmax(self, chunk: _Chunk) -> _ChunkSoftmax:
        """Return the softmax of a chunk's logits, in this object's memory.

        It is valid until the next chunk.
        """
        z = self._logits(chunk.h, self.buffer[: len(chunk.h)])
        spread = self._spread(z)  # before the softmax overwrites z
        if not self.softmax_is_in_place:
            return self._softmax_in_spare(chunk, z, spread)
        slope = None
        if self.needs_slope:
            slope = self._softcap_slope(z, self.spare[: len(z)])
        if self.shard is None:
            nll, lse = self._softmax_in_place(chunk, z)
        else:
            z, nll, lse, spread = self.shard.softmax(z, chunk.targets, spread)
        return _ChunkSoftmax(z, nll, lse, spread, slope)

    def _logits(self, h: Tensor, z: Tensor) -> Tensor:
        """Write the logits of features `h` into `z`, and return it."""
        return chunk_logits(h, self.weight, self.bias, self.options, z)

    def _softcap_slope(self, z: Tensor, out: Tensor) -> Tensor:
        """Write the soft-cap's derivative at the logits `z` into `out`, and return it."""
        assert self.options.softcap is not None, "only a soft-cap has a slope"
        return softcap_slope(z, self.options.softcap, out)

    def _spread(self, z: Tensor) -> Tensor | None:
        """Return (1/V) Σ_j w_j z_j [n] over the local columns; None without label smoothing."""
        if not self.options.label_smoothing:
            return None
        total = z.sum(1) if self.column_weight is None else z @ self.column_weight
        return total / self.vocab

    def _softmax_in_place(self, chunk: _Chunk, z: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrite the logits `z` with their softmax, and return nll and lse [n].

        On a CPU the softmax is one pass over memory, and a logarithm of the full matrix would be a second one. So nll
        is the logarithm of the target's probability alone. Targets whose probability is below SMALLEST are computed
        again from their logits.
        """
        target_logit = z.gather(1, chunk.column)[:, 0]
        p = torch.softmax(z, 1, out=z)
        at_target = p.gather(1, chunk.column)[:, 0]
        nll = at_target.log().neg_()
        lse = target_logit + nll
        underflowed = (at_target < SMALLEST).nonzero()[:, 0]
        if len(underflowed):
            logits = self._logits(chunk.h[underflowed], p.new_empty(len(underflowed), p.shape[1]))
            lse[underflowed] = logits.logsumexp(1)
            nll[underflowed] = lse[underflowed] - target_logit[underflowed]
        return nll, lse

    def _softmax_in_spare(self, chunk: _Chunk, z: Tensor, spread: Tensor | None) -> _ChunkSoftmax:
        """Return the softmax in the spare memory, as a GPU computes it.

        A soft-cap's slope overwrites the logits. The largest probability is 1 / Σ_j exp(z_j − top), whose logarithm
        loses no accuracy.
        """
        p = torch.softmax(z, 1, out=self.spare[: len(z)])
        top = z.amax(1)
        rest = p.amax(1).log_().neg_()
        lse = top + rest
        nll = rest - (z.gather(1, chunk.column)[:, 0] - top)
        slope = self._softcap_slope(z, z) if self.needs_slope else None
        return _ChunkSoftmax(p, nll, lse, spread, slope)

    def token_losses(self, chunk: _Chunk, softmax: _ChunkSoftmax) -> Tensor:
        """Return the loss of each token [n], 0 for ignored tokens."""
        options = self.options
        loss = chunk.hit * softmax.nll
        if options.z_loss:
            loss += options.z_loss * softmax.lse.square()
        if softmax.spread is not None:
            loss += self.spread_weight * softmax.lse - options.label_smoothing * softmax.spread
        return loss.masked_fill_(~chunk.valid, 0)

    def add_gradients(
        self, gradients: Gradients, chunk: _Chunk, softmax: _ChunkSoftmax, row_weight: Tensor | None, *, onto: bool
    ) -> None:
        """Add the gradients of a chunk, overwriting its softmax with the slopes.

        `onto` is as in `accumulate_gradients`.
        """
        token_weight = _token_weights(chunk, row_weight, self.wide)
        p, c = self._logit_slopes(chunk, softmax, token_weight)
        accumulate_gradients(gradients, chunk.part, p, c, chunk.h, self.weight, self.options.scale, onto=onto)
        if self.smoothed is not None and softmax.slope is None:
            self._subtract_smoothing(gradients, chunk, token_weight, self.smoothed)

    def _logit_slopes(self, chunk: _Chunk, softmax: _ChunkSoftmax, token_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrite P [n, V] so that c ∘ P are the logits' slopes; return both.

        Without a soft-cap, the term −v ⊗ u of label smoothing is added later: it needs no [n, V].
        """
        p, slope, z_loss = softmax.p, softmax.slope, self.options.z_loss
        lse_slope = 2 * z_loss * softmax.lse if z_loss else 0.0
        c, q = token_weight * (chunk.hit + self.spread_weight + lse_slope), token_weight * chunk.hit
        if chunk.is_here is not None:
            q = q * chunk.is_here
        if slope is None and not z_loss:
            p.scatter_add_(1, chunk.column, -(q / c.where(c != 0, 1))[:, None])
            return p, c
        # c may be 0, or P must be multiplied by the soft-cap's slope: multiply by c here
        p.mul_(c[:, None]).scatter_add_(1, chunk.column, -q[:, None])
        if slope is not None:
            if self.smoothed is not None:
                p.addr_(token_weight, self.smoothed, alpha=-1)
            p.mul_(slope)
        return p, torch.ones_like(c)

    def _subtract_smoothing(self, gradients: Gradients, chunk: _Chunk, token_weight: Tensor, u: Tensor) -> None:
        """Subtract the gradients of v ⊗ u: slopes u [V] of every counted token."""
        by_features, by_weight, by_bias = gradients
        scale = self.options.scale
        if by_bias is not None:
            by_bias.sub_(token_weight.sum() * u)
        if by_features is not None:
            row = (u.to(self.product_dtype) @ self.weight).to(self.wide)
            by_features[chunk.part].addr_(token_weight, row, alpha=-scale)
        if by_weight is not None:
            by_weight.addr_(u, token_weight @ (chunk.h.to(self.wide) * scale), alpha=-1)


def _token_weights(chunk: _Chunk, row_weight: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return the factor [n] on each loss of a chunk, 0 for ignored tokens."""
    if row_weight is None:
        return chunk.valid.to(wide)
    if row_weight.dim():
        row_weight = row_weight[chunk.part]
    return chunk.valid * row_weight
