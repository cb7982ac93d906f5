"""Tests that all runs of a comparison use the matrix products chosen at its start."""

import json
import re
import shutil

import pytest
from tests.boundary.ops.processor import PLAIN, Machine, flag, needs_exact

from tiewise.boundary.ops import compiled_kernels
from tiewise.boundary.ops import fast_products as fp
from tiewise.core.errors import RunError
from tiewise.training import compare
from tiewise.training.compare import finish, finish_one
from tiewise.training.kinds import decoder
from tiewise.training.trainer import TiewiseTrainer

pytestmark = needs_exact
AMX = {"cpu_name": "Xeon", "amx_tile": True}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that fakes a processor and trial times (default, oneDNN). Every problem counts as large."""
    made = Machine(monkeypatch)

    def make(*times, traits=PLAIN, large=1):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{times} {traits['cpu_name']}"))
        for where in (fp, compare):
            monkeypatch.setattr(where, "LARGE", large)
        made(*times, traits=traits)

    yield make
    made.restarted()


@pytest.fixture
def flags(monkeypatch):
    """Collect the flag of every training step and every measurement."""
    found = set()
    step, measure = TiewiseTrainer.training_step, decoder.measure
    monkeypatch.setattr(TiewiseTrainer, "training_step", lambda *a, **k: found.add(flag()) or step(*a, **k))
    monkeypatch.setattr(decoder, "measure", lambda *a, **k: found.add(flag()) or measure(*a, **k))
    return found


def products(out, file="env.json"):
    record = json.loads((out / file).read_text())
    return record.get("env", record)["products"]


def test_all_runs_use_matrix_products_chosen_at_start(tiny_settings, tmp_path, lines, machine, flags):
    machine(10.0, 5.0)
    out = lines.begin(tiny_settings(steps=4, tune=True, arms=("tied",)), tmp_path / "out")
    assert products(out)["product"] == "onednn"
    assert json.loads((out / "env.json").read_text())["kernels"] == compiled_kernels.kernels_state(full=False)
    assert products(out)["reason"] == "a trial on oneDNN took 0.50 of the time"
    machine(10.0, 20.0)  # a later trial changes nothing
    before = len(lines)
    finish(out, lines.display)
    assert flags == {"bf16"}
    assert flag() == "none"
    said = products(out, "results.json")
    assert re.fullmatch(r"onednn products on EPYC, \d+ threads?: a trial on oneDNN took 0.50 of the time", said)
    assert not any("products" in line for line in lines[before:])


def test_start_records_default_products_for_small_problems(tiny_settings, tmp_path, lines, machine, flags):
    machine(10.0, 5.0, large=2**28)
    out = lines.begin(tiny_settings(steps=2, seed=1, arms=("tied",)), tmp_path / "out")
    assert products(out)["product"] == "default"
    finish_one(out, lines.display)
    assert flags == {"none"}


@pytest.fixture
def onednn(tiny_settings, tmp_path, lines, machine):
    """Start a single run with oneDNN products."""
    machine(10.0, 5.0)
    return lines.begin(tiny_settings(steps=4, seed=1, arms=("tied",)), tmp_path / "out")


def test_run_falls_back_to_default_products_on_rounding_processor_and_reports_it(onednn, lines, machine, flags):
    machine(traits=AMX)
    finish_one(onednn, lines.display)
    assert flags == {"none"}
    said = "this machine computes onednn products otherwise than the run did so far; torch's own are used now"
    assert [line for line in lines if "products" in line] == [said]


def test_run_without_recorded_products_reaches_equal_loss_to_fp32(onednn, tmp_path, lines, flags):
    shutil.copytree(onednn, tmp_path / "before")
    record = json.loads((onednn / "env.json").read_text())
    (tmp_path / "before" / "env.json").write_text(json.dumps(record | {"products": {"product": 3}}))
    with pytest.raises(RunError, match=r"env\.json: products: product must be text, not 3; start anew"):
        finish_one(tmp_path / "before", lines.display)
    del record["products"]
    (tmp_path / "before" / "env.json").write_text(json.dumps(record))
    ours = finish_one(tmp_path / "before", lines.display)
    assert flags == {"none"}
    theirs = finish_one(onednn, lines.display)
    assert flags == {"none", "bf16"}
    assert ours.result.heldout_nll == pytest.approx(theirs.result.heldout_nll, rel=1e-5)
