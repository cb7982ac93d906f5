"""The loss with compiled steps between its products, compared with the formula in fp64.

Quick tests run the steps without a compiler, or with Dynamo alone; slow ones compile them by Inductor for the CPU.
"""

import logging
import time
from functools import partial

import pytest
import torch
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.test_cross_entropy import OPTIONS, assert_near, error, gradients, options_of, problem

from tiewise.boundary.ops import chunked, compiled_rows, devices, exactness, gpu_chunks, gpu_kernels
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

N, V = 70, 57
NEAR = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
REDUCTIONS = ("mean", "sum", "none")
CACHES = (compiled_rows.compiled_rows, compiled_rows._announce)


@pytest.fixture
def emulated(monkeypatch):
    """Let CPU tensors take the branch of a GPU, with no compilation of an earlier test."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_kernels, "TRIALS", gpu_kernels.Trials())
    forget()
    with gpu_branch():
        yield
    forget()


def forget():
    for function in CACHES:
        function.cache_clear()


@pytest.fixture
def steps(emulated, monkeypatch):
    """Run the steps as they are written, and return the list of their settings."""
    made = []

    def uncompiled(function, **kw):
        def step(settings, *tensors):
            made.append(settings)
            return function(settings, *tensors)

        return step

    monkeypatch.setattr(torch, "compile", uncompiled)
    return made


def compiled_loss(*inputs, **kw):
    return linear_cross_entropy(*inputs, backend="compile", **kw)


def assert_equals_the_formula(kind, chosen, reduction, **more):
    inputs, t = problem(kind, n=N, v=V, spread=0.5)
    kw = options_of(chosen, V) | {"reduction": reduction}
    up = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.7)
    truth, true_grads = gradients(oracle, [x.double() for x in inputs], t, upstream=up.double(), **kw)
    got, grads = gradients(compiled_loss, inputs, t, upstream=up, **kw, **more)
    assert got.dtype == torch.float32
    assert [x.dtype for x in grads] == [kind] * 3
    assert error(got, truth) < (2e-6 if kind == torch.float32 else NEAR[kind])
    assert_near(grads, true_grads, NEAR[kind])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", NEAR, ids=str)
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: "+".join(chosen) or "plain")
def test_compiled_loss_equals_the_formula_in_fp64(chosen, kind, reduction, steps):
    assert_equals_the_formula(kind, chosen, reduction, chunk=None if reduction == "sum" else 23)
    assert all(one.needs_slopes for one in steps[-1:])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda chosen: "+".join(chosen) or "plain")
def test_error_is_that_of_the_plain_computation(chosen, reduction, kind, steps):
    (h, w, b), t = problem(kind, spread=0.5)
    options = LossOptions(reduction=reduction, **options_of(chosen))
    assert exactness.measure_excess(compiled_rows.loss_pass, options, LossTensors(h, w, b, t), kind) <= 1.5


def test_confident_predictions_do_not_cancel(steps):
    h, w = torch.tensor([[20.0], [15.0], [-3.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    t = torch.tensor([0, 0, 2])
    got = compiled_loss(h, w, t, reduction="none")
    assert (got - oracle(h, w, t, reduction="none")).abs().max() < 1.2e-7  # one rounding of a sum near 1


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_minus_infinity_and_targets_outside_are_those_of_the_row_kernel(softcap, steps):
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    if softcap is None:
        b[:3] = -torch.inf
    t = t.where(t > 2, 3)
    t[1] = 0
    truth = oracle(h, w, t, b, reduction="none", softcap=softcap)
    got, grads = gradients(compiled_loss, (h, w, b), t, upstream=torch.ones(N), reduction="none", softcap=softcap)
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)
    assert all(x.isfinite().all() for x in grads)
    settings = compiled_rows.RowSettings(-100, needs_slopes=False)
    options = compiled_rows.RowOptions.of(LossOptions(), None, h)
    losses = compiled_rows.compute_rows(
        settings, h @ w.T, torch.tensor([V, -1, -100] + [0] * (N - 3)), h.new_ones(()), options
    )
    assert losses[:2].isnan().all()
    assert losses[2] == 0
    assert losses[3:].isfinite().all()


def test_ignored_tokens_have_no_gradient_even_if_their_features_are_nan(steps):
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    t[5] = -100
    h[5] = torch.nan
    for reduction in ("mean", "none"):
        up = torch.ones(N) if reduction == "none" else None
        got, grads = gradients(compiled_loss, (h, w, None), t, upstream=up, reduction=reduction)
        assert got.isfinite().all()
        assert not grads[0][5].any()


def test_into_gets_the_table_gradient_and_evaluation_needs_no_slopes(steps):
    (h, w, _), t = problem(torch.bfloat16, n=N, v=V, spread=0.5)
    _, (_, true) = gradients(lambda h, w, t, bias: oracle(h, w, t), [h.double(), w.double(), None], t)
    into = torch.ones(V, h.shape[1])
    compiled_loss(h.requires_grad_(), w.requires_grad_(), t, into=into, chunk=16).backward()
    assert error(into - 1, true) < 3e-2
    with torch.inference_mode():
        alone = compiled_loss(h, w, t)
    assert error(alone, oracle(h, w, t)) < 1e-2
    assert not steps[-1].needs_slopes


def test_chunk_buffer_has_the_type_of_the_products(steps, monkeypatch):
    (h, w, _), t = problem(torch.bfloat16, n=N, v=V)
    buffers, allocate = [], gpu_chunks.ChunkBuffer.allocate

    def watched(features, vocab, rows, dtype):
        buffers.append((rows, dtype))
        return allocate(features, vocab, rows, dtype)

    monkeypatch.setattr(gpu_chunks.ChunkBuffer, "allocate", watched)
    compiled_loss(h, w, t, chunk=23)
    assert set(buffers) == {(23, torch.bfloat16)}


# compilation


def test_each_set_of_options_is_compiled_once_for_every_number_of_tokens(emulated, monkeypatch, caplog):
    graphs = []

    def count(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    monkeypatch.setattr(compiled_rows, "COMPILER", count)
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    with caplog.at_level(logging.WARNING):
        for size in (70, 64, 33, 70):
            options = LossOptions(backend="compile")
            tensors = LossTensors(h[:size], w, None, t[:size])
            losses, _ = compiled_rows.loss_pass(options, tensors, torch.float32, (True, True, False), None)
            assert error(losses, oracle(*tensors[:2], tensors.targets, reduction="none")) < 1e-6
    assert len(graphs) == 1
    wider = torch.cat([w, w])
    for table in (wider, w):
        tensors = LossTensors(h, table, None, t)
        compiled_rows.loss_pass(LossOptions(), tensors, torch.float32, (True, True, False), None)
    assert len(graphs) == 2
    assert [record.message for record in caplog.records if record.name == compiled_rows.__name__] == [
        compiled_rows.ANNOUNCED
    ]


def test_other_values_of_the_options_are_not_compiled_again(emulated, monkeypatch):
    """A learned temperature changes the scale at every step."""
    graphs = []

    def count(graph, inputs):
        graphs.append(inputs)
        return graph.forward

    monkeypatch.setattr(compiled_rows, "COMPILER", count)
    (h, w, b), t = problem(torch.float32, n=N, v=V, spread=0.5)
    for scale, softcap, smoothing, z_loss in ((0.3, 2.0, 0.1, 0.01), (0.7, 3.0, 0.2, 0.02), (0.9, 4.0, 0.3, 0.03)):
        kw = {"scale": scale, "softcap": softcap, "label_smoothing": smoothing, "z_loss": z_loss}
        truth, true_grads = gradients(oracle, [x.double() for x in (h, w, b)], t, **kw)
        tensors, options = LossTensors(h, w, b, t), LossOptions(reduction="sum", **kw)
        share = 1 / (t != -100).sum()
        losses, grads = compiled_rows.loss_pass(options, tensors, torch.float32, (True, True, True), share)
        assert error(losses.sum() * share, truth) < 2e-6
        assert_near(grads, true_grads, 2e-6)
    assert len(graphs) == 1
    for used in ({"scale": 0.5}, {"scale": 1.0}, {"z_loss": 0.5}, {"scale": 0.2}):
        compiled_rows.loss_pass(LossOptions(**used), LossTensors(h, w, None, t), torch.float32, (False,) * 3, None)
    assert len(graphs) == 4  # one for each set of options


def test_compiled_model_may_contain_the_loss(emulated, monkeypatch):
    monkeypatch.setattr(compiled_rows, "COMPILER", "eager")
    (h, w, b), t = problem(torch.float32, n=N, v=V)
    model = torch.compile(lambda h, w, t, bias: compiled_loss(h, w, t, bias), fullgraph=True, backend="aot_eager")
    truth, true_grads = gradients(oracle, [x.double() for x in (h, w, b)], t)
    got, grads = gradients(model, (h, w, b), t)
    assert error(got, truth) < 2e-6
    assert_near(grads, true_grads, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_computes_the_same(kind, emulated):
    assert_equals_the_formula(kind, OPTIONS[-1], "mean", chunk=32)


# refusals


@pytest.mark.parametrize(
    ("kind", "kw", "says"),
    [
        (torch.float64, {}, "'compile' has no products in float64"),
        (torch.bfloat16, {"logits": "fp32"}, "'compile' rounds logits, and logits='fp32' asks for exact ones"),
    ],
)
def test_refusals_name_what_is_missing(kind, kw, says, emulated):
    (h, w, _), t = problem(kind, n=N, v=V)
    with pytest.raises(UnsupportedError, match=says):
        compiled_loss(h, w, t, **kw)


def test_compiled_loss_runs_on_a_gpu_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    with pytest.raises(UnsupportedError, match="'compile' runs on a GPU, and the features are on a cpu"):
        compiled_loss(h, w, t)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with gpu_branch(wide_products=False), pytest.raises(UnsupportedError, match="'compile' needs fp32 sums of narrow"):
        compiled_loss(h.bfloat16(), w.bfloat16(), t)


# the compiled loss as a candidate of `auto`


@pytest.fixture
def trials(emulated, monkeypatch, tmp_path):
    """Return the times that a trial measures; the list `trials["tried"]` gets its candidates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = {"tried": [], "tiewise": 1.0, "compile": 0.9}

    def trial(candidates, *_):
        times["tried"].append(list(candidates))
        return gpu_kernels.TrialResult({"tiewise": times["tiewise"], "compile": times["compile"]})

    monkeypatch.setattr(gpu_kernels, "run_trial", trial)
    monkeypatch.setattr(gpu_kernels, "KERNELS", {})
    return times


def chosen_by_auto(kind=torch.float32, n=N, *, with_into=False, **options):
    (h, w, b), t = problem(kind, n=n, v=V)
    tensors = LossTensors(h, w, b, t)
    options = LossOptions(backend="auto", **options)
    return gpu_kernels.backend_loss_pass("auto", options, tensors, kind, chunked.loss_pass, with_into=with_into)


@pytest.mark.parametrize(("milliseconds", "is_used"), [(0.9, True), (0.979, True), (0.985, False), (1.2, False)])
def test_auto_uses_the_compiled_loss_if_it_saves_two_percent(milliseconds, is_used, trials):
    trials["compile"] = milliseconds
    for with_into in (False, True):
        expected = compiled_rows.loss_pass if is_used else None
        assert chosen_by_auto(softcap=30.0, with_into=with_into) is expected
    assert trials["tried"] == [["tiewise", "compile"]]


def test_auto_leaves_the_compiled_loss_out_where_logits_must_not_be_rounded(trials):
    assert chosen_by_auto(torch.bfloat16, logits="fp32") is None
    assert chosen_by_auto(torch.float64) is None
    assert not trials["tried"]


def test_auto_tries_nothing_while_a_graph_is_recorded(trials, monkeypatch):
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    assert chosen_by_auto() is None
    monkeypatch.setattr(devices, "is_capturing", lambda x: False)
    assert chosen_by_auto() is compiled_rows.loss_pass
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    assert chosen_by_auto() is compiled_rows.loss_pass
    assert len(trials["tried"]) == 1


def test_trial_measures_the_compiled_loss_and_leaves_out_a_slow_start(emulated, monkeypatch):
    monkeypatch.setattr(compiled_rows, "COMPILER", "eager")
    (h, w, _), t = problem(torch.float32, n=N, v=V)
    arguments = (
        {"tiewise": None, "compile": compiled_rows.loss_pass},
        LossOptions(),
        LossTensors(h, w, None, t),
        torch.float32,
        chunked.loss_pass,
    )
    assert list(gpu_kernels.run_trial(*arguments).milliseconds) == ["tiewise", "compile"]
    forget()
    monkeypatch.setattr(gpu_kernels, "LONGEST_START", 0.02)
    real = compiled_rows.compute_rows

    def slow(*given):
        time.sleep(0.03)
        return real(*given)

    monkeypatch.setattr(compiled_rows, "compiled_rows", lambda settings, *_: partial(slow, settings))
    trial = gpu_kernels.run_trial(*arguments)
    assert list(trial.milliseconds) == ["tiewise"]
    assert trial.reasons == {"compile": "its first run took 0 s, and 0.02 s is the limit"}
