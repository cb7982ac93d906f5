"""Hypothesis times nothing, and no trial chooses the matrix products: how long something takes is the machine's.

Commands that rewrite do not load their results with transformers, which takes seconds; test_verify_load.py does.
"""

import os

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ.setdefault("TIEWISE_PRODUCTS", "default")
os.environ.setdefault("TIEWISE_NO_VERIFY_LOAD", "1")
