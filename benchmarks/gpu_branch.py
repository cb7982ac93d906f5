"""A GPU's branch of the sweeps on CPU tensors: for tests, and for `benchmarks.gpu` where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from tiewise.boundary.ops import devices


@contextmanager
def gpu_branch(*, wide_products: bool = True) -> Iterator[None]:
    """Within this context CPU tensors take the branch of a GPU, with or without products that keep their fp32 sums."""
    with patch.multiple(
        devices,
        is_cpu=lambda x: False,
        has_wide_products=lambda x: wide_products,
        wide_product=_wide_product,
    ):
        yield


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write what `torch.mm(a, b, out_dtype=…, out=…)` of a GPU writes."""
    torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
