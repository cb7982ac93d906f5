"""Nvidia's GPUs of this machine, and which of them a worker process sees."""

from __future__ import annotations

import os

from tiewise.core import Late

torch = Late("torch")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def list_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    chosen = os.environ.get(VARIABLE)
    names = [str(index) for index in range(count)] if chosen is None else chosen.split(",")
    return [name.strip() for name in names[:count]]


def gpu_of_worker(index: int) -> dict[str, str]:
    """Return the environment variables that give a worker one of several GPUs, in turn.

    With fewer than two GPUs there are none.
    """
    gpus = list_gpus()
    return {VARIABLE: gpus[index % len(gpus)]} if len(gpus) > 1 else {}
