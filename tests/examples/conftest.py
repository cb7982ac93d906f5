"""Make the folder of the examples importable in these tests, because the examples are scripts without a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
