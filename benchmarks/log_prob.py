"""Log-probabilities, entropies, divergences and fp32 logits beside the loss: one run, alternated rounds.

python -m benchmarks.log_prob [N V D] [NAME …]   times of all, or of those named, as multiples of the first
python -m benchmarks.log_prob memory NAME N V D  peak memory of one, in a process of its own
"""

from __future__ import annotations

import sys

import torch

from benchmarks.measure import alternate, in_fresh_process, peak_megabytes, ratio, spread
from tiewise.ops.cross_entropy import linear_cross_entropy
from tiewise.ops.divergence import linear_divergence
from tiewise.ops.log_prob import linear_log_prob

SHAPE = (2048, 50304, 768)


class PostTraining:
    """Inputs, and what is measured: results of each token, differentiated by an upstream of each."""

    def __init__(self, n: int, v: int, d: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.h, self.w = torch.randn(n, d, generator=g), torch.randn(v, d, generator=g) * 0.02
        self.t = torch.randint(0, v, (n,), generator=g)
        self.up = torch.randn(n, generator=g) / n
        self.teacher = (self.h.flip(0), self.w.flip(1))

    def differentiate(
        self, function: object, *arguments: object, kind: torch.dtype = torch.float32, **how: object
    ) -> None:
        """Run forward and backward, of a function of (features, table, …)."""
        leaves = [x.to(kind).requires_grad_() for x in (self.h, self.w)]
        found = function(*leaves, *arguments, **how)  # type: ignore[operator]
        found = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad(found, leaves, [self.up] * len(found))

    def candidates(self) -> dict[str, object]:
        """Name -> what to run; the first of each type is what the others are held against."""
        run, t, each, bf16 = self.differentiate, self.t, {"reduction": "none"}, {"kind": torch.bfloat16}
        return {
            "loss": lambda: run(linear_cross_entropy, t, **each),
            "log_prob": lambda: run(linear_log_prob, t),
            "entropy": lambda: run(linear_log_prob, t, entropy=True),
            "kl": lambda: run(linear_divergence, *self.teacher, t, beta=0.0, **each),
            "jsd": lambda: run(linear_divergence, *self.teacher, t, beta=0.5, **each),
            "bf16": lambda: run(linear_cross_entropy, t, **bf16, **each),
            "fp32_logits": lambda: run(linear_cross_entropy, t, logits="fp32", **bf16, **each),
        }


def main(arguments: list[str]) -> None:
    """Print what is asked for."""
    if arguments[:1] == ["memory"]:
        candidate = PostTraining(*map(int, arguments[2:])).candidates()[arguments[1]]
        print(f"{peak_megabytes(candidate):.0f}")  # type: ignore[arg-type]
        return
    shape = tuple(int(x) for x in arguments if x.isdigit()) or SHAPE
    names = [x for x in arguments if not x.isdigit()]
    every = PostTraining(*shape).candidates()
    chosen = {name: every[name] for name in names or every}
    times = alternate(chosen, rounds=7)  # type: ignore[arg-type]
    print(f"N, V, D = {shape}\n| | ms | beside {next(iter(chosen))} | extra MB |\n|---|---|---|---|")
    for name in chosen:
        memory = in_fresh_process("benchmarks.log_prob", "memory", name, *map(str, shape))
        print(f"| {name} | {spread(times[name])} | {ratio(times, name, next(iter(chosen))):.2f} | {memory} |")


if __name__ == "__main__":
    main(sys.argv[1:])
