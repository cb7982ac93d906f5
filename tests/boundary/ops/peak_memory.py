"""Peak memory of a call, by torch's profiler."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call):
    """Return the peak of bytes that `call` allocates, with temporaries of torch's kernels."""
    call()  # warm up, so that one-time allocations are not counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
