"""Each cell of the table of backends, compared with what the loss accepts."""

import re
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.test_cross_entropy import problem

from tiewise.boundary.ops import devices, gpu_kernels, row_loss
from tiewise.boundary.ops.backend_coverage import COLUMNS, OPTIONS, TYPES, list_coverage
from tiewise.boundary.ops.backend_table import KERNELS
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import linear_log_prob
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import REDUCTIONS, LossOptions
from tiewise.core.errors import UnsupportedError

COVERED = {row.name: row.backends for row in list_coverage()}
V = 256
VALUES = {
    "softcap": 3.0,
    "label_smoothing": 0.1,
    "z_loss": 0.1,
    "class_weight": torch.ones(V),
    "logits": "fp32",
    "chunk": 7,
}
PAGE = Path(__file__).parents[3] / "docs" / "loss.md"


@pytest.fixture(autouse=True)
def every_backend_is_there(monkeypatch):
    """Let CPU tensors take the branch of a card that runs all backends; no package is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(devices, "missing_triton", lambda x: "")
    monkeypatch.setattr(devices, "compute_capability", lambda x: (9, 0))
    monkeypatch.setattr(gpu_kernels, "_import_kernel", lambda kernel, name: None)
    with gpu_branch():
        yield


def is_accepted(backend, dtype=torch.bfloat16, *, with_bias=False, **options):
    (h, w, b), t = problem(dtype, n=128, v=V)
    tensors = LossTensors(h, w, b if with_bias else None, t)
    return not gpu_kernels.reason_against(backend, LossOptions(**options), tensors, dtype)


@pytest.mark.parametrize("backend", COLUMNS)
def test_table_says_what_the_backend_accepts(backend):
    kind = KERNELS[backend].types[-1] if backend in KERNELS else torch.bfloat16
    for dtype, name in TYPES.items():
        assert is_accepted(backend, dtype) == (backend in COVERED[f"products in {name}"]), name
    for option, name in OPTIONS.items():
        if option == "logits" and kind == torch.float32:
            continue  # all logits are fp32
        chosen = {option: VALUES[option]} if option != "bias" else {"with_bias": True}
        assert is_accepted(backend, kind, **chosen) == (backend in COVERED[name]), name
    for reduction in REDUCTIONS:
        assert is_accepted(backend, kind, reduction=reduction) == (backend in COVERED[f'`reduction="{reduction}"`'])


@pytest.mark.parametrize("backend", KERNELS)
def test_into_is_refused_by_other_packages(backend):
    assert COVERED["`into`"] == set(COLUMNS) - KERNELS.keys()
    (h, w, _), t = problem(torch.bfloat16, n=128, v=V)
    with pytest.raises(UnsupportedError, match=rf"\(into=…\) by backend='{backend}'"):
        linear_cross_entropy(h, w.requires_grad_(), t, into=torch.zeros(w.shape), backend=backend)


def test_log_probabilities_take_the_chunks_unless_kernels_are_requested(monkeypatch):
    def never(*_, **__):
        raise AssertionError("nothing requests a kernel")

    monkeypatch.setattr(row_loss, "load_kernels", never)
    monkeypatch.delenv("TIEWISE_LOSS", raising=False)
    (h, w, _), t = problem(torch.float32, n=20, v=V)
    expected = torch.log_softmax(h.double() @ w.double().T, 1).gather(1, t.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(linear_log_prob(h, w, t.clamp(min=0)).double(), expected, rtol=1e-5, atol=1e-5)


def test_page_names_the_versions_that_are_used():
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    for kernel in KERNELS.values():
        assert f"{kernel.package} {kernel.versions[-1]}" in text or f"and {kernel.versions[-1]}" in text
