"""Test the pre-commit hook and the GitHub action: their files are parsed, and their commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.answers.faults import FAULTS
from tests.checkpoint.tiny_checkpoints import llama

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programs(tmp_path):
    """Return variables with which `tiewise` and `python` are this interpreter's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, command in (("python", ""), ("tiewise", " -m tiewise")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{command} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}


@pytest.fixture
def repository(tmp_path):
    """Return a git repository with a sound and a broken model, both staged."""
    path = tmp_path / "repository"
    path.mkdir()
    llama(path / "sound", rows=64)
    FAULTS["b012-rows"](path / "broken")
    for line in ("git init -q", "git add ."):
        subprocess.run(line.split(), cwd=path, check=True)
    return path


def run(command, folder, variables):
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


def test_hook_checks_the_folders_of_its_arguments(repository, programs):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("tiewise-check", "python", False)
    staged = subprocess.run(["git", "diff", "--cached", "--name-only"], cwd=repository, capture_output=True, text=True)
    triggers = [name for name in staged.stdout.split() if re.search(hook["files"], name)]
    assert {"sound/config.json", "broken/model.safetensors"} <= set(triggers)
    assert run([*shlex.split(hook["entry"]), "sound"], repository, programs).returncode == 0
    failed = run([*shlex.split(hook["entry"]), "sound", "broken"], repository, programs)
    assert failed.returncode == 1
    assert "broken: BROKEN: the config says tied" in failed.stdout
    assert run(shlex.split(hook["entry"]), repository, programs).returncode == 2  # without arguments


def check_step():
    """Return the shell script of the action's last step, and the variables that it reads."""
    steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    assert all("${{" not in step.get("run", "") for step in steps)  # inputs reach the shell as variables only
    return steps[-1]["run"], steps[-1]["env"]


@pytest.mark.parametrize(
    ("paths", "options", "code"),
    [
        ("sound", {}, 0),
        ("sound\nbroken\n", {}, 1),
        ("broken", {"FAIL_ON": "never"}, 0),
        ("broken", {"BASELINE": "base.json"}, 0),
        ("nowhere", {}, 2),
        ("$(touch planted)", {}, 2),
    ],
)
def test_action_annotates_and_writes_sarif(repository, programs, paths, options, code):
    base = run(["tiewise", "check", "broken", "--json"], repository, programs).stdout
    (repository / "base.json").write_text(base)
    script, names = check_step()
    values = {"PATHS": paths, "FAIL_ON": "error", "BASELINE": "", "SARIF_FILE": "out.sarif"} | options
    assert values.keys() == names.keys()
    done = run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], repository, programs | values)
    assert done.returncode == code, done.stderr
    is_reported = code > 0 or options.get("FAIL_ON") == "never"
    assert ("::error " in done.stdout) == is_reported
    log = json.loads((repository / "out.sarif").read_text())
    assert log["version"] == "2.1.0"
    assert bool(log["runs"][0]["results"]) == (is_reported and code < 2)
    assert not (repository / "planted").exists()


def test_action_installs_the_package_at_its_own_path():
    _, install, _ = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    assert shlex.split(install["run"]) == ["python", "-m", "pip", "install", "--quiet", "$GITHUB_ACTION_PATH"]
