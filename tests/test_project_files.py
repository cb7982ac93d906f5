"""Test that the files about the project agree: metadata, workflow, changelog and CONTRIBUTING."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
MINORS = ("3.10", "3.11", "3.12", "3.13")
MOST_LINES = 25  # of a version in the changelog


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def workflow():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))


def changelog_versions():
    """Return each version's heading and its lines that are not empty."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    versions = {}
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        versions[heading] = [line for line in body.splitlines() if line.strip()]
    return versions


def test_classifiers_name_the_versions_of_python_that_the_workflow_runs(project, workflow):
    classified = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    jobs = workflow["jobs"]
    gate = jobs["gate"]["steps"][1]["with"]["python-version"]
    assert sorted(classified) == sorted(MINORS)
    assert sorted([gate, *jobs["quick"]["strategy"]["matrix"]["python"]]) == sorted(MINORS)
    assert project["requires-python"] == f">={MINORS[0]}"


def test_the_workflow_runs_the_gate_with_the_whole_history(workflow):
    checkout, _, gate = workflow["jobs"]["gate"]["steps"]
    assert checkout["with"]["fetch-depth"] == 0
    assert (ROOT / gate["run"]).is_file()


@pytest.mark.parametrize("heading", changelog_versions())
def test_a_version_of_the_changelog_is_short(heading):
    lines = changelog_versions()[heading]
    sections = [line for line in lines if line.startswith("#")]
    assert len(lines) <= MOST_LINES
    assert set(sections) <= {"### Added", "### Changed", "### Fixed", "### Removed"}
    assert all(line.startswith(("- ", "### ")) for line in lines)


def test_the_newest_version_of_the_changelog_is_the_version_of_the_package(project):
    newest = next(iter(changelog_versions())).split()[0]
    assert project["version"].startswith(newest)


def test_contributing_is_one_page():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 75


@pytest.mark.parametrize("path", re.findall(r"`(src/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
def test_contributing_names_files_that_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_no_committed_file_is_a_link():
    """A link names a folder of one machine, and a pattern with a slash does not ignore it."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in listed.splitlines() if line.startswith("120000 ")] == []
