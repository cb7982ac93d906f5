"""Trial that chooses how a bf16 loss of few tokens multiplies, with AMX.

With many tokens the products take the time, and tiles are fastest at them. With few tokens, reading the table and
writing its gradient take as long, and any method may be fastest. So each method computes a loss of random tokens on the
caller's table, with its gradients, and the fastest is used from then on. The milliseconds are cached in `products.json`
in the user's cache, by the processor, torch, the number of threads and the shape.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tiewise.boundary.ops.fast_products import cached_or_measured, trial_conditions

FEW_TOKENS = 512  # from here on the products take most of the time
ROUNDS = 3

_lock = threading.Lock()
_fastest: dict[tuple[object, ...], str] = {}  # by the properties of a problem


def choose_fastest(
    tokens: int, weight: Tensor, logits: str | None, make_losses: Callable[[], dict[str, Callable[[], object]]]
) -> str:
    """Return the name of the fastest computation of a loss.

    A trial, now or earlier, decides.

    Args:
        tokens: number of tokens; a trial applies to all numbers with the same nearest power of two.
        weight: the table [V, E].
        logits: the loss's option of this name.
        make_losses: returns the computations by name. It is called only for a trial.
    """
    problem = trial_conditions(torch.get_num_threads()) | {
        "type": "bfloat16",
        "tokens": 2 ** round(math.log2(tokens)),
        "table": [str(weight.dtype), *weight.shape],
        "logits": logits,
    }
    key = tuple(map(str, problem.values()))
    with _lock:
        if key not in _fastest:
            times = cached_or_measured("products.json", problem, ("tiles_ms",), lambda: measure(make_losses()))
            fastest = min(times, key=times.__getitem__)
            _fastest[key] = fastest.removesuffix("_ms")
        return _fastest[key]


def measure(losses: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the milliseconds of each computation: the minimum of alternating rounds.

    Keys are the names with `_ms`. An uncounted round comes first.
    """
    best = {f"{name}_ms": math.inf for name in losses}
    for number in range(-1, ROUNDS):
        for name in losses if number % 2 else reversed(losses):
            start = time.perf_counter()
            losses[name]()
            milliseconds = 1e3 * (time.perf_counter() - start)
            if number >= 0:
                best[f"{name}_ms"] = min(best[f"{name}_ms"], milliseconds)
    return best
