"""What a run ran on, and how much memory it took."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

import torch
import transformers

import tiewise
from tiewise.training import ranks


def environment() -> dict[str, Any]:
    """Versions, processor and threads, as `env.json` and the report say them."""
    cuda = torch.cuda.is_available()
    return {
        "tiewise": tiewise.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": ranks.size(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or "unknown"
    return platform.processor() or "unknown"


def reset_peak_memory() -> None:
    """Start a new peak where the system allows it (Linux, CUDA); elsewhere the peak is that of the whole process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_memory() -> int:
    """Bytes: the device's peak on CUDA, else the process's peak resident size."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
