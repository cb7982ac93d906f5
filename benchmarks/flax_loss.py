"""The JAX loss beside the plain jitted one: forward and backward, one run, alternated rounds, error beside time.

JAX_PLATFORMS=cpu python -m benchmarks.flax_loss [N V D]            times, errors and memory
JAX_PLATFORMS=cpu python -m benchmarks.flax_loss memory NAME N V D  peak memory of one candidate, in its own process
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.measure import alternate, in_fresh_process, peak_megabytes, ratio, spread
from tiewise.flax.flax_loss import linear_cross_entropy

SHAPE = (2048, 50304, 768)
ROUNDS = 9


def plain(h: Any, w: Any, t: Any) -> Any:
    """Mean cross-entropy from logits, in the form of these that XLA runs fastest."""
    z = h @ w.T
    return (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, t[:, None], 1)[:, 0]).mean()


def of_optax(h: Any, w: Any, t: Any) -> Any:
    """The same by the loss that Optax has for it."""
    return optax.softmax_cross_entropy_with_integer_labels(h @ w.T, t).mean()


def of_log_softmax(h: Any, w: Any, t: Any) -> Any:
    """The same by way of all log-probabilities."""
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ w.T), t[:, None], 1).mean()


def products(h: Any, w: Any, t: Any) -> Any:
    """The three matrix products of any exact method."""
    z = h @ w.T
    return z[0, 0], (z @ w, z.T @ h)


class Problem:
    """Inputs, and every candidate compiled for them."""

    def __init__(self, n: int, v: int, d: int) -> None:
        g = np.random.default_rng(0)
        self.h = jnp.asarray(g.standard_normal((n, d), np.float32))
        self.w = jnp.asarray(g.standard_normal((v, d), np.float32) * np.float32(d**-0.5))
        self.t = jnp.asarray(g.integers(0, v, n))
        self.steps: dict[str, Callable[..., Any]] = {
            "three bare products": jax.jit(products),
            "plain": jax.jit(jax.value_and_grad(plain, (0, 1))),
            "plain, by optax": jax.jit(jax.value_and_grad(of_optax, (0, 1))),
            "plain, by log_softmax": jax.jit(jax.value_and_grad(of_log_softmax, (0, 1))),
            "tiewise": jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))),
        }

    def run(self, name: str) -> Any:
        return jax.block_until_ready(self.steps[name](self.h, self.w, self.t))

    def temporary(self, name: str) -> float:
        """Megabytes that the compiled program holds besides its inputs and outputs."""
        memory = self.steps[name].lower(self.h, self.w, self.t).compile().memory_analysis()  # type: ignore[attr-defined]
        return memory.temp_size_in_bytes / 1e6


def errors(p: Problem, name: str) -> tuple[float, float, float]:
    """Relative error of (loss, gradient of the features, gradient of the table) against fp64, on 64 tokens."""
    few = 64
    h, w, t = (np.asarray(x) for x in (p.h[:few], p.w, p.t[:few]))
    h, w = h.astype(np.float64), w.astype(np.float64)
    z = h @ w.T
    lse = np.logaddexp.reduce(z, axis=1)
    rows = np.arange(few)
    loss = (lse - z[rows, t]).mean()
    q = np.exp(z - lse[:, None])
    q[rows, t] -= 1
    value, (dh, dw) = p.steps[name](p.h[:few], p.w, p.t[:few])
    pairs = ((value, loss), (dh, q @ w / few), (dw, q.T @ h / few))
    return tuple(float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)) for a, b in pairs)  # type: ignore[return-value]


def table(n: int, v: int, d: int, rounds: int) -> str:
    """Return the Markdown table of one shape."""
    p = Problem(n, v, d)
    times = alternate({name: (lambda name=name: p.run(name)) for name in p.steps}, rounds)
    lines = [
        f"N = {n}, V = {v}, D = {d}, fp32, jax {jax.__version__}, {rounds} alternated rounds; [N, V] is "
        f"{4e-6 * n * v:,.0f} MB",
        "",
        "| | ms, median (range) | × plain | loss error | features' gradient error | table's gradient error "
        "| temporaries, MB | growth of the process, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in times.items():
        wrong = " | ".join(["–"] * 3 if name == "three bare products" else [f"{e:.1e}" for e in errors(p, name)])
        memory = in_fresh_process("benchmarks.flax_loss", "memory", name, str(n), str(v), str(d))
        lines.append(
            f"| {name} | {spread(values)} | {ratio(times, name, 'plain'):.2f} | {wrong} "
            f"| {p.temporary(name):,.0f} | {memory} |"
        )
    return "\n".join(lines)


def memory(name: str, *shape: int) -> str:
    """Growth of the resident size during the first call, compilation and the gradients included."""
    p = Problem(*shape)
    return f"{peak_megabytes(lambda: p.run(name)):,.0f}"


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["memory"]:
        print(memory(arguments[1], *map(int, arguments[2:])))
        return
    print(table(*(map(int, arguments) if arguments else SHAPE), rounds=ROUNDS))  # type: ignore[misc]


if __name__ == "__main__":
    main()
