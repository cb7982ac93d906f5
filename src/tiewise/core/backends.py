"""Options and checks of the fused loss, for PyTorch and JAX alike; norms of gradient paths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiewise.core.errors import UnsupportedError

REDUCTIONS = ("mean", "sum", "none")
# implementations of PyTorch's loss on a GPU
TIEWISE_BACKENDS = ("tiewise", "triton", "chunked", "compile")
PACKAGE_BACKENDS = ("torch", "liger", "liger-sm90", "cce")  # of torch and other packages
DESCRIBED_BACKENDS = ("quack", "liger-sm100")  # recognised, and refused with the reason
BACKENDS = (*TIEWISE_BACKENDS, *PACKAGE_BACKENDS, "auto")

# fp32 numbers per chunk: 104 MB, 268 MB. On two CPU cores 512 rows of 50,304 took at most 3 % longer than the matrix
# products alone. Much smaller chunks slow the product down; larger ones only cost memory. A GPU needs more rows.
CHUNK_ELEMENTS = {"cpu": 26_000_000, "cuda": 67_000_000}
MINIMUM_ROWS = 256
LARGE_CHUNKS_IN_MEMORY = 32  # on a GPU, a chunk of the default loss takes at most 1/32 of its memory
ROW_MULTIPLE = 16  # numbers to a multiple of which that loss pads a row of logits


def chunk_rows(
    n: int, numbers: int, device: str, rows: int | None = None, most: int | None = None, budget: int | None = None
) -> int:
    """Return how many rows of logits a pass computes at a time.

    There are `n` rows of `numbers` fp32 numbers each. `rows` overrides the result. A chunk has at most `most` numbers,
    but at least MINIMUM_ROWS rows. `budget` replaces the numbers of CHUNK_ELEMENTS.
    """
    if rows is not None:
        return rows
    if budget is None:
        budget = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    budget = budget if most is None else min(budget, most)
    full_chunk = max(MINIMUM_ROWS, budget // max(1, numbers))
    chunks = max(1, -(-n // full_chunk))
    return max(1, -(-n // chunks))  # chunks of even size: a short last one would waste the buffer


@dataclass(frozen=True)
class LossOptions:
    """Options of `linear_cross_entropy`, each of which is also one of its keyword arguments.

    Attributes:
        scale: factor on the product, before the bias.
        softcap: c of c · tanh(z / c); None leaves logits as they are.
        ignore_index: target value of tokens that the loss ignores.
        label_smoothing: ε, in [0, 1].
        z_loss: ζ, the coefficient of lse².
        class_weight: w [V]; gets no gradient.
        reduction: "mean" or "sum" (an fp32 scalar), or "none" (fp32, shaped like the targets).
        chunk: tokens per chunk; None: as many as fit in 104 MB on a CPU, or on a GPU in a 32nd of its memory (268 MB
            without the Triton kernel, and in JAX); at least 256.
        logits: "fp32": never rounded to a narrower type; None: the type of the matrix product.
        backend: one of BACKENDS; None: the value of TIEWISE_LOSS, else "tiewise".

    >>> LossOptions(softcap=30.0, label_smoothing=0.1).reduction
    'mean'
    """

    scale: float = 1.0
    softcap: float | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: Any = None
    reduction: str = "mean"
    chunk: int | None = None
    logits: str | None = None
    backend: str | None = None


def check_loss(
    features: Any, weight: Any, targets: Any, bias: Any, o: LossOptions, floating: Callable[[Any], bool]
) -> None:
    """Refuse arrays and options that neither backend accepts.

    `floating` tests whether an array has a float type.

    Raises:
        UnsupportedError: features or weight of another type.
        ValueError: shapes that do not fit together, or an option out of range.
    """
    for name, array in (("features", features), ("a weight", weight)):
        if not floating(array):
            remedy = "pass floating-point hidden states [..., E] and a table [V, E]; token ids are looked up first"
            raise UnsupportedError(f"linear_cross_entropy of {name} of type {array.dtype}", remedy)
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
    if o.backend not in (None, *BACKENDS, *DESCRIBED_BACKENDS):
        raise ValueError(f"unknown backend {o.backend!r}; choose one of {', '.join(BACKENDS)}")
    if o.softcap is not None and not 0 < o.softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, not {o.softcap}")


def check_words(vocab: int) -> None:
    """Refuse a vocabulary without words, which has no distribution. Raises ValueError."""
    if vocab < 1:
        raise ValueError("the weight [V, E] has no rows; a vocabulary needs V ≥ 1 words")


@dataclass(frozen=True)
class PathNorms:
    """Frobenius norms of a table's two gradient paths [V, E].

    A is the lookup path, B the head path.

    Attributes:
        a: ‖A‖, the norm of the lookup path.
        b: ‖B‖, the norm of the head path.
        total: ‖A + B‖, the norm of the gradient.
        cosine: cosine of the angle between A and B.

    >>> PathNorms(a=1.0, b=3.0, total=3.5, cosine=0.375).share_b
    0.75
    """

    a: float
    b: float
    total: float
    cosine: float

    @property
    def share_b(self) -> float:
        """‖B‖ / (‖A‖ + ‖B‖); NaN if both are zero."""
        both = self.a + self.b
        return self.b / both if both else math.nan
