"""Run transformers' own model tests on plain models and on installed ones, and compare the outcomes.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers FOLDER
    pip install parameterized timeout-decorator httpx            # imported by transformers' tests
    python tools/transformers_tests.py FOLDER                    # all families, about an hour on one core
    python tools/transformers_tests.py FOLDER --families llama t5
    python tools/transformers_tests.py FOLDER --models uninstalled    # install, then uninstall

FOLDER is a checkout of transformers at the installed version. The tool reads it and writes nothing there. The common
tests of training, tying, resizing, saving, loading, gradient checkpointing, generation and outputs run twice in each
family: on the models as they are, and with `tiewise.install` at the end of every constructor and of `from_pretrained`
(tools/pytest_install.py). A model that `install` refuses stays plain; its class and the reason are printed.

Exit code: 0 if every test has the same outcome in both runs; 1 if outcomes differ or a run did not finish; 2 if FOLDER
cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

MODES = ("plain", "installed", "uninstalled")  # what tools/pytest_install.py does with every model
NO_HEAD = "no output head"  # the plugin's answer for a model without one
FAMILIES = ("llama", "gpt2", "gemma2", "gemma3", "bert", "t5", "bart", "albert", "whisper", "mamba", "qwen2")
# words in the names of the selected tests, as an expression for pytest -k
SELECTED = (
    "(training or loss or tied or tie or resize or embeddings or save or load or missing or checkpointing or generate "
    "or decoding or output or outputs or hidden_states or attentions or determinism or batching or require_grads "
    "or past or logits) "
    "and not (tensor_parallel or fsdp or export or compile or flash or deepspeed or offload or parallelism "
    "or multi_gpu or Integration or tp_plan or kernels)"
)
SECONDS = 3600  # limit for one family in one mode
WORSE = ("passed", "skipped", "xfailed", "failed", "not run")  # a test's outcome is the worst of its reports


class FolderError(Exception):
    """Reason, in one line, why FOLDER cannot be used."""


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="checkout of transformers at the installed version")
    parser.add_argument("--families", nargs="+", metavar="NAME", default=list(FAMILIES), help="folders of tests/models")
    parser.add_argument("--models", choices=MODES[1:], default="installed", help="what is compared with plain models")
    parser.add_argument("--timeout", type=int, metavar="SECONDS", default=SECONDS, help="for one run of one family")
    parser.add_argument(
        "-k", dest="selected", metavar="EXPRESSION", default=SELECTED, help="tests to run, as in pytest"
    )
    options = parser.parse_args(arguments)
    try:
        root = checkout(options.folder)
        files = {family: test_file(root, family) for family in options.families}
        same = [compare(root, family, files[family], options) for family in files]
    except FolderError as error:
        print(f"transformers_tests: {error}", file=sys.stderr)
        return 2
    print(f"{sum(same)} of {len(same)} families have the same outcomes")
    return 0 if all(same) else 1


# the checkout


def checkout(folder: Path) -> Path:
    """Return the root of the checkout of transformers that a folder belongs to.

    The folder is the root or its `tests`. Its version must be the installed one.
    """
    if not folder.is_dir():
        raise FolderError(f"{folder} is not a folder; give a checkout of transformers")
    root = folder.resolve()
    if (root / "test_modeling_common.py").is_file():
        root = root.parent
    if not (root / "tests" / "test_modeling_common.py").is_file():
        raise FolderError(f"{folder} has no tests/test_modeling_common.py; give a checkout of transformers")
    source = root / "src" / "transformers" / "__init__.py"
    try:
        version = re.search(r'^__version__ = "([^"]+)"', source.read_text(encoding="utf-8"), re.M)
    except (OSError, UnicodeDecodeError):
        version = None
    if version is None:
        raise FolderError(f"{source} names no version; give a whole checkout of transformers")
    installed = metadata.version("transformers")
    if version[1] != installed:
        fix = f"check out v{installed} there"
        raise FolderError(f"{folder} is transformers {version[1]}, and {installed} is installed; {fix}")
    return root


def test_file(root: Path, family: str) -> Path:
    """Return the path of a family's tests of models, from the root of the checkout."""
    file = Path("tests", "models", family, f"test_modeling_{family}.py")
    if not (root / file).is_file():
        raise FolderError(f"{root} has no {file}; name other --families")
    return file


# one run of a family


@dataclass
class Run:
    """Outcomes of one run of a family's tests."""

    outcomes: dict[str, str] = field(default_factory=dict)  # outcome by test
    failed_subtests: dict[str, set[str]] = field(default_factory=dict)  # names by test
    reasons: dict[str, str] = field(default_factory=dict)  # first failure by test
    answers: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # number of models by class and answer of `install`
    trouble: str = ""  # reason if the run did not finish

    def outcome(self, test: str) -> str:
        """Return a test's outcome, with the subtests that failed."""
        subtests = self.failed_subtests.get(test)
        return self.outcomes.get(test, "not run") + (f" in {len(subtests)} subtests" if subtests else "")

    def differs(self, other: Run, test: str) -> bool:
        """Return whether a test or one of its subtests has another outcome in the other run."""
        subtests = [run.failed_subtests.get(test, set()) for run in (self, other)]
        return self.outcome(test) != other.outcome(test) or subtests[0] != subtests[1]

    def counts(self) -> str:
        """Return the counts of the outcomes in words."""
        counts = Counter(self.outcomes.values())
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in WORSE if counts[outcome]) or "no tests"

    def add(self, entry: dict[str, str | None]) -> None:
        """Add one object of the file of results."""
        if "model" in entry:
            self.answers[str(entry["model"]), str(entry["answer"])] += 1
            return
        test, outcome = str(entry["test"]).rpartition("/")[2], str(entry["outcome"])
        self.outcomes[test] = max(self.outcomes.get(test, "passed"), outcome, key=WORSE.index)
        if outcome == "failed":
            self.reasons.setdefault(test, str(entry["reason"]))
            if entry["subtest"] is not None:
                self.failed_subtests.setdefault(test, set()).add(str(entry["subtest"]))


def run_family(root: Path, file: Path, models: str, options: argparse.Namespace) -> Run:
    """Run a family's selected tests in a child process.

    Raises FolderError if they cannot be imported.
    """
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results.jsonl")
        results.touch()
        settings = Path(scratch, "pytest.ini")
        settings.write_text("[pytest]\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", "-p", "no:warnings", "--noconftest", "-c", str(settings), "--rootdir", str(root)]
        command += ["-p", "pytest_install", "--models", models, "--results", str(results)]
        code, output = run_child([*command, "-k", options.selected, str(root / file)], root, Path(scratch), options)
        run = Run()
        for line in results.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "uncollected" in entry:
                raise FolderError(f"{file} cannot be imported: {entry['reason']}")
            run.add(entry)
    if code not in (0, 1):
        last = (output.strip().splitlines() or ["no output"])[-1]
        run.trouble = f"stopped after {options.timeout} s" if code is None else f"pytest ended with code {code}: {last}"
    return run


def run_child(command: list[str], root: Path, scratch: Path, options: argparse.Namespace) -> tuple[int | None, str]:
    """Run a command offline and return its exit code and output.

    The code is None if the time ran out.
    """
    tools = str(Path(__file__).resolve().parent)
    paths = [tools, *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    surroundings = os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    log = scratch / "output.txt"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=root, env=surroundings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(options.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


# two runs


def compare(root: Path, family: str, file: Path, options: argparse.Namespace) -> bool:
    """Run a family in both modes, print the differences and return whether there is none."""
    start = time.monotonic()
    plain, changed = (run_family(root, file, models, options) for models in ("plain", options.models))
    print(f"{family}: plain {plain.counts()}; {options.models} {changed.counts()} ({time.monotonic() - start:.0f} s)")
    for line in answers(changed):
        print(f"  {line}")
    for models, run in (("plain", plain), (options.models, changed)):
        if run.trouble:
            print(f"  the {models} run did not finish: {run.trouble}")
    differing = sorted(t for t in plain.outcomes.keys() | changed.outcomes.keys() if plain.differs(changed, t))
    for test in differing:
        reason = changed.reasons.get(test) or plain.reasons.get(test, "")
        print(f"  {test}: plain {plain.outcome(test)}, {options.models} {changed.outcome(test)}: {reason}")
    print(f"  {len(differing)} of {len(plain.outcomes)} tests differ", flush=True)
    return not (differing or plain.trouble or changed.trouble or not plain.outcomes)


def answers(run: Run) -> list[str]:
    """Return the lines on the answers of `install`.

    One line lists the installed classes, one those without a head; each refusal has a line.
    """
    installed = [f"{kind} ({count})" for (kind, answer), count in sorted(run.answers.items()) if answer == "installed"]
    headless = sorted({kind for kind, answer in run.answers if answer == NO_HEAD})
    lines = [f"installed (models): {', '.join(installed) or 'none'}"]
    if headless:
        lines.append(f"plain, because they have no output head: {', '.join(headless)}")
    for (kind, answer), count in sorted(run.answers.items()):
        if answer not in ("installed", NO_HEAD):
            lines.append(f"plain, {count} of {kind}, {answer}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
