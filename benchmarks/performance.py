"""x."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "loss"
SQUARE, READ, PRODUCTS = "square product", "read of memory", "three products"


def write():
    pass
