"""The loss by the compiled kernel, compared with the formula in fp64 on the same inputs."""

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.boundary.ops.test_cross_entropy import assert_near, error, gradients, options_of
from tests.boundary.ops.test_log_prob import PARTS, plain, run

from tiewise.boundary.ops import compiled_kernels as compiled
from tiewise.boundary.ops import few_tokens, native_loss
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.fast_products import ProductChoice
from tiewise.boundary.ops.log_prob import vocabulary_statistics
from tiewise.boundary.ops.native_loss import KernelProducts
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

faster = native_loss._is_faster
SHAPES = [(32, 1, 1), (33, 57, 12), (777, 1009, 33), (64, 4000, 128), (1500, 50, 300), (1030, 509, 64)]
OPTIONS = [
    {},
    {"scale": 0.3, "chunk": 100},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"softcap": 2.0, "scale": 1.3, "z_loss": 0.02},
    {"class_weight": True},
    {"label_smoothing": 0.1, "z_loss": 0.01, "scale": 1.7},
    {"label_smoothing": 0.2, "class_weight": True, "scale": 0.7},
]


@pytest.fixture(scope="module", autouse=True)
def kernel_calls(kernel_library):
    """Send losses of every size to the kernel, in fp32 and bf16, and record its calls."""
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        compiled._load.cache_clear()
        patch.setenv("XDG_CACHE_HOME", str(kernel_library))
        patch.setattr(native_loss, "LEAST", 0)
        patch.setattr(native_loss, "_is_faster", lambda kind, multiplications: kind in (torch.float32, torch.bfloat16))
        patch.setattr(native_loss, "processor", frozenset)  # a processor without bf16 products
        register = native_loss._register_shapes
        patch.setattr(native_loss, "_register_shapes", lambda library: (sent.append(1), register(library)))
        yield sent
    compiled._load.cache_clear()


def problem(n, v, d, dtype=torch.float32, seed=0, ignored=5):
    g = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(shape, generator=g).to(dtype) for shape in ((n, d), (v, d), (v,)))
    t = torch.randint(0, v, (n,), generator=g)
    if ignored and n > 40:
        t[::ignored] = -100
    return [h, w / d**0.5 * 2, b], t


def compiled_and_true(inputs, t, **kw):
    """Return (loss, gradients) of the compiled kernel and those of the oracle."""
    truth = gradients(oracle, [None if x is None else x.double() for x in inputs], t, **kw)
    return gradients(linear_cross_entropy, inputs, t, **kw), truth


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("with_bias", [True, False])
def test_compiled_loss_equals_the_formula(kernel_calls, chosen, with_bias, reduction):
    (h, w, b), t = problem(777, 1009, 33)
    kw = options_of(chosen, 1009) | {"reduction": reduction}
    kw["upstream"] = torch.linspace(-1, 2, 777) if reduction == "none" else torch.tensor(0.7)
    before = len(kernel_calls)
    (got, grads), (truth, true_grads) = compiled_and_true((h, w, b if with_bias else None), t, **kw)
    assert len(kernel_calls) > before
    assert error(got, truth) < 5e-7
    assert_near(grads, true_grads, 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chosen", [{}, {"label_smoothing": 0.2, "chunk": 100}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_accumulates_into_an_existing_gradient(kernel_calls, shape, chosen, dtype):
    (h, w, b), t = problem(*shape, dtype)
    into, before = torch.linspace(-1, 1, w.numel()).view_as(w), len(kernel_calls)
    kw, rounded = {"reduction": "sum"} | chosen, 1e-6 if dtype == torch.float32 else 4e-3
    standing = into.clone()
    _, (dh, dw, db) = gradients(oracle, [x.double() for x in (h, w, b)], t, **kw)
    _, grads = gradients(linear_cross_entropy, (h, w, b), t, into=into, **kw)
    assert len(kernel_calls) == before + 1
    assert (into - standing - dw).norm() < 2e-6 * (standing.norm() + dw.norm())
    assert shape[1] == 1 or error(grads[0], dh) < rounded > error(grads[2], db)
    assert grads[1] is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_is_accurate_for_ragged_shapes_and_bf16_inputs(kernel_calls, shape, dtype):
    (h, w, b), t = problem(*shape, dtype)
    before = len(kernel_calls)
    got = linear_cross_entropy(h, w, t, b, reduction="none")
    assert len(kernel_calls) == before + 1
    truth = oracle(h, w, t, b.double(), reduction="none")
    assert (got - truth).abs().max() < 1e-5  # logits rounded to bf16 would give 0.1
    (_, grads), (_, true_grads) = compiled_and_true((h.float(), w.float(), b.float()), t, reduction="sum")
    if shape[1] > 1:
        assert_near(grads, true_grads, 1e-6)
    _, narrow = gradients(linear_cross_entropy, (h, w, b), t, reduction="sum")
    for x, wide in zip(narrow, grads, strict=True):
        assert torch.equal(x, wide.to(dtype))  # rounded once, at the end


@pytest.fixture
def without_amx(monkeypatch):
    """Simulate a processor without AMX, because torch's bf16 products would use AMX."""
    monkeypatch.setattr(native_loss, "processor", lambda: frozenset(("avx512_bf16",)))


NEEDED = {
    KernelProducts.PAIRS: "avx512_bf16",
    KernelProducts.TILES: "amx_bf16",
    KernelProducts.EMULATED_TILES: "avx512_bf16",
}


def skip_without(products):
    """Skip the test if this processor cannot multiply in this way."""
    if compiled.kernels(NEEDED[products]) is None:
        pytest.skip(f"NOT TESTED: this processor has no {NEEDED[products]}")


@pytest.fixture(params=list(NEEDED), ids=lambda products: products.name)
def bf16_products(request, monkeypatch):
    """Let the kernel multiply bf16 with AVX-512, with AMX, or with an emulation of AMX; skip if it cannot."""
    skip_without(request.param)
    multiply_bf16(monkeypatch, request.param)
    return request.param


def multiply_bf16(monkeypatch, products):
    """Let the kernel multiply bf16 in this way, for any number of tokens."""
    monkeypatch.setattr(native_loss, "bf16_products", lambda: products)
    monkeypatch.setattr(few_tokens, "FEW_TOKENS", 0)


@pytest.mark.parametrize("shape", [*SHAPES, (1600, 3000, 768)])
@pytest.mark.parametrize("wide", [False, True])
def test_bf16_products_keep_the_loss_accurate(kernel_calls, bf16_products, shape, wide):
    """P and h are rounded to bf16 before a product. The loss and the terms of its target are not."""
    (h, w, b), t = problem(*shape, torch.float32 if wide else torch.bfloat16)
    rounded = [x.bfloat16().double() for x in (h, w)]
    before = len(kernel_calls)
    with torch.autocast("cpu", torch.bfloat16):
        each, grads = gradients(linear_cross_entropy, (h, w, b), t, reduction="none", upstream=torch.ones(len(t)))
    assert len(kernel_calls) == before + 2
    truth, true = gradients(oracle, (*rounded, b.double()), t, reduction="none", upstream=torch.ones(len(t)))
    assert (each - truth).abs().max() < 1e-5
    assert error(each.mean(), truth.mean()) < 1e-6
    for x, y in zip(grads, true, strict=True):
        assert x.dtype == h.dtype
        assert shape[1] == 1 or (x - y).norm() < 4e-3 * y.norm()


@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_bf16_products_support_every_option(kernel_calls, bf16_products, chosen):
    (h, w, b), t = problem(777, 1009, 34, torch.bfloat16)
    before = len(kernel_calls)
    (got, grads), (truth, true) = compiled_and_true((h, w, b), t, **options_of(chosen, 1009))
    assert len(kernel_calls) == before + 1
    assert error(got, truth) < 1e-6
    assert_near(grads, true, 5e-3)


@pytest.fixture
def emulated_tiles(monkeypatch):
    """Let the kernel multiply bf16 with an emulation of AMX."""
    skip_without(KernelProducts.EMULATED_TILES)
    multiply_bf16(monkeypatch, KernelProducts.EMULATED_TILES)


@given(st.integers(32, 130), st.integers(2, 90), st.integers(1, 70), st.integers(0, 10_000), st.integers(1, 99))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_tiles_equal_the_formula_for_any_shape_and_chunk(emulated_tiles, n, v, d, seed, chunk):
    (h, w, b), t = problem(n, v, d, torch.bfloat16, seed=seed, ignored=0)
    (got, grads), (truth, true_grads) = compiled_and_true((h, w, b), t, reduction="sum", chunk=chunk)
    assert (got - truth).abs() < 1e-5 * max(1, truth.abs().item())
    for x, true in zip(grads, true_grads, strict=True):
        assert (x - true).norm() < 5e-3 * n**0.5 * (1 + true.norm())


@pytest.mark.parametrize(
    ("shape", "kept", "rows"),
    [
        ((2048, 50304, 768), False, 2048),  # E is 206 MB; in two chunks, E and a second table are 181 MB
        ((2048, 50304, 768), True, 1024),  # a kept gradient needs no second table
        ((8192, 8192, 256), False, 4096),  # a small table: the second one costs little
        ((2048, 128256, 1024), False, 2048),
        ((4096, 50304, 1024), False, 1024),
    ],
)
def test_tiles_take_all_tokens_at_once_where_a_second_table_would_cost_as_much(shape, kept, rows):
    count, words, width = shape
    features, weight = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (count, words))
    tensors = LossTensors(features, weight, None, torch.zeros(count, dtype=torch.long))
    kernel = native_loss.NativeKernel(None, LossOptions(), tensors, torch.bfloat16, KernelProducts.TILES)
    assert kernel._rows(count, sums_narrow_table=not kept) == rows
    chosen = native_loss.NativeKernel(None, LossOptions(chunk=7), tensors, torch.bfloat16, KernelProducts.TILES)
    assert chosen._rows(count, sums_narrow_table=not kept) == 7


# 4 threads share 608 tokens or 100 words, and each has all of the other
@pytest.mark.parametrize("shape", [(600, 100, 40), (64, 700, 40)])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_tiles_repeat_exactly_with_any_number_of_threads(emulated_tiles, threads, shape):
    inputs, t = problem(*shape, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        first = gradients(linear_cross_entropy, inputs, t)
        again = gradients(linear_cross_entropy, inputs, t)
    finally:
        torch.set_num_threads(before)
    truth, true_grads = gradients(oracle, [x.double() for x in inputs], t)
    assert torch.equal(first[0], again[0])
    assert all(map(torch.equal, first[1], again[1]))
    assert error(first[0], truth) < 1e-6
    assert_near(first[1], true_grads, 5e-3)


def test_tiles_stay_accurate_for_very_unlikely_targets(emulated_tiles):
    (h, w, b), t = problem(100, 300, 20, torch.bfloat16)
    h = h * 60  # targets have e^-200 of the largest probability, which underflows in fp32
    (got, grads), (truth, true_grads) = compiled_and_true((h, w, b), t, reduction="none", upstream=torch.ones(100))
    assert truth.max() > 200
    assert error(got, truth) < 1e-6
    assert_near(grads, true_grads, 5e-3)


def test_nan_reaches_every_row_of_the_table_gradient_by_tiles(emulated_tiles):
    (h, w, b), t = problem(100, 300, 20, torch.bfloat16, ignored=0)
    h[50, 3] = torch.nan
    loss, (dh, dw, _) = gradients(linear_cross_entropy, (h, w, b), t)
    assert loss.isnan()
    assert dh.isnan().any(1).nonzero().tolist() == [[50]]
    assert dw.isnan().all()


@pytest.mark.parametrize("chunk", [32, 1000])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_emulated_tiles_equal_those_of_the_processor(monkeypatch, chosen, chunk):
    """Skipped without AMX. The emulation is compared with Intel's definition in tile_registers.cpp."""
    skip_without(KernelProducts.TILES)
    inputs, t = problem(777, 1009, 33, torch.bfloat16)
    results = []
    for products in (KernelProducts.TILES, KernelProducts.EMULATED_TILES):
        multiply_bf16(monkeypatch, products)
        loss, grads = gradients(linear_cross_entropy, inputs, t, **options_of(chosen | {"chunk": chunk}, 1009))
        results.append([loss, *grads])
    assert all(map(torch.equal, *results))


class AmxLibrary:
    """The operators with AMX emulated, and an error in one of its results by a factor."""

    def __init__(self, result, factor):
        self.result, self.factor = result, factor

    def vocabulary_loss(self, *arguments):
        emulated = [KernelProducts.EMULATED_TILES if a is KernelProducts.TILES else a for a in arguments]
        results = list(compiled.kernels().vocabulary_loss(*emulated))
        if KernelProducts.TILES in [a for a in arguments if isinstance(a, KernelProducts)]:
            results[self.result] *= self.factor
        return results


# results 0, 3 and 4 are the losses and the gradients of features and table
@pytest.mark.parametrize("result", [0, 3, 4])
@pytest.mark.parametrize("factor", [1.0, 1.03, torch.nan])
@pytest.mark.parametrize("switch", ["avx512", "auto"])
def test_amx_is_used_if_right_and_not_disabled(monkeypatch, recwarn, result, factor, switch):
    skip_without(KernelProducts.EMULATED_TILES)
    library = AmxLibrary(result, factor)
    monkeypatch.setenv("TIEWISE_KERNELS", switch)
    monkeypatch.setattr(native_loss, "processor", lambda: frozenset(("avx512_bf16", "amx_bf16")))
    monkeypatch.setattr(native_loss, "kernels", lambda needs="avx512": library)
    expected = {"avx512": KernelProducts.PAIRS, "auto": KernelProducts.TILES if factor == 1 else None}
    assert native_loss.bf16_products() == expected[switch]
    assert native_loss.bf16_products() == expected[switch]
    warned = [str(warning.message) for warning in recwarn if "kernel for AMX" in str(warning.message)]
    assert len(warned) == (switch == "auto" and factor != 1)  # once in a process
    monkeypatch.setattr(native_loss, "kernels", lambda needs="avx512": None)  # no permission, or no library
    assert native_loss.bf16_products() == (KernelProducts.PAIRS if switch == "avx512" else None)


@pytest.fixture
def few_token_trials(monkeypatch, tmp_path):
    """Simulate AMX with the trial's times; return them, and the losses that each trial got."""
    times, trials = {}, []
    monkeypatch.setattr(native_loss, "bf16_products", lambda: KernelProducts.EMULATED_TILES)
    monkeypatch.setattr(native_loss, "processor", lambda: frozenset(("avx512_bf16", "amx_bf16")))
    monkeypatch.setattr(few_tokens, "_fastest", {})
    monkeypatch.setattr(few_tokens, "measure", lambda losses: trials.append(losses) or dict(times))
    monkeypatch.setattr("tiewise.boundary.ops.fast_products.cache_folder", lambda: tmp_path)
    return times, trials


def chosen_products(count, v=300):
    """Return how the kernel multiplies this many tokens in bf16; None if torch does."""
    (h, w, _), t = problem(count, v, 20, torch.bfloat16)
    kernel = native_loss.find_kernel(LossOptions(), LossTensors(h, w, None, t), torch.bfloat16, count)
    return None if kernel is None else kernel.products


@pytest.mark.parametrize(
    ("fastest", "products"),
    [("tiles", KernelProducts.EMULATED_TILES), ("pairs", KernelProducts.PAIRS), ("torch", None)],
)
def test_trial_chooses_the_products_of_few_tokens(few_token_trials, fastest, products):
    times, trials = few_token_trials
    times.update({"tiles_ms": 2.0, "pairs_ms": 3.0, "torch_ms": 4.0} | {f"{fastest}_ms": 1.0})
    assert chosen_products(100) == products
    assert chosen_products(130) == products  # the same power of two
    assert len(trials) == 1
    few_tokens._fastest.clear()  # a new process reads the cached trial
    assert chosen_products(100) == products
    assert len(trials) == 1
    assert chosen_products(300) == products
    assert chosen_products(100, v=301) == products
    assert len(trials) == 3
    assert chosen_products(512) == KernelProducts.EMULATED_TILES
    assert len(trials) == 3


def test_trial_of_few_tokens_times_the_same_loss_by_each_method(few_token_trials, monkeypatch):
    times, trials = few_token_trials
    skip_without(KernelProducts.PAIRS)
    times["tiles_ms"] = 1.0
    chosen_products(100)
    results = []
    for owner, name in ((native_loss._NativeLoss, "compute"), (native_loss.chunked, "loss_pass")):
        compute = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, compute=compute: results.append(compute(*args)))
    (losses,) = trials
    for compute_loss in losses.values():
        compute_loss()
    assert set(losses) == {"tiles", "pairs", "torch"}
    (tiles, tile_gradients), *others = results
    for loss, grads in others:
        assert error(loss, tiles) < 5e-3  # torch rounds logits to bf16
        assert_near(grads[:2], tile_gradients[:2], 1e-2)


def test_measure_returns_the_fastest_round_of_each_computation():
    calls = []
    times = few_tokens.measure({name: lambda name=name: calls.append(name) for name in ("a", "b")})
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert set(times) == {"a_ms", "b_ms"}
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", ["log_prob", "entropy", "lse"])
def test_compiled_statistics_match_the_formulas(kernel_calls, bf16_products, asked, dtype, softcap):
    (h, w, b), t = problem(300, 700, 40, dtype)
    b = b.float()  # a bf16 bias would be rounded again when it is divided by the temperature
    b[5] = -torch.inf
    how, before, at = {"scale": 1.5, "softcap": softcap, "temperature": 0.7}, len(kernel_calls), PARTS.index(asked)

    def ours(h, w, targets, bias, **how):
        found = vocabulary_statistics(h, w, targets, bias, entropy=asked == "entropy", **how)
        return [found.lse if x is None else x for x in found]

    got, grads = run(ours, (h, w, b), t, (asked,), **how)
    assert len(kernel_calls) == before + 2
    truth, true_grads = run(plain, (h.double(), w.double(), b.double()), t, (asked,), **how)
    assert (got[at] - truth[at]).abs().max() < 1e-5  # logits are near 20
    assert_near(grads, true_grads, 5e-3 if dtype == torch.bfloat16 else 1e-5)


@given(st.integers(32, 120), st.integers(1, 90), st.integers(1, 70), st.integers(0, 10_000), st.integers(1, 99))
def test_compiled_loss_equals_the_formula_for_any_shape_and_chunk(n, v, d, seed, chunk):
    (h, w, b), t = problem(n, v, d, seed=seed, ignored=0)
    (got, grads), (truth, true_grads) = compiled_and_true((h, w, b), t, reduction="sum", chunk=chunk)
    assert (got - truth).abs() < 1e-5 * max(1, truth.abs().item())
    for x, true in zip(grads, true_grads, strict=True):
        assert (x - true).norm() < 3e-6 * n**0.5 * (1 + true.norm())


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_compiled_loss_repeats_exactly_with_any_number_of_threads(threads):
    inputs, t = problem(200, 700, 40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        first = gradients(linear_cross_entropy, inputs, t)
        again = gradients(linear_cross_entropy, inputs, t)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(first[0], again[0])
    assert all(map(torch.equal, first[1], again[1]))
    assert_near(first[1], gradients(oracle, inputs, t)[1], 1e-6)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    (h, w, b), t = problem(100, 300, 20)
    leaves = [h, w]
    leaves[1 - frozen].requires_grad_()
    linear_cross_entropy(*leaves, t, b).backward()
    assert leaves[frozen].grad is None
    assert error(leaves[1 - frozen].grad, gradients(oracle, (h, w, b), t)[1][1 - frozen]) < 1e-6


def test_compiled_loss_stays_accurate_for_very_unlikely_targets():
    (h, w, b), t = problem(100, 300, 20)
    h = h * 60  # targets have e^-200 of the largest probability, which underflows in fp32
    (got, grads), (truth, true_grads) = compiled_and_true((h, w, b), t, reduction="none", upstream=torch.ones(100))
    assert truth.max() > 200
    assert error(got, truth) < 1e-6
    assert_near(grads, true_grads, 1e-5)


def test_compiled_loss_gives_the_infinities_and_nans_of_the_portable_one(monkeypatch):
    (h, w, b), t = problem(100, 300, 20, ignored=0)
    b[4] = b[9] = -torch.inf
    t[:20] = 4
    h[50, 3] = torch.nan
    t[70] = -100
    h[70] = torch.nan  # ignored
    up = torch.ones(100).where(torch.arange(100) != 50, 0)
    for ignore in (-100, 4):
        kw = {"reduction": "none", "ignore_index": ignore}
        h2, t2 = (h, t) if ignore == -100 else (h.nan_to_num(), t.where(t >= 0, 4))
        got = linear_cross_entropy(h2, w, t2, b, **kw)
        with monkeypatch.context() as patch:
            patch.setattr(native_loss, "kernels", lambda: None)
            wanted = linear_cross_entropy(h2, w, t2, b, **kw)
        torch.testing.assert_close(got, wanted, equal_nan=True)
        assert not got.isfinite().all() or ignore == 4
    h[50] = h[70] = 0
    (_, grads), (_, true_grads) = compiled_and_true((h, w, b), t, reduction="none", upstream=up)
    assert_near(grads, true_grads, 1e-6)  # gradients are finite although the loss is not


def test_nan_reaches_every_row_of_the_table_gradient():
    (h, w, b), t = problem(100, 300, 20, ignored=0)
    h[50, 3] = torch.nan
    loss, (dh, dw, _) = gradients(linear_cross_entropy, (h, w, b), t)
    assert loss.isnan()
    assert dh[50].isnan().all()
    assert dh[:50].isfinite().all()
    assert dw.isnan().all()


def test_portable_loss_computes_what_the_kernel_lacks(kernel_calls):
    (h, w, b), t = problem(100, 300, 20)
    before = len(kernel_calls)
    (got, _), (truth, _) = compiled_and_true((h, w, b), t, softcap=5.0, label_smoothing=0.1)
    assert error(got, truth) < 1e-6
    for change in (torch.Tensor.double, torch.Tensor.half):
        linear_cross_entropy(change(h), change(w), t)
    linear_cross_entropy(h, w.T.contiguous().T, t)
    linear_cross_entropy(h, w, torch.full_like(t, -100))
    linear_cross_entropy(h[:31], w, t[:31])
    assert len(kernel_calls) == before


def test_autocast_passes_fp32_tables_to_the_kernel_unrounded(kernel_calls):
    (h, w, b), t = problem(100, 300, 20)
    before = len(kernel_calls)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = gradients(linear_cross_entropy, (h, w, b), t)
    assert len(kernel_calls) == before + 1
    assert error(loss, oracle(h, w, t, b)) < 1e-6
    assert all(x.dtype == torch.float32 for x in grads)


def test_loss_operator_passes_opcheck_and_compiles_in_one_graph(kernel_calls):
    (h, w, b), t = problem(100, 300, 20, ignored=0)
    linear_cross_entropy(h, w, t)
    c = torch.rand(100)
    for last in ((True, True, True), (True, False, False), (False, False, False)):
        for into in (None, torch.zeros_like(w)):
            arguments = (h, w, b, t, c, c, None, None, into, 0.5, 3.0, 64, 0, False, True, *last)
            torch.library.opcheck(compiled.kernels().vocabulary_loss.default, arguments)
    how = (None, None, None, 1.0, 0.0, 64, 0, False, False)
    for products in (-1, 4, *([] if compiled.kernels("amx_bf16") else [KernelProducts.TILES])):
        with pytest.raises(RuntimeError, match=r"products must be 0 to 3|no AMX|no dot product"):
            compiled.kernels().vocabulary_loss(
                *(h, w, None, t, c, c), *how[:5], 64, products, False, False, True, True, True
            )
    for wrong in ((h[:, ::2], w[:, ::2]), (h.double(), w.double()), (h[:, 1:].contiguous(), w), (h[:0], w)):
        with pytest.raises(RuntimeError, match=r"must be|do not meet|nothing"):
            compiled.kernels().vocabulary_loss(*wrong, None, t[: len(wrong[0])], c, c, *how, *last)

    inputs = (h, w, b)
    eager, eager_grads = gradients(lambda *a, bias: linear_cross_entropy(*a, bias), inputs, t)
    step = torch.compile(lambda h, w, t, bias: linear_cross_entropy(h * 2, w, t, bias), fullgraph=True, backend="eager")
    got, grads = gradients(step, (h / 2, w, b), t)
    torch.testing.assert_close(got, eager)
    assert_near([grads[0] / 2, *grads[1:]], eager_grads, 1e-6)


def test_kernel_is_used_only_if_it_is_faster(monkeypatch):
    tensors = problem(100, 300, 20, torch.bfloat16)
    tensors = (*tensors[0], tensors[1])

    def serves(kind=torch.bfloat16):
        return native_loss.find_kernel(LossOptions(), LossTensors(*tensors), kind, 100) is not None

    assert serves()
    with monkeypatch.context() as patch:
        patch.setattr(native_loss, "LEAST", 2**27)
        assert not serves()
    monkeypatch.setattr(native_loss, "_is_faster", faster)
    assert serves()
    assert not serves(torch.float16)
    monkeypatch.setattr(native_loss, "processor", lambda: frozenset(("avx512f", "avx512_bf16", "amx_bf16")))
    with monkeypatch.context() as patch:
        without_tiles = {"avx512": native_loss.kernels(), "amx_bf16": None}
        patch.setattr(native_loss, "kernels", lambda needs="avx512": without_tiles[needs])
        assert not serves()
    for native in (True, False):
        choice = ProductChoice("default", "a test", True, "EPYC", 2, native=native)
        monkeypatch.setattr(native_loss, "choose_products", lambda asked, size, choice=choice: choice)
        assert serves(torch.float32) == native


LIBRARY = ("-shared", "-fPIC", "-O3")  # options that a program does not need


def test_emulated_tiles_multiply_as_intel_defines(kernel_library, tmp_path):
    driver, source = Path(__file__).with_name("tile_registers.cpp"), f'-DSOURCE="{compiled.SOURCE}"'
    options = [option for option in compiled.OPTIONS if option not in LIBRARY]
    command = ["g++", *options, "-O1", "-DWITHOUT_TORCH", source, str(driver), "-o", str(tmp_path / "driver")]
    subprocess.run(command, check=True)
    done = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "200 problems\n")


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "problems"), [("loss_kernel.cpp", 60), ("int8_kernel.cpp", 72)])
def test_sanitizers_report_no_error(driver, problems, tmp_path):
    driver, source = Path(__file__).with_name(driver), f'-DSOURCE="{compiled.SOURCE}"'
    options = [option for option in compiled.OPTIONS if option not in LIBRARY]
    checked = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DWITHOUT_TORCH", source]
    subprocess.run(["g++", *options, *checked, str(driver), "-o", str(tmp_path / "driver")], check=True)
    done = subprocess.run([str(tmp_path / "driver")], capture_output=True, text=True, env={"OMP_NUM_THREADS": "2"})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[:2000]
    assert done.stdout.splitlines()[-1] == f"{problems} problems"
