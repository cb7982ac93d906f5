"""The loss with its table split over four simulated devices, which JAX can only be given at its start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded_loss.py"


@pytest.mark.slow
def test_a_table_split_over_the_vocabulary_gives_the_same_loss_and_gradients():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 10
    for case, errors in found.items():
        assert errors.pop("padding") == 0, case
        assert max(errors.values()) < 1e-6, (case, errors)
