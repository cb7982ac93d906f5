"""Hypothesis times nothing: how long an example takes is the machine's, and tests do not assert it."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
