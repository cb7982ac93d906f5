"""Errors that end all work on a GPU in this process, named by their cause.

An illegal access or a failed assertion in a kernel breaks the context of its GPU: every later call raises the same
error, also of correct code. Its report may come late, since kernels run asynchronously. So a trial first waits for
the operations before it, whose errors are not those of a backend, and after an error asks whether the GPU still works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiewise.boundary.ops import devices
from tiewise.core.errors import RunError, one_line_message

VARIABLE = "TIEWISE_LOSS"


class BrokenDevice(RunError):
    """Error that left a GPU unusable for this process."""


def require_working(device: torch.device) -> None:
    """Wait for a device, and raise BrokenDevice if an earlier operation broke it."""
    try:
        devices.wait_for(device)
    except RuntimeError as error:
        what = f"an operation before the trial of backends broke the context of {device} ({one_line_message(error)})"
        fix = "no backend is the cause: start anew with CUDA_LAUNCH_BLOCKING=1, which names the operation"
        raise BrokenDevice(what, fix) from error


@contextmanager
def name_broken_device(name: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Raise BrokenDevice if an error in this block broke the device.

    Other errors are raised as they are. The block runs the backend `name`, and `remedy` is the one to take instead.
    """
    try:
        yield
    except BrokenDevice:
        raise
    except Exception as error:
        raise_if_broken(name, remedy, device, error)
        raise


def raise_if_broken(name: str, remedy: str, device: torch.device, error: Exception) -> None:
    """Raise BrokenDevice if nothing runs on the device after an error of the backend `name`."""
    try:
        devices.wait_for(device)
    except RuntimeError:
        what = f"the trial of backend={name!r} broke the context of {device} ({one_line_message(error)})"
        raise BrokenDevice(what, f"start anew with backend={remedy!r}, or {VARIABLE}={remedy}") from error
