"""The same sweep as opaque operators, so that `torch.compile` keeps one graph around the loss.

Dynamo cannot trace the eager autograd function (it asks the running backward whether its graph survives), and must not
unroll the chunk loop. An operator's tensors may not be given away either: under compile the backward scales a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiewise.ops.chunked import sweep
from tiewise.ops.fused import mean_factor
from tiewise.ops.problem import Head, Tensors, TokenLoss, Wanted, accumulator, compute_dtype

_KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_AUTO = 0  # chunk chosen by the vocabulary


def traced_scalar(tensors: Tensors, head: Head, loss: TokenLoss, *, mean: bool) -> Tensor:
    """Sum or weighted mean, as one operator."""
    features, weight, bias, targets, class_weight = tensors
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (features, weight, bias)]
    floats, ints = _pack(tensors, head, loss)
    op = torch.ops.tiewise.scalar_loss
    return op(features, weight, bias, targets, class_weight, floats, [*ints, int(mean), *map(int, wanted)])[0]


def traced_tokens(tensors: Tensors, head: Head, loss: TokenLoss) -> Tensor:
    """Loss of each token [N], as one operator."""
    return torch.ops.tiewise.token_losses(*tensors, *_pack(tensors, head, loss))


def _pack(tensors: Tensors, head: Head, loss: TokenLoss) -> tuple[list[float], list[int]]:
    # Autocast is decided while tracing: at run time the operator no longer sees which region it stood in.
    kind = _KINDS.index(compute_dtype(tensors[0], tensors[1]))
    floats = [float(head.scale), float(head.softcap or 0.0), float(loss.smoothing), float(loss.z_loss)]
    return floats, [loss.ignore_index, loss.chunk or _AUTO, kind]


def _unpack(floats: list[float], ints: list[int]) -> tuple[Head, TokenLoss, torch.dtype]:
    scale, softcap, smoothing, z_loss = floats
    head = Head(scale, softcap or None)
    return head, TokenLoss(ints[0], smoothing, z_loss, ints[1] or None), _KINDS[ints[2]]


@torch.library.custom_op("tiewise::scalar_loss", mutates_args=())
def _scalar_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    floats: list[float],
    ints: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head, loss, kind = _unpack(floats, ints[:3])
    wide = accumulator(kind)
    factor = mean_factor(targets, class_weight, loss.ignore_index, wide) if ints[3] else None
    tensors = (features, weight, bias, targets, class_weight)
    early = None if kind == torch.float16 else factor
    each, g = sweep(tensors, head, loss, Wanted(*map(bool, ints[4:])), kind, early)
    if factor is not None and early is None:
        for x in (g.features, g.weight, g.bias):
            if x is not None:
                x.mul_(factor)
    nothing = [each.new_empty(0) for _ in range(3)]
    grads = [n if x is None else x for x, n in zip((g.features, g.weight, g.bias), nothing, strict=True)]
    return (each.sum() if factor is None else each.sum() * factor, *grads)  # type: ignore[return-value]


@_scalar_loss.register_fake
def _scalar_shapes(features, weight, bias, targets, class_weight, floats, ints):  # type: ignore[no-untyped-def]
    wide = accumulator(_KINDS[ints[2]])
    shapes = [x.shape if on else (0,) for x, on in zip((features, weight, bias), ints[4:], strict=True)]
    return (features.new_empty((), dtype=wide), *(features.new_empty(shape, dtype=wide) for shape in shapes))


def _scalar_keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.wanted = inputs[6][4:]


def _scalar_backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
    triples = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    return (*((x * upstream).to(dtype) if on else None for x, dtype, on in triples), None, None, None, None)


_scalar_loss.register_autograd(_scalar_backward, setup_context=_scalar_keep)


@torch.library.custom_op("tiewise::token_losses", mutates_args=())
def _token_losses(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    floats: list[float],
    ints: list[int],
) -> Tensor:
    head, loss, kind = _unpack(floats, ints)
    return sweep((features, weight, bias, targets, class_weight), head, loss, Wanted(False, False, False), kind)[0]


@_token_losses.register_fake
def _token_shapes(features, weight, bias, targets, class_weight, floats, ints):  # type: ignore[no-untyped-def]
    return features.new_empty(targets.shape, dtype=accumulator(_KINDS[ints[2]]))


@torch.library.custom_op("tiewise::token_gradients", mutates_args=())
def _token_gradients(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    upstream: Tensor,
    floats: list[float],
    ints: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    head, loss, kind = _unpack(floats, ints)
    wanted = Wanted(True, True, bias is not None)
    _, g = sweep((features, weight, bias, targets, class_weight), head, loss, wanted, kind, upstream)
    assert g.features is not None
    assert g.weight is not None
    empty = g.features.new_empty(0) if g.bias is None else g.bias
    return g.features, g.weight, empty


@_token_gradients.register_fake
def _gradient_shapes(features, weight, bias, targets, class_weight, upstream, floats, ints):  # type: ignore[no-untyped-def]
    wide = accumulator(_KINDS[ints[2]])
    shapes = (features.shape, weight.shape, (0,) if bias is None else bias.shape)
    return tuple(features.new_empty(shape, dtype=wide) for shape in shapes)


def _tokens_keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:5])
    ctx.floats, ctx.ints = inputs[5:]


def _tokens_backward(ctx, upstream):  # type: ignore[no-untyped-def]
    found = torch.ops.tiewise.token_gradients(*ctx.saved_tensors, upstream, ctx.floats, ctx.ints)
    pairs = zip(found, ctx.saved_tensors[:3], strict=True)
    return (*(None if like is None else x.to(like.dtype) for x, like in pairs), None, None, None, None)


_token_losses.register_autograd(_tokens_backward, setup_context=_tokens_keep)
