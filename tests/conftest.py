"""Hypothesis times nothing, and no trial chooses the matrix products: how long something takes is the machine's.

Commands that rewrite do not load their results with transformers, which takes seconds; test_verify_load.py does.
"""

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ.setdefault("TIEWISE_PRODUCTS", "default")
os.environ.setdefault("TIEWISE_NO_VERIFY_LOAD", "1")


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """Exempt what earlier modules left, imports above all, from garbage collection: every Trainer collects garbage.

    A collection takes half a second once the suite has imported everything, and two milliseconds after this.
    """
    gc.collect()
    gc.freeze()
