"""Settings of JAX for tiny programs, set before JAX starts: optimisation would only lengthen their compilation."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
