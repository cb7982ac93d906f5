"""What broke in public, made again as a tiny folder, and what a command says of it; docs/incidents.md is this table."""

from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_checkpoints import V, bpe_tokenizer, llama, table
from typer.testing import CliRunner

from tiewise.cli.main import command_line

DOC = Path(__file__).parents[2] / "docs" / "incidents.md"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Incident(NamedTuple):
    """Threads, what makes the folder(s), the command run beside them, its exit code, and words that it says."""

    threads: str
    make: object
    command: str
    code: int
    says: tuple[str, ...]


def granite(here):
    """A tied Granite that ships an equal head."""
    config = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    llama(here / "model", True, config=config, head=table())


def surplus(here):
    """A tied model whose trainer saved the head besides."""
    llama(here / "model", True, head=table())


def moved(here):
    """A fine-tune with two more rows, and one row that moved."""
    llama(here / "base", True)
    rows = table(V + 2)
    rows[:V] = table()
    rows[5] += 1
    llama(here / "tuned", True, rows=V + 2, tensors={TABLE: rows})


def donor(here):
    """A merge whose tokenizer has ids that no row answers."""
    llama(here / "model", True, tokenizer=bpe_tokenizer(V, [(V, "<donor>", True)]))


def renamed(here):
    """A tied model whose table has a name of nobody's."""
    tensors = {TABLE: None, "model.word_table.weight": table()}
    llama(here / "model", True, tensors=tensors)


def plain(here):
    llama(here / "model", True)


INCIDENTS = [
    Incident("mlx-lm#1298, mlx-lm#1055", granite, "check model --fail-on warning", 1, ("B013",)),
    Incident("ColossalAI#6160, Pai-Megatron-Patch#593", surplus, "dedupe model --to mended", 0, ("lm_head.weight",)),
    Incident("Megatron-Bridge#4883", renamed, "check model", 1, ("B010",)),
    Incident("mergekit#328", moved, "diff base tuned", 0, ("rows 24 to 25",)),
    Incident("mergekit#657", donor, "check model", 1, ("B031",)),
    Incident("vllm#42775, sglang#7252", plain, "resize model --vocab 32 --rows zero --to padded", 0, ("zero",)),
    Incident("NeMo-RL#403, Automodel#425", plain, "check model --world 16", 0, ("B042", "16")),
]


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.threads.split(",")[0])
def test_it_is_answered(tmp_path, monkeypatch, incident):
    incident.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = incident.command.split()
    answer = CliRunner().invoke(command_line(arguments), arguments, env={"COLUMNS": "200"})
    assert answer.exit_code == incident.code, answer.output
    for words in incident.says:
        assert words in answer.output, answer.output
