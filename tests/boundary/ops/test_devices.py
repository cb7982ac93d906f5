"""The autocast dtype of a tensor, in eager mode and under `torch.compile`."""

from contextlib import nullcontext

import pytest
import torch

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy


@pytest.fixture
def untraceable_query(monkeypatch):
    """Make `is_autocast_available` break a compiled graph, as in torch 2.11."""
    is_available = torch.amp.is_autocast_available

    def breaks_the_graph(device):
        torch._dynamo.graph_break()
        return is_available(device)

    monkeypatch.setattr(torch.amp, "is_autocast_available", breaks_the_graph)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CASES = {
    "off": ("cpu", nullcontext(), None),
    "disabled": ("cpu", torch.autocast("cpu", enabled=False), None),
    "bf16": ("cpu", torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
    "fp16": ("cpu", torch.autocast("cpu", torch.float16), torch.float16),
    "no autocast on meta": ("meta", torch.autocast("cpu", torch.bfloat16), None),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("device", "region", "expected"), CASES.values(), ids=CASES)
def test_autocast_type_is_that_of_the_region_in_one_compiled_graph(
    device, region, expected, compiled, untraceable_query
):
    def zero_of_the_type(x):
        return torch.zeros((), dtype=devices.autocast_type(x) or x.dtype)

    step = torch.compile(zero_of_the_type, fullgraph=True, backend="eager") if compiled else zero_of_the_type
    x = torch.ones(3, dtype=torch.float64, device=device)
    with region:
        assert step(x).dtype == (expected or torch.float64)


@pytest.mark.parametrize("has_autocast", [False, True])
def test_loss_compiles_in_one_graph_if_dynamo_cannot_trace_the_autocast_query(has_autocast, untraceable_query):
    def step(h, w, t):
        return linear_cross_entropy(h, w, t)

    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(rows, 4, generator=generator, requires_grad=True) for rows in (6, 11))
    t = torch.arange(6)
    results = []
    for way in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            loss = way(h, w, t)
        results.append((loss, *torch.autograd.grad(loss, (h, w))))
    torch.testing.assert_close(*results, rtol=0, atol=0)
