"""The choice of `backend="tiewise"` between the row kernel of a GPU, which is replaced here, and the other passes."""

import warnings

import pytest
import torch
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.test_cross_entropy import error, problem

from tiewise.boundary.ops import chunked, devices, gpu_kernels, own_pass, row_loss
from tiewise.boundary.ops.broken_device import BrokenDevice
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.core.errors import TiewiseWarning


@pytest.fixture
def row_passes(monkeypatch):
    """Let a pass with the chunks' numbers replace the row kernel, and return the list of its numbers of tokens."""
    seen = []

    def row_pass(options, tensors, *rest):
        seen.append(len(tensors[-1]))
        return chunked.loss_pass(options, tensors, *rest)

    monkeypatch.setattr(row_loss, "loss_pass", row_pass)
    monkeypatch.setattr(row_loss, "missing_support", lambda tensors, product_dtype: "")
    monkeypatch.setattr(own_pass, "_compared", {})
    monkeypatch.setattr(gpu_kernels, "TRIALS", gpu_kernels.Trials())
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that TIEWISE_LOSS applies to a CPU
    monkeypatch.delenv("TIEWISE_LOSS", raising=False)
    with gpu_branch():
        yield seen


def draw():
    (h, w, _), t = problem(torch.float32, n=70)
    return h, w, t


def test_row_kernel_is_compared_once_and_then_used(row_passes):
    h, w, t = draw()
    for _ in range(2):
        assert error(linear_cross_entropy(h, w, t), oracle(h, w, t)) < 1e-6
    assert row_passes == [64, 70, 70]  # the small problem of the comparison has 64 tokens
    linear_cross_entropy(h, w, t, softcap=30.0)
    assert row_passes[3:] == [64, 70]
    linear_cross_entropy(h[:0], w, t[:0])
    assert len(row_passes) == 5


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_first_use_may_be_an_evaluation_or_under_autocast(row_passes, mode):
    h, w, t = draw()
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("error")
        loss = linear_cross_entropy(h, w, t, softcap=30.0)
    assert error(loss, oracle(h, w, t, softcap=30.0)) < 1e-2
    assert row_passes == [64, 70]


def test_into_is_passed_on(row_passes):
    h, w, t = draw()
    into = torch.zeros_like(w)
    linear_cross_entropy(h.requires_grad_(), w.requires_grad_(), t, into=into).backward()
    assert row_passes == [64, 70]
    assert into.any()


@pytest.mark.parametrize("how", ["keyword", "variable"])
def test_chunked_backend_never_takes_the_row_kernel(row_passes, how, monkeypatch):
    h, w, t = draw()
    options = {"backend": "chunked"} if how == "keyword" else {}
    if how == "variable":
        monkeypatch.setenv("TIEWISE_LOSS", "chunked")
    assert error(linear_cross_entropy(h, w, t, **options), oracle(h, w, t)) < 1e-6
    assert not row_passes


def assert_warns_once_and_stays_right(says):
    h, w, t = draw()
    with pytest.warns(TiewiseWarning, match=says):
        loss = linear_cross_entropy(h, w, t)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = linear_cross_entropy(h, w, t)
    for found in (loss, again):
        assert error(found, oracle(h, w, t)) < 1e-6


def test_kernel_that_fails_is_replaced_with_a_warning(row_passes, monkeypatch):
    def failing(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(row_loss, "loss_pass", failing)
    assert_warns_once_and_stays_right(
        r"cannot use its kernel for GPUs \(Failed to find C compiler.*TIEWISE_LOSS=chunked"
    )


def test_inexact_kernel_is_replaced_with_a_warning(row_passes, monkeypatch):
    exact = row_loss.loss_pass

    def inexact(*given):
        losses, gradients = exact(*given)
        return losses * 1.001, gradients

    monkeypatch.setattr(row_loss, "loss_pass", inexact)
    monkeypatch.setattr(gpu_kernels, "version", lambda package: "3.9")
    assert_warns_once_and_stays_right("with triton 3.9 has .* times the error of all logits")


def test_nothing_is_compared_while_a_graph_is_recorded(row_passes, monkeypatch):
    h, w, t = draw()
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    linear_cross_entropy(h, w, t)
    assert not row_passes
    monkeypatch.setattr(devices, "is_capturing", lambda x: False)
    linear_cross_entropy(h, w, t)
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    linear_cross_entropy(h, w, t)
    assert row_passes == [64, 70, 70]


def test_error_that_breaks_the_gpu_names_the_chunks_as_remedy(row_passes, monkeypatch):
    def fails(*_):
        monkeypatch.setattr(devices, "wait_for", broken)
        raise RuntimeError("CUDA error: an illegal memory access")

    def broken(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(row_loss, "loss_pass", fails)
    h, w, t = draw()
    with pytest.raises(BrokenDevice, match=r"'triton' broke the context of cpu .*an illegal.*TIEWISE_LOSS=chunked"):
        linear_cross_entropy(h, w, t)
