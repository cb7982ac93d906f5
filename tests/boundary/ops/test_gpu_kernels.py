"""Each backend of the loss on a GPU, compared with the formula in fp64, and the choice of backend.

Without a GPU those tests skip with a reason. Liger's kernels also run on a CPU, by triton's interpreter, in fp32 alone:
it truncates bf16 where a GPU rounds, and sums fp16 less exactly. Those of Cut Cross-Entropy run there in fp16: their
backward pass refuses fp32, and the interpreter multiplies the bits of bf16 as integers. A process can enable the
interpreter only at its start, so `test_kernels_of_packages_pass_under_tritons_interpreter` runs this file in one.
"""

import json
import re
import shutil
import sys
import weakref
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.interpreted import INTERPRETED, passed, run_interpreted
from tests.boundary.ops.test_cross_entropy import OPTIONS, E, assert_near, error, gradients, options_of, problem

import tiewise
from tiewise.boundary.ops import compiled_rows, exactness, gpu_kernels
from tiewise.boundary.ops.chunked import loss_pass
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.gpu_kernels import KERNELS
from tiewise.boundary.ops.package_pass import PackagePass
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions
from tiewise.core.errors import RunError, UnsupportedError

N, V = (23, 57) if INTERPRETED else (777, 5003)
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
NARROW = {name for name, kernel in KERNELS.items() if kernel.vocab_multiple > 1}  # they take some shapes only
TYPES = {"tiewise": tuple(NEAR)} | {name: kernel.types for name, kernel in KERNELS.items()}
EVERY = {"tiewise": {"bias", *OPTIONS[-1]}} | {name: set(kernel.has) for name, kernel in KERNELS.items()}
CLAIMED = [
    pytest.param(name, kind, chosen, id="-".join([name, str(kind)[6:], *chosen]))
    for name in TYPES
    for kind in TYPES[name]
    for chosen in OPTIONS
    if set(chosen) <= EVERY[name] | {"scale"} and name not in NARROW
]


# Liger's in fp16 differs from a GPU's. The backward pass of Cut Cross-Entropy takes fp16 and bf16 alone.
INTERPRETED_TYPES = {"liger": torch.float32, "cce": torch.float16}
HAS_TORCHS_LOSS = torch.__version__.partition("+")[0] in KERNELS["torch"].versions


def installed(name):
    if name == "torch":
        return HAS_TORCHS_LOSS
    return name not in KERNELS or find_spec(KERNELS[name].entry_point.split(".")[0].split(":")[0]) is not None


@pytest.fixture
def device(request, monkeypatch):
    """Return the device for the backend of the test, or skip with what is missing."""
    name = request.node.callspec.params["name"]
    if not installed(name):
        pytest.skip(f"{name}: NOT COMPARED, not installed: pip install {KERNELS[name].package}")
    if not INTERPRETED:
        if name == "torch":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if not torch.cuda.is_available():
            pytest.skip(f"{name}: NOT COMPARED on a GPU, torch sees none")
        return "cuda"
    if name not in INTERPRETED_TYPES:
        pytest.skip(f"{name}: not for triton's interpreter")
    kind = request.node.callspec.params.get("kind", INTERPRETED_TYPES[name])
    if kind != INTERPRETED_TYPES[name]:
        pytest.skip(f"{name}: NOT COMPARED in {kind}, which the interpreter computes less exactly than a GPU")
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def as_on_a_gpu(value):  # on a GPU, floats of a kernel are fp32 tensors with methods
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", as_on_a_gpu)
    # the interpreter lacks the device library, which has tanh and log1p
    packages = {"liger": "liger_kernel.ops.cross_entropy.tanh", "cce": "cut_cross_entropy.tl_utils.tl_tanh"}
    monkeypatch.setattr(packages[name], lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
    if name == "cce":
        monkeypatch.setattr("cut_cross_entropy.tl_utils.tl_log1p", lambda x: tl.log(1 + x))
    return "cpu"


def to_device(device, tensors, t):
    return [None if x is None else x.to(device) for x in tensors], t.to(device)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "kind", "chosen"), CLAIMED)
def test_backend_equals_the_formula_in_fp64(name, kind, chosen, reduction, device):
    is_padded = name == "cce" and "softcap" in chosen  # padding then enters its softmax
    (h, w, b), t = problem(kind, n=N, v=256 * max(1, V // 256) if is_padded else V, spread=0.5)
    inputs = (h, w, b if "bias" in EVERY[name] else None)
    kw = options_of(chosen, V) | {"reduction": reduction}
    up = torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.7)
    exact = [None if x is None else x.double() for x in inputs]
    truth, true_grads = gradients(oracle, exact, t, upstream=up.double(), **kw)
    if "class_weight" in kw:
        kw["class_weight"] = kw["class_weight"].to(device)
    there, at = to_device(device, inputs, t)
    up = up.to(device, torch.float64 if kind == torch.float64 else torch.float32)
    got, grads = gradients(linear_cross_entropy, there, at, upstream=up, backend=name, **kw)
    assert error(got.cpu(), truth) < NEAR[kind]
    assert_near([g.cpu() for g in grads], true_grads, NEAR[kind])
    for before, after in zip(inputs, there, strict=True):
        assert before is None or torch.equal(before, after.cpu())


@pytest.mark.parametrize("name", ["tiewise", "cce"])
def test_fp32_logits_of_bf16_inputs_give_losses_near_fp64(name, device):
    if INTERPRETED:
        pytest.skip("the interpreter multiplies bf16 as integers")
    (h, w, _), t = problem(torch.bfloat16, n=N, v=V, spread=3.0)
    got = linear_cross_entropy(h.to(device), w.to(device), t.to(device), reduction="none", logits="fp32", backend=name)
    assert (got.cpu() - oracle(h, w, t, reduction="none")).abs().max() < 1e-3


@pytest.mark.parametrize("name", [name for name in TYPES if name not in NARROW])
def test_backend_supports_freezing_repeated_backward_compile_and_autocast(name, device):
    kind = TYPES[name][-1 if name == "cce" and not INTERPRETED else 0]
    inputs, t = problem(kind, n=N, v=V)
    (h, w), t = to_device(device, inputs[:2], t)
    near = NEAR[kind]

    def step(h, w, targets, bias, **kw):
        return linear_cross_entropy(h, w, targets, bias, backend=name, **kw)

    _, grads = gradients(step, (h, w, None), t)
    for frozen in (0, 1):
        leaves = [h.clone(), w.clone()]
        leaves[1 - frozen].requires_grad_()
        step(*leaves, t, None).backward()
        assert leaves[frozen].grad is None
        assert error(leaves[1 - frozen].grad, grads[1 - frozen]) < near
    leaves = [x.clone().requires_grad_() for x in (h, w)]
    loss = step(*leaves, t, None)
    torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    assert_near(torch.autograd.grad(3 * loss, leaves), [3 * x for x in grads], near)
    for reduction in ("mean", "none"):
        up = torch.ones(N, device=device) if reduction == "none" else None
        none, zeros = gradients(step, (h, w, None), torch.full_like(t, -100), upstream=up, reduction=reduction)
        assert not any(x.any() for x in (none, *zeros))
        eager, eager_grads = gradients(step, (h, w, None), t, upstream=up, reduction=reduction)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got, found = gradients(compiled, (h, w, None), t, upstream=up, reduction=reduction)
        assert error(got, eager) < near
        assert_near(found, eager_grads, near)
    if torch.bfloat16 not in TYPES[name] or INTERPRETED:
        return
    with torch.autocast(device, dtype=torch.bfloat16):
        got, found = gradients(step, (h.float(), w.float(), None), t)
    assert error(got, loss) < NEAR[torch.bfloat16]
    assert_near(found, grads, NEAR[torch.bfloat16])
    assert all(x.dtype == torch.float32 for x in found)


@pytest.mark.parametrize("name", ["tiewise", "liger"])
def test_tied_step_uses_the_backend_of_the_environment_variable(name, device, monkeypatch):
    monkeypatch.setenv("TIEWISE_LOSS", name)
    (_, w, _), t = problem(torch.float32, n=N, v=V)
    ids, body = t.roll(1).clamp(min=0), torch.linspace(-1, 1, E * E).view(E, E)
    a, b = (w.double().requires_grad_() for _ in "ab")
    F.cross_entropy(torch.tanh(F.embedding(ids, a) @ body.double()) @ b.T, t).backward()
    table, record = w.to(device).requires_grad_(), PathRecord()
    rows, after = tied_lookup(table, ids.to(device), LookupOptions(record=record))
    linear_cross_entropy(torch.tanh(rows @ body.to(device)), after, t.to(device)).backward()
    assert error(table.grad.cpu(), a.grad + b.grad) < NEAR[torch.float32]
    found = path_norms(table.grad, record)
    assert (found.a, found.b) == pytest.approx((a.grad.norm().item(), b.grad.norm().item()), rel=1e-4)


@pytest.mark.parametrize("name", ["tiewise"])
def test_log_probabilities_and_entropies_match_fp64_on_a_gpu(name, device):
    (h, w, b), t = problem(torch.float32, n=N, v=V, spread=0.5)
    t = t.clamp(min=0)
    exact = [x.double().requires_grad_() for x in (h, w, b)]
    log_p = (F.linear(*exact) / 0.7).log_softmax(-1)
    truth = log_p.gather(1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    leaves = [x.to(device).requires_grad_() for x in (h, w, b)]
    got = tiewise.boundary.linear_log_prob(*leaves[:2], t.to(device), leaves[2], temperature=0.7, entropy=True)
    assert_near([x.cpu() for x in got], truth, 1e-5)
    found, wanted = (torch.autograd.grad((x[0] * x[1]).sum(), y) for x, y in ((got, leaves), (truth, exact)))
    assert_near([x.cpu() for x in found], wanted, 1e-4)


def test_interpreted_liger_is_refused_in_bf16_with_its_error():
    if not INTERPRETED or not installed("liger"):
        pytest.skip("liger: NOT COMPARED, needs the package and triton's interpreter")
    inputs, t = problem(torch.bfloat16, n=N, v=V, spread=0.5)
    with pytest.raises(UnsupportedError, match=r"'liger' with .* has .* times the error of all logits .*bfloat16"):
        linear_cross_entropy(*inputs[:2], t, inputs[2], backend="liger")


@pytest.mark.parametrize("name", ["cce"])
def test_cce_with_a_soft_cap_is_refused_if_its_blocks_do_not_divide_the_vocabulary(name, device):
    """Version 25.1.1 applies the soft-cap to the padding after the last word, which then enters the softmax."""
    if not INTERPRETED:
        pytest.skip("cce: this refusal was seen in triton's interpreter only")
    inputs, t = problem(torch.float16, n=N, v=1024, spread=0.5)
    linear_cross_entropy(*inputs[:2], t, backend=name, softcap=2.0)
    inputs, t = problem(torch.float16, n=N, v=3 * 256 + V, spread=0.5)
    with pytest.raises(UnsupportedError, match=r"'cce' with .* has .* times the error of all logits .*softcap"):
        linear_cross_entropy(*inputs[:2], t, backend=name, softcap=2.0)


@pytest.mark.parametrize(("words", "small"), [(1, 1), (512, 512), (513, 257), (768, 512), (5003, 395), (128_256, 512)])
def test_small_problem_pads_its_last_block_as_the_callers(words, small):
    assert exactness.small_vocabulary(words) == small
    assert all(small % block == words % block for block in (16, 64, 128, 256))


def test_backend_that_fails_with_padding_alone_is_refused_for_such_a_vocabulary(kernels, monkeypatch):
    def padded(options, tensors, *rest):
        losses, gradients = loss_pass(options, tensors, *rest)
        return losses * (1.01 if len(tensors.weight) % 128 else 1), gradients

    monkeypatch.setattr(gpu_kernels, "kernel_loss_pass", lambda *given: padded)
    for words, raised in ((640, None), (641, "times the error of all logits"), (640, None)):
        (h, w, _), t = problem(torch.float32, n=N, v=words)
        given = "right", LossOptions(backend="right"), (h, w, None, t), torch.float32, loss_pass
        if raised is None:
            assert gpu_kernels.backend_loss_pass(*given) is padded
        else:
            with pytest.raises(UnsupportedError, match=raised):
                gpu_kernels.backend_loss_pass(*given)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module"), [("liger", "liger_kernel"), ("cce", "cut_cross_entropy")])
def test_kernels_of_packages_pass_under_tritons_interpreter(name, module):
    printed = run_interpreted(__file__, "-k", name, module=module)
    compared = [case for case in CLAIMED if case.values[:2] == (name, INTERPRETED_TYPES[name])]
    assert passed(printed) > 3 * len(compared)  # each with three reductions


# refusals


@pytest.mark.parametrize(
    ("kw", "kind", "says"),
    [
        ({"backend": "cce", "label_smoothing": 0.1}, torch.bfloat16, "'cce' has no bias, no label_smoothing; "),
        ({"backend": "cce"}, torch.float32, "'cce' has no bias, no products in float32; take backend='tiewise'"),
        ({"backend": "liger"}, torch.float64, "'liger' has no products in float64"),
        ({"backend": "liger", "chunk": 7}, torch.float32, "'liger' has no chunk; "),
        ({"backend": "liger", "logits": "fp32", "scale": 0.3}, torch.bfloat16, "no logits, no scale beside logits; "),
    ],
)
def test_loss_names_the_options_that_a_backend_lacks(kw, kind, says, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (h, w, b), t = problem(kind)
    with pytest.raises(UnsupportedError, match=says):
        linear_cross_entropy(h, w, t, b, **kw)


def test_loss_refuses_a_backend_on_a_cpu_or_without_its_package(monkeypatch):
    (h, w, _), t = problem(torch.float32)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plain = linear_cross_entropy(h, w, t)
    with pytest.raises(UnsupportedError, match=r"'liger' runs on a GPU, and the features are on a cpu; take .* 'auto'"):
        linear_cross_entropy(h, w, t, backend="liger")
    assert torch.equal(linear_cross_entropy(h, w, t, backend="auto"), plain)
    monkeypatch.setenv("TIEWISE_LOSS", "liger")
    assert torch.equal(linear_cross_entropy(h, w, t), plain)
    monkeypatch.setenv("TIEWISE_LOSS", "cut")
    assert torch.equal(linear_cross_entropy(h, w, t, backend="tiewise"), plain)
    with pytest.raises(RunError, match=r"no loss is called 'cut'; choose .*liger.* in TIEWISE_LOSS"):
        linear_cross_entropy(h, w, t)
    with pytest.raises(
        ValueError,
        match="'cut'; choose one of tiewise, triton, chunked, compile, torch, liger, liger-sm90, cce, auto",
    ):
        linear_cross_entropy(h, w, t, backend="cut")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    missing = r"'liger' cannot be imported \(.*liger_kernel.*; pip install liger-kernel"
    with pytest.raises(UnsupportedError, match=missing):
        linear_cross_entropy(h, w, t, backend="liger")
    with pytest.raises(ValueError, match="and backend are of cross-entropies alone"):
        tiewise.boundary.linear_log_prob(h, w, t.clamp(min=0), backend="auto")


# the choice of the fastest backend
@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Register functions of this file as backends, each installed in version 1.0, without earlier trials.

    They are the only ones besides tiewise's default.
    """
    monkeypatch.setattr(compiled_rows, "missing_support", lambda *_: "is not tried here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(gpu_kernels, "TRIALS", gpu_kernels.Trials())
    CALLS.clear()
    made = {
        name: gpu_kernels.Kernel(
            name, f"{__name__}:{name}", (torch.float32,), ("softcap",), ("1.0",), lambda o, bias: {}
        )
        for name in ("right", "wrong", "failing", "first_upstream", "counts_ignored")
    }
    install(tmp_path, made, "1.0")
    monkeypatch.setattr(gpu_kernels, "KERNELS", made)
    return made


def install(tmp_path, packages, version):
    """Write the metadata that pip writes for packages of this version."""
    for name in packages:
        folder = tmp_path / "packages" / f"{name}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


CALLS = []  # one entry per call of `right`


def right(h, w, t, *, ignore_index, reduction):
    CALLS.append("right")
    return F.cross_entropy(h @ w.T, t, ignore_index=ignore_index, reduction=reduction)


def wrong(h, w, t, **kw):
    return right(h, w, t, **kw) * (1 + 1e-4)


def failing(h, w, t, **kw):
    raise MemoryError


class _FirstUpstream(torch.autograd.Function):
    """An identity whose backward uses only the first token's upstream gradient, as Liger 0.6.4 to 0.8.1 do."""

    @staticmethod
    def forward(ctx, each):
        return each.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream.reshape(-1)[0].expand(upstream.shape)


def first_upstream(h, w, t, **kw):
    return _FirstUpstream.apply(right(h, w, t, **kw))


def counts_ignored(h, w, t, *, ignore_index, reduction):
    return right(h, w, t.clamp(min=0), ignore_index=-100, reduction=reduction)


@pytest.mark.parametrize(
    ("reduction", "agree"), [("mean", ["right", "first_upstream"]), ("sum", None), ("none", ["right"])]
)
def test_trial_times_only_backends_that_run_and_agree(kernels, reduction, agree):
    (h, w, _), t = problem(torch.float32)
    tensors, options = (h, w, None, t), LossOptions(reduction=reduction)
    ways = {name: gpu_kernels.kernel_loss_pass(name, options, tensors, torch.float32) for name in kernels}
    trial = gpu_kernels.run_trial(ways, options, tensors, torch.float32, loss_pass)
    assert list(trial.milliseconds) == (agree or ["right", "first_upstream"])
    assert min(trial.milliseconds.values()) > 0
    assert trial.milliseconds.keys() | trial.reasons.keys() == kernels.keys()
    assert trial.reasons["failing"] == "MemoryError: MemoryError"
    assert re.fullmatch(r".*'wrong' with wrong 1.0 has \d+ times the error of all logits .*", trial.reasons["wrong"])


def test_trial_holds_one_table_gradient_at_a_time(kernels):
    v = 40_000
    tensors = torch.randn(64, E), torch.randn(v, E), None, torch.arange(64)
    way = gpu_kernels.kernel_loss_pass("right", LossOptions(), tensors, torch.float32)
    alive, most = [], 0

    def watched(*given):
        nonlocal most
        each, found = loss_pass(*given)
        alive.append(weakref.ref(found[1].untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return each, found

    gpu_kernels.run_trial({"tiewise": None, "right": way}, LossOptions(), tensors, torch.float32, watched)
    assert len(alive) == 5
    assert most == 1


@pytest.mark.parametrize(
    ("name", "reduction", "right_here"),
    [
        ("right", "none", True),
        ("first_upstream", "mean", True),
        ("first_upstream", "none", False),
        ("wrong", "sum", False),
        ("counts_ignored", "mean", False),
    ],
)
def test_error_of_requested_backend_is_measured_at_first_use(kernels, name, reduction, right_here):
    (h, w, _), t = problem(torch.float32)

    def loss():
        return gpu_kernels.backend_loss_pass(
            name, LossOptions(backend=name, reduction=reduction), (h, w, None, t), torch.float32, loss_pass
        )

    if right_here:
        assert loss() is not None
        return
    for _ in range(2):  # the second call uses the remembered result
        with pytest.raises(
            UnsupportedError, match=f"with {name} 1.0 has .* times the error .*; take backend='tiewise'"
        ):
            loss()


@pytest.mark.skipif(not HAS_TORCHS_LOSS, reason="needs torch 2.13.0")
def test_torchs_loss_is_exact_in_fp32_alone():
    """The reason for its row in the table of backends."""
    torch_loss = PackagePass(F.linear_cross_entropy, KERNELS["torch"])
    for reduction in ("sum", "none"):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            (h, w, b), t = problem(kind, n=300, v=700)
            options = LossOptions(reduction=reduction)
            excess = exactness.measure_excess(torch_loss, options, LossTensors(h, w, b, t), kind)
            assert (excess <= 2) == (kind in KERNELS["torch"].types)


@pytest.mark.skipif(not HAS_TORCHS_LOSS, reason="needs torch 2.13.0")
def test_torchs_loss_is_explained_and_chosen_by_name_or_by_auto(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_rows, "missing_support", lambda *_: "is not tried here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_kernels, "TRIALS", gpu_kernels.Trials())
    (h, w, b), t = problem(torch.float32)
    assert error(linear_cross_entropy(h, w, t, b, backend="torch", chunk=7), oracle(h, w, t, b)) < 1e-6
    explain = tiewise.boundary.explain_backends
    assert explain(h, w, t, b)["torch"] == "supports this call; no trial has timed it in this process"
    assert explain(h, w, t, softcap=3.0, label_smoothing=0.1)["torch"] == "has no softcap, no label_smoothing"
    assert explain(h.bfloat16(), w.bfloat16(), t)["torch"] == "has no products in bfloat16"
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a CPU tries backends then
    linear_cross_entropy(h, w, t, b, backend="auto")
    assert explain(h, w, t, b)["torch"].endswith(" ms")


def test_inexact_backend_is_left_out_of_a_trial(kernels, monkeypatch):
    """An error of 1e-5 is small against ours, and 20 times that of all logits in fp32."""
    (h, w, _), t = problem(torch.float32)
    tensors, options = LossTensors(h, w, None, t), LossOptions(reduction="none")

    def slightly_wrong(*given):
        losses, grads = loss_pass(*given)
        return losses * (1 + 8e-6), grads

    candidates = {"tiewise": None, "wrong": slightly_wrong, "right": loss_pass}
    assert exactness.measure_excess(slightly_wrong, options, tensors, torch.float32) > 4
    trial = gpu_kernels.run_trial(candidates, options, tensors, torch.float32, loss_pass)
    assert list(trial.milliseconds) == ["tiewise", "right"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_plain_computation_is_right_and_exceeds_itself_at_most_once(kind, reduction, chosen):
    (h, w, b), t = problem(kind, spread=0.5)
    options = LossOptions(reduction=reduction, **options_of(chosen))
    tensors = LossTensors(h, w, b, t)
    losses, _ = exactness.plain_loss_pass(options, tensors, kind, (True,) * 3, None)
    truth = oracle(h, w, t, b, options, reduction="none")
    assert error(losses, truth) < NEAR[kind]
    assert exactness.measure_excess(exactness.plain_loss_pass, options, tensors, kind) <= 1.01
    with gpu_branch():  # a CPU rounds narrow products once more
        assert exactness.measure_excess(loss_pass, options, tensors, kind) <= 2


def test_untested_version_of_a_backend_is_refused(kernels, tmp_path):
    (h, w, _), t = problem(torch.float32)
    install(tmp_path, kernels, "1.1")
    with pytest.raises(UnsupportedError, match=r"'right' is tested with right 1\.0, not 1\.1; pip install right==1\.0"):
        gpu_kernels.backend_loss_pass("right", LossOptions(backend="right"), (h, w, None, t), torch.float32, loss_pass)
    assert (
        gpu_kernels.backend_loss_pass("auto", LossOptions(backend="auto"), (h, w, None, t), torch.float32, loss_pass)
        is None
    )
    gpu_kernels.TRIALS.versions.clear()
    shutil.rmtree(tmp_path / "packages")
    with pytest.raises(UnsupportedError, match="not a copy without a version"):
        gpu_kernels.backend_loss_pass("right", LossOptions(backend="right"), (h, w, None, t), torch.float32, loss_pass)


def test_liger_versions_are_those_that_pass_these_tests():
    """Version 0.8.1 fails `test_backend_equals_the_formula_in_fp64` without reduction, 0.8.2 and 0.8.3 with a soft-cap.

    The two versions below pass every case.
    """
    assert KERNELS["liger"].versions == ("0.8.4", "0.8.5")


def test_auto_uses_and_remembers_the_fastest_backend(kernels, monkeypatch, tmp_path):
    tried = []

    def trial(ways, *_):
        tried.append(tuple(ways))
        return gpu_kernels.TrialResult({"tiewise": 3.0, "right": 2.0}, {"wrong": "is inexact"})

    monkeypatch.setattr(gpu_kernels, "run_trial", trial)
    (h, w, b), t = problem(torch.float32)
    t = t.clamp(min=0)
    for _ in range(2):
        for _ in range(2):
            assert error(linear_cross_entropy(h, w, t, backend="auto"), oracle(h, w, t)) < 1e-6
        gpu_kernels.TRIALS.results.clear()  # as a new process would start
    assert tried == [("tiewise", *kernels)]
    assert CALLS == ["right"] * 4
    (record,) = json.loads((tmp_path / "tiewise" / "losses.json").read_text()).values()
    assert record.pop("tiewise").startswith(f"{tiewise.__version__} ")
    assert record | {"torch": ""} == {
        **{"device": "cpu", "type": "torch.float32", "options": "", "losses": "summed", "shape": "32 64 16"},
        **dict.fromkeys(kernels, "1.0"),
        **{"torch": "", "row kernel": "none", "tiewise_ms": 3.0, "right_ms": 2.0, "wrong_why": "is inexact"},
        "candidates": " ".join(("tiewise", *kernels)),
    }
    linear_cross_entropy(h, w, t, b, backend="auto")  # no backend supports a bias, so no trial runs
    assert (len(tried), len(CALLS)) == (1, 4)
