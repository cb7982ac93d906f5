"""Test the table of loaders on random checkpoints, and the tool that compares it with the loaders."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from observed_loads import Observed

from tiewise.checkpoint import loader_columns as columns
from tiewise.checkpoint.loader_columns import MLX, outcome_of

ROOT = Path(__file__).parents[2]
TENTH = 30  # checkpoints of one test; ten tests run a tenth of 3,000


@pytest.fixture
def loader_diff(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delenv("TIEWISE_NO_BUILD", raising=False)
    import loader_diff

    return loader_diff


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_table_of_loaders_is_as_run_on_random_checkpoints(loader_diff, tenth):
    pools, wrong, decided = loader_diff.class_pools(), {}, 0
    for seed in range(tenth * TENTH, (tenth + 1) * TENTH):
        for comparison in loader_diff.compare(seed, pools, loader_diff.LOADERS):
            decided += comparison.verdict == loader_diff.AGREES
            if comparison.verdict == loader_diff.DISAGREES:
                wrong[seed] = comparison.line()
    assert wrong == {}
    assert decided > TENTH // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [91053, 91108, 91203, 91306, 91475, 91662, 201537, 202506, 203056, 1401363])
def test_checkpoints_that_once_disagreed_are_as_run(loader_diff, seed):
    (comparison,) = loader_diff.compare(seed, loader_diff.class_pools(), ["transformers"])
    assert comparison.verdict == loader_diff.AGREES, comparison.line()


def options_of(loader_diff, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["loader_diff.py", *map(str, arguments)])
    return loader_diff.parsed_options()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", 1, "--loaders", "mlx"], "no such loader: mlx"),
        (["--seed", 1, "--families", "nobody"], "nobody"),
        (["--seed", 1, "--out", "/"], "--out /: name a file"),
        (["--seed", 1, "--out", "/no/such/states.jsonl"], "name a file in a folder that exists"),
        ([], "give --minutes, --count or --seed"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(loader_diff, monkeypatch, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        options_of(loader_diff, monkeypatch, *arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_resumed_run_continues_at_next_seed(loader_diff, monkeypatch, tmp_path):
    file = tmp_path / "states.jsonl"
    line = ["--count", 1, "--seed", 4, "--out", file, "--families", "llama", "--loaders", "transformers"]
    for next_seed in (5, 6):
        options = options_of(loader_diff, monkeypatch, *line)
        tally = loader_diff.read_tally(options)
        assert loader_diff.run_many(options, tally) == int(bool(tally.disagreements))
        assert tally.next_seed == next_seed
        file.write_text(file.read_text() + '{"seed": 5, "compar')  # a run that was killed while it wrote
    assert loader_diff.read_tally(options) == tally
    assert tally.checkpoints == sum(tally.counts["transformers"].values()) == 2
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines()] == [4, 5]


@pytest.mark.parametrize(
    "content", ["[]", "[]\n", "{}\n", "4\n", "\xff\n", '{"seed": 1, "comparisons": [{"seed": 1}]}\n']
)
def test_file_that_is_not_of_this_tool_is_refused_and_left_alone(loader_diff, monkeypatch, tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_text(content, "latin-1")
    options = options_of(loader_diff, monkeypatch, "--count", 1, "--out", file)
    with pytest.raises(SystemExit, match="not a file of this tool"):
        loader_diff.read_tally(options)
    assert file.read_text("latin-1") == content


@pytest.mark.parametrize(
    ("predicted", "observed", "verdict"),
    [
        (columns.TIED, [columns.TIED], "as run"),
        (columns.TIED, [columns.UNTIED], "disagrees"),
        (columns.NOT_SERVED, [columns.ERROR], "as run"),
        (columns.NOT_SERVED, [columns.TIED], "disagrees"),
        (columns.RANDOM_TABLE, [columns.RANDOM_TABLE, columns.NEW_BIAS], "as run"),
        (columns.DEPENDS, [columns.ERROR], "not known"),
        (columns.TIED, [], "cannot be observed"),
    ],
)
def test_verdict_compares_row_with_observed_outcomes(loader_diff, predicted, observed, verdict):
    assert loader_diff.verdict_of(outcome_of(MLX, predicted), Observed(frozenset(observed))) == verdict


def test_both_readers_of_a_written_gguf_file_are_compared(loader_diff, monkeypatch):
    pytest.importorskip("gguf")
    pools = loader_diff.class_pools(("llama", "qwen2"))
    first_seed = next(seed for seed in range(50) if list(loader_diff.compare(seed, pools, ["gguf"])))
    (comparison,) = loader_diff.compare(first_seed, pools, ["gguf"])
    assert comparison.verdict == loader_diff.AGREES, comparison.line()
    seen_by_gguf = loader_diff.loads.gguf_ends
    wrong = {"head": (1, 1)}
    monkeypatch.setattr(loader_diff.loads, "gguf_ends", lambda path: dataclasses.replace(seen_by_gguf(path), **wrong))
    (comparison,) = loader_diff.compare(first_seed, pools, ["gguf"])
    assert comparison.verdict == loader_diff.DISAGREES


def test_seed_decides_checkpoint(loader_diff):
    names = loader_diff.class_pools(("llama", "gpt2")).all
    first, second = (loader_diff.folders.draw_checkpoint(7, names) for _ in range(2))
    assert (first.class_name, first.changes, first.config) == (second.class_name, second.changes, second.config)
    assert all(first.tensors[name].equal(tensor) for name, tensor in second.tensors.items())
