"""The memory that a call holds at its peak."""

from torch.profiler import ProfilerActivity, profile


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
