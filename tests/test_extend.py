"""Test docs/dev/extend.md: its section, rule, verb, kind of run, column, family and option work.

A fixture applies the page to a copy of the repository. It takes new files and changed lines from the page's blocks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.inspection.tiny_folders import write_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dev" / "extend.md"
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEW_FILE = re.compile(r"# (src/\S+)\n")

# tests that go through a registry or compare it with a list
REGISTRY_TESTS = """
tests/test_layering.py
tests/test_family_records.py
tests/core/test_spec.py
tests/test_spec_options.py
tests/test_wrong_types.py
tests/tools/test_run_docs.py::test_every_measured_number_in_docs_is_in_its_source
tests/boundary/test_boundary.py
tests/checkpoint/test_audit.py::test_rule_table_in_docs_equals_registry_and_every_rule_has_explanation
tests/checkpoint/test_audit.py::test_new_rule_needs_one_new_file_and_no_other_change
tests/cli/test_commands.py::test_every_command_has_json_and_quiet
tests/cli/test_commands.py::test_every_command_of_the_help_has_a_function
tests/cli/test_encodings.py
tests/cli/test_light_install.py
tests/inspection/test_inspection.py
tests/report/test_views.py
tests/report/test_comparison_measurement.py
tests/checkpoint/rewrite/test_factor_undo.py::test_undo_equals_every_boundary_in_torch
tests/checkpoint/rewrite/test_registry.py
tests/training/kinds/test_kind.py
tests/training/test_setting_types.py
tests/checkpoint/test_audit.py::test_check_of_healthy_folder_reports_parts_loaders_and_no_findings
"""
# of the tests of each option, those of the added option, whose backends share code with the others
OF_OTHER_OPTIONS = "honours_the_option or refuses_the_option_by_name or refuses_model_with_boundary or run_installs"
CHOSEN = f"temperature or not ({OF_OTHER_OPTIONS})"


@dataclass(frozen=True)
class Change:
    """Lines of a file, and the lines that replace them."""

    path: str
    old: str
    new: str


def new_files(page):
    """Return {path: text} of the blocks that are complete files."""
    blocks = (code for kind, code in BLOCK.findall(page) if kind == "python")
    headed = ((NEW_FILE.match(code), code) for code in blocks)
    return {head[1]: code for head, code in headed if head}


def changes(page):
    """Return the changes of all blocks of kind diff."""
    made = []
    for kind, code in BLOCK.findall(page):
        if kind != "diff":
            continue
        head, _, body = code.partition("\n")
        for hunk in body.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            made.append(Change(head.removeprefix("+++ "), old, new))
    return made


def follow(page, root):
    """Apply the changes of the page to a repository."""
    for path, text in new_files(page).items():
        assert not (root / path).exists()
        (root / path).write_text(text, encoding="utf-8")
    for change in changes(page):
        text = (root / change.path).read_text(encoding="utf-8")
        assert text.count(change.old) == 1, (
            f"{change.path} has these lines {text.count(change.old)} times:\n{change.old}"
        )
        (root / change.path).write_text(text.replace(change.old, change.new), encoding="utf-8")


def recipe(target):
    """Return the commands of one target of the Makefile, with the programs of this interpreter."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    body = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    return [line.strip().replace("$(BIN)", str(BIN)) for line in body.splitlines()]


class Clone:
    """A copy of the files that git tracks, and commands that run on it."""

    def __init__(self, folder):
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.split("\0")[:-1]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def run(self, *command, cwd=None, code=0):
        """Run a command, require its exit code, and return its output."""
        paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(self.folder / "src")}
        place = cwd or self.folder
        done = subprocess.run(command, cwd=place, env=os.environ | paths, capture_output=True, text=True)
        assert done.returncode == code, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
        return done.stdout

    def tiewise(self, *arguments, cwd, code=0):
        """Run the command line of the copy."""
        return self.run(sys.executable, "-m", "tiewise", *arguments, cwd=cwd, code=code)


def test_the_page_adds_seven_things():
    page = PAGE.read_text(encoding="utf-8")
    folders = [Path(path).parent.name for path in new_files(page)]
    assert folders == ["sections", "rules", "verbs", "kinds"]
    rows = ("core/spec.py", "report/comparison_measurement.py", "checkpoint/families.py")
    assert {f"src/tiewise/{path}" for path in rows} <= {change.path for change in changes(page)}
    assert all(change.old and change.old != change.new for change in changes(page))


def test_the_recipe_of_a_target_is_read_from_the_makefile():
    commands = recipe("check")
    assert len(commands) >= 6
    assert commands[0].startswith(f"{BIN / 'ruff'} format --check src tests ")
    assert all(command.startswith(f"{BIN}{os.sep}") for command in commands)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the repository that was extended by the page."""
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files of a clone, and this is none")
    clone = Clone(tmp_path_factory.mktemp("extended"))
    page = PAGE.read_text(encoding="utf-8")
    follow(page, clone.folder)
    generators = re.findall(r"^python (tools/\S+)$", page, re.MULTILINE)
    assert len(generators) == 3
    for generator in generators:
        clone.run(sys.executable, generator)
    return clone


@pytest.mark.slow
def test_what_the_page_adds_passes_the_checks(extended):
    for command in recipe("check"):
        extended.run(*command.split())


@pytest.mark.slow
def test_what_the_page_adds_passes_the_tests_of_registries(extended):
    out = extended.run(sys.executable, "-m", "pytest", "-rp", *REGISTRY_TESTS.split(), "-k", CHOSEN)
    assert "honours_the_option[Boundary in PyTorch-temperature]" in out
    assert " passed" in out


@pytest.mark.slow
def test_the_section_measures(extended, tmp_path):
    write_model(tmp_path / "tiny")
    line = ["inspect", "tiny", "--only", "row_length", "--json"]
    record = json.loads(extended.tiewise(*line, cwd=tmp_path))["sections"]["row_length"]["found"]["tiny"]
    table = load_file(tmp_path / "tiny" / "model.safetensors")["model.embed_tokens.weight"].astype(float)
    lengths = np.sqrt((table**2).sum(1))
    assert record["quantities"][0]["value"] == pytest.approx(lengths.std() / lengths.mean(), rel=1e-6)


@pytest.mark.slow
def test_the_rule_reports(extended, tmp_path):
    for rows in (40, 64):
        write_model(tmp_path / str(rows), rows=rows)
        record = json.loads(extended.tiewise("check", str(rows), "--json", cwd=tmp_path))
        evidence = [one["evidence"] for one in record["findings"] if one["rule"] == "B199"]
        assert evidence == ([] if rows == 64 else ["40 rows"])
    assert "our own guide" in extended.tiewise("check", "--explain", "B199", cwd=tmp_path)


@pytest.mark.slow
def test_the_verb_rewrites(extended, tmp_path):
    source = write_model(tmp_path / "model")
    extended.tiewise("sign", "model", "--by", "us", "--to", "new", cwd=tmp_path)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "new"))
    assert after == before | {"made_by": "us"}
    weights = "model.safetensors"
    assert (source / weights).read_bytes() == (tmp_path / "new" / weights).read_bytes()
    assert "newer was not made" in extended.tiewise("sign", "new", "--by", "us", "--to", "newer", cwd=tmp_path)


@pytest.mark.slow
def test_the_kind_trains(extended, tmp_path):
    sizes = ["width=16", "layers=1", "heads=2", "length=16", "batch=4", "measured=512", "kind=loud", "louder=2"]
    settings = [f"--set={size}" for size in sizes]
    line = ["train", "-t", "builtin", "--tokenizer=bytes", "--steps=4", "--boundary=tied", "-o", "run", "--json"]
    record = json.loads(extended.tiewise(*line, *settings, cwd=tmp_path))
    assert record["init_std"] == 2 * 16**-0.5


COLUMN = """
import io
from rich.console import Console
from tests.report.comparison_sample import sample_comparison
from tiewise.report.comparison_measurement import comparison_view
from tiewise.report.comparison_page import render
comparison = sample_comparison()
printed = io.StringIO()
Console(file=printed, width=200).print(comparison_view(comparison))
assert "minutes" in printed.getvalue()
assert "minutes" in render(comparison)
"""


@pytest.mark.slow
def test_the_column_is_in_every_view(extended):
    extended.run(sys.executable, "-c", COLUMN)


FAMILY = """
import json, numpy, tiewise
from pathlib import Path
from safetensors.numpy import load_file, save_file
config = {"model_type": "ours", "architectures": ["OursForCausalLM"], "vocab_size": 8, "dim": 4, "depth": 1}
config |= {"num_attention_heads": 2, "intermediate_size": 16}
found = tiewise.plan(config).record()["model"]
assert not found["estimated"]
assert found["parameters"]["total"] == 8 * 4 + 4 * 4 * 4 + 3 * 4 * 16 + 3 * 4  # table, attention, ffn, norms
Path("model").mkdir()
Path("model/config.json").write_text(json.dumps(config))
save_file({"core.symbols.weight": numpy.ones((8, 4), "float32")}, "model/model.safetensors")
assert tiewise.check("model").claims.tied
assert tiewise.untie("model", "new").notes == ()
assert load_file("new/model.safetensors").keys() == {"core.symbols.weight", "core.readout.weight"}
"""


@pytest.mark.slow
def test_the_family_is_known_to_every_command(extended, tmp_path):
    extended.run(sys.executable, "-c", FAMILY, cwd=tmp_path)


OPTION = """
import torch, transformers, tiewise
from tiewise.boundary.flax.boundary import PureBoundary
hot, plain = (tiewise.Boundary(spec, 11, 8) for spec in ("tied+temperature=4", "tied"))
plain.load_state_dict(hot.state_dict())
hidden, targets = torch.randn(5, 8), torch.arange(5)
expected = plain.logits(hidden) / 4
assert torch.allclose(hot.logits(hidden), expected)
assert torch.allclose(hot.loss(hidden, targets), torch.nn.functional.cross_entropy(expected, targets))
params = {"table_in": hot.table_in.detach().numpy()}
logits = PureBoundary.of("tied+temperature=4", 11, 8).logits(params, hidden.numpy())
assert torch.allclose(torch.tensor(logits.tolist()), expected, atol=1e-6)
sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
before = model(targets[None]).logits
tiewise.install(model, "tied+temperature=4")
assert torch.allclose(model(targets[None]).logits, before / 4, atol=1e-6)
model.save_pretrained("saved")
assert torch.allclose(tiewise.load("saved")(targets[None]).logits, before / 4, atol=1e-6)
"""


@pytest.mark.slow
def test_the_option_divides_logits_in_every_backend(extended, tmp_path):
    extended.run(sys.executable, "-c", OPTION, cwd=tmp_path)
    line = ["plan", "--vocab=100", "--width=8", "--layers=1", "--heads=2", "--boundary=tied+temperature=4"]
    assert "tied+temperature=4" in extended.tiewise(*line, cwd=tmp_path)
