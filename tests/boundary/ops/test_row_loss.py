"""The loss by a row kernel between the products, compared with the formula in fp64.

The kernel runs on a GPU, or on a CPU in triton's interpreter. A process can enable the interpreter only at its start,
so `test_kernel_tests_pass_under_tritons_interpreter` runs this file again in a process that does.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.interpreted import INTERPRETED, passed, run_interpreted
from tests.boundary.ops.test_cross_entropy import (
    OPTIONS,
    E,
    assert_near,
    error,
    gradients,
    options_of,
    plain_cross_entropy,
    problem,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_rows, gpu_times
from tiewise.boundary.ops import cross_entropy, devices, gpu_chunks, row_loss
from tiewise.boundary.ops.cross_entropy import oracle
from tiewise.boundary.ops.path_gradient import LookupOptions, tied_lookup
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

N, V = (11, 41) if INTERPRETED else (777, 5003)
NEAR = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
linear_cross_entropy = partial(cross_entropy.linear_cross_entropy, backend="triton")
REDUCTIONS = ("mean", "sum", "none")
CASES = [
    pytest.param(kind, chosen, reduction, id="-".join([str(kind)[6:], reduction, *chosen]))
    for kind in NEAR
    for chosen in OPTIONS
    for reduction in (REDUCTIONS if kind == torch.float32 else REDUCTIONS[::2])
]
NUMBERS = ("vocab", "width", "slope_stride", "token_weight_stride", "ignore_index")
FLOATS = ("scale", "softcap", "smoothing", "z_loss")
KERNEL_TYPES = dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(FLOATS, "fp32") | {"targets": "*i64"}
MISSING = "triton: NOT RUN, not installed: pip install 'triton>=3.9'"


@pytest.fixture
def device(monkeypatch):
    """Return the device on which the kernel runs, in several blocks for each row; or skip with what is missing."""
    if find_spec("triton") is None:
        pytest.skip(MISSING)
    monkeypatch.setattr(row_loss, "BLOCK", 16 if INTERPRETED else 1024)
    if INTERPRETED:
        round_to_bf16_as_a_gpu(monkeypatch)
        with gpu_branch():
            yield "cpu"
        return
    if not torch.cuda.is_available():
        pytest.skip("row kernel: NOT RUN on a GPU, torch sees none")
    yield "cuda"


def round_to_bf16_as_a_gpu(monkeypatch):
    """Let the interpreter round fp32 to the nearest bf16: it truncates, which has twice the error of a GPU."""
    from triton.runtime import interpreter

    def truncate(builder, source, to):
        if to.scalar != interpreter.tl.bfloat16:
            return builder.cast_impl(source, to)
        rounded = torch.from_numpy(source.data).bfloat16().view(torch.int16).numpy().view("uint16")
        return interpreter.TensorHandle(rounded, interpreter.tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", truncate)


@pytest.fixture
def passes(monkeypatch):
    """Return the list of the types in which the pass under test was run: no test may compare another one."""
    seen, original = [], row_loss.loss_pass

    def counted(options, tensors, product_dtype, *rest):
        seen.append(product_dtype)
        return original(options, tensors, product_dtype, *rest)

    monkeypatch.setattr(row_loss, "loss_pass", counted)
    return seen


def on(device, inputs, t):
    return [None if x is None else x.to(device) for x in inputs], t.to(device)


@pytest.mark.parametrize(("kind", "chosen", "reduction"), CASES)
def test_kernel_loss_equals_the_formula_in_fp64(kind, chosen, reduction, device, passes):
    inputs, t = problem(kind, n=N, v=V, spread=0.5)
    kw = options_of(chosen, V) | {"reduction": reduction}
    up = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.7)
    truth, true_grads = gradients(oracle, [x.double() for x in inputs], t, upstream=up.double(), **kw)
    if "class_weight" in kw:
        kw["class_weight"] = kw["class_weight"].to(device)
    there, at = on(device, inputs, t)
    chunk = 7 if reduction == "mean" else None
    got, grads = gradients(linear_cross_entropy, there, at, upstream=up.to(device), chunk=chunk, **kw)
    assert set(passes) == {kind}
    assert got.dtype == torch.float32
    assert [x.dtype for x in grads] == [kind] * 3
    assert error(got.cpu(), truth) < (2e-6 if kind == torch.float32 else 1e-4)  # narrow products, fp32 logits
    assert_near([x.cpu() for x in grads], true_grads, NEAR[kind])
    for before, after in zip(inputs, there, strict=True):
        assert torch.equal(before, after.cpu())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_the_plain_computation(kind, device, passes):
    inputs, t = problem(kind, n=N, v=V, spread=0.5)
    truth, true_grads = gradients(oracle, [x.double() for x in inputs], t)
    there, at = on(device, inputs, t)
    reference, reference_grads = gradients(plain_cross_entropy, there, at)
    got, grads = gradients(linear_cross_entropy, there, at)
    assert passes
    eps = torch.finfo(torch.float32).eps
    assert error(got.cpu(), truth) <= 2 * error(reference.cpu(), truth) + eps
    for one, plain_one, true in zip(grads, reference_grads, true_grads, strict=True):
        assert error(one.cpu(), true) <= 2 * error(plain_one.cpu(), true) + eps


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1000.0])
def test_softcap_of_small_and_large_logits_is_as_exact_as_torchs_tanh(softcap, device):
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    t = t.clamp(min=0)
    truth, true_grads = gradients(oracle, [x.double() for x in (h, w, b)], t, softcap=softcap)
    there, at = on(device, (h, w, b), t)
    got, grads = gradients(linear_cross_entropy, there, at, softcap=softcap)
    assert error(got.cpu(), truth) < 1e-6
    assert_near([x.cpu() for x in grads], true_grads, 1e-6 if softcap > 1 else 1e-5)


def test_loss_of_confident_predictions_does_not_cancel(device):
    h, w = torch.tensor([[20.0], [15.0], [-3.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    t = torch.tensor([0, 0, 2])
    truth = oracle(h, w, t, reduction="none")
    got = linear_cross_entropy(h.to(device), w.to(device), t.to(device), reduction="none")
    assert (got.cpu() - truth).abs().max() < 1.2e-7  # one rounding of a sum near 1


def test_into_sums_parts_of_a_batch_in_fp32(device, passes):
    for kind in (torch.float32, torch.bfloat16):
        (h, w, _), t = problem(kind, n=N, v=V, spread=0.5)
        t = t.clamp(min=0)
        _, (_, true) = gradients(lambda h, w, t, bias: oracle(h, w, t), [h.double(), w.double(), None], t)
        into = torch.ones(V, E, device=device)
        table = w.to(device).requires_grad_()
        for part in torch.arange(N).split(-(-N // 2)):
            share = len(part) / N
            loss = linear_cross_entropy(
                h[part].to(device), table, t[part].to(device), into=into, upstream=share, chunk=5
            )
            (loss * share).backward()
        assert table.grad is None
        assert error(into.cpu() - 1, true) < max(NEAR[kind], 1e-5)  # 1 and a small gradient share one fp32 number
    assert {torch.float32, torch.bfloat16} == set(passes)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_both_paths_of_a_tied_step_share_one_fp32_buffer(softcap, kind, device, passes):
    """Lookup rows and the head's gradient of two micro-batches are added to a buffer that is not empty."""
    (_, w, _), t = problem(kind, n=N, v=V)
    ids, body = t.roll(1).clamp(min=0), torch.linspace(-0.3, 0.3, E * E).view(E, E).to(kind)
    table = w.to(device).requires_grad_()
    into, start = torch.linspace(-1, 1, V * E, device=device).view(V, E), torch.linspace(-1, 1, V * E).view(V, E)
    a, b = (w.detach().double().requires_grad_() for _ in "ab")
    for part in torch.arange(N).split(-(-N // 2)):
        rows, after = tied_lookup(table, ids[part].to(device), LookupOptions(into=into))
        h = torch.tanh(rows @ body.to(device))
        loss = linear_cross_entropy(h, after, t[part].to(device), into=into, upstream=0.5, softcap=softcap, chunk=5)
        (loss / 2).backward()
        logits = torch.tanh(F.embedding(ids[part], a) @ body.double()) @ b.T
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        (F.cross_entropy(capped, t[part]) / 2).backward()
    assert table.grad is None
    assert error(into.cpu().double() - start, a.grad + b.grad) < max(NEAR[kind], 1e-5)
    assert set(passes) == {kind}


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_factored_head_has_the_gradients_of_its_logits(kind, device, passes):
    """The head's map lies between the hidden states [N, 3 E] and a table [V, E] that lookups use too."""
    (x, w, b), t = problem(kind, n=N, v=V)
    there, at = on(device, (x, w, b), t)
    table, bias = (y.requires_grad_() for y in there[1:])
    a, c, d = (y.detach().double().requires_grad_() for y in (w, w, b))
    maps = [torch.linspace(-0.3, 0.2, 3 * E * E).to(kind).view(*shape) for shape in ((E, 3 * E), (3 * E, E))]
    up, down = (y.to(device).requires_grad_() for y in maps)
    true_up, true_down = (y.detach().double().requires_grad_() for y in maps)
    ids = t.roll(1).clamp(min=0)
    rows, after = tied_lookup(table, ids.to(device))
    loss = linear_cross_entropy(torch.tanh(rows @ up) @ down, after, at, bias, label_smoothing=0.1, chunk=7)
    loss.backward()
    logits = F.linear(torch.tanh(F.embedding(ids, a) @ true_up) @ true_down, c, d)
    truth = F.cross_entropy(logits, t, label_smoothing=0.1)
    truth.backward()
    assert error(loss.detach().cpu(), truth.detach()) < (2e-6 if kind == torch.float32 else 1e-2)
    found = [y.grad.cpu() for y in (table, bias, up, down)]
    assert_near(found, [a.grad + c.grad, d.grad, true_up.grad, true_down.grad], max(NEAR[kind], 1e-5))
    assert set(passes) == {kind}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_inputs_and_ignored_tokens_get_no_gradient(reduction, device, passes):
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    (h, w), t = on(device, (h, w), t)
    up = torch.ones(N, device=device) if reduction == "none" else None
    _, grads = gradients(linear_cross_entropy, (h, w, None), t, upstream=up, reduction=reduction)
    for frozen in (0, 1):
        leaves = [h.clone(), w.clone()]
        leaves[1 - frozen].requires_grad_()
        linear_cross_entropy(*leaves, t, reduction=reduction).backward(up)
        assert leaves[frozen].grad is None
        assert error(leaves[1 - frozen].grad, grads[1 - frozen]) < 1e-6
    assert not grads[0][t == -100].any()
    loss, zeros = gradients(
        linear_cross_entropy, (h, w, None), torch.full_like(t, -100), upstream=up, reduction=reduction
    )
    assert not any(x.any() for x in (loss, *zeros))
    with torch.no_grad():
        alone = linear_cross_entropy(h, w, t, reduction=reduction)
    assert torch.isfinite(alone).all()
    assert passes


def test_minus_infinity_costs_infinity_and_leaves_finite_gradients(device):
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    b[:3] = -torch.inf
    t = t.where(t > 2, 3)
    t[1] = 0
    truth = oracle(h, w, t, b, reduction="none")
    there, at = on(device, (h, w, b), t)
    got, grads = gradients(linear_cross_entropy, there, at, upstream=torch.ones(N, device=device), reduction="none")
    assert got[1] == torch.inf
    others = torch.arange(N) != 1
    assert error(got.cpu()[others], truth[others]) < 1e-6
    assert all(x.isfinite().all() for x in grads)


def test_target_outside_the_vocabulary_makes_its_loss_nan(device):
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    t[1], t[2] = V, -1
    (h, w), t = on(device, (h, w), t)
    tensors = LossTensors(h, w, None, t)
    losses, _ = row_loss.loss_pass(LossOptions(), tensors, torch.float32, (False,) * 3, None)
    assert losses.isnan().nonzero()[:, 0].tolist() == [1, 2]


def test_compile_and_repeated_backward_give_the_same_gradients(device, passes):
    (h, w, b), t = problem(torch.bfloat16, n=N, v=V, spread=0.5)
    inputs, t = on(device, (h, w, b), t)
    eager, eager_grads = gradients(linear_cross_entropy, inputs, t)

    def loss_of(h, w, t, bias):
        return cross_entropy.linear_cross_entropy(h, w, t, bias, backend="triton")

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    got, grads = gradients(compiled, inputs, t)
    assert torch.equal(got, eager)
    assert_near(grads, eager_grads, 1e-6)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = linear_cross_entropy(leaves[0], leaves[1], t, leaves[2])
    torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    assert_near(torch.autograd.grad(4 * loss, leaves), [4 * x for x in eager_grads], 1e-6)
    assert set(passes) == {torch.bfloat16}


def test_chunk_is_halved_until_it_fits_into_memory(device, monkeypatch):
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    (h, w), t = on(device, (h, w), t)
    expected = linear_cross_entropy(h, w, t)
    sizes, original = [], torch.Tensor.new_empty

    def with_little_memory(x, *shape, **kw):
        if len(shape) == 2 and shape[1] >= V:
            sizes.append(shape[0])
            if shape[0] > N // 3:
                raise torch.OutOfMemoryError("out of memory")
        return original(x, *shape, **kw)

    monkeypatch.setattr(torch.Tensor, "new_empty", with_little_memory)
    monkeypatch.setattr(gpu_chunks, "MINIMUM_ROWS", 2)
    assert error(linear_cross_entropy(h, w, t), expected) < 1e-6
    assert sizes == [N, -(-N // 2), -(-N // 4)]
    monkeypatch.setattr(gpu_chunks, "MINIMUM_ROWS", N // 2)
    with pytest.raises(torch.OutOfMemoryError):
        linear_cross_entropy(h, w, t)


def test_chunk_is_halved_if_the_gradients_do_not_fit_beside_it(device, monkeypatch):
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    (h, w), t = on(device, (h, w), t)
    failures, original = [torch.OutOfMemoryError("out of memory")], gpu_chunks.GradientSums
    seen = []

    def with_little_memory(*arguments, is_single):
        seen.append(is_single)
        if failures:
            raise failures.pop()
        return original(*arguments, is_single=is_single)

    monkeypatch.setattr(gpu_chunks, "GradientSums", with_little_memory)
    monkeypatch.setattr(gpu_chunks, "MINIMUM_ROWS", 2)
    _, grads = gradients(linear_cross_entropy, (h, w, None), t)
    assert seen == [True, False]
    _, expected = gradients(linear_cross_entropy, (h, w, None), t)
    assert_near(grads, expected, 1e-6)


def test_default_backend_takes_the_kernel_where_it_runs(device, passes):
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    there, at = on(device, (h, w, b), t)
    got, _ = gradients(cross_entropy.linear_cross_entropy, there, at)
    assert error(got.cpu(), oracle(h, w, t, b)) < 1e-6
    assert passes
    passes.clear()
    gradients(cross_entropy.linear_cross_entropy, there, at, backend="chunked")
    assert not passes


def test_scaling_by_one_and_by_another_number_equals_a_product(device):
    for kind in (torch.float32, torch.bfloat16):
        x = torch.randn(37, 41, generator=torch.Generator().manual_seed(0)).to(device, kind)
        for factor in (1.0, 0.3):
            scaled = x.clone()
            row_loss.scale_gradient(scaled, torch.tensor(factor, device=device))
            assert torch.equal(scaled, (x.float() * factor).to(kind))


@pytest.mark.slow
def test_kernel_tests_pass_under_tritons_interpreter():
    printed = run_interpreted(__file__)
    assert passed(printed) >= len(CASES) + 10
    assert "skipped" not in printed


# without triton


def tensors_of(x):
    return LossTensors(x, x, None, x)


def test_missing_support_names_the_type_the_device_or_the_package(monkeypatch):
    x = tensors_of(torch.ones(2))
    on_meta = tensors_of(torch.ones(2, device="meta"))
    assert row_loss.missing_support(x, torch.float64) == "has no products in float64"
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    assert row_loss.missing_support(x, torch.float32) == "needs triton; pip install triton"
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    assert row_loss.missing_support(x, torch.float32) == "runs on a GPU, and the features are on a cpu"
    assert row_loss.missing_support(on_meta, torch.float32) == "runs on a GPU, and the features are on a meta"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with gpu_branch(wide_products=False):
        assert not row_loss.missing_support(x, torch.float32)
        assert row_loss.missing_support(x, torch.bfloat16) == "needs torch 2.8 or later for narrow products"
    with gpu_branch():
        assert not row_loss.missing_support(x, torch.bfloat16)


def test_tensors_without_memory_of_their_own_are_refused(monkeypatch):
    """Triton would read the address 0 of a fake tensor or of a wrapper of tensors."""
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.ones(2)
    with FakeTensorMode() as mode, gpu_branch():
        fake = mode.from_tensor(x)
        assert row_loss.missing_support(tensors_of(fake), torch.float32) == "runs on plain tensors, not on a FakeTensor"
        mixed = LossTensors(x, fake, None, x)
        assert row_loss.missing_support(mixed, torch.float32) == "runs on plain tensors, not on a FakeTensor"
        parameter = tensors_of(torch.nn.Parameter(x))
        assert not row_loss.missing_support(parameter, torch.float32)


def test_gradient_of_the_table_is_overwritten_by_the_first_chunk_and_zero_without_any():
    h, w = torch.randn(4, 3).bfloat16(), torch.randn(5, 3).bfloat16()
    slopes = torch.randn(4, 5).bfloat16()
    needs = (True, True, False)
    for is_single in (True, False):
        memory = LossTensors(h, w, None, torch.zeros(4, dtype=torch.long))
        with gpu_branch(), torch.no_grad():
            sums = gpu_chunks.GradientSums(memory, torch.bfloat16, needs, None, is_single=is_single)
            sums.by_weight.fill_(torch.nan)
            sums.add(slice(0, 4), slopes, h, w, 0.5)
            expected = 0.5 * slopes.double().T @ h.double()
            assert error(sums.results()[1], expected) < 1e-2
            sums = gpu_chunks.GradientSums(memory, torch.bfloat16, needs, None, is_single=is_single)
            sums.by_weight.fill_(torch.nan)
            assert not sums.results()[1].any()


@pytest.mark.parametrize(
    ("width", "columns", "warps"), [(1, 512, 1), (512, 512, 1), (528, 1024, 2), (8192, 8192, 16), (50_304, 8192, 16)]
)
def test_programs_take_a_power_of_two_of_the_vocabulary(width, columns, warps):
    assert row_loss.program_size(width) == (columns, warps)


def test_requested_backend_without_its_device_is_an_error():
    (h, w, _), t = problem(torch.float32)
    missing = r"backend='triton' (needs triton|runs on a GPU).*; take backend='tiewise'"
    with pytest.raises(UnsupportedError, match=missing):
        linear_cross_entropy(h, w, t)


def test_product_is_added_in_the_type_of_the_sum():
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
    exact = a.double() @ b.double()
    with gpu_branch():
        for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            out = torch.full((5, 3), torch.nan, dtype=dtype)
            devices.add_product(out, a, b, beta=0, alpha=0.5)
            devices.add_product(out, a, b, beta=1)
            assert error(out, 1.5 * exact) < near


def test_large_chunk_takes_its_share_of_a_gpus_memory(monkeypatch):
    monkeypatch.setattr(devices, "_total_memory", lambda device: 64 * 2**30)
    gpu = Mock(device=torch.device("cuda"))
    assert devices.large_chunk_size(10_000, 2**17, gpu, None) == 3334  # three chunks of 2 GB at most
    assert devices.large_chunk_size(10_000, 2**17, gpu, None, saved=2**27) == 3334
    assert devices.large_chunk_size(5000, 2**17, gpu, None, saved=2**27) == 5000  # a single chunk of 2.4 GB
    assert devices.large_chunk_size(5000, 2**17, gpu, None, saved=2**26) == 2500
    assert devices.chunk_size(10_000, 2**17, gpu, None) == 500
    assert devices.large_chunk_size(10_000, 2**17, gpu, 7) == 7
    assert devices.large_chunk_size(10_000, 2**17, torch.ones(1), None) == devices.chunk_size(
        10_000, 2**17, torch.ones(1), None
    )


# compilation for GPUs, which needs none


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("slope_type", ["bf16", "fp16", "fp32"])
def test_kernel_compiles_for_nvidias_cards_with_wide_loads_and_stores(slope_type, capability):
    if find_spec("triton") is None:
        pytest.skip(MISSING)
    if INTERPRETED:
        pytest.skip("the interpreter replaces the compiler")
    with_slopes = compile_kernel(slope_type, capability, options=True, slopes=True)
    assert "ld.global.v4.b32" in with_slopes
    assert "st.global.v4.b32" in with_slopes
    for options in (True, False):
        overwriting = compile_kernel(slope_type, capability, options=options, slopes=True).count("bar.sync")
        sums = compile_kernel(slope_type, capability, options=options, slopes=False).count("bar.sync")
        assert overwriting >= sums + 2  # one barrier before the second reading, and one before each store


def compile_kernel(slope_type, capability, *, options, slopes):
    """Return the PTX code of the row kernel with all options of the loss, or with none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, size = import_module("tiewise.boundary.ops.row_kernels").loss_rows, row_loss.program_size(width=50_304)
    flags = [name for name in kernel.arg_names if name.startswith("HAS_")]
    constants = dict.fromkeys(flags, options) | {"NEEDS_SLOPES": slopes, "BLOCK": size.columns}
    types = {name: KERNEL_TYPES.get(name, "*fp32") for name in kernel.arg_names} | {"slopes": f"*{slope_type}"}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name in ("width", "slope_stride")]
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(place(name),): constant for name, constant in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": size.warps})
    return compiled.asm["ptx"]


# the benchmark of its parts


def test_benchmark_names_and_runs_every_part(device, tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 16, generator=generator).to(device) for n in (16, 40))
    problem = gpu_times.Problem(h, w, torch.arange(16, device=device))
    monkeypatch.setattr(gpu_rows, "SIZES", ((16, 4), (32, 8)))
    monkeypatch.setattr(gpu_rows, "ROUNDS", 1)
    path, record = tmp_path / "rows.json", {"times": {}}
    assert gpu_rows.measure_parts(problem, "small", record, path, deadline=-1.0).missing == 15
    assert record["times"] == {}
    assert not gpu_rows.measure_parts(problem, "small", record, path, deadline=torch.inf).wrong
    assert len(record["times"]) == 1 + len(gpu_rows.CHUNKS) + 2 + 2 + 2 + 3
    assert all(milliseconds > 0 for milliseconds in record["times"].values())
