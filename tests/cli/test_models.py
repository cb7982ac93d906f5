"""`tiewise models`: the table, its filters, its JSON, and what it refuses."""

import json
import subprocess
import sys

import pytest

from tiewise.planning.catalogue import models

BETTER = "`tiewise check PATH` on the files themselves is better evidence than this catalogue."


@pytest.fixture
def shown(tiewise, monkeypatch):
    """Run the command on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: tiewise("models", *arguments)


def test_every_model_on_one_line_of_a_hundred_columns(shown):
    said = shown()
    assert (said.code, said.err) == (0, "")
    lines = [line.rstrip() for line in said.out.splitlines()]
    assert max(map(len, lines)) <= 100
    for model in models():
        (line,) = [line for line in lines if line.split()[:1] == [model.name]]
        assert f" {model.width:,} " in line
        assert f" {model.checked} " in line
        assert f" { {True: 'yes', False: 'no', None: '?'}[model.tied] } " in line
        if model.vocab:
            assert f" {model.vocab:,} " in line
    assert lines[-1] == BETTER


def test_eighty_columns_cut_no_figure(tiewise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = tiewise("models")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "…" not in said.out
    assert " 262,144 " in said.out


def test_a_row_says_what_it_should(shown):
    (line,) = [line for line in shown("--family", "pythia").out.splitlines() if line.startswith("pythia-70m")]
    assert line.split() == [
        "pythia-70m",
        "50,304",
        "512",
        "6",
        "98.2",
        "70.4",
        "M",
        "73.1",
        "%",
        "no",
        "verified",
        *line.split()[11:],
    ]


def test_filters_and_sort_reach_the_rows(shown):
    record = json.loads(
        shown("--tied", "--family=gemma", "--min-vocab=262000", "--max-size=5", "--sort=size", "--json").out
    )
    assert [row["name"] for row in record["models"]] == ["gemma-3-270m", "gemma-3-1b", "gemma-3-4b"]
    untied = json.loads(shown("--untied", "--min-size", "600", "--json").out)["models"]
    assert {row["name"] for row in untied} == {"deepseek-v3", "kimi-k2"}


def test_json_holds_everything_once(shown):
    said = shown("--json")
    record = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert record["note"] == BETTER
    assert [row["name"] for row in record["models"]] == [model.name for model in models()]
    gpt2 = record["models"][0]
    assert gpt2["table_share"] == pytest.approx(50_257 * 768 / 124_439_808)
    assert gpt2["class_default"] == ["vocab", "width", "layers", "tied"]
    assert {"status", "source", "checked", "config", "config_source"} <= gpt2.keys()


def test_nothing_found_is_said(shown):
    said = shown("--family=nobody")
    assert said.code == 0
    assert "0 models" in said.out


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--sort=age"], "cannot sort by 'age'; choose one of"), (["--min-vocab=x"], "--min-vocab")]
)
def test_what_it_refuses(shown, arguments, says):
    said = shown(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("tiewise: ")
    assert said.err.count("\n") == 1
    assert says in said.err


def test_no_torch():
    code = (
        "import sys; from tiewise.cli.main import command_line; "
        "command_line(['models'])(['models', '--json'], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'plotly', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
