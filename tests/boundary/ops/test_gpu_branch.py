"""The GPU branch of the losses on CPU and `meta` tensors, and the memory of both branches.

This file imports tests of the losses, so that pytest runs them again within `gpu_branch`.
"""

import pytest
import torch
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.peak_memory import peak_bytes
from tests.boundary.ops.test_cross_entropy import (  # noqa: F401
    OPTIONS,
    V,
    error,
    gradients,
    options_of,
    problem,
    test_bf16_loss_does_not_depend_on_the_chunk,
    test_cross_entropy_equals_the_formula_in_fp64,
    test_cross_entropy_error_is_at_most_that_of_the_plain_computation,
    test_fp16_gradients_stay_accurate_under_a_loss_scale,
    test_into_accumulates_the_table_gradient,
    test_loss_and_gradients_stay_accurate_for_huge_logits,
    test_target_logit_of_minus_infinity_gives_the_loss_of_torch,
)
from tests.boundary.ops.test_divergence import test_divergence_equals_the_definition_in_fp64  # noqa: F401
from tests.boundary.ops.test_every_loss import EVERY, summed

from tiewise.boundary.ops import chunk_products, devices
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, tied_lookup
from tiewise.core import backends


@pytest.fixture(autouse=True)
def emulated(request):
    """Let CPU tensors take the GPU branch, unless a test has the argument `branch` or `plain_devices`."""
    if {"branch", "plain_devices"} & set(request.fixturenames):
        yield
        return
    with gpu_branch():
        yield


@pytest.fixture
def plain_devices():
    """Let tensors take the branch of their device."""


CROSS_ENTROPIES = [("linear_cross_entropy", chosen, kind) for chosen in OPTIONS for kind in ("mean", "none")]
OTHERS = [(name, {}, "mean") for name in EVERY if not name.startswith("linear_cross")]


@pytest.mark.parametrize(("name", "chosen", "reduction"), CROSS_ENTROPIES + OTHERS)
def test_gpu_and_cpu_branches_compute_the_same(name, chosen, reduction, plain_devices):
    inputs, t = problem()
    loss, kw = summed(name), {}
    if name == "linear_cross_entropy":
        loss, kw = linear_cross_entropy, options_of(chosen) | {"reduction": reduction}
    up = torch.linspace(-1, 2, len(t), dtype=torch.float64) if reduction == "none" else None
    wanted = gradients(loss, inputs, t, upstream=up, **kw)
    with gpu_branch():
        found = gradients(loss, inputs, t, upstream=up, **kw)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_nll_of_a_nearly_certain_target_stays_accurate():
    """Here 1 − p is 8e-7, but lse − z in fp32 would be a multiple of 2e-6."""
    h, w = torch.full((1, 1), 20.0), torch.tensor([[1.0], [0.3]])
    wanted = oracle(h, w, torch.zeros(1, dtype=torch.long)).item()
    assert linear_cross_entropy(h, w, torch.zeros(1, dtype=torch.long)).item() == pytest.approx(wanted, abs=1.3e-7)


# memory

BUDGET = 400_000  # numbers of a chunk
CALLS = {
    "linear_cross_entropy, plain": lambda *given: linear_cross_entropy(*given),
    "linear_cross_entropy, all options": lambda *given: linear_cross_entropy(
        *given, softcap=3.0, label_smoothing=0.1, z_loss=0.1, class_weight=torch.ones(len(given[1]))
    ),
    "linear_cross_entropy, smoothing": lambda *given: linear_cross_entropy(*given, label_smoothing=0.1, z_loss=0.1),
    **{name: summed(name) for name in EVERY},
}


@pytest.mark.parametrize(
    ("branch", "dtype"),
    [
        ("cpu", torch.float32),
        ("gpu", torch.bfloat16),
        pytest.param("cpu", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gpu", torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_losses_stay_within_the_chunk_memory_budget(name, branch, dtype, monkeypatch):
    monkeypatch.setenv("TIEWISE_KERNELS", "off")
    monkeypatch.setattr(backends, "CHUNK_ELEMENTS", {"cpu": BUDGET, "cuda": BUDGET})
    monkeypatch.setattr(backends, "MINIMUM_ROWS", 1)
    monkeypatch.setattr(chunk_products, "UNDIVIDED", 0)
    monkeypatch.setattr(chunk_products, "CACHED", 4000)
    n, v, width = 2000, 1000, 2
    h, w = (torch.randn(rows, width).to(dtype).requires_grad_() for rows in (n, v))
    t = torch.randint(0, v, (n,))

    def step():
        CALLS[name](h, w, t).backward()
        h.grad = w.grad = None

    if branch == "gpu":
        with gpu_branch():
            held = peak_bytes(step)
    else:
        held = peak_bytes(step)
    vectors = 40 * n * 4  # of tokens: losses, targets, coefficients
    assert 0.4 * 4 * BUDGET < held < min(1.12 * 4 * BUDGET + vectors, 1.3 * 4 * BUDGET)


def test_chunk_budgets_match_the_docs():
    assert {name: 4 * numbers // 10**6 for name, numbers in backends.CHUNK_ELEMENTS.items()} == {
        "cpu": 104,
        "cuda": 268,
    }
    assert backends.chunk_rows(8192, 32_000, "cuda") < 8192 / 3  # in several chunks
    assert backends.chunk_rows(8192, 32_000, "cuda", most=32_000 * 300) == 293
    assert backends.chunk_rows(8192, 32_000, "cuda", most=1000) == backends.MINIMUM_ROWS


# no synchronisation with the GPU


@pytest.mark.parametrize(
    "name", [name for name in EVERY if not name.startswith("augmented")]
)  # this loss reads the distinct tokens
def test_losses_run_on_meta_tensors_and_so_never_synchronise(name, plain_devices):
    """Reading a value raises an error on a meta tensor and synchronises on a CUDA tensor."""
    inputs, t = problem(torch.float32)
    h, w, b = (x.to("meta").requires_grad_() for x in inputs)
    loss = EVERY[name](h, w, t.to("meta"), bias=b)
    assert loss.device.type == "meta"
    loss.sum().backward()
    assert all(x.grad.shape == x.shape and x.grad.device.type == "meta" for x in (h, w, b))


def test_tied_step_runs_on_meta_tensors(plain_devices):
    (_, w, _), t = problem(torch.bfloat16)
    leaf, record = w.to("meta").requires_grad_(), PathRecord()
    rows, table = tied_lookup(leaf, t.to("meta"), LookupOptions(record=record))
    linear_cross_entropy(rows, table, t.to("meta")).backward()
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("factor", [0.25, 0.26])
def test_wrong_factor_of_into_makes_its_first_row_nan_without_a_wait(factor):
    """A CPU reads the factor and raises an error; on a meta tensor, as on a GPU, it must not be read."""
    (h, w, _), t = problem(torch.float32)
    for device in ("cpu", "meta"):
        there, table = (x.to(device, copy=True).requires_grad_() for x in (h, w))
        into = torch.zeros_like(table, requires_grad=False)
        loss = linear_cross_entropy(there, table, t.to(device), into=into, upstream=0.25)
        (factor * loss).backward()
        assert there.grad.shape == h.shape
        if device == "cpu":
            assert into[0].isnan().all() == (factor != 0.25)
            assert into[1:].isfinite().all()


# products with results in fp32


def test_fp32_logits_widen_the_table_if_gpu_products_round(plain_devices):
    (h, w, _), t = problem(torch.bfloat16, n=512, v=1000, spread=3.0)
    truth = oracle(h, w, t, reduction="none")
    worst = {}
    for wide in (True, False):
        with gpu_branch(wide_products=wide):
            for logits in (None, "fp32"):
                got = linear_cross_entropy(h, w, t, reduction="none", logits=logits)
                worst[wide, logits] = (got - truth).abs().max().item()
    assert max(worst[True, None], worst[True, "fp32"], worst[False, "fp32"]) < 1e-4
    assert 1e-3 < worst[False, None] < 0.2


@pytest.mark.parametrize(
    ("overloads", "hip", "has"),
    [(["default", "dtype_out"], None, True), (["default"], None, False), (["dtype_out"], "7.2", False)],
)
def test_wide_products_need_cuda_and_the_dtype_out_overload(overloads, hip, has, plain_devices, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.ops.aten, "mm", type("mm", (), {"overloads": staticmethod(lambda: overloads)}))
    devices._mm_takes_out_dtype.cache_clear()
    try:
        assert devices._mm_takes_out_dtype() is has
    finally:
        devices._mm_takes_out_dtype.cache_clear()
    assert not devices.has_wide_products(torch.ones(1))
