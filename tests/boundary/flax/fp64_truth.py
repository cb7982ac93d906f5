"""Problems and fp64 results of torch as numpy arrays, for tests that compare JAX with torch."""

from typing import Any

import numpy as np
import torch

from tiewise.boundary.ops.cross_entropy import oracle


def problem(n: int, v: int, e: int, *, seed: int = 0, ignored: int = 2, bias: bool = False) -> dict[str, Any]:
    """Return random features, table, targets (some ignored) and a bias or None, in fp64."""
    g = np.random.default_rng(seed)
    targets = g.integers(0, v, n)
    targets[g.permutation(n)[:ignored]] = -100
    return {
        "features": g.normal(size=(n, e)),
        "weight": g.normal(size=(v, e)) * e**-0.5,
        "targets": targets,
        "bias": g.normal(size=v) if bias else None,
    }


def truth(given: dict[str, Any], upstream: np.ndarray | None = None, **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return (loss, gradients of features, weight and bias) by the fp64 oracle and torch's autograd."""
    floats = {name: given[name] for name in ("features", "weight", "bias") if given[name] is not None}
    leaves = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in floats.items()}
    if "class_weight" in options:
        options["class_weight"] = torch.tensor(options["class_weight"])
    loss = oracle(**leaves, targets=torch.tensor(given["targets"]), **options)
    grads = torch.autograd.grad(loss, list(leaves.values()), None if upstream is None else torch.tensor(upstream))
    return loss.detach().numpy(), [g.numpy() for g in grads]


def error(found: Any, wanted: Any) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖ in fp64; if `wanted` is zero, the norm of `found`."""
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert a.shape == b.shape
    scale = np.linalg.norm(b)
    return float(np.linalg.norm(a - b) / (scale or 1.0))
