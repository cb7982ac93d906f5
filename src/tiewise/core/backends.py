"""What both backends, PyTorch and JAX, have alike: the fused loss seen from outside, and norms of two gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiewise.core.errors import UnsupportedError

REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("tiewise", "liger", "cce", "auto")  # what computes PyTorch's loss on a GPU

# Numbers of fp32 that a chunk holds: 104 MB, 268 MB. On two CPU cores 512 rows of 50,304 were within 3 % of the bare
# products; much smaller chunks starve the matrix product, larger ones only cost memory. A GPU wants more rows.
CHUNK_ELEMENTS = {"cpu": 26_000_000, "cuda": 67_000_000}
MINIMUM_ROWS = 256


def chunk_rows(n: int, numbers: int, device: str, asked: int | None = None, most: int | None = None) -> int:
    """Rows of logits that a sweep holds at a time, for `n` tokens that hold `numbers` of fp32 each.

    `asked` overrides; a chunk has at most `most` numbers, if given, where that leaves MINIMUM_ROWS.
    """
    if asked is not None:
        return asked
    budget = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    budget = budget if most is None else min(budget, most)
    rows = max(MINIMUM_ROWS, budget // max(1, numbers))
    pieces = max(1, -(-n // rows))
    return max(1, -(-n // pieces))  # even pieces: a short last chunk would waste the buffer


@dataclass(frozen=True)
class LossOptions:
    """Options of `linear_cross_entropy`; each may also be passed to it by keyword."""

    scale: float = 1.0  # factor on the product, before the bias
    softcap: float | None = None  # c of c · tanh(z / c); None leaves logits as they are
    ignore_index: int = -100  # target value whose tokens count for nothing
    label_smoothing: float = 0.0  # ε, in [0, 1]
    z_loss: float = 0.0  # ζ, the coefficient of lse²
    class_weight: Any = None  # w [V]; gets no gradient
    reduction: str = "mean"  # or `sum` (both an fp32 scalar), or `none` (fp32, shaped like the targets)
    chunk: int | None = None  # tokens per chunk; None: what 104 MB hold on a CPU, 268 MB on a GPU, but 256 at least
    logits: str | None = None  # "fp32": never rounded to a narrower type; None: as the processor's products leave them
    backend: str | None = None  # one of BACKENDS; None: what TIEWISE_LOSS says, else our own chunks


def check_loss(
    features: Any, weight: Any, targets: Any, bias: Any, o: LossOptions, floating: Callable[[Any], bool]
) -> None:
    """Refuse arrays and options that neither backend can take; `floating` tests whether an array has a float type.

    Raises:
        UnsupportedError: features or weight of another type.
        ValueError: shapes that do not fit together, or an option out of range.
    """
    for name, array in (("features", features), ("a weight", weight)):
        if not floating(array):
            fix = "pass floating-point hidden states [..., E] and a table [V, E]; token ids are looked up first"
            raise UnsupportedError(f"linear_cross_entropy of {name} of type {array.dtype}", fix)
    _check_shapes(features, weight, targets)
    for name, vector in (("bias", bias), ("class_weight", o.class_weight)):
        if vector is not None and vector.shape != (weight.shape[0],):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; need [V] = [{weight.shape[0]}]")
    _check_options(o)


def _check_shapes(features: Any, weight: Any, targets: Any) -> None:
    """Raise ValueError unless the shapes are [..., E], [V, E], [...]."""
    has_dimensions = weight.ndim == 2 and features.ndim >= 1
    if has_dimensions and features.shape == (*targets.shape, weight.shape[1]):
        return
    shapes = f"features {tuple(features.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    raise ValueError(f"shapes do not meet: {shapes}; need [..., E], [V, E], [...]")


def _check_options(o: LossOptions) -> None:
    """Raise ValueError for an option out of range."""
    if o.reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {o.reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if not 0 <= o.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], not {o.label_smoothing}")
    if not 0 <= o.z_loss < math.inf:
        raise ValueError(f"z_loss must be at least 0 and finite, not {o.z_loss}")
    if not -math.inf < o.scale < math.inf:
        raise ValueError(f"scale must be finite, not {o.scale}")
    if o.chunk is not None and o.chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {o.chunk}")
    if o.logits not in (None, "fp32"):
        raise ValueError(f"unknown logits {o.logits!r}; choose 'fp32', or None for those of the processor's products")
    if o.backend not in (None, *BACKENDS):
        raise ValueError(f"unknown backend {o.backend!r}; choose one of {', '.join(BACKENDS)}")
    if o.softcap is not None and not 0 < o.softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, not {o.softcap}")


def check_words(vocab: int) -> None:
    """Refuse a vocabulary without words, over which there is no distribution."""
    if vocab < 1:
        raise ValueError("the weight [V, E] has no rows; a vocabulary needs V ≥ 1 words")


@dataclass(frozen=True)
class PathNorms:
    """Frobenius norms of the lookup path, the head path and their sum [V, E], and the cosine between the two."""

    a: float
    b: float
    total: float
    cosine: float

    @property
    def share_b(self) -> float:
        """‖B‖ / (‖A‖ + ‖B‖); nan where both are zero."""
        both = self.a + self.b
        return self.b / both if both else math.nan
