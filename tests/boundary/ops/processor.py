"""A simulated processor for tests of the choice of matrix products, which must not depend on the machine."""

import warnings

import pytest
import torch

from tiewise.boundary.ops import fast_products as fp
from tiewise.core.errors import UnsupportedError

PLAIN = {"cpu_name": "EPYC", "amx_tile": False, "amx_bf16": False}


def flag():
    """Return torch's flag for fp32 products on oneDNN; None if this torch has none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None) if torch.backends.mkldnn.is_available() else None
    return getattr(matmul, "fp32_precision", None)


def is_exact():
    """Return whether oneDNN computes fp32 products without rounding to bf16 on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fp.choose_products("onednn").exact
        except UnsupportedError:
            return False


needs_flag = pytest.mark.skipif(flag() is None, reason="this torch has no such flag")
needs_exact = pytest.mark.skipif(not is_exact(), reason="oneDNN rounds to bf16 here")


class Machine:
    """A machine with simulated processor, kernels and trial times; `tried` counts its trials."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.tried = monkeypatch, 0
        self.times, self.traits, self.library = (), PLAIN, None
        monkeypatch.delenv("TIEWISE_PRODUCTS", raising=False)

    def __call__(self, *times, traits=PLAIN):
        """Set the trial times in milliseconds: default, oneDNN and, with compiled kernels, tiewise."""
        self.times, self.traits, self.library = times, traits, "kernels" if len(times) == 3 else None
        self.restarted()
        self.monkeypatch.setattr(fp, "_processor_traits", lambda: self.traits)
        self.monkeypatch.setattr(fp, "run_trial", self.trial)
        self.monkeypatch.setattr(fp, "kernels", lambda: self.library)

    def trial(self, threads, deadline):
        self.tried += 1
        return dict(zip(("default_ms", "onednn_ms", "native_ms"), self.times, strict=False))

    def restarted(self):
        """Forget the decisions of this process, as if a new one had started."""
        fp._rounding_reason.cache_clear()
        fp._find_fastest_exact.cache_clear()
