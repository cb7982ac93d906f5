"""Log-probabilities, entropies and shards by Triton kernels, compared with fp64.

`test_kernels_pass_under_tritons_interpreter` runs this file again in a process that interprets triton, on a CPU.
"""

from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.interpreted import INTERPRETED, passed, run_interpreted
from tests.boundary.ops.peak_memory import peak_bytes
from tests.boundary.ops.test_cross_entropy import assert_near, error, problem
from tests.boundary.ops.test_log_prob import PARTS, ours, plain, run
from tests.boundary.ops.test_row_loss import MISSING, N, V, on, round_to_bf16_as_a_gpu
from tests.boundary.ops.test_sharded_ops import run_ranks

from tiewise.boundary.ops import (
    devices,
    fused_loss,
    gpu_kernels,
    log_prob,
    row_loss,
    row_statistics,
    statistics_operators,
)
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import linear_log_prob
from tiewise.core import backends

NEAR = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
CHOSEN = [{}, {"scale": 0.3}, {"temperature": 0.7}, {"softcap": 3.0, "temperature": 1.6, "scale": 1.7}]


@pytest.fixture
def device(monkeypatch):
    """Return the device of the kernels, and let the chunks in PyTorch fail; or skip."""
    if find_spec("triton") is None:
        pytest.skip(MISSING)
    monkeypatch.setenv("TIEWISE_LOSS", "triton")
    monkeypatch.setattr(row_loss, "BLOCK", 16 if INTERPRETED else 1024)
    monkeypatch.setattr(statistics_operators, "_Head", None)
    if INTERPRETED:
        round_to_bf16_as_a_gpu(monkeypatch)
        with gpu_branch():
            yield "cpu"
        return
    if not torch.cuda.is_available():
        pytest.skip("row kernels: NOT RUN on a GPU, torch sees none")
    yield "cuda"


@pytest.mark.parametrize("parts", [("log_prob",), ("lse",), ("entropy",), PARTS], ids="+".join)
@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda o: "+".join(o) or "as it is")
@pytest.mark.parametrize("kind", NEAR, ids=str)
def test_statistics_equal_the_formulas_in_fp64(kind, chosen, parts, device):
    inputs, t = problem(kind, n=N, v=V, spread=0.5)
    truth, true_grads = run(plain, [x.double() for x in inputs], t, parts, **chosen)
    there, at = on(device, inputs, t)
    got, grads = run(ours, there, at, parts, chunk=7, **chosen)
    rounds_bias = kind == torch.bfloat16 and "temperature" in chosen  # the bias is divided in its type
    for one, true in zip(got, truth, strict=True):
        assert error(one.cpu(), true) < (2e-3 if rounds_bias else 1e-5)
    assert [x.dtype for x in grads] == [kind] * 3
    assert_near([x.cpu() for x in grads], true_grads, 10 * NEAR[kind])


def test_word_of_minus_infinity_adds_nothing_to_the_entropy(device):
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    b[0], t = -torch.inf, t.clamp(min=1)
    truth, true_grads = run(plain, [x.double() for x in (h, w, b)], t)
    there, at = on(device, (h, w, b), t)
    got, grads = run(ours, there, at)
    for one, true in zip(got, truth, strict=True):
        assert error(one.cpu(), true) < 1e-5
    assert error(grads[0].cpu(), true_grads[0]) < 1e-4


def test_target_outside_the_vocabulary_makes_its_log_probability_nan(device, monkeypatch):
    monkeypatch.setattr(log_prob, "check_range", lambda *_: None)  # a GPU's targets are not checked
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    t[1], t[2], t[3] = V, -1, -100
    (h, w), t = on(device, (h, w), t)
    log_p = linear_log_prob(h, w, t)
    assert log_p.isnan().nonzero()[:, 0].tolist() == [1, 2]
    assert log_p[3] == 0


def test_without_targets_lse_alone_is_computed(device):
    (h, w, b), _ = problem(torch.float32, n=N, v=V)
    there, _ = on(device, (h, w, b), h)
    leaves = [x.requires_grad_() for x in there]
    lse = ours(leaves[0], leaves[1], None, leaves[2]).lse
    lse.sum().backward()
    z = (h.double() @ w.double().T + b.double()).softmax(1)
    assert error(leaves[2].grad.cpu(), z.sum(0)) < 1e-5


def test_ranks_of_a_divided_table_agree_with_one(device, tmp_path):
    if not INTERPRETED:
        pytest.skip("Gloo ranks run on a CPU")
    for size, case in ((2, "row_kernels"), (4, "row_kernels_of_few_words")):
        folder = tmp_path / case
        folder.mkdir()
        run_ranks(folder, size, [case])


@pytest.mark.slow
def test_kernels_pass_under_tritons_interpreter():
    assert passed(run_interpreted(__file__)) >= 4 * len(CHOSEN) * len(NEAR) + 4


@pytest.mark.parametrize(
    ("variable", "kind", "missing", "takes"),
    [
        ("triton", torch.float32, "", True),
        ("triton", torch.bfloat16, "", True),
        ("triton", torch.float16, "", False),
        ("triton", torch.float32, "needs triton", False),
        ("tiewise", torch.float32, "", False),
    ],
)
def test_kernels_are_taken_at_request_alone(variable, kind, missing, takes, monkeypatch):
    monkeypatch.setenv("TIEWISE_LOSS", variable)
    monkeypatch.setattr(row_loss, "missing_support", lambda tensors, product_dtype: missing)
    (h, w, b), t = problem(kind)
    tensors = row_statistics.LossTensors(h, w, b, t)
    assert row_statistics.is_requested(tensors, kind) == takes
    assert not row_statistics.is_requested(tensors._replace(features=h[:0]), kind)


class NoKernels:
    """Kernels that write nothing, so that the memory around them can be measured without triton."""

    def __getattr__(self, name):
        return self

    def __getitem__(self, grid):
        return lambda *_, **__: None


CALLS = {
    "loss": lambda h, w, t: linear_cross_entropy(h, w, t, backend="triton"),
    "loss, every option": lambda h, w, t: linear_cross_entropy(
        h, w, t, backend="triton", softcap=3.0, label_smoothing=0.1, z_loss=0.1, class_weight=torch.ones(len(w))
    ),
    "loss by token": lambda h, w, t: linear_cross_entropy(h, w, t, backend="triton", reduction="none").sum(),
    "log-probabilities": lambda h, w, t: linear_log_prob(h, w, t, softcap=3.0).sum(),
    "entropies": lambda h, w, t: sum(x.sum() for x in linear_log_prob(h, w, t, entropy=True, softcap=3.0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_products_of_a_chunk_are_the_only_matrix_of_logits(name, dtype, monkeypatch):
    """The limit is 1.3 times the budget of a chunk; all logits are five times the budget."""
    budget, n, v = 400_000, 2000, 1000
    monkeypatch.setenv("TIEWISE_LOSS", "triton")
    monkeypatch.setattr(row_loss, "missing_support", lambda tensors, product_dtype: "")
    monkeypatch.setattr(row_loss, "load_kernels", NoKernels)
    monkeypatch.setattr(gpu_kernels, "require_exactness", lambda *_: None)
    monkeypatch.setattr(fused_loss, "_scale_in_place", torch.Tensor.mul_)
    monkeypatch.setattr(backends, "CHUNK_ELEMENTS", {"cpu": budget, "cuda": budget})
    monkeypatch.setattr(backends, "MINIMUM_ROWS", 1)
    h, w = (torch.randn(rows, 2).to(dtype).requires_grad_() for rows in (n, v))
    t = torch.randint(0, v, (n,))

    def step():
        CALLS[name](h, w, t).backward()
        h.grad = w.grad = None

    with gpu_branch(), patch.object(devices, "_add_wide_product", lambda *_: None):  # the emulation copies its factors
        held = peak_bytes(step)
    vectors = 30 * n * 4  # of tokens
    assert 0.8 * 4 * budget < held < 1.0 * 4 * budget + vectors < 1.3 * 4 * budget
