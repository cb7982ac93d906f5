"""Test the tool that compares findings and figures between two revisions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """
from types import SimpleNamespace

def check(path):
    if path.name == "bad":
        raise ValueError(f"{path}: not a checkpoint")
    finding = SimpleNamespace(rule="B011", where="lm_head", severity="warning")
    rows = [{"loader": "mlx-lm", "versions": "", "outcome": "tied"}]
    return SimpleNamespace(findings=[finding], record=lambda: {"loaders": rows})

def plan(path):
    model = {"width": 8, "not_counted": ["experts"], "parameters": {"total": TOTAL}}
    choices = [{"boundary": "tied", "saved": 5, "flops_per_token": {"forward": 7}}]
    return SimpleNamespace(record=lambda: {"model": model, "choices": choices})
"""


@pytest.fixture
def ecosystem(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import ecosystem

    return ecosystem


def stub_tree(folder, total):
    """Write a tree whose package answers with fixed findings and figures."""
    package = folder / "src" / "tiewise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STUB.replace("TOTAL", str(total)))
    return folder


def run(ecosystem, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["ecosystem.py", *map(str, arguments)])
    return ecosystem.main()


BEFORE = {
    "a": {"findings": {"B011 lm_head": "error", "mlx-lm": "tied"}, "figures": {"parameters.total": 1000, "saved": 5}},
    "b": {"findings": {}, "figures": {"PlanError": "no vocab_size"}},
}
AFTER = {
    "a": {"findings": {"mlx-lm": "tied", "B012 lm_head": "info"}, "figures": {"parameters.total": 2000, "saved": 5}},
    "b": {"findings": {}, "figures": {"parameters.total": 1, "estimated": True}},
}


def test_compare_lists_each_changed_value_of_two_recorded_results(ecosystem):
    comparison = ecosystem.compare(BEFORE, AFTER)
    assert [(one.path, one.kind, one.what, one.before, one.after) for one in comparison.changes] == [
        ("a", "findings", "B012 lm_head", "–", "info"),
        ("a", "findings", "B011 lm_head", "error", "–"),
        ("a", "figures", "parameters.total", "1,000", "2,000"),
        ("b", "figures", "parameters.total", "–", "1"),
        ("b", "figures", "estimated", "–", "True"),
        ("b", "figures", "PlanError", "no vocab_size", "–"),
    ]
    assert comparison.answer() == "2 of 3 findings and 4 of 5 figures changed"
    assert ecosystem.compare(AFTER, AFTER).changes == ()


def test_table_shortens_cells_and_counts_left_out_rows(ecosystem):
    changes = [ecosystem.Change(f"path-{number}", "figures", "x" * 99, "1\n2", "3") for number in range(5)]
    header, *rows, last = ecosystem.table(changes, 2)
    assert header.split() == ["path", "finding", "or", "figure", "before", "after"]
    assert [row.split()[0] for row in rows] == ["path-0", "path-1"]
    assert "1 2" in rows[0]
    assert len(rows[0].split()[2]) == ecosystem.MOST_WIDTH
    assert last == "… and 3 more (--most prints them)"


def test_outcomes_are_those_of_the_package_of_the_tree(ecosystem, tmp_path):
    trees = [stub_tree(tmp_path / name, total) for name, total in (("old", 10), ("new", 20))]
    paths = {"good": tmp_path / "good", "bad": tmp_path / "bad"}
    before, after = (ecosystem.outcomes_of(tree, paths, builds=False) for tree in trees)
    assert before["good"]["findings"] == {"B011 lm_head": "warning", "mlx-lm": "tied"}
    assert before["bad"]["findings"] == {"ValueError": "PATH: not a checkpoint"}
    assert before["good"]["figures"]["tied.flops_per_token"] == '{"forward": 7}'
    assert before["good"]["figures"]["not_counted"] == "experts"
    changed = ecosystem.compare(before, after).changes
    assert [(one.path, one.what, one.before, one.after) for one in changed] == [
        ("good", "parameters.total", "10", "20"),
        ("bad", "parameters.total", "10", "20"),
    ]


def test_package_that_cannot_start_is_an_error_in_one_line(ecosystem, tmp_path):
    tree = stub_tree(tmp_path, 10)
    (tree / "src" / "tiewise" / "__init__.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(ecosystem.CannotRun, match="exit code 1: RuntimeError: broken"):
        ecosystem.outcomes_of(tree, {}, builds=False)
    with pytest.raises(ecosystem.CannotRun, match=r"Python imports .*, not the package of"):
        ecosystem.outcomes_of(tmp_path / "empty", {}, builds=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--configs", "nowhere"], "nowhere: no such folder"),
        (["--configs", ROOT / "src" / "tiewise" / "cli"], "no config.json below it"),
        (["--against", "no-such-revision"], "no revision 'no-such-revision'"),
    ],
)
def test_wrong_paths_and_revisions_are_one_line(ecosystem, monkeypatch, capsys, arguments, words):
    assert run(ecosystem, monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--folders", "-1"], ["--folders", "0"], ["--seed", "x"]])
def test_wrong_numbers_are_refused(ecosystem, monkeypatch, arguments):
    with pytest.raises(SystemExit) as stopped:
        run(ecosystem, monkeypatch, *arguments)
    assert stopped.value.code == 2


def test_interrupt_ends_without_a_traceback(ecosystem, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ecosystem, "_stages", interrupted)
    assert run(ecosystem, monkeypatch) == 130
    assert capsys.readouterr().err == "ecosystem: interrupted\n"


def test_generated_folders_are_broken_and_random_ones(ecosystem, tmp_path):
    made = ecosystem.generate_folders(tmp_path, 3, seed=0)
    assert len(made) == 3
    assert all(path.exists() or path.is_symlink() for path in made.values())


@pytest.mark.slow
def test_tool_compares_the_working_tree_with_head(tmp_path):
    """Run 67 broken folders, 13 random ones and one config on both revisions."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "tools" / "ecosystem.py"), "--folders", "80", "--configs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    stages = ["writing 80 folders", "HEAD on 81 paths", "the working tree on 81 paths"]
    assert done.stderr.splitlines() == [f"ecosystem: {stage}" for stage in stages]
    answer, *rows = done.stdout.splitlines()
    assert answer.endswith("changed from HEAD to the working tree, on 81 paths")
    assert done.returncode == int(bool(rows))
