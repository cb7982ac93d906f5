"""A GPU's branch of the sweeps on CPU tensors, and the memory that a call holds at its peak."""

import contextlib

import torch
from torch.profiler import ProfilerActivity, profile

from tiewise.ops import devices


def wide_product(a, b, out):
    """What `torch.mm(a, b, out_dtype=…, out=…)` of a GPU writes: the fp32 sums of narrow products."""
    torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


@contextlib.contextmanager
def gpu_branch(patch, *, wide_products=True):
    """Within this context CPU tensors take the branch of a GPU, with or without products that keep their sums."""
    with patch.context() as local:
        local.setattr(devices, "is_cpu", lambda x: False)
        local.setattr(devices, "has_wide_products", lambda x: wide_products)
        local.setattr(devices, "wide_product", wide_product)
        yield


def peak_bytes(call):
    """Bytes that `call` holds at its peak beyond what there was before, temporaries of torch's kernels among them."""
    call()  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
