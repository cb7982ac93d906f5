"""Test the pre-commit hook with pre-commit itself, and the GitHub action by its shell steps, without a network."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv

import pytest
import yaml
from tests.answers.faults import FAULTS
from tests.checkpoint.tiny_checkpoints import llama
from tests.cli.source_copies import CLONE as ROOT
from tests.cli.source_copies import OFFLINE, add_dependencies, copy_sources, dependency_folders


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
    git(path, "init", "-q")
    git(path, "add", ".")
    return path


def git(folder, *words):
    """Run git in a folder as a made-up person; return what it prints."""
    person = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *person, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


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


@pytest.fixture
def hooks(tmp_path):
    """Return the folder of a git repository with the hook's file."""
    path = tmp_path / "hooks"
    path.mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", path)
    git(path, "init", "-q")
    return path


@pytest.fixture
def pre_commit(repository, programs, hooks):
    """Return a function that runs pre-commit on all files of the repository, with the hook of the other one."""
    pytest.importorskip("pre_commit")

    def run_hook(*arguments, variables=programs, **settings):
        git(hooks, "add", ".")
        if git(hooks, "status", "--porcelain"):
            git(hooks, "commit", "-q", "-m", "test: add the files")
        hook = {"id": "tiewise-check", "args": list(arguments), **settings}
        source = {"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD").strip(), "hooks": [hook]}
        (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [source]}))
        git(repository, "add", ".")
        command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color=never"]
        return run(command, repository, variables | {"PRE_COMMIT_HOME": str(hooks.with_name("pre-commit"))})

    return run_hook


def test_pre_commit_passes_on_a_sound_folder_and_fails_on_a_broken_one(pre_commit):
    passed = pre_commit("sound", language="system")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert re.search(r"^tiewise check\.+Passed$", passed.stdout, re.MULTILINE)
    failed = pre_commit("sound", "broken", language="system")
    assert failed.returncode == 1
    assert re.search(r"^tiewise check\.+Failed$", failed.stdout, re.MULTILINE)
    assert "exit code: 1" in failed.stdout
    assert "broken: BROKEN: the config says tied" in failed.stdout


def test_pre_commit_skips_the_hook_if_no_file_is_of_a_checkpoint(pre_commit, repository):
    git(repository, "rm", "-rqf", "sound", "broken")
    (repository / "notes.md").write_text("no checkpoint\n")
    skipped = pre_commit("broken", language="system")
    assert skipped.returncode == 0, skipped.stdout + skipped.stderr
    assert re.search(r"^tiewise check\.+\(no files to check\)Skipped$", skipped.stdout, re.MULTILINE)


@pytest.mark.slow
def test_pre_commit_installs_the_hook_as_its_file_says(pre_commit, hooks, tmp_path):
    copy_sources(hooks)
    installed = {"PYTHONPATH": os.pathsep.join(dependency_folders()), "COLUMNS": "200"}
    installed |= {"VIRTUALENV_OVERRIDE_APP_DATA": str(tmp_path / "app-data"), "VIRTUALENV_NO_PERIODIC_UPDATE": "1"}
    variables = os.environ | OFFLINE | installed
    passed = pre_commit("sound", variables=variables)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    failed = pre_commit("broken", variables=variables)
    assert failed.returncode == 1
    assert "BROKEN: the config says tied" in failed.stdout
    assert len(list((tmp_path / "pre-commit").glob("repo*/py_env-*/bin/tiewise"))) == 1


BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")  # as a composite action runs its steps


def shell_steps():
    """Return the steps of the action that are shell scripts."""
    setup, *steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    assert setup["uses"].startswith("actions/setup-python@")
    assert [step["shell"] for step in steps] == ["bash", "bash"]
    assert all("${{" not in step["run"] for step in steps)  # inputs reach the shell as variables only
    return steps


INPUTS = {"FAIL_ON": "error", "BASELINE": "", "SARIF_FILE": "out.sarif"}


def check_variables(**values):
    """Return the variables of the check's step, as the action sets them from its inputs."""
    values = INPUTS | values
    assert values.keys() == shell_steps()[-1]["env"].keys()
    return values


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
    if "BASELINE" in options:
        base = run(["tiewise", "check", "broken", "--json"], repository, programs).stdout
        (repository / options["BASELINE"]).write_text(base)
    values = check_variables(PATHS=paths, **options)
    done = run([*BASH, shell_steps()[-1]["run"]], repository, programs | values)
    assert done.returncode == code, done.stderr
    is_reported = code > 0 or options.get("FAIL_ON") == "never"
    assert ("::error " in done.stdout) == is_reported
    log = json.loads((repository / "out.sarif").read_text())
    assert log["version"] == "2.1.0"
    assert bool(log["runs"][0]["results"]) == (is_reported and code < 2)
    assert not (repository / "planted").exists()


@pytest.fixture
def new_python(tmp_path):
    """Return variables with which `python` is that of a new environment without tiewise, as after setup-python."""
    environment = tmp_path / "environment"
    venv.create(environment)
    add_dependencies(environment)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | OFFLINE | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "PIP_NO_COMPILE": "1"}


def test_action_installs_the_package_at_its_own_path_and_checks_with_it(repository, new_python, tmp_path):
    action = tmp_path / "action"
    copy_sources(action)
    variables = new_python | {"GITHUB_ACTION_PATH": str(action)} | check_variables(PATHS="sound\nbroken")
    install, check = (step["run"] for step in shell_steps())
    missing = run([*BASH, check], repository, variables)
    assert "No module named tiewise" in missing.stderr
    done = run([*BASH, install], repository, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(action)  # the package does not need its sources any more
    checked = run([*BASH, check], repository, variables)
    assert checked.returncode == 1, checked.stderr
    assert "::error " in checked.stdout
    assert json.loads((repository / "out.sarif").read_text())["runs"][0]["results"]
