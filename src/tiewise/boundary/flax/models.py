"""Small decoder in NNX around an `NNXBoundary`, and the smallest tied model in Linen.

    model = FlaxDecoder("tied", vocab=4096, width=128, layers=4, heads=4, rngs=nnx.Rngs(0))
    loss = model.loss(ids, targets)         # [B, T] each; one gradient buffer for a tied table
    logits = model.logits(ids)              # [B, T, V]

`named` returns its parameters with the names of transformers' Llama. Shapes and arithmetic of the layers are Llama's
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array, lax

from tiewise.boundary.flax.boundary import NNXBoundary, Spec
from tiewise.boundary.flax.parameter_files import flat, require_shapes
from tiewise.core.errors import SpecError

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6
STD = 0.02  # standard deviation of a decoder's new matrices, as in transformers
EMBEDDING, HEAD, BODY = "model.embed_tokens", "lm_head", "model"  # names in transformers' Llama


class FlaxDecoder(nnx.Module):
    """Llama's decoder: pre-norm blocks with rotary attention and a gated feed-forward layer.

    Args:
        spec: a `BoundarySpec` or its written form.
        vocab: V.
        width: D.
        layers: number of blocks.
        heads: number of attention heads; each has an even width.
        inner: width of the feed-forward layer; None uses 8/3·D, rounded to a multiple of 8.
        rngs: random streams of NNX.

    Raises:
        SpecError: the sizes do not divide, or do not allow the spec.
    """

    def __init__(
        self, spec: Spec, vocab: int, width: int, layers: int, heads: int, inner: int | None = None, *, rngs: nnx.Rngs
    ) -> None:
        if width % (2 * heads):
            raise SpecError(f"width {width} does not divide into {heads} heads of even width", "change one of them")
        inner = inner or max(8, round(width * 8 / 3 / 8) * 8)
        # the body is drawn first, so that arms of one seed share it although their boundaries differ
        self.layers = nnx.List([DecoderBlock(width, heads, inner, rngs=rngs) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.boundary = NNXBoundary(spec, vocab, width, rngs=rngs)

    def body(self, rows: Array) -> Array:
        """Map rows [B, T, D] to hidden states [B, T, D]."""
        for layer in self.layers:
            rows = layer(rows)
        return self.norm(rows)

    def loss(self, ids: Any, targets: Any, probe: Array | None = None, **options: Any) -> Array:
        """Return the cross-entropy of `targets` [B, T] after `ids` [B, T], plus the spec's penalty.

        `options` are those of `linear_cross_entropy`.
        """
        return self.boundary(ids, self.body, targets, probe, **options) + self.boundary.penalty()

    def logits(self, ids: Any) -> Array:
        """Map tokens [B, T] to logits [B, T, V]."""
        return self.boundary.logits(self.body(self.boundary.embed(ids)))

    def named(self) -> dict[str, Array]:
        """Return name → array of every parameter with the names of a PyTorch checkpoint.

        A tied table is in it once.
        """
        return {_torch_name(name): value for name, value in flat(nnx.state(self, nnx.Param)).items()}

    def load_named(self, params: Mapping[str, Any]) -> None:
        """Replace all parameters by those of a PyTorch checkpoint.

        Raises:
            CheckpointError: a parameter is missing or unknown, or has another shape.
        """
        remaining = dict(params)
        if self.boundary.pure.tied:
            remaining.pop(f"{HEAD}.weight", None)  # a second copy of the tied table
        shapes = {name: value.shape for name, value in self.named().items()}
        arrays = require_shapes(remaining, shapes, "the checkpoint", "build the same model")
        leaves = [jnp.asarray(value) for value in arrays.values()]
        structure = jax.tree.structure(nnx.state(self, nnx.Param))
        nnx.update(self, jax.tree.unflatten(structure, leaves))


class Linear(nnx.Module):
    """Linear map `x @ weightᵀ` without bias; weight [to, from] is drawn from N(0, 0.02²)."""

    def __init__(self, width_from: int, width_to: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(STD * jax.random.normal(rngs.params(), (width_to, width_from)))

    def __call__(self, x: Array) -> Array:
        """Map [.., from] to [.., to]."""
        return x @ self.weight[...].T


class RMSNorm(nnx.Module):
    """Norm `weight · x / √(mean x² + ε)`; weight [D] starts at one."""

    def __init__(self, width: int) -> None:
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: Array) -> Array:
        """Map [.., D] to [.., D]."""
        return self.weight[...] * x * lax.rsqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON)


class CausalAttention(nnx.Module):
    """Causal self-attention with rotary positions, as Llama's (arXiv:2302.13971 §2.2)."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.q_proj = Linear(width, width, rngs=rngs)
        self.k_proj = Linear(width, width, rngs=rngs)
        self.v_proj = Linear(width, width, rngs=rngs)
        self.o_proj = Linear(width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map [B, T, D] to [B, T, D]."""
        b, t, d = x.shape
        by_head = (b, t, self.heads, d // self.heads)
        q = _rotate(self.q_proj(x).reshape(by_head))
        k = _rotate(self.k_proj(x).reshape(by_head))
        v = self.v_proj(x).reshape(by_head)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.reshape(b, t, d))


class GatedMLP(nnx.Module):
    """Gated feed-forward layer, `down(silu(gate x) · up x)`."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(width, inner, rngs=rngs)
        self.up_proj = Linear(width, inner, rngs=rngs)
        self.down_proj = Linear(inner, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map [.., D] to [.., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nnx.Module):
    """Attention and feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)
        self.self_attn = CausalAttention(width, heads, rngs=rngs)
        self.mlp = GatedMLP(width, inner, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map [B, T, D] to [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def _torch_name(name: str) -> str:
    """Return the name that transformers' Llama gives to a parameter."""
    part, _, rest = name.partition(".")
    if part != "boundary":
        return f"{BODY}.{name}"
    module = EMBEDDING if rest.startswith(("table_in", "in_map")) else HEAD
    if rest.startswith("table"):
        return f"{module}.weight"
    return f"{module}.{rest}"


def _rotate(x: Array) -> Array:
    """Rotate each pair (j, j + d/2) of [B, T, heads, d] by position · base^(−2j/d)."""
    t, d = x.shape[1], x.shape[3]
    angle = jnp.arange(t)[:, None] * ROPE_BASE ** (-jnp.arange(0, d, 2) / d)
    cos, sin = _repeat_halves(jnp.cos(angle), x), _repeat_halves(jnp.sin(angle), x)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def _repeat_halves(of_pairs: Array, x: Array) -> Array:
    """Repeat numbers [T, d/2] of the pairs for both halves of a head.

    The result is [T, 1, d] in the type of `x`.
    """
    return jnp.concatenate([of_pairs, of_pairs], -1)[:, None, :].astype(x.dtype)


class TiedIO(linen.Module):
    """Smallest tied model: `embedding[ids] @ embedding.T`, the direct path of one table.

    `flax.linen.Embed` would create a second matrix, and two calls of `self.param` would create two.

    Attributes:
        vocab_size: V.
        d_model: D.
    """

    vocab_size: int
    d_model: int

    @linen.compact
    def __call__(self, token_ids: Array) -> Array:
        """Map tokens [T] to logits [T, V]."""
        table = self.param("embedding", linen.initializers.normal(STD), (self.vocab_size, self.d_model))
        return table[token_ids] @ table.T


def tied_io_embed(seed: int, token_ids: Any, vocab_size: Any, d_model: Any) -> Array:
    """Initialise `TiedIO` from `PRNGKey(seed)`, and return its logits of the tokens.

    >>> tied_io_embed(0, [1, 2], 10, 4).shape
    (20,)

    Args:
        seed: seed of the random key.
        token_ids: [T], any number type.
        vocab_size: V, any number type.
        d_model: D, any number type.

    Returns:
        logits, flattened to [T · V].
    """
    ids = jnp.asarray(token_ids).astype(jnp.int32)
    module = TiedIO(int(vocab_size), int(d_model))
    variables = module.init(jax.random.PRNGKey(int(seed)), ids)
    return module.apply(variables, ids).reshape(-1)


def count_parameters(model: nnx.Module) -> int:
    """Return the number of a model's parameters, with a tied table once."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
