"""Which backends a call can take, the reasons against the others, and errors that break a GPU."""

import re
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.test_cross_entropy import assert_near, error, gradients

import tiewise
from tiewise.boundary.ops import compiled_rows, devices, gpu_kernels
from tiewise.boundary.ops.backend_table import DESCRIBED, KERNELS
from tiewise.boundary.ops.broken_device import BrokenDevice
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.core import backends
from tiewise.core.backends import BACKENDS, DESCRIBED_BACKENDS, PACKAGE_BACKENDS
from tiewise.core.errors import UnsupportedError

SM90 = "liger-sm90"


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Let CPU tensors take the branch of a GPU; the dictionary has its compute capability."""
    state = {"capability": (9, 0)}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_kernels, "TRIALS", gpu_kernels.Trials())
    monkeypatch.setattr(devices, "compute_capability", lambda x: state["capability"])
    with gpu_branch():
        yield state


def draw(n=70, v=256, width=12):
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(rows, width, generator=generator).mul_(0.5).bfloat16() for rows in (n, v))
    t = torch.randint(0, v, (n,), generator=generator)
    t[::5] = -100
    return h, w, t


@pytest.fixture
def hopper_kernel(card, monkeypatch):
    """Install a module with the checks and the rounding of Liger's kernel for Hopper; return its shapes."""
    shapes = []

    def loss(_input, weight, target, ignore_index=-100, reduction="mean"):
        assert reduction in ("mean", "sum")
        assert {_input.dtype, weight.dtype} == {torch.bfloat16}
        assert len(_input) % 128 == 0
        assert len(weight) % 256 == 0
        shapes.append((len(_input), len(weight)))
        logits = (_input @ weight.T).float()
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    path = KERNELS[SM90].entry_point.split(":")[0]
    module = ModuleType(path)
    module.liger_fused_linear_cross_entropy_sm90 = loss
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, path, module)
    gpu_kernels.TRIALS.versions["liger-kernel"] = "0.8.5"
    return shapes


def test_names_of_backends_are_those_of_the_tables():
    assert set(PACKAGE_BACKENDS) == KERNELS.keys()
    assert set(DESCRIBED_BACKENDS) == DESCRIBED.keys()
    assert not DESCRIBED.keys() & set(BACKENDS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kernel_for_hopper_gets_padded_tokens_and_equals_fp64(reduction, hopper_kernel):
    h, w, t = draw()
    up = torch.tensor(0.7)
    truth, true_grads = gradients(oracle, (h.double(), w.double(), None), t, upstream=up.double(), reduction=reduction)
    got, grads = gradients(
        lambda *given, **kw: linear_cross_entropy(*given, backend=SM90, **kw),
        (h, w, None),
        t,
        upstream=up,
        reduction=reduction,
    )
    assert error(got, truth) < 1e-3
    assert_near(grads, true_grads, 1e-2)
    assert grads[0].shape == h.shape
    assert set(hopper_kernel) == {(128, 256)}


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"reduction": "none"}, "has no reduction='none'"),
        ({"softcap": 30.0, "z_loss": 0.1}, "has no softcap, no z_loss"),
        ({"logits": "fp32"}, "has no logits"),
    ],
)
def test_kernel_for_hopper_refuses_what_it_lacks(kw, says, hopper_kernel):
    h, w, t = draw()
    with pytest.raises(UnsupportedError, match=re.escape(f"backend='liger-sm90' {says}; take backend='tiewise'")):
        linear_cross_entropy(h, w, t, backend=SM90, **kw)
    assert not hopper_kernel


def test_kernel_for_hopper_refuses_other_shapes_types_and_cards(hopper_kernel, card, monkeypatch):
    h, w, t = draw()

    def reason(h, w):
        return tiewise.boundary.explain_backends(h, w, t)[SM90]

    assert reason(h, w[:200]) == "needs a vocabulary that 256 divides, and this one has 200 words"
    assert reason(h.float(), w.float()) == "has no products in float32"
    card["capability"] = (8, 0)
    assert reason(h, w) == "needs an Nvidia GPU of compute capability 9.0"
    card["capability"] = (9, 0)
    monkeypatch.setattr(backends, "MINIMUM_ROWS", 1)
    monkeypatch.setitem(backends.CHUNK_ELEMENTS, "cuda", 69 * 128)
    assert reason(h, w) == "stores all logits, here 0.0 GB, more than a chunk of the loss may take"
    monkeypatch.setitem(backends.CHUNK_ELEMENTS, "cuda", 70 * 128)
    assert "supports this call" in reason(h, w)
    assert not hopper_kernel


def test_missing_module_of_a_kernel_names_the_extra_to_install(card, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    h, w, t = draw()
    says = r"'liger-sm90' cannot be imported \(.*\); pip install 'liger-kernel\[cutedsl\]==0.8.5'"
    with pytest.raises(UnsupportedError, match=says):
        linear_cross_entropy(h, w, t, backend=SM90)


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        (
            "quack",
            "0.6.5",
            r"kernels for Hopper and Blackwell .* \(quack-kernels 0.6.5 is installed",
        ),
        ("quack", "", r"kernels for Hopper and Blackwell .* \(quack-kernels is not installed"),
        (
            "liger-sm100",
            "0.8.5",
            r"kernels for Blackwell have never run with tiewise \(liger-kernel 0.8.5",
        ),
    ],
)
def test_described_backends_are_refused_with_the_reason(name, version, says, card):
    gpu_kernels.TRIALS.versions[DESCRIBED[name].package] = version
    h, w, t = draw()
    with pytest.raises(UnsupportedError, match=f"'{name}' is not used: its {says}.*; take backend='tiewise'"):
        linear_cross_entropy(h, w, t, backend=name)
    assert re.match(f"is not used: its {says}", tiewise.boundary.explain_backends(h, w, t)[name])


def test_variable_that_names_a_described_backend_is_ignored_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TIEWISE_LOSS", "quack")
    h, w, t = draw()
    assert linear_cross_entropy(h, w, t).isfinite()
    with pytest.raises(UnsupportedError, match="'quack' is not used"):
        linear_cross_entropy(h, w, t, backend="quack")


def test_explanation_has_times_and_reasons_after_a_trial(hopper_kernel, monkeypatch):
    monkeypatch.setattr(compiled_rows, "COMPILER", "no such compiler")
    compiled_rows.compiled_rows.cache_clear()
    h, w, t = draw()
    before = tiewise.boundary.explain_backends(h, w, t)
    assert before["tiewise"].startswith("supports this call")
    assert linear_cross_entropy(h, w, t, backend="auto").isfinite()
    states = tiewise.boundary.explain_backends(h, w, t)
    assert re.fullmatch(r"[\d.e+]+ ms", states["tiewise"])
    assert re.fullmatch(r"[\d.e+]+ ms", states[SM90])
    assert "no such compiler" in states["compile"]
    assert "cannot be imported" in states["cce"]
    gpu_kernels.TRIALS.results.clear()  # a new process reads reasons from the cache too
    linear_cross_entropy(h, w, t, backend="auto")
    assert tiewise.boundary.explain_backends(h, w, t) == states


# errors that break a GPU


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def breaking(hopper_kernel, monkeypatch):
    """Let Liger's kernel break the context of the GPU, as an illegal access does; return its settings."""
    settings = {"breaks": True}
    module = sys.modules[KERNELS[SM90].entry_point.split(":")[0]]

    def loss(*_, **__):
        if settings["breaks"]:
            monkeypatch.setattr(devices, "wait_for", raises(RuntimeError("CUDA error: an illegal memory access")))
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(module, "liger_fused_linear_cross_entropy_sm90", loss)
    monkeypatch.setattr(compiled_rows, "missing_support", lambda *_: "is not tried here")
    return settings


@pytest.mark.parametrize("backend", [SM90, "auto"])
def test_backend_that_breaks_the_context_is_named(backend, breaking):
    h, w, t = draw()
    says = r"the trial of backend='liger-sm90' broke the context of cpu \(.*illegal.*\); start anew .*='tiewise'"
    with pytest.raises(BrokenDevice, match=says):
        linear_cross_entropy(h, w, t, backend=backend)
    # nothing else runs in this process, and the next trial does not blame another backend
    with pytest.raises(BrokenDevice, match="an operation before the trial of backends broke the context of cpu"):
        linear_cross_entropy(h, w, t, backend=backend)


def test_error_that_leaves_the_context_intact_is_a_reason(breaking):
    breaking["breaks"] = False
    h, w, t = draw()
    assert error(linear_cross_entropy(h, w, t, backend="auto"), oracle(h, w, t)) < 1e-3
    assert "RuntimeError: CUDA error" in tiewise.boundary.explain_backends(h, w, t)[SM90]
    with pytest.raises(RuntimeError, match="CUDA error"):
        linear_cross_entropy(h, w, t, backend=SM90)


def test_first_use_of_a_backend_is_not_recorded_in_a_graph(hopper_kernel, monkeypatch):
    h, w, t = draw()
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    with pytest.raises(UnsupportedError, match="no CUDA graph can record; compute the loss once before"):
        linear_cross_entropy(h, w, t, backend=SM90)
    monkeypatch.setattr(devices, "is_capturing", lambda x: False)
    linear_cross_entropy(h, w, t, backend=SM90)
    monkeypatch.setattr(devices, "is_capturing", lambda x: True)
    assert linear_cross_entropy(h, w, t, backend=SM90).isfinite()
