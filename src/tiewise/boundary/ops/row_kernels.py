"""Triton kernels of the fused loss, which turn logits into losses and slopes.

Only `row_loss` and `row_statistics` import this module, and only where triton is installed. A program processes one
row. With the letters of `chunked`'s header, for token i with target t and factor r_i on its loss, it reads its row of
products x_j twice:

    first   z_j = softcap(scale · x_j + b_j)        m = max_j z_j        S = Σ_j exp(z_j − m)        U = Σ_j w_j z_j
            lse = m + log S        nll = log S − (z_t − m)
            loss = (1−ε) w_t nll + ζ lse² + ε mean(w) lse − (ε / V) U
    second  slope_j = (c exp(z_j − m) / S − r ε w_j / V − q [j = t]) · softcap'(z_j)
            c = r ((1−ε) w_t + ε mean(w) + 2ζ lse)        q = r (1−ε) w_t

Everything is fp32. Each lane of a program keeps a maximum and a sum of its columns, so that the first reading needs one
exponential per logit and no exchange between lanes. The second reading goes from the last block of columns to the
first: the L2 cache has the columns that were read last. In the other direction, with rows that do not all fit, each
block would be evicted before it is read again.

The slopes may overwrite the products. A narrow slope takes half the bytes of an fp32 product. Narrow slopes take the
second half of their row: slope j of W numbers begins at byte 2 W + 2 j, which is not before byte 4 j. So a program that
goes backward overwrites only products that it has read. A barrier separates its reads from its writes.

`loss_rows` does both readings. `read_rows` and `write_rows` do one each, where something happens between them: the
upstream gradients of log-probabilities and entropies arrive, or ranks with other columns of a table exchange their
sums. `write_rows` takes any coefficients of

    slope_j = ((level − tilt (z_j − m)) exp(z_j − m) − spread w_j + hit [j = t]) · softcap'(z_j)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # start of a maximum: finite, so that −inf minus it is no nan
LEAST = tl.constexpr(-1.0e4)  # least z − m in a product with its exponential, which is 0: −inf would give nan
SMALL_ANGLE = tl.constexpr(0.6)  # below it a polynomial has the smaller error


@triton.jit
def tanh(x):
    """Return tanh x, with a relative error of at most 2e-7.

    The interpreter has no tanh. The polynomial is a least-squares fit of tanh x / x.
    """
    y = x * x
    series = -0.3333329929930626 + y * (
        0.133319590700751 + y * (-0.05378675947432539 + y * (0.020805654285580292 + y * -0.005906194826985734))
    )
    near_zero = x + x * y * series
    size = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    elsewhere = tl.where(x < 0, -size, size)
    return tl.where(tl.abs(x) < SMALL_ANGLE, near_zero, elsewhere)


@triton.jit
def nth_last_block(n, vocab, BLOCK: tl.constexpr):
    """Return the columns of block n of a row, counted from its end."""
    return (tl.cdiv(vocab, BLOCK) - 1 - n) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load_logits(
    products, bias, columns, vocab, width, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Return the logits at `columns` of a row, −inf outside the vocabulary.

    The row has memory for `width` products, a multiple of 16, so that lanes load several at once for every vocabulary.
    """
    z = tl.load(products + columns, mask=columns < width, other=0.0).to(tl.float32) * scale
    inside = columns < vocab
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0)
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def write_zeros(slopes, width, BLOCK: tl.constexpr):
    """Write the slopes of an ignored token."""
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], tl.float32).to(slopes.dtype.element_ty)
        tl.store(slopes + columns, zeros, mask=columns < width)


@triton.jit
def load_weights(class_weight, columns, inside, HAS_CLASS_WEIGHT: tl.constexpr):
    """Return the class weights at `columns`; 1 without any."""
    w = 1.0
    if HAS_CLASS_WEIGHT:
        w = tl.load(class_weight + columns, mask=inside, other=0.0)
    return w


@triton.jit
def sum_row(
    products,
    bias,
    class_weight,
    vocab,
    width,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return m, S and U of a row: the first reading."""
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = load_logits(products, bias, columns, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        factor = tl.exp(-tl.abs(z - top))  # of the old sum if z is a new maximum, else of z
        total = tl.where(z > top, total * factor + 1, total + factor)
        top = tl.maximum(top, z)
        if HAS_SMOOTHING:
            inside = columns < vocab
            w = load_weights(class_weight, columns, inside, HAS_CLASS_WEIGHT)
            weighted += tl.where(inside, w * z, 0.0)
    highest = tl.max(top, 0)
    return highest, tl.sum(total * tl.exp(top - highest), 0), tl.sum(weighted, 0)


@triton.jit
def write_slopes(
    products,
    slopes,
    bias,
    class_weight,
    target,
    highest,
    c,
    q,
    spread,
    vocab,
    width,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slopes of a row: the second reading."""
    tl.debug_barrier()  # every lane has read the target's product
    for n in range(0, tl.cdiv(vocab, BLOCK)):
        columns = nth_last_block(n, vocab, BLOCK)
        z = load_logits(products, bias, columns, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        slope = c * tl.exp(z - highest)
        if HAS_SMOOTHING:
            slope -= spread * load_weights(class_weight, columns, columns < vocab, HAS_CLASS_WEIGHT)
        slope = tl.where(columns == target, slope - q, slope)
        if HAS_SOFTCAP:
            ratio = z / softcap
            slope *= 1 - ratio * ratio
        tl.debug_barrier()  # every lane has read its products of this block
        tl.store(slopes + columns, slope.to(slopes.dtype.element_ty), mask=columns < width)


@triton.jit
def loss_rows(
    products,
    slopes,
    losses,
    targets,
    token_weight,
    bias,
    class_weight,
    mean_weight,
    vocab,
    width,
    slope_stride,
    token_weight_stride,
    ignore_index,
    scale,
    softcap,
    smoothing,
    z_loss,
    NEEDS_SLOPES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the loss of one row and the slopes of its weighted loss."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if NEEDS_SLOPES:
            write_zeros(slopes + row * slope_stride, width, BLOCK)
        return

    highest, total, weighted = sum_row(
        products + row * width,
        bias,
        class_weight,
        vocab,
        width,
        scale,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        HAS_CLASS_WEIGHT,
        HAS_SMOOTHING,
        BLOCK,
    )
    log_total = tl.log(total)
    lse = highest + log_total

    has_target = (target >= 0) & (target < vocab)
    place = tl.where(has_target, target, 0)
    at_target = load_logits(products + row * width, bias, place, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    at_target = tl.where(has_target, at_target, float("nan"))  # a target outside the vocabulary must not pass unseen
    hit = (1 - smoothing) * load_weights(class_weight, place, has_target, HAS_CLASS_WEIGHT)
    spread = smoothing * tl.load(mean_weight)
    loss = hit * (log_total - (at_target - highest)) + z_loss * lse * lse
    if HAS_SMOOTHING:
        loss += spread * lse - smoothing * weighted / vocab
    tl.store(losses + row, loss)

    if NEEDS_SLOPES:
        r = tl.load(token_weight + row * token_weight_stride)
        write_slopes(
            products + row * width,
            slopes + row * slope_stride,
            bias,
            class_weight,
            target,
            highest,
            r * (hit + spread + 2 * z_loss * lse) / total,
            r * hit,
            r * smoothing / vocab,
            vocab,
            width,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_CLASS_WEIGHT,
            HAS_SMOOTHING,
            BLOCK,
        )


@triton.jit
def tilt_row(
    products,
    bias,
    highest,
    vocab,
    width,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return Σ_j exp(z_j − m) (z_j − m) of a row."""
    tilted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = load_logits(products, bias, columns, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        below = tl.maximum(z - highest, LEAST)
        tilted += tl.exp(below) * below
    return tl.sum(tilted, 0)


@triton.jit
def read_rows(
    products,
    targets,
    bias,
    class_weight,
    tops,
    totals,
    below_tops,
    tilts,
    weighted_sums,
    vocab,
    width,
    elsewhere,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_TILT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of one row.

    They are m, S, z_t − m, Σ exp(z − m) (z − m) and U. The third is 0 if the target is `elsewhere`, and nan if it is
    outside the vocabulary. The fourth needs HAS_TILT.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    highest, total, weighted = sum_row(
        products + row * width,
        bias,
        class_weight,
        vocab,
        width,
        scale,
        softcap,
        HAS_BIAS,
        HAS_SOFTCAP,
        HAS_CLASS_WEIGHT,
        HAS_SMOOTHING,
        BLOCK,
    )
    tl.store(tops + row, highest)
    tl.store(totals + row, total)
    tl.store(weighted_sums + row, weighted)
    has_target = (target >= 0) & (target < vocab)
    place = tl.where(has_target, target, 0)
    at_target = load_logits(products + row * width, bias, place, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    missing = tl.where(target == elsewhere, 0.0, float("nan"))
    tl.store(below_tops + row, tl.where(has_target, at_target - highest, missing))
    if HAS_TILT:
        tilted = tilt_row(
            products + row * width, bias, highest, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK
        )
        tl.store(tilts + row, tilted)


@triton.jit
def write_rows(
    products,
    slopes,
    targets,
    bias,
    class_weight,
    tops,
    levels,
    tilts,
    hits,
    spreads,
    vocab,
    width,
    slope_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_TILT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slopes of one row from its coefficients."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    highest, level, hit = tl.load(tops + row), tl.load(levels + row), tl.load(hits + row)
    tilt, spread = 0.0, 0.0
    if HAS_TILT:
        tilt = tl.load(tilts + row)
    if HAS_SMOOTHING:
        spread = tl.load(spreads + row)
    for n in range(0, tl.cdiv(vocab, BLOCK)):
        columns = nth_last_block(n, vocab, BLOCK)
        z = load_logits(products + row * width, bias, columns, vocab, width, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        below = z - highest
        slope = level * tl.exp(below)
        if HAS_TILT:
            slope = (level - tilt * tl.maximum(below, LEAST)) * tl.exp(below)
        if HAS_SMOOTHING:
            slope -= spread * load_weights(class_weight, columns, columns < vocab, HAS_CLASS_WEIGHT)
        slope = tl.where(columns == target, slope + hit, slope)
        if HAS_SOFTCAP:
            ratio = z / softcap
            slope *= 1 - ratio * ratio
        tl.debug_barrier()  # every lane has read its products of this block
        tl.store(slopes + row * slope_stride + columns, slope.to(slopes.dtype.element_ty), mask=columns < width)


@triton.jit
def scale_unless_one(values, factor, count, BLOCK: tl.constexpr):
    """Multiply `count` values by a number on the device.

    The usual 1 costs no memory traffic.
    """
    f = tl.load(factor)
    if f == 1.0:
        return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(values + places, mask=inside)
    tl.store(values + places, (x.to(tl.float32) * f).to(values.dtype.element_ty), mask=inside)
