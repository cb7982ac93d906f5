"""Tests that settings alone refuse minutes that no machine can meet, against an estimate by hand."""

import subprocess
import sys

import pytest

from tiewise.core.errors import RunError
from tiewise.training import least_time, short_trials, tuning
from tiewise.training.least_time import Machine, refuse_impossible_minutes
from tiewise.training.settings import Settings

TWO_CORES = Machine(cores=2, may_have_gpu=False)


def test_refuse_impossible_minutes_reports_minutes_that_tuned_default_needs():
    with pytest.raises(RunError, match=r"--minutes 0\.3 does not hold 15 tuning runs and 9 runs of 20") as refused:
        refuse_impossible_minutes(Settings(minutes=0.3, tune=True), TWO_CORES)
    # 5 s to start and 0.05 s for each of 24 runs; all train on 20·512 tokens; a run evaluates 2·45,000 + 21·2,048, a
    # trial 2·20,000 + 21·2,048; evaluation takes 2 and training 6 operations for each of 4,096·128 + 24·128² weights;
    # a core does 1.5e11 operations a second
    weights = 4096 * 128 + 24 * 128**2
    work = 9 * (2 * 133_008 + 6 * 10_240) + 15 * (2 * 83_008 + 6 * 10_240)
    assert 24 < 5 + 24 * 0.05 + work * weights / 3e11 < 30
    assert "2 cores need 0.5 minutes at the very least" in str(refused.value)
    assert refused.value.remedy == "give --minutes 5 or more, or fewer arms and seeds"


@pytest.mark.parametrize(
    "settings", [{"minutes": 0.6, "tune": True}, {"minutes": 0.4}, {"tune": True}, {"minutes": 0.2, "text": ("a.txt",)}]
)
def test_refuse_impossible_minutes_accepts_settings_that_might_fit(settings):
    refuse_impossible_minutes(Settings(**settings), TWO_CORES)


def test_refuse_impossible_minutes_accepts_any_minutes_with_possible_gpu():
    refuse_impossible_minutes(Settings(minutes=0.001, tune=True), Machine(cores=2, may_have_gpu=True))


@pytest.mark.skipif(sys.platform != "linux", reason="devices are looked up in /dev on Linux alone")
@pytest.mark.parametrize(("device", "may_have"), [("nvidia0", True), ("dri", True), ("accel1", True), ("null", False)])
def test_machine_detects_possible_gpu_from_device_files(device, may_have, tmp_path, monkeypatch):
    (tmp_path / device).touch()
    monkeypatch.setattr(least_time, "Path", lambda _: tmp_path)
    assert Machine.here().may_have_gpu is may_have


@pytest.mark.parametrize("table_rate", [None, 0.064])
def test_least_time_constants_match_short_trials(table_rate):
    settings = Settings(tune=True, table_rate=table_rate)
    assert tuning.least_trials_per_arm(settings) == least_time._trials_per_arm(settings)
    assert tuning.TRIAL_TOKENS == least_time.TRIAL_TOKENS
    assert short_trials.LEAST_STEPS == least_time.LEAST_STEPS


def test_compare_command_refuses_impossible_minutes_before_importing_torch(tmp_path):
    program = """
import sys, atexit
from tiewise.cli.main import main
from tiewise.training import least_time
least_time.Machine.here = classmethod(lambda cls: cls(cores=2, may_have_gpu=False))
sys.argv = ["tiewise", "compare", "--minutes", "0.01", "--tune"]
atexit.register(lambda: print({"torch", "transformers", "datasets", "tokenizers"} & set(sys.modules), flush=True))
main()
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (2, "set()\n")
    assert said.stderr.startswith("tiewise: --minutes 0.01 does not hold 15 tuning runs and 9 runs of 20 steps: ")
    assert said.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
