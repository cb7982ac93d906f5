"""Test `tools/transformers_tests.py` on a small checkout: different tests, installed models and refusals."""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import transformers

TOOL = Path(__file__).parents[2] / "tools" / "transformers_tests.py"
COMMON = """
import random

global_rng = random.Random()
"""
FAMILY = """
import random
import tempfile
import unittest

import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from ...test_modeling_common import global_rng

SIZES = dict(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def head_class(model):
    return type(model.get_output_embeddings()).__name__


class BertOfImages(BertForMaskedLM):
    def forward(self, labels=None, **inputs):
        raise ValueError("give pixel_values")


class ToyTest(unittest.TestCase):
    def test_tied_constructor(self):
        self.assertEqual(head_class(BertForMaskedLM(BertConfig(**SIZES))), "Linear")

    def test_load_from_pretrained(self):
        with tempfile.TemporaryDirectory() as folder:
            BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(folder)
            loaded, _ = BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
        self.assertEqual(head_class(loaded), "Linear")

    def test_save_subtests(self):
        model = BertForMaskedLM(BertConfig(**SIZES))
        for wanted in ("Linear", "none"):
            with self.subTest(wanted=wanted):
                self.assertEqual(head_class(model), wanted)

    def test_output_of_a_refused_model(self):
        model = BertOfImages(BertConfig(**SIZES))
        self.assertEqual(head_class(model), "Linear")

    def test_output_of_a_body(self):
        self.assertFalse(hasattr(BertModel(BertConfig(**SIZES)), "_tiewise"))

    def test_output_is_drawn_alike(self):
        self.assertEqual(global_rng.random(), random.random())  # both start from the plugin's seed

    def test_generate_skipped(self):
        self.skipTest("not here")

    def test_not_selected(self):
        self.fail("it runs")
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout of transformers with one family, `toy`."""
    files = {
        "src/transformers/__init__.py": f'__version__ = "{transformers.__version__}"\n',
        "tests/__init__.py": "",
        "tests/test_modeling_common.py": COMMON,
        "tests/models/__init__.py": "",
        "tests/models/toy/__init__.py": "",
        "tests/models/toy/test_modeling_toy.py": FAMILY,
    }
    for name, text in files.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


@dataclass
class ToolResult:
    """Exit code and output of the tool."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_in_process(monkeypatch, capfd):
    """Run the tool's main in this process, because a separate process spends two seconds on imports."""
    monkeypatch.syspath_prepend(TOOL.parent)
    tool = import_module(TOOL.stem)

    def run(*arguments):
        capfd.readouterr()
        code = tool.main([str(one) for one in arguments])
        return ToolResult(code, *capfd.readouterr())

    return run


def _run_as_command(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)


def _without_seconds(text):
    return re.sub(r"\(\d+ s\)", "(… s)", text)


@pytest.fixture(scope="module")
def plain_run():
    """Return a dictionary for the run without installed models, which is the same in every test."""
    return {}


@pytest.fixture
def run_with_shared_plain_run(run_in_process, plain_run, monkeypatch):
    """Run the tool's main, with one plain run for all tests of the module."""
    tool = import_module(TOOL.stem)
    run_family = tool.run_family

    def run_once(root, file, models, options):
        if models != "plain":
            return run_family(root, file, models, options)
        if models not in plain_run:
            plain_run[models] = run_family(root, file, models, options)
        return plain_run[models]

    monkeypatch.setattr(tool, "run_family", run_once)
    return run_in_process


@pytest.mark.slow
def test_tool_lists_tests_that_differ_after_install(checkout, run_with_shared_plain_run):
    result = run_with_shared_plain_run(checkout, "--families", "toy")
    lines = _without_seconds(result.stdout).splitlines()
    assert result.returncode == 1, result.stderr
    assert lines[0] == "toy: plain 5 passed, 1 skipped, 1 failed; installed 3 passed, 1 skipped, 3 failed (… s)"
    assert lines[1] == "  installed (models): BertForMaskedLM (4)"
    assert lines[2] == "  plain, because they have no output head: BertModel"
    refused = "BertOfImages does not run on a random batch: give pixel_values"
    assert lines[3] == f"  plain, 1 of BertOfImages, refused: {refused}"
    toy = "test_modeling_toy.py::ToyTest::"
    failed = "AssertionError: 'TiewiseLinear' != 'Linear'"
    assert lines[4:] == [
        f"  {toy}test_load_from_pretrained: plain passed, installed failed: {failed}",
        f"  {toy}test_save_subtests: plain failed in 1 subtests, installed failed in 2 subtests: {failed}",
        f"  {toy}test_tied_constructor: plain passed, installed failed: {failed}",
        "  3 of 7 tests differ",
        "0 of 1 families have the same outcomes",
    ]
    assert not list(checkout.rglob("__pycache__"))  # the tool writes nothing into the checkout


@pytest.mark.slow
def test_tool_reports_no_difference_after_uninstall(checkout, run_with_shared_plain_run):
    result = run_with_shared_plain_run(checkout / "tests", "--families", "toy", "--models", "uninstalled")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert lines[0].startswith("toy: plain 5 passed, 1 skipped, 1 failed; uninstalled 5 passed, 1 skipped, 1 failed")
    assert lines[-2:] == ["  0 of 7 tests differ", "1 of 1 families have the same outcomes"]


def test_tool_reports_run_that_does_not_finish(checkout, run_in_process):
    result = run_in_process(checkout, "--families", "toy", "--timeout", "0")
    assert result.returncode == 1
    assert "  the plain run did not finish: stopped after 0 s" in result.stdout.splitlines()


WRONG = {
    "no folder": (lambda root: root / "nowhere", "is not a folder"),
    "another folder": (lambda root: root / "src", "has no tests/test_modeling_common.py"),
    "no sources": (lambda root: _rewrite(root, "src/transformers/__init__.py", ""), "names no version"),
    "another version": (
        lambda root: _rewrite(root, "src/transformers/__init__.py", '__version__ = "4.57.0"\n'),
        f"is transformers 4.57.0, and {transformers.__version__} is installed",
    ),
    "no family": (lambda root: _rename_folder(root / "tests" / "models" / "toy"), "has no tests/models/toy"),
    "a name that is missing": (
        lambda root: _rewrite(root, "tests/test_modeling_common.py", "from transformers import Missing\n"),
        "cannot be imported: ImportError: cannot import name 'Missing'",
    ),
}


def _rewrite(root, name, text):
    (root / name).write_text(text)
    return root


def _rename_folder(folder):
    folder.rename(folder.with_name("other"))
    return folder.parents[2]


@pytest.mark.parametrize("wrong", WRONG)
def test_tool_refuses_unusable_checkout_with_one_line(checkout, wrong, run_in_process):
    make, reason = WRONG[wrong]
    result = (_run_as_command if wrong == "no folder" else run_in_process)(make(checkout), "--families", "toy")
    assert result.returncode == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
