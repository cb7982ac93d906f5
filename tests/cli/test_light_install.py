"""Test a light install (`pip install tiewise`): each command works or names the missing extra in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoint.rewrite.verb_examples import byte_level, example_lines, write_sources
from tests.inspection.tiny_folders import write_model

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.cli.commands import commands
from tiewise.inspection.sections import section_names
from tiewise.inspection.tables import token_texts

TORCH, PLOTS = "pip install 'tiewise[torch]'", "pip install 'tiewise[plots]'"
WORK = [
    "plan --like=gpt2",
    "plan --list --family=gpt2",
    "check untied",
    "check untied --target=tied",
    "inspect untied --samples=50",
    "inspect untied tied --samples=50 --json",
    "explore untied --no-open --out=explored.html",
    "diff untied tied",
    "check adapter --base=tied",
    "exercise 1",
]
NEEDS_TOKENIZERS = {"vocab trim"}  # verbs whose example reads a text with the tokenizers library
WORK += [
    f"{name} {' '.join(words)} --to=new-{name.replace(' ', '-')}"
    for name, words in example_lines().items()
    if name not in NEEDS_TOKENIZERS
]
LACK = {
    "compare": TORCH,
    "train": TORCH,
    "sweep quick": TORCH,
    "data show": TORCH,
    "vocab hot --tokenizer=tied": TORCH,
    "heal untied --teacher=tied": TORCH,
    "kernels": TORCH,
    "plan --like=gpt2 --build": TORCH,
    "plan --like=gpt2 --plot=p.html": PLOTS,
    "inspect tied --out=o": PLOTS,
    "inspect tied -t builtin": TORCH,
    "inspect tied --tokens a,b": TORCH,
    "explore tied --no-open --out=e.html -t builtin": TORCH,
    "inspect tied --only lens": TORCH,
    "factor tied --rank=4 --to=h --text=text.txt": TORCH,
    "vocab trim tied --size=40 --to=i": TORCH,
    "vocab transplant tied --tokenizer=untied --to=h --text=text.txt": TORCH,
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Return the exit code and output of each command line; all run in one process."""
    folder = tmp_path_factory.mktemp("light")
    write_sources(folder)
    (folder / "text.txt").write_text("a b")
    lines = [*WORK, *LACK]
    split = json.dumps([line.split() for line in lines])
    command = [sys.executable, Path(__file__).with_name("without_torch.py"), split]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(zip(lines, json.loads(run.stdout), strict=True))


@pytest.mark.parametrize("line", WORK)
def test_light_install_runs_command(outputs, line):
    output = outputs[line]
    assert (output["code"], output["err"]) == (0, "")
    assert output["out"]


@pytest.mark.parametrize("line", LACK)
def test_light_install_names_missing_extra_in_one_line(outputs, line):
    output = outputs[line]
    assert (output["code"], output["out"], output["err"].count("\n")) == (2, "", 1)
    assert output["err"].startswith("tiewise: ")
    assert LACK[line] in output["err"]


def test_light_install_examples_cover_every_command():
    missing = [name for name in commands() if not any(f"{line} ".startswith(f"{name} ") for line in [*WORK, *LACK])]
    assert missing == []


def test_inspect_without_torch_measures_tables_and_names_missing_packages(outputs):
    out = outputs["inspect untied --samples=50"]["out"]
    for title in (
        "Without layers, does the model know the order of words?",
        "Are input and output table alike?",
        "How do rows depend on the frequency of their token?",
    ):
        assert f"\n{title}\n" in out
    assert " ".join(out.split()).count("needs torch and transformers: pip install 'tiewise[torch]'") == 1
    sections = json.loads(outputs["inspect untied tied --samples=50 --json"]["out"])["sections"]
    assert set(sections) == {"evidence", *section_names()}
    assert set(sections["which_end"]["found"]) == {"tied"}


def test_import_error_of_public_name_names_missing_extra():
    code = "import sys; sys.modules['torch'] = None; import tiewise; tiewise.check; tiewise.inspect; tiewise.install"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == f"ImportError: tiewise.install needs torch: {TORCH}"


def test_token_texts_are_equal_without_tokenizers_library(tmp_path, monkeypatch):
    folder = open_folder(byte_level(write_model(tmp_path / "a")))
    ids = range(40)
    expected = token_texts.read_as(folder, ids)
    assert {" é", " ab", "<eos>", "<0xC3>", "<0xA9>", "#39"} <= set(expected)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert token_texts.read_as(folder, ids) == expected
