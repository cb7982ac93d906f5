"""Layers of the small Flax models, with the names, shapes and arithmetic of their PyTorch counterparts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6
STD = 0.02  # of a decoder's matrices, as transformers draws them


class Linear(nnx.Module):
    """`x @ weightᵀ`, weight [to, from], drawn N(0, 0.02²); no bias."""

    def __init__(self, width_from: int, width_to: int, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(STD * jax.random.normal(rngs.params(), (width_to, width_from)))

    def __call__(self, x: Array) -> Array:
        """[.., from] -> [.., to]."""
        return x @ self.weight[...].T


class RMSNorm(nnx.Module):
    """`weight · x / √(mean x² + ε)`; weight [D] starts at one."""

    def __init__(self, width: int) -> None:
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: Array) -> Array:
        """[.., D] -> [.., D]."""
        return self.weight[...] * x * lax.rsqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, as Llama's (arXiv:2302.13971 §2.2)."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(width, width, rngs=rngs) for _ in range(4))

    def __call__(self, x: Array) -> Array:
        """[B, T, D] -> [B, T, D]."""
        b, t, d = x.shape
        q, k, v = (p(x).reshape(b, t, self.heads, d // self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return self.o_proj(mixed.reshape(b, t, d))


class MLP(nnx.Module):
    """Gated feed-forward layer, `down(silu(gate x) · up x)`."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.gate_proj, self.up_proj = Linear(width, inner, rngs=rngs), Linear(width, inner, rngs=rngs)
        self.down_proj = Linear(inner, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[.., D] -> [.., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and feed-forward, each behind its norm and added to its input."""

    def __init__(self, width: int, heads: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn, self.mlp = Attention(width, heads, rngs=rngs), MLP(width, inner, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LSTM(nnx.Module):
    """One LSTM layer with one bias, gates in the order i, f, g, o; everything starts uniform in ± 1/√H."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        def draw(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-(width**-0.5), maxval=width**-0.5))

        self.weight_ih, self.weight_hh, self.bias_ih = draw(4 * width, width), draw(4 * width, width), draw(4 * width)

    def __call__(self, x: Array) -> Array:
        """[B, T, H] -> [B, T, H], from a state of zeros."""
        recurrent = self.weight_hh[...].T
        entered = x @ self.weight_ih[...].T + self.bias_ih[...]

        def step(state: tuple[Array, Array], at: Array) -> tuple[tuple[Array, Array], Array]:
            h, c = state
            i, f, g, o = jnp.split(at + h @ recurrent, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros_like(x[:, 0])
        return lax.scan(step, (zero, zero), entered.swapaxes(0, 1))[1].swapaxes(0, 1)


def _rotated(x: Array) -> Array:
    """Turn each pair (j, j + d/2) of [B, T, heads, d] by its position times base^(−2j/d)."""
    t, d = x.shape[1], x.shape[3]
    angle = jnp.arange(t)[:, None] * ROPE_BASE ** (-jnp.arange(0, d, 2) / d)
    cos, sin = (jnp.concatenate([f(angle)] * 2, -1)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin
