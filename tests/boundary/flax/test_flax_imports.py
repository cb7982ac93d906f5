"""The Flax modules import without torch and transformers, checked in a new process."""

import subprocess
import sys
from pathlib import Path

import tiewise

FOLDER = Path(tiewise.__file__).parent / "boundary" / "flax"


def test_flax_modules_import_neither_torch_nor_transformers():
    names = ["tiewise.flax"]
    names += [f"tiewise.boundary.flax.{path.stem}" for path in FOLDER.glob("*.py") if path.stem != "__init__"]
    assert len(names) > 5
    program = f"import sys, {', '.join(names)}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_importing_tiewise_flax_names_a_missing_library():
    program = (
        "import importlib.util as u; found = u.find_spec; "
        "u.find_spec = lambda name: None if name == 'jax' else found(name); import tiewise.flax"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "tiewise.flax needs jax; pip install 'tiewise[flax]'" in done.stderr
