"""The choice of matrix products, and that torch's flag for them is always restored.

Trials and processors are simulated, so that every branch runs on any machine. The products of oneDNN are real.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.boundary.ops.processor import PLAIN, Machine, flag, needs_exact, needs_flag

from tiewise import linear_cross_entropy
from tiewise.boundary import fast_products
from tiewise.boundary.ops import chunked
from tiewise.boundary.ops import fast_products as fp
from tiewise.boundary.ops.soft_targets import augmented_cross_entropy
from tiewise.core.errors import RunError, TiewiseWarning, UnsupportedError


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a simulated machine with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Machine(monkeypatch)
    yield made
    made.restarted()
    assert not fp._active


@pytest.fixture
def flags(monkeypatch):
    """Record the flag at each product of logits."""
    found = []
    logits = chunked.chunk_logits
    monkeypatch.setattr(chunked, "chunk_logits", lambda *a: found.append(flag()) or logits(*a))
    return found


class RoundedFactor:
    """A matrix whose products round both factors to bf16, as AMX does."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, part):
        return self.x[part]

    def __matmul__(self, other):
        return self.x.bfloat16().float() @ other.bfloat16().float()


# the decision


@needs_exact
@pytest.mark.parametrize(("took", "product", "share"), [(9.0, "onednn", "0.90"), (9.1, "default", "0.91")])
def test_trial_selects_onednn_only_by_a_margin(machine, took, product, share):
    machine(10.0, took)
    with fast_products() as choice:
        assert flag() == ("bf16" if product == "onednn" else "none")
    assert (choice.product, choice.exact, choice.default_ms, choice.onednn_ms) == (product, True, 10.0, took)
    assert str(choice).startswith(f"{product} products on EPYC, {torch.get_num_threads()} thread")
    assert str(choice).endswith(f": a trial on oneDNN took {share} of the time")
    assert fp.choose_products() is choice
    assert machine.tried == 1


@needs_exact
@pytest.mark.parametrize(("times", "native"), [((10.0, 5.0, 5.5), True), ((5.0, 9.0, 5.6), False), ((5.0, 9.0), False)])
def test_compiled_kernel_is_chosen_if_it_is_as_fast(machine, times, native):
    machine(*times)
    choice = fp.choose_products()
    assert (choice.native, choice.native_ms) == (native, times[2] if len(times) == 3 else None)
    assert ("own kernel" in str(choice)) == (len(times) == 3)
    assert not fp.choose_products("default").native  # a requested choice never uses the kernel
    tried = machine.tried
    machine.library = None if machine.library else "kernels"
    machine.restarted()
    fp.choose_products()
    assert machine.tried == tried + 1  # a new or removed library requires another trial


@needs_flag
@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (PLAIN | {"amx_tile": True, "amx_bf16": True}, "the processor has AMX"),
        (PLAIN | {"amx_fp16": True}, "the processor has AMX"),
        ({}, "does not say"),
    ],
)
def test_onednn_is_never_tried_if_it_may_round(machine, traits, reason):
    machine(traits=traits)
    choice = fp.choose_products()
    assert (choice.product, choice.exact, choice.default_ms, machine.tried) == ("default", True, None, 0)
    assert reason in choice.reason


@needs_flag
def test_no_trial_runs_if_onednn_rounds_a_probe(machine, monkeypatch):
    machine()
    factors = fp._product_factors
    monkeypatch.setattr(fp, "_product_factors", lambda rows: [(RoundedFactor(a), b) for a, b in factors(rows)])
    assert fp.choose_products().reason == "a probe on oneDNN was rounded to bf16"
    assert flag() == "none"
    with pytest.warns(TiewiseWarning, match="rounded to bf16"):
        assert not fp.choose_products("onednn").exact


def test_fast_products_keeps_the_default_if_torch_lacks_the_flag(machine, monkeypatch):
    machine()
    monkeypatch.setattr(fp, "_matmul", None)
    with fast_products() as choice:
        assert (choice.product, choice.reason) == ("default", "this torch has no other")
    with pytest.raises(UnsupportedError, match=r"cannot send.*TIEWISE_PRODUCTS"), fast_products("onednn"):
        pass


@needs_flag
def test_requesting_onednn_on_amx_warns_that_it_rounds(machine):
    machine(traits=PLAIN | {"amx_tile": True})
    with pytest.warns(TiewiseWarning, match=r"has AMX.*rounds to bf16"), fast_products("onednn") as choice:
        assert flag() == "bf16"
    assert not choice.exact
    assert "rounds to bf16" in str(choice)


@needs_flag
def test_fast_products_keeps_a_flag_set_by_hand(machine):
    machine(10.0, 5.0)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with fast_products() as choice:
            assert (choice.product, flag()) == ("default", "bf16")
        assert "already" in choice.reason
        assert machine.tried == 0
        with fast_products("default"):
            assert flag() == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@needs_exact
def test_real_trial_returns_positive_times_and_keeps_the_random_state(machine):
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        times = fp.run_trial(1, 0.0)
    assert len(times) == 2 + (fp.kernels() is not None)
    assert all(0 < took < 1e4 for took in times.values())
    state = torch.get_rng_state()
    assert fp.choose_products().onednn_ms > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert flag() == "none"


# the requested choice


def test_environment_variable_applies_only_to_auto(machine, monkeypatch):
    machine()
    monkeypatch.setenv("TIEWISE_PRODUCTS", "default")
    assert fp.choose_products().reason == "asked for"
    monkeypatch.setenv("TIEWISE_PRODUCTS", "mkl")
    assert fp.choose_products("default").product == "default"
    for call in (fp.choose_products, lambda: linear_cross_entropy(*problem())):
        with pytest.raises(RunError, match=r"'mkl'; choose auto, default, onednn, also in TIEWISE_PRODUCTS"):
            call()


@needs_exact
def test_auto_inside_another_context_takes_its_choice(machine, monkeypatch):
    machine()
    monkeypatch.setenv("TIEWISE_PRODUCTS", "default")
    with fast_products("onednn") as outer:
        with fast_products() as inner:
            assert inner is outer
            assert flag() == "bf16"
        with fast_products("default"), fast_products() as inner:
            assert (inner.product, flag()) == ("default", "none")
        assert flag() == "bf16"


# the flag


@needs_exact
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["default", "onednn"])), max_size=30))
def test_last_entered_context_sets_the_flag(moves):
    inside = {}
    for place, product in moves:
        if place in inside:
            inside.pop(place)[0].close()
        else:
            stack = ExitStack()
            stack.enter_context(fast_products(product))
            inside[place] = stack, product
        last = list(inside.values())[-1][1] if inside else "default"
        assert flag() == ("bf16" if last == "onednn" else "none")
    for stack, _ in inside.values():
        stack.close()
    assert flag() == "none"
    assert not fp._active


@needs_exact
@pytest.mark.parametrize("found", ["none", "ieee"])
def test_fast_products_restores_the_flag_after_an_error(found):
    @fast_products("onednn")
    def fails(depth):
        assert flag() == "bf16"
        if depth:
            fails(depth - 1)
        raise KeyError

    torch.backends.mkldnn.matmul.fp32_precision = found
    try:
        for _ in range(2):
            with pytest.raises(KeyError):
                fails(2)
            assert flag() == found
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@needs_exact
def test_flag_stays_set_until_the_last_thread_leaves():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with fast_products("onednn"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with fast_products("onednn"):
        thread.start()
        entered.wait(30)
    assert flag() == "bf16"
    leave.set()
    thread.join()
    assert flag() == "none"


@needs_exact
def test_concurrent_threads_run_one_trial(machine):
    machine(10.0, 5.0)
    together = threading.Barrier(8)

    def choose(_):
        together.wait(30)
        return fp.choose_products()

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(choose, range(8)))
    assert machine.tried == len(set(found)) == 1


# the cache


@needs_exact
def test_cache_keeps_trial_times_per_processor_and_thread_count(machine, tmp_path):
    machine(10.0, 5.0)
    assert fp.choose_products().product == "onednn"
    machine.restarted()
    assert str(fp.choose_products()).endswith("0.50 of the time")
    assert machine.tried == 1
    machine(10.0, 20.0, traits=PLAIN | {"cpu_name": "Xeon"})
    assert fp.choose_products().product == "default"
    assert machine.tried == 2
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert fp.choose_products().threads == before + 1
    finally:
        torch.set_num_threads(before)
    assert machine.tried == 3
    (path,) = (tmp_path / "cache" / "tiewise").iterdir()
    kept = [(trial["processor"], trial["threads"]) for trial in json.loads(path.read_text()).values()]
    assert kept == [("EPYC", before), ("Xeon", before), ("Xeon", before + 1)]


@needs_exact
@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"KEY": 3}', '{"KEY": {"default_ms": 0, "onednn_ms": 1}}'])
def test_damaged_cache_is_replaced(machine, tmp_path, content):
    machine(10.0, 5.0)
    fp.choose_products()
    path = tmp_path / "cache" / "tiewise" / "products.json"
    whole = path.read_text()
    path.write_text(content.replace("KEY", next(iter(json.loads(whole)))))
    for _ in range(2):
        machine.restarted()
        assert fp.choose_products().product == "onednn"
    assert machine.tried == 2
    assert path.read_text() == whole


@needs_exact
@pytest.mark.parametrize("home", ["a file", "none"])
def test_every_process_runs_a_trial_if_the_cache_cannot_be_written(machine, tmp_path, monkeypatch, home):
    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "~")  # a value for which Path.home() raises
    else:
        (tmp_path / "cache").write_text("")
    machine(10.0, 5.0)
    for _ in range(2):
        assert fp.choose_products().product == "onednn"
    machine.restarted()
    assert fp.choose_products().product == "onednn"
    assert machine.tried == 2


# products of the losses


def problem(dtype=torch.float32, n=40, v=50, d=300):
    draw = torch.Generator().manual_seed(0)
    h, w = torch.randn(n, d, generator=draw), torch.randn(v, d, generator=draw) / d**0.5
    targets = torch.randint(0, v, (n,), generator=draw)
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), targets


LARGE = {"n": 1024, "v": 512, "d": 512}  # 2²⁸ multiplications: the fewest that start a trial


def test_small_loss_starts_no_trial(machine, flags):
    machine()
    h, w, t = problem()
    linear_cross_entropy(h, w, t).backward()
    assert flags == ["none" if flag() is not None else None]
    assert "no large" in fp.choose_products("auto", 2**28 - 1).reason


@needs_exact
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_loss_uses_the_choice_forward_and_backward(machine, flags, monkeypatch, reduction, compiled):
    machine(10.0, 5.0)
    found = {}
    for asked, product in (("default", "none"), ("auto", "bf16")):
        monkeypatch.setenv("TIEWISE_PRODUCTS", asked)
        h, w, t = problem(**LARGE)
        loss = linear_cross_entropy
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        loss(h, w, t, reduction=reduction).sum().backward()
        found[asked] = h.grad, w.grad
        assert set(flags) == {product}
        assert len(flags) == (2 if reduction == "none" else 1)
        assert flag() == "none"
        flags.clear()
    for default, onednn in zip(*found.values(), strict=True):
        assert (onednn - default).norm() < 1e-5 * default.norm()


@needs_exact
def test_products_of_other_dtypes_start_no_trial(machine, flags):
    machine()
    for dtype in (torch.bfloat16, torch.float64):
        linear_cross_entropy(*problem(dtype, **LARGE)).backward()
    assert set(flags) == {"none"}
    assert machine.tried == 0


@needs_exact
def test_augmented_loss_starts_a_trial(machine):
    machine(10.0, 5.0)
    augmented_cross_entropy(*problem(**LARGE)).backward()
    assert machine.tried == 1


@needs_exact
@given(st.integers(1, 70), st.integers(1, 400), st.integers(1, 90), st.integers(0, 3), st.integers(0, 2**31))
def test_onednn_products_have_fp32_accuracy(n, k, m, turned, seed):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn((n, k) if turned % 2 else (k, n), generator=draw)
    b = torch.randn((k, m) if turned // 2 else (m, k), generator=draw)
    a, b = a if turned % 2 else a.T, b if turned // 2 else b.T
    start = torch.randn(n, m, generator=draw)
    with fast_products("onednn"):
        product, added = a @ b, torch.addmm(start, a, b)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((product - exact).abs() / size).max() < 1e-6
    assert ((added - start - exact).abs() / (size + start.abs())).max() < 1e-6


@needs_exact
@pytest.mark.slow
def test_compiled_graph_uses_the_choice_at_run_time():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.rand(100, 3000, generator=draw), torch.rand(3000, 50, generator=draw)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b) + 1, fullgraph=True)
    found = {}
    for product in ("default", "onednn", "default"):
        with fast_products(product):
            assert torch.equal(compiled(a, b), (a @ b).relu() + 1)
            found[product] = a @ b
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # torch uses oneDNN only there
        assert not torch.equal(*found.values())  # otherwise the test could not see a difference


@needs_exact
@pytest.mark.slow
def test_fast_products_sets_the_flag_inside_a_compiled_function():
    def step(a):
        with fast_products("onednn"):
            return flag(), a @ a

    flag_within, product = torch.compile(step)(torch.eye(3))
    assert flag_within == "bf16"
    assert torch.equal(product, torch.eye(3))
    assert flag() == "none"
