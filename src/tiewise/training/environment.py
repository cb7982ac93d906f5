"""What a run ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from tiewise.core.version import __version__
from tiewise.training import ranks


def environment() -> dict[str, Any]:
    """Versions, processor and threads, as `env.json` and the report say them."""
    cuda = torch.cuda.is_available()
    return {
        "tiewise": __version__,
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
