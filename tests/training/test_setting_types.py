"""Tests that the typed settings list exactly the settings that a run accepts."""

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from tiewise.training.setting_types import ComparisonSettings
from tiewise.training.settings import DECODER, Settings, find_kind, kinds

ROOT = Path(__file__).parents[2]
NAMED = {"seed", "teacher", "text"}  # parameters of the functions


def test_comparison_settings_list_every_setting_of_every_kind():
    taken = set(get_type_hints(Settings)) - {"kind_options"}
    for kind in kinds():
        options = None if kind == DECODER else find_kind(kind).options
        taken |= set(get_type_hints(options)) if options else set()
    assert set(ComparisonSettings.__annotations__) | NAMED == taken | {"boundary"}


@pytest.mark.slow
def test_a_type_checker_refuses_a_misspelt_setting(tmp_path):
    calls = tmp_path / "calls.py"
    right = "tiewise.compare('a.txt', arms='tied', seeds=3, out='runs/a')"
    calls.write_text(f"import tiewise\n\n{right}\ntiewise.compare('a.txt', seedz=3)\n")
    # with the project's options, mypy takes what `make check` has read of torch; without them that takes minutes
    done = subprocess.run([sys.executable, "-m", "mypy", str(calls)], capture_output=True, text=True, cwd=ROOT)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert "calls.py:4: error:" in errors[0]  # after an earlier run, mypy may print that run's folder
    assert "seedz" in errors[0]
