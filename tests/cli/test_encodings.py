"""Test commands on terminals without UTF-8: the same exit code, and substitutes for missing characters."""

import io
import json
import shutil
import sys

import pytest
from cli_tiny import TINY, write_text
from tests.checkpoint.rewrite.verb_examples import example_lines, write_sources

from tiewise.cli.commands import commands
from tiewise.cli.main import main
from tiewise.training.data.tokenizer import make_tokenizer

RUN = ["-t", "text.txt", *TINY, "--steps=4", "--seeds=2", "--arms=tied,untied", "--out=made"]
COMMAND_LINES = {  # a line of each command, its exit code, and a character of its output that ASCII lacks
    "compare": (["compare", *RUN], 0, "−"),
    "train": (["train", "-t", "no…where.txt", *TINY], 2, "…"),
    "heal": (["heal", "no…where", "--teacher=tied"], 2, "…"),
    "sweep": (["sweep", "no…where"], 2, "…"),
    "data show": (["data", "show", "-t", "dots.txt", "--tokenizer=bpe:300"], 0, "…"),
    "vocab hot": (["vocab", "hot", "-t", "lines.jsonl:text", "--tokenizer=words.json", "--size=40"], 0, "–"),
    "plan": (["plan", "--like", "gpt2", "--full"], 0, "·"),
    "inspect": (["inspect", "wrong", "--only=direct_path,tokens", "--samples=50"], 0, "−"),
    "explore": (["explore", "no…where"], 2, "…"),
    "diff": (["diff", "no…where", "wrong"], 2, "…"),
    "check": (["check", "wrong"], 1, "→"),
    "kernels": (["kernels", "b…d"], 2, "…"),
    "exercise": (["exercise", "2"], 0, "−"),
    **{name: ([*name.split(), *words, "--to=made"], 0, "→") for name, words in example_lines().items()},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    text = (folder / write_text(folder)).read_text()
    (folder / "dots.txt").write_text(text.replace(" a", " … a"), encoding="utf-8")
    # enough documents of about the same length for an interval, which is printed with a dash
    lines = [json.dumps({"text": f"{number} {text[:200]}"}) for number in range(200)]
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    make_tokenizer("bytes").backend_tokenizer.save(str(folder / "words.json"))
    write_sources(folder)
    return folder


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_command_exits_alike_in_every_encoding_and_prints_substitutes(command, folders, tmp_path, monkeypatch):
    arguments, code, letter = COMMAND_LINES[command]
    printed = {}
    for encoding in ("utf-8", "cp1252", "ascii"):
        shutil.copytree(folders, tmp_path / encoding)
        monkeypatch.chdir(tmp_path / encoding)
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        monkeypatch.setattr(sys, "argv", ["tiewise", *arguments])
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as end:
            main()
        printed[encoding] = "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert end.value.code == code, printed[encoding]
    assert letter in printed["utf-8"]
    marks = printed["utf-8"].count("?") + printed["utf-8"].count("\ufffd")
    assert [printed["cp1252"].count("?"), printed["ascii"].count("?")] == [marks, marks]  # others have a substitute


def test_encoding_examples_cover_every_command():
    assert set(COMMAND_LINES) == set(commands())
