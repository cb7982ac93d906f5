"""The examples are scripts, not a package: their folder is importable in these tests alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
