"""Table of what each backend of the loss covers, made from their own tables.

`tools/make_reference.py` writes it to `docs/loss.md`. A test tries each option on each backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiewise.boundary.ops import gpu_chunks
from tiewise.boundary.ops.backend_table import KERNELS
from tiewise.boundary.ops.gpu_kernels import CHUNKED, STEPS, TRITON
from tiewise.core.backends import REDUCTIONS

COLUMNS = (CHUNKED, *STEPS, *KERNELS)
# options as `gpu_kernels` names them → how the table names them
OPTIONS = {
    "bias": "`bias`",
    "softcap": "`softcap`",
    "label_smoothing": "`label_smoothing`",
    "z_loss": "`z_loss`",
    "class_weight": "`class_weight`",
    "logits": '`logits="fp32"` of bf16 and fp16',
    "chunk": "`chunk`",
}
TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# what the chunks compute, and Triton's kernels for rows of fp32 and bf16 products at request (`row_statistics`)
ROWS_AT_REQUEST = "`shard`; log-probabilities and entropies by `TIEWISE_LOSS`"
CHUNKS_ALONE = "divergences"


@dataclass(frozen=True)
class CoverageRow:
    """A property of a loss, and the backends that have it."""

    name: str
    backends: frozenset[str]


def list_coverage() -> list[CoverageRow]:
    """Return the rows of the table.

    >>> list_coverage()[0].name
    'products in fp64'
    """
    rows = []
    for dtype, name in TYPES.items():
        rows.append(CoverageRow(f"products in {name}", backends_with_type(dtype)))
    for option, name in OPTIONS.items():
        rows.append(CoverageRow(name, backends_with_option(option)))
    for reduction in REDUCTIONS:
        rows.append(CoverageRow(f'`reduction="{reduction}"`', backends_with_reduction(reduction)))
    rows.append(CoverageRow("`into`", frozenset((CHUNKED, *STEPS))))
    rows.append(CoverageRow(ROWS_AT_REQUEST, frozenset((CHUNKED, TRITON))))
    rows.append(CoverageRow(CHUNKS_ALONE, frozenset((CHUNKED,))))
    return rows


def backends_with_type(product_dtype: torch.dtype) -> frozenset[str]:
    """Return the backends that have products of a type."""
    types = {CHUNKED: tuple(TYPES)}
    types |= dict.fromkeys(STEPS, gpu_chunks.TYPES)
    types |= {name: kernel.types for name, kernel in KERNELS.items()}
    return frozenset(name for name in COLUMNS if product_dtype in types[name])


def backends_with_option(option: str) -> frozenset[str]:
    """Return the backends that have an option of the loss."""
    complete = [CHUNKED, *(name for name, step in STEPS.items() if option not in step.LACKS)]
    return frozenset((*complete, *(name for name, kernel in KERNELS.items() if option in kernel.has)))


def backends_with_reduction(reduction: str) -> frozenset[str]:
    """Return the backends that have a reduction of the loss."""
    return frozenset((CHUNKED, *STEPS, *(name for name, kernel in KERNELS.items() if reduction in kernel.reductions)))
