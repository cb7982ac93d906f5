"""Deferred logits compared with computed logits: shapes, recorded steps, methods, operators, losses and refusals."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiewise.boundary.deferred import _RECORDERS, Deferred
from tiewise.boundary.lazy_logits import LazyLogits
from tiewise.boundary.logit_answers import ANSWERS
from tiewise.boundary.recorded_logits import Counts, RecordedLogits
from tiewise.core.errors import UnsupportedError

B, T, E, V = 2, 5, 4, 7


@pytest.fixture
def pair():
    """Return (deferred logits, the same logits computed, counts), with a head bias."""
    torch.manual_seed(0)
    hidden, table, bias = torch.randn(B, T, E), torch.randn(V, E), torch.randn(V)
    counts = Counts()
    return Deferred(hidden, table, bias, counts), F.linear(hidden, table, bias), counts


VECTOR = torch.linspace(-1, 1, V)
STEPS = {
    "scale": lambda z: z * 0.3,
    "scaled from the left": lambda z: 0.3 * z,
    "division": lambda z: z / 3,
    "division by function": lambda z: torch.div(z, 3),
    "method": lambda z: z.mul(2.0).div(5.0),
    "soft-cap": lambda z: torch.tanh(z / 0.5) * 0.5,
    "soft-cap by method and functional": lambda z: 2 * F.tanh(z / 2),
    "scale, soft-cap, scale": lambda z: (z * 0.7 / 3).tanh() * 3 * 0.5,
    "bias": lambda z: z + VECTOR,
    "bias [1, V] from the left": lambda z: VECTOR[None] + z,
    "bias, scale, cap": lambda z: torch.tanh((z * 0.3 + VECTOR) / 4) * 4,
    "cast": lambda z: z.float().contiguous().to(torch.float32),
    "last positions": lambda z: z[:, -2:],
    "shifted": lambda z: z[..., :-1, :].contiguous(),
    "one position": lambda z: z[:, -1],
    "mask of positions": lambda z: z[torch.arange(B * T).reshape(B, T) % 2 == 0],
    "chosen rows": lambda z: z[torch.tensor([1, 0])],
    "view": lambda z: z.view(-1, V),
    "view by list": lambda z: z.reshape([B * T, -1]),
    "flatten": lambda z: z.flatten(0, 1),
    "sliced vocabulary": lambda z: z[..., :5],
    "sliced and scaled": lambda z: z[..., 1:4] * 2,
}


@pytest.mark.parametrize("name", STEPS)
def test_deferred_logits_record_steps_and_fuse_the_cross_entropy(pair, name):
    deferred, real, counts = pair
    got, wanted = STEPS[name](deferred), STEPS[name](real)
    assert isinstance(got, Deferred)
    assert (got.shape, got.dtype, got.ndim) == (wanted.shape, wanted.dtype, wanted.ndim)
    rows = wanted.reshape(-1, wanted.shape[-1])
    targets = torch.randint(0, rows.shape[1], (len(rows),))
    targets[0] = -100
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction, "label_smoothing": 0.1}
        loss = F.cross_entropy(got.view(-1, got.shape[-1]), targets, **how)
        torch.testing.assert_close(loss, F.cross_entropy(rows, targets, **how), rtol=1e-5, atol=1e-6)
    assert (counts.fused, counts.materialised) == (3, 0)
    torch.testing.assert_close(got.real(), wanted, rtol=1e-6, atol=1e-6)


COMPUTES = {  # besides the calls in `CALLS`
    "quotient": lambda z: torch.ones(V) / z,
    "product of logits": lambda z: z * z,
    "in a list": lambda z: torch.cat([z, z], 1),
    "cap of a cap": lambda z: torch.tanh(torch.tanh(z)),
    "bias behind a cap": lambda z: torch.tanh(z) + VECTOR,
    "negative factor behind a cap": lambda z: torch.tanh(z) * -2,
    "tensor factor": lambda z: z * torch.tensor(2.0),
    "bias, then fewer tokens": lambda z: (z * 2 + VECTOR)[..., :3],
    "division by zero": lambda z: z / 0,
    "infinite factor": lambda z: z * float("inf"),
    "factor of NumPy's from the left": lambda z: np.float32(2) * z,
    "contains": lambda z: torch.tensor([5.0 in z, z[0, 0, 0].item() in z]),
    "wider bias": lambda z: z + VECTOR.double(),
    "pickled": lambda z: _pickle_and_load(z),
    "copied": lambda z: copy.copy(z),
    "added to a tensor in place": lambda z: torch.ones(B, T, V).__iadd__(z),
}


def _pickle_and_load(z):
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", COMPUTES)
def test_unrecorded_operations_compute_the_logits(pair, name):
    deferred, real, counts = pair
    torch.testing.assert_close(COMPUTES[name](deferred), COMPUTES[name](real), rtol=0, atol=0, equal_nan=True)
    assert counts.materialised >= 1
    assert counts.operations


LOST = {
    "method": lambda z: z.div_(VECTOR),
    "function": lambda z: torch.sigmoid_(z),
    "augmented": lambda z: z.__imul__(VECTOR),
    "product of logits": lambda z: z.mul_(z),
    "item": lambda z: z.__setitem__(0, 0.0),
    "out": lambda z: torch.exp(torch.ones(1), out=z),
    "masked": lambda z: z.masked_fill_(torch.ones(V, dtype=torch.bool), 0.0),
    "outs": lambda z: torch.max(torch.ones(B, T, V), 0, out=(z, torch.ones(T, V, dtype=torch.long))),
    "flag": lambda z: F.relu(z, inplace=True),
    "floor": lambda z: z.__ifloordiv__(2),
    "hook on a gradient that is never made": lambda z: z.register_hook("hook"),
    "gradient that is never made": lambda z: z.retain_grad(),
}


@pytest.mark.parametrize("name", LOST)
def test_deferred_logits_refuse_changes_that_would_be_lost(pair, name):
    with pytest.raises(UnsupportedError, match="the gradient of logits" if "grad" in name else "in place"):
        LOST[name](pair[0])


def test_logits_keep_their_gradient_after_a_read_without_gradients():
    hidden, table, bias = torch.randn(T, E), torch.randn(V, E), torch.zeros(V, requires_grad=True)
    deferred = Deferred(hidden, table, bias, Counts())
    assert deferred.requires_grad
    with torch.no_grad():
        deferred.argmax(-1)
        assert not deferred[1:].real().requires_grad
    F.log_softmax(deferred, -1)[:, 0].sum().backward()
    assert bias.grad.norm() > 0
    with torch.no_grad():
        forward_without = Deferred(hidden, table, bias, Counts())
    assert not forward_without.real().requires_grad
    assert not F.cross_entropy(forward_without, torch.zeros(T, dtype=torch.long)).requires_grad


def test_deferred_logits_use_the_autocast_of_the_head(pair):
    deferred, real, _ = pair
    with torch.autocast("cpu", torch.bfloat16):
        inside = Deferred(deferred.hidden, deferred.table, deferred.bias, Counts())
        wanted = F.linear(deferred.hidden, deferred.table, deferred.bias)
        assert torch.equal(deferred.real(), real)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside.real(), wanted)
    assert (inside + VECTOR).dtype == (inside + VECTOR).real().dtype == torch.float32


def test_probability_targets_and_higher_ranks_use_the_computed_logits(pair):
    deferred, real, counts = pair
    targets = torch.softmax(torch.randn(B * T, V), -1)
    assert torch.equal(F.cross_entropy(deferred.view(-1, V), targets), F.cross_entropy(real.reshape(-1, V), targets))
    assert counts.fused == 0


def test_lazy_logits_compute_themselves_once_and_only_when_read(pair):
    deferred, real, counts = pair
    lazy = LazyLogits(deferred)
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device) == (real.shape, real.dtype, real.device)
    assert (lazy.size(-1), lazy.dim()) == (V, 3)
    targets = torch.randint(0, V, (B * T,))
    assert counts.materialised == 0
    assert torch.equal(lazy.detach(), real)
    assert torch.equal(lazy + 1, real + 1)
    assert torch.equal(torch.stack([lazy, real])[0], real)
    assert counts.materialised == 1
    lazy.mul_(2)
    assert torch.equal(lazy.clone(), 2 * real)
    assert torch.allclose(F.cross_entropy(lazy.view(-1, V), targets), F.cross_entropy(2 * real.view(-1, V), targets))


def call(*args, **kwargs):
    return args, kwargs


OTHER, OUT = torch.ones(3, dtype=torch.float64), torch.zeros(B, T, V)
BINARY = [call(x) for x in (2, 2.5, True, 2j, VECTOR, torch.ones(T, V), "x", torch.ones(5), np.float64(2))]
BINARY += [call(), call(other=2.0, out=OUT)]
DIVISION = [*BINARY, *(call(3, rounding_mode=mode) for mode in (None, "floor", "trunc", "odd"))]
SHAPES = [(-1, V), (B * T, -1), (T, B, V), ([B, T, V],), (B * V, T), (torch.Size([B * T, V]),), (7, -1, -1), (4, V), ()]
SHAPES = [call(*shape) for shape in SHAPES]
INDICES = [0, -1, 9, True, None, ..., (), [0, 1], [[0], [1]], "x", slice(None, None, 2), range(2), np.int64(1)]
INDICES += [np.array([1, 0]), torch.tensor(1), (0, 0), (0, 0, 0), (0, 0, 0, 0), (torch.tensor(True), ...)]
INDICES += [(..., None), (..., 0), (..., slice(None, None, 2)), torch.ones(B, T, V, dtype=torch.uint8)]
INDICES += [(None, ..., slice(2)), (slice(None), [0, 2]), ([0, 1], slice(None), [1, 2]), (..., slice(-3, None))]
INDICES += [(torch.tensor([0, 1]), None, 0), (torch.ones(B, T, dtype=torch.bool), slice(1, 4))]
TOKENS = torch.arange(B * T).reshape(B, T, 1) % V
GATHERED = [TOKENS, TOKENS[:1], TOKENS + 1, TOKENS[..., 0], TOKENS.int(), TOKENS.expand(B, T, 3)]
GATHERED = [*(call(-1, index) for index in GATHERED), call(2, TOKENS), call(1, TOKENS % T), call()]
GATHERED += [call(-1, TOKENS, out=OUT), call(dim=-1, index=TOKENS, sparse_grad=False)]
REDUCED = [*(call(dim) for dim in (-1, 1, [0, 2], 9, None, True, (-1,), "x")), call(), call(-1, out=OUT)]
REDUCED += [call(dim=2, keepdim=True), call(-1, True)]
TYPED = [*REDUCED, call(-1, dtype=torch.float64)]
SOFTMAX = [*(call(dim) for dim in (-1, 2, 0, 9)), call(-1, torch.float64), call(-1, torch.float32), call()]
SOFTMAX += [call(dim=-1, dtype=torch.float32), call(dim=2, dtype=torch.float64), call(-1, out=OUT)]
PIECES = [call(2), call(2, 1), call([1, 4], 1), call(3, -1), call([1, 1], 1), call(), call(2, 9)]
PIECES += [call(split_size=1, dim=0), call(split_sizes=[1, 1])]
ALONE = [call()]
NEGATED = [call(), call(1), call(out=OUT)]
# name of a method that Deferred defines -> arguments of calls, which cover every parameter of torch's method
CALLS = {
    "to": [
        *(call(kind) for kind in (torch.float32, torch.int32, torch.complex64, "cpu", "meta", OTHER, "nowhere")),
        *(call(*given) for given in ((), (torch.float64, True), (torch.float16, False, True), (OTHER, False, True))),
        call("cpu", torch.float32, False, True),
        call(other=OTHER),
        call(device="cpu", dtype=torch.float32, non_blocking=True, copy=True),
        call(dtype=torch.float32, memory_format=torch.preserve_format),
        call(torch.float32, memory_format=torch.channels_last),
    ],
    "float": [call(), call(memory_format=torch.preserve_format), call(memory_format=torch.channels_last)],
    "contiguous": [call(), call(memory_format=torch.contiguous_format), call(torch.channels_last)],
    "view": [*SHAPES, call(torch.int32), call(size=(-1, V)), call(dtype=torch.int32)],
    "reshape": [*SHAPES, call(shape=(-1, V)), call(shape=(-1,))],
    "flatten": [call(), call(1), call(0, 1), call(0, -2), call(start_dim=0, end_dim=1), call(0, 3)],
    "size": [call(), call(1), call(-1), call(dim=2), call(5)],
    "tanh": [call(), call(2), call(out=OUT)],
    "add": [*BINARY, call(VECTOR, alpha=2), call(1, alpha=3)],
    **dict.fromkeys(("mul", "multiply", "true_divide"), BINARY),
    **dict.fromkeys(("__mul__", "__rmul__", "__add__", "__radd__", "__truediv__"), BINARY),
    **dict.fromkeys(("div", "divide"), DIVISION),
    "__getitem__": [call(index) for index in INDICES],
    "gather": GATHERED,
    "take_along_dim": [call(TOKENS, -1), call(TOKENS, -1, out=OUT), call(), call(indices=TOKENS, dim=2)],
    **dict.fromkeys(("logsumexp", "argmax"), REDUCED),
    **dict.fromkeys(("sum", "mean"), TYPED),
    **dict.fromkeys(("log_softmax", "softmax"), SOFTMAX),
    "exp": [call(), call(1), call(out=OUT)],
    **dict.fromkeys(("neg", "negative", "__neg__"), NEGATED),
    "detach": [call(), call(1)],
    "unbind": [call(), call(1), call(-1), call(9), call(dim=-3)],
    "split": PIECES,
    "chunk": [call(2), call(2, 1), call(2, -1), call(0), call(chunks=3, dim=1)],
    **dict.fromkeys(("dim", "numel", "__iter__", "__len__"), ALONE),
    "__repr__": [],
}


def _outcome(z, name, args, kwargs, function=None):
    """Return (kind, value) of a call. The kind describes a tensor, a plain value or an error."""
    try:
        found = getattr(z, name)(*args, **kwargs) if function is None else function(z, *args, **kwargs)
    except Exception as error:
        return type(error), None
    found = found.real() if isinstance(found, Deferred) else found
    if name in ("split", "chunk", "unbind", "__iter__"):
        found = torch.cat([(x.real() if isinstance(x, Deferred) else x).reshape(-1) for x in found])
    return (found.dtype, found.shape, found.device) if torch.is_tensor(found) else type(found), found


def _assert_same(deferred, real, name, args=(), kwargs=None, function=None):
    torch.manual_seed(0)
    got = _outcome(deferred, name, args, kwargs or {}, function)
    torch.manual_seed(0)
    wanted = _outcome(real.clone(), name, args, kwargs or {}, function)
    assert got[0] == wanted[0], (name, args, kwargs)
    if torch.is_tensor(wanted[1]) and not wanted[1].is_meta:
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    elif isinstance(wanted[1], int | float | str | torch.Size):
        assert got[1] == wanted[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_deferred_methods_honour_every_argument_or_compute_the_logits(pair, name):
    deferred, real, _ = pair
    for args, kwargs in CALLS[name]:
        _assert_same(deferred, real, name, args, kwargs)
        if hasattr(torch, name) and not args[1:]:
            _assert_same(deferred, real, name, args, kwargs, getattr(torch, name))


def test_calls_cover_every_deferred_method_and_every_parameter_of_torch():
    written = {
        name
        for cls in (Deferred, RecordedLogits)
        for name in dir(torch.Tensor)
        if getattr(vars(cls).get(name), "__qualname__", "") == f"{cls.__name__}.{name}"
    }
    assert written >= {"size", "numel"}
    own = {"__torch_function__", "__dict__", "__weakref__", "__init__", "real"}
    own |= {
        name for name in _RECORDERS if name.endswith("_") and name not in CALLS
    }  # test_deferred_statistics.py tests those in place
    assert (written | _RECORDERS.keys() | ANSWERS.keys()) - own - {"cross_entropy"} <= CALLS.keys()
    for name, calls in CALLS.items():
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        taken = (schema.arguments for schema in schemas if schema.arguments)
        methods = [given for given in taken if (given[0].name, str(given[0].type)) == ("self", "Tensor")]
        parameters = {argument.name for arguments in methods for argument in arguments[1:]}
        given = {key for _, kwargs in calls for key in kwargs}
        assert parameters <= given | {"layout", "pin_memory"}, name  # these two exist only in TorchScript


_METHODS = [n for n in dir(torch.Tensor) if callable(getattr(torch.Tensor, n)) and not n.startswith("_")]
_OPERATORS = [n for n in dir(torch.Tensor) if n.startswith("__") and n not in dir(object)]
_OPERATORS = [n for n in _OPERATORS if callable(getattr(torch.Tensor, n))]


@pytest.mark.filterwarnings("ignore")
def test_unrecorded_methods_return_what_the_computed_logits_return(pair):
    deferred, real, _ = pair
    unlike = {"real", "register_hook", "retain_grad", "data_ptr", "const_data_ptr", "to_mkldnn", "new"}
    unlike |= {"resize", "resize_as"}
    for name in _METHODS:
        if name.endswith("_"):
            with pytest.raises(UnsupportedError, match="in place"):
                getattr(deferred, name)()
        elif name not in unlike:
            _assert_same(deferred, real, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operand", [(), (2.0,), (3,), (VECTOR,), ("x",)], ids=str)
def test_operators_return_what_the_computed_logits_return(pair, operand):
    deferred, real, _ = pair
    own = {"__torch_function__", "__torch_dispatch__", "__setstate__", "__dlpack__", "__deepcopy__"}
    own |= {"__delitem__", "__setitem__"}
    own |= {"__imul__", "__itruediv__", "__idiv__"}  # scales in place are recorded, if no logits were computed before
    comparisons = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    for name in sorted({*_OPERATORS, *comparisons} - own):
        if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS:
            with pytest.raises(UnsupportedError, match="in place"):
                getattr(deferred, name)(*operand)
        else:
            _assert_same(deferred, real, name, operand)


@pytest.mark.parametrize("step", [lambda z: z / 0.7, lambda z: 7 * torch.tanh(z / 7)], ids=["temperature", "cap"])
def test_scaling_recorded_logits_does_not_round_a_narrow_bias(step):
    hidden, table, bias = torch.zeros(T, E).bfloat16(), torch.zeros(V, E).bfloat16(), torch.randn(V).bfloat16()
    deferred, targets = step(Deferred(hidden, table, bias, Counts())), torch.arange(T) % V
    truth = F.cross_entropy(step(bias.double().expand(T, V)), targets, reduction="none")
    got = F.cross_entropy(deferred.float(), targets, reduction="none")
    assert type(deferred) is Deferred
    assert (got - truth).abs().max() < 2e-6
