"""Settings of all tests that make results independent of the speed of the machine.

Hypothesis has no deadline, and no timing trial chooses the matrix products. Commands that rewrite checkpoints do not
load their results with transformers, which takes seconds; test_verify_load.py does. `check` builds no class of
transformers; test_built_class.py does.
"""

import gc
import io
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ.setdefault("TIEWISE_PRODUCTS", "default")
os.environ.setdefault("TIEWISE_NO_VERIFY_LOAD", "1")
os.environ.setdefault("TIEWISE_NO_BUILD", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the network; huggingface_hub reads this once, at import


@pytest.fixture
def type_command(monkeypatch):
    """Return a function that sets the words of this process's command line."""
    return lambda *words: monkeypatch.setattr(sys, "argv", [str(word) for word in words])


@pytest.fixture
def pipe_in(monkeypatch):
    """Return a function that sets standard input: to bytes, or to a stream of bytes."""

    def piped(data):
        stream = io.TextIOWrapper(io.BytesIO(data)) if isinstance(data, bytes) else SimpleNamespace(buffer=data)
        monkeypatch.setattr(sys, "stdin", stream)

    return piped


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """Exempt objects of earlier modules, mostly imports, from garbage collection: every Trainer collects garbage.

    A collection takes half a second once the suite has imported everything, and two milliseconds after this.
    """
    gc.collect()
    gc.freeze()
