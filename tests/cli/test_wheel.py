"""Test an installed wheel: it has every file of the package, and its commands run without the source tree.

The new environment takes the dependencies from the running interpreter's site-packages.
"""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.cli_tiny import TINY, write_text
from tests.cli.source_copies import CLONE, add_dependencies, copy_sources, package_files
from tests.inspection.tiny_folders import write_model

pytestmark = pytest.mark.slow

PACKAGE = CLONE / "src/tiewise"
PLOTLY_BYTES = 1_000_000  # plotly's script has 4.8 MB, the page's own script 3 kB
# why `kernels build` refuses: the processor or torch cannot use kernels, or the machine has no g++
NO_KERNELS = ("no kernels for this machine", "no C++ compiler")


@dataclass(frozen=True)
class Wheel:
    """A built wheel, the environment that it is installed in, and a folder outside the clone."""

    path: Path
    environment: Path
    folder: Path

    def run(self, program, *arguments, fails=False):
        """Run a program of the environment in the folder; return the finished process."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        variables |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
        command = [self.environment / "bin" / program, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True)
        assert fails or done.returncode == 0, done.stdout + done.stderr
        return done

    def tiewise(self, line):
        """Run one command line of `tiewise`; return what it prints."""
        return self.run("tiewise", *line.split()).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheel")
    sources, built, environment, folder = (root / name for name in ("sources", "built", "environment", "folder"))
    copy_sources(sources)
    pip = [sys.executable, "-m", "pip"]
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-build-isolation", *offline, "-w", built, sources], check=True)
    venv.create(environment)
    (path,) = built.iterdir()
    python = environment / "bin/python"
    subprocess.run([*pip, "--python", python, "install", "-q", *offline, path], check=True)
    add_dependencies(environment)
    folder.mkdir()
    return Wheel(path, environment, folder)


@pytest.fixture(scope="module")
def model(wheel):
    return write_model(wheel.folder / "model", tied=False)


def scripts_of(page):
    """Return the attributes and the text of each script of a page."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def test_every_tracked_file_of_the_package_is_in_the_wheel_and_no_other(wheel):
    packed = {name for name in zipfile.ZipFile(wheel.path).namelist() if name.startswith("tiewise/")}
    assert sorted(package_files() - packed) == []
    assert sorted(packed - package_files()) == []


def test_the_package_is_imported_from_the_environment_and_the_clone_is_not_on_the_path(wheel):
    code = "import json, sys, tiewise; print(json.dumps([tiewise.__file__, sys.path]))"
    file, path = json.loads(wheel.run("python", "-c", code).stdout)
    assert Path(file).is_relative_to(wheel.environment)
    assert [entry for entry in path if Path(entry).resolve() in (CLONE, CLONE / "src")] == []


def test_every_documented_name_is_imported(wheel):
    documented = re.findall(
        r"^### `(?:tiewise\.)?([\w.]+)`", (CLONE / "docs/reference-api.md").read_text(), re.MULTILINE
    )
    assert {"check", "compare", "install", "plan", "boundary.untie_at"} <= set(documented)
    code = f"""
import tiewise
from operator import attrgetter
print([name for name in {documented} if not attrgetter(name)(tiewise)])
"""
    assert wheel.run("python", "-c", code).stdout == "[]\n"


def test_check_reports_the_tables_and_the_loaders(wheel, model):
    printed = wheel.tiewise(f"check {model.name}")
    assert "lm_head.weight" in printed
    assert "transformers" in printed
    assert "mlx-lm" in printed  # its outcomes are package data


def test_plan_counts_a_model_of_the_catalogue(wheel):
    printed = wheel.tiewise("plan --like gpt2")
    assert "124,439,808" in printed  # GPT-2's parameters, as published
    assert "gpt2" in wheel.tiewise("plan --list --family=gpt2")


def test_explore_writes_a_page_with_its_script_styles_and_facts(wheel, model):
    wheel.tiewise(f"explore {model.name} --no-open --out=explored.html")
    page = (wheel.folder / "explored.html").read_text(encoding="utf-8")
    (_, facts), (_, code) = scripts_of(page)
    assert json.loads(facts)["at"] == "checkpoint"
    for source in sorted((PACKAGE / "report/explorer/web").glob("*.js")):
        functions = re.findall(
            r"^(?:export )?(?:async )?function \w+\(", source.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert [one for one in functions if one.removeprefix("export ") not in code] == [], source.name
    for style in ("report/templates/report.css", "report/explorer/web/page.css"):
        assert (PACKAGE / style).read_text(encoding="utf-8").strip() in page


def test_exercises_are_listed_printed_and_checked(wheel):
    listed = wheel.tiewise("exercise").splitlines()
    texts = sorted((PACKAGE / "lab/exercises").glob("*.md"))
    assert len([line for line in listed if re.match(r" *\d+  ", line)]) == len(texts)
    assert "saved(v, d, layers)" in wheel.tiewise("exercise 1")
    (wheel.folder / "right.py").write_text(
        "def saved(v, d, layers):\n    return [v * d, v * d / (2 * v * d + layers * 12 * d**2)]\n"
    )
    wheel.tiewise("exercise 1 right.py")
    (wheel.folder / "wrong.py").write_text("def saved(v, d, layers):\n    return [v, d]\n")
    assert wheel.run("tiewise", "exercise", "1", "wrong.py", fails=True).returncode == 1


def test_kernels_are_built_from_the_source_in_the_wheel(wheel):
    built = wheel.run("tiewise", "kernels", "build", fails=True)
    if any(reason in built.stderr for reason in NO_KERNELS):
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    (library,) = wheel.folder.glob("cache/tiewise/kernels/*.so")
    assert library.name in wheel.tiewise("kernels")


def test_compare_trains_and_writes_a_page_with_its_scripts_styles_and_figures(wheel):
    text = write_text(wheel.folder)
    wheel.run("tiewise", "compare", f"--text={text}", "--arms=tied,untied", "--seeds=2", "--out=run", *TINY)
    results = json.loads((wheel.folder / "run/results.json").read_text())
    assert results
    page = (wheel.folder / "run/report.html").read_text(encoding="utf-8")
    (_, figures), (_, plotly), (_, code) = scripts_of(page)
    assert len(json.loads(figures)["figures"]) > 1
    assert len(plotly) > PLOTLY_BYTES
    for script in ("report.js", "theme.js"):
        assert (PACKAGE / "report/templates" / script).read_text(encoding="utf-8").strip() in code
    assert (PACKAGE / "report/templates/report.css").read_text(encoding="utf-8").strip() in page
