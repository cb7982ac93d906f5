"""Hypothesis times nothing, and no trial chooses the matrix products: how long something takes is the machine's."""

import os

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ.setdefault("TIEWISE_PRODUCTS", "default")
