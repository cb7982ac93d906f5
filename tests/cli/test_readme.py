"""Compare the outputs that README.md shows with what the commands print."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from tiewise.cli.options import print_view
from tiewise.report.comparison_measurement import comparison_view
from tiewise.training.results import Comparison

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONSOLE = re.compile(r"^```console\n\$ tiewise (?P<arguments>.*)\n(?P<output>(?s:.*?))^```", re.M)
LINES, WIDTH, LINKS = 95, 120, 8  # of the README, at most


def shown(command):
    """Return the arguments and the output lines of a command that README.md shows."""
    (block,) = [block for block in CONSOLE.finditer(README) if block["arguments"].startswith(command)]
    return block["arguments"].split(), [line.rstrip() for line in block["output"].splitlines()]


def assert_lines_in_order(lines, text):
    """Assert that lines occur in a text, in the same order, and that the first line is the text's first."""
    printed = [line.rstrip() for line in text.splitlines()]
    assert printed[0] == lines[0]
    rest = iter(printed)
    assert [line for line in lines if line not in rest] == []


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


def test_plan_prints_the_answer_that_readme_shows(tiewise):
    arguments, lines = shown("plan")
    assert_lines_in_order(lines, tiewise(*arguments).out)
    vocab, width = 128_000, 1_024
    assert f"saves {round(vocab * width / 1e6)} M" in lines[0]


def test_check_prints_the_answer_that_readme_shows(tiewise, tmp_path):
    arguments, lines = shown("check")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32_000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, tie_word_embeddings=True)).save_pretrained("my-model")
    config = tmp_path / "my-model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    answer = tiewise(*arguments)
    assert answer.code == 1
    assert_lines_in_order(lines, answer.out)


def test_compare_prints_for_the_recorded_run_the_answer_that_readme_shows(capsys):
    record = json.loads((ROOT / "benchmarks/results/demo.json").read_text(encoding="utf-8"))
    print_view(comparison_view(Comparison.from_dict(record)))
    _, lines = shown("compare")
    assert_lines_in_order(lines, capsys.readouterr().out)
    by_arm = {arm: [run for run in record["runs"] if run["arm"] == arm] for arm in ("tied", "untied")}
    tied, untied = (np.array([run["documents"]["nats"] for run in runs]) for runs in by_arm.values())
    tokens = np.array(by_arm["tied"][0]["documents"]["tokens"])
    gains, (seeds, documents) = tied - untied, tied.shape
    total = gains.sum(1, keepdims=True)
    mean, of_seeds = total.mean() / tokens.sum(), (total / tokens.sum()).var(ddof=1) / seeds
    without = (total - gains) / (tokens.sum() - tokens)  # of each seed without each document
    of_documents = (documents - 1) * without.mean(0).var()
    of_both = (documents - 1) * (without - without.mean(0)).var(axis=1).sum() / (seeds * (seeds - 1))
    variance = max(of_seeds + of_documents - of_both, of_seeds, of_documents)
    equal = tokens.sum() ** 2 / (tokens**2).sum()
    freedom = variance**2 / (of_seeds**2 / (seeds - 1) + of_documents**2 / (equal - 1))
    half = stats.t.ppf(0.975, freedom) * variance**0.5
    assert f"{mean:.3f} nats/token lower" in lines[0]
    assert f"95 % CI {mean - half:.3f}–{mean + half:.3f}" in lines[0]


def test_command_that_readme_proposes_repairs_the_checked_folder(tiewise, tmp_path):
    test_check_prints_the_answer_that_readme_shows(tiewise, tmp_path)
    text = " ".join(shown("check")[1])
    repair = re.search(r"tiewise (tie my-model .*? --to (\S+))", text)
    assert tiewise(*repair[1].split()).code == 0
    assert tiewise("check", repair[2]).code == 0


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH
    assert len(re.findall(r"(?<!!)\[[^\]]+\]\([^)]+\)", README)) <= LINKS
    assert len(CONSOLE.findall(README)) >= 3


def test_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target
