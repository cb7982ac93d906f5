"""Every method of a tensor, with every argument that torch gives it, does on deferred logits what it does on logits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiewise.boundary.deferred import Counts, Deferred
from tiewise.core.errors import UnsupportedError

B, T, E, V = 2, 5, 4, 7
VECTOR = torch.linspace(-1, 1, V)


@pytest.fixture
def pair():
    """(deferred logits, the same logits computed), with a head bias."""
    torch.manual_seed(0)
    hidden, table, bias = torch.randn(B, T, E), torch.randn(V, E), torch.randn(V)
    return Deferred(hidden, table, bias, Counts()), F.linear(hidden, table, bias)


OTHER = torch.ones(3, dtype=torch.float64)
OUT = torch.zeros(B, T, V)
BINARY = [((2,), {}), ((2.5,), {}), ((True,), {}), ((2j,), {}), ((VECTOR,), {}), ((torch.ones(T, V),), {}), ((), {})]
BINARY += [(("x",), {}), ((torch.ones(5),), {}), ((np.float64(2),), {}), ((), {"other": 2.0, "out": OUT})]
ROUNDED = [((3,), {"rounding_mode": mode}) for mode in (None, "floor", "trunc", "odd")]
SHAPES = [
    ((-1, V),),
    ((B * T, -1),),
    ((T, B, V),),
    (([B, T, V],),),
    ((B * V, T),),
    ((torch.Size([B * T, V]),),),
    ((7, -1, -1),),
]
SHAPES = [(*shape, {}) for shape in SHAPES] + [((4, V), {}), ((), {})]
INDICES = [
    0,
    -1,
    9,
    True,
    None,
    ...,
    (),
    [0, 1],
    [[0], [1]],
    "x",
    slice(None, None, 2),
    range(2),
    np.int64(1),
    (..., 0),
]
INDICES += [np.array([1, 0]), torch.tensor(1), (..., None), (0, 0), (0, 0, 0), (0, 0, 0, 0), (torch.tensor(True), ...)]
INDICES += [(None, ..., slice(2)), (slice(None), [0, 2]), ([0, 1], slice(None), [1, 2]), (..., slice(-3, None))]
INDICES += [(torch.tensor([0, 1]), None, 0), (torch.ones(B, T, dtype=torch.bool), slice(1, 4))]
# name of a method that is written out in Deferred -> arguments of calls, among them every parameter that torch has
CALLS = {
    "to": [
        ((torch.float32,), {}),
        ((torch.float64, True), {}),
        ((torch.int32,), {}),
        (("cpu",), {}),
        (("meta",), {}),
        ((torch.float16, False, True), {}),
        (("cpu", torch.float32, False, True), {}),
        ((OTHER,), {}),
        ((OTHER, False, True), {}),
        ((), {}),
        ((), {"other": OTHER}),
        ((), {"device": "cpu", "dtype": torch.float32, "non_blocking": True, "copy": True}),
        ((), {"dtype": torch.float32, "memory_format": torch.preserve_format}),
        ((torch.float32,), {"memory_format": torch.channels_last}),
        (("nowhere",), {}),
    ],
    "float": [((), {}), ((), {"memory_format": torch.preserve_format}), ((), {"memory_format": torch.channels_last})],
    "contiguous": [((), {}), ((), {"memory_format": torch.contiguous_format}), ((torch.channels_last,), {})],
    "view": [*SHAPES, ((torch.int32,), {}), ((), {"size": (-1, V)}), ((), {"dtype": torch.int32})],
    "reshape": [*SHAPES, ((), {"shape": (-1, V)}), ((), {"shape": (-1,)})],
    "flatten": [((), {}), ((1,), {}), ((0, 1), {}), ((0, -2), {}), ((), {"start_dim": 0, "end_dim": 1}), ((0, 3), {})],
    "size": [((), {}), ((1,), {}), ((-1,), {}), ((), {"dim": 2}), ((5,), {})],
    "tanh": [((), {}), ((2,), {}), ((), {"out": OUT})],
    "dim": [((), {})],
    "numel": [((), {})],
    "mul": BINARY,
    "multiply": BINARY,
    "add": [*BINARY, ((VECTOR,), {"alpha": 2}), ((1,), {"alpha": 3})],
    "div": [*BINARY, *ROUNDED],
    "divide": [*BINARY, *ROUNDED],
    "true_divide": BINARY,
    **dict.fromkeys(("__mul__", "__rmul__", "__add__", "__radd__", "__truediv__"), BINARY),
    "__getitem__": [((index,), {}) for index in INDICES],
    "__len__": [((), {})],
    "__repr__": [],
}


def _outcome(z, name, args, kwargs, function=None):
    """(kind, value) of a call: a tensor with its type, a plain value, or the class of what it raises."""
    try:
        found = getattr(z, name)(*args, **kwargs) if function is None else function(z, *args, **kwargs)
    except Exception as error:
        return type(error), None
    found = found.real() if isinstance(found, Deferred) else found
    return (found.dtype, found.shape, found.device) if torch.is_tensor(found) else type(found), found


def _same(deferred, real, name, args=(), kwargs=None, function=None):
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
def test_every_argument_is_honoured_or_computes_the_logits(pair, name):
    deferred, real = pair
    for args, kwargs in CALLS[name]:
        _same(deferred, real, name, args, kwargs)
        if hasattr(torch, name) and not args[1:]:
            _same(deferred, real, name, args, kwargs, getattr(torch, name))


def test_the_calls_name_every_method_of_ours_and_every_parameter_that_torch_gives_it():
    ours = {name for name in dir(torch.Tensor) if callable(getattr(Deferred, name, None)) and name not in dir(object)}
    written = {name for name in ours if getattr(Deferred, name).__qualname__.split(".")[-1] == name}
    assert written - {"__torch_function__", "real"} <= CALLS.keys()
    for name, calls in CALLS.items():
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        methods = [
            s.arguments
            for s in schemas
            if s.arguments and s.arguments[0].name == "self" and str(s.arguments[0].type) == "Tensor"
        ]
        parameters = {argument.name for arguments in methods for argument in arguments[1:]}
        given = {key for _, kwargs in calls for key in kwargs}
        assert parameters <= given | {"layout", "pin_memory"}, name  # those two are TorchScript's


_METHODS = [n for n in dir(torch.Tensor) if callable(getattr(torch.Tensor, n)) and not n.startswith("_")]
_OPERATORS = [
    n for n in dir(torch.Tensor) if n.startswith("__") and n not in dir(object) and callable(getattr(torch.Tensor, n))
]


@pytest.mark.filterwarnings("ignore")
def test_methods_that_we_do_not_know_are_those_of_the_logits(pair):
    deferred, real = pair
    unlike = {
        "real",
        "register_hook",
        "retain_grad",
        "data_ptr",
        "const_data_ptr",
        "to_mkldnn",
        "new",
        "resize",
        "resize_as",
    }
    for name in _METHODS:
        if name.endswith("_"):
            with pytest.raises(UnsupportedError, match="in place"):
                getattr(deferred, name)()
        elif name not in unlike:
            _same(deferred, real, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operand", [(), (2.0,), (3,), (VECTOR,), ("x",)], ids=str)
def test_operators_are_those_of_the_logits(pair, operand):
    deferred, real = pair
    own = {
        "__torch_function__",
        "__torch_dispatch__",
        "__setstate__",
        "__dlpack__",
        "__deepcopy__",
        "__delitem__",
        "__setitem__",
    }
    comparisons = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
    for name in {*_OPERATORS, *comparisons} - own:
        if name.startswith("__i") and f"__{name[3:]}" in _OPERATORS:
            with pytest.raises(UnsupportedError, match="in place"):
                getattr(deferred, name)(*operand)
        else:
            _same(deferred, real, name, operand)
