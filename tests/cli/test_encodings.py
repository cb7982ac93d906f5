"""Terminals of few letters: every command ends as it does in UTF-8, and says the same in what the encoding has."""

import io
import json
import shutil
import sys

import pytest
from cli_tiny import TINY, write_text
from safetensors.numpy import load_file
from tests.inspection.tiny_folders import write_model

from tiewise.cli.main import COMMANDS, main
from tiewise.training.data.tokenizer import make_tokenizer

RUN = ["-t", "text.txt", *TINY, "--seeds=2", "--arms=tied,untied", "--out=made"]
SAID = {  # a command line of each command, its exit code, and a letter of its output that ASCII lacks
    "compare": (["compare", *RUN], 0, "−"),
    "train": (["train", "-t", "no…where.txt", *TINY], 2, "…"),
    "heal": (["heal", "no…where", "--teacher=tied"], 2, "…"),
    "sweep": (["sweep", "no…where"], 2, "…"),
    "data": (["data", "show", "-t", "dots.txt", "--tokenizer=bpe:300"], 0, "…"),
    "vocab": (["vocab", "hot", "-t", "lines.jsonl:text", "--tokenizer=words.json", "--size=40"], 0, "–"),
    "plan": (["plan", "--like", "gpt2"], 0, "·"),
    "models": (["models", "--untied"], 0, "≈"),
    "inspect": (["inspect", "wrong", "--only=direct_path,tokens", "--samples=50"], 0, "−"),
    "explore": (["explore", "no…where"], 2, "…"),
    "diff": (["diff", "no…where", "wrong"], 2, "…"),
    "check": (["check", "wrong"], 1, "→"),
    "tie": (["tie", "wrong", "--keep=mean", "--to=made", "--force"], 0, "→"),
    "untie": (["untie", "tied", "--to=made"], 0, "→"),
    "factor": (["factor", "wrong", "--rank=4", "--to=made", "--force"], 0, "→"),
    "densify": (["densify", "no…where", "--to=made"], 2, "…"),
    "slim": (["slim", "no…where", "--base=tied", "--to=made"], 2, "…"),
    "merge": (["merge", "no…where", "--base=tied", "--to=made"], 2, "…"),
    "resize": (["resize", "wrong", "--vocab=70", "--to=made"], 0, "→"),
    "trim": (["trim", "no…where", "--size=9", "--to=made"], 2, "…"),
    "transplant": (["transplant", "wrong", "--tokenizer=no…where", "--to=made"], 2, "…"),
    "dedupe": (["dedupe", "equal", "--to=made"], 0, "→"),
    "repair": (["repair", "wrong", "--to=made"], 0, "→"),
    "kernels": (["kernels", "b…d"], 2, "…"),
    "exercise": (["exercise", "2"], 0, "−"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    text = (folder / write_text(folder)).read_text()
    (folder / "dots.txt").write_text(text.replace(" a", " … a"), encoding="utf-8")
    # enough documents of about one length for an interval, which is printed with a dash
    lines = [json.dumps({"text": f"{number} {text[:200]}"}) for number in range(200)]
    (folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    make_tokenizer("bytes").backend_tokenizer.save(str(folder / "words.json"))
    write_model(folder / "tied")
    table = load_file(folder / "tied/model.safetensors")["model.embed_tokens.weight"]
    write_model(folder / "equal", tensors={"lm_head.weight": table})
    write_model(folder / "wrong", tensors={"lm_head.weight": table[::-1].copy()})
    return folder


@pytest.mark.parametrize("command", SAID)
def test_no_encoding_stops_a_command(command, folders, tmp_path, monkeypatch):
    arguments, code, letter = SAID[command]
    said = {}
    for encoding in ("utf-8", "cp1252", "ascii"):
        shutil.copytree(folders, tmp_path / encoding)
        monkeypatch.chdir(tmp_path / encoding)
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        monkeypatch.setattr(sys, "argv", ["tiewise", *arguments])
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as end:
            main()
        said[encoding] = "".join(stream.buffer.getvalue().decode(encoding) for stream in streams)
        assert end.value.code == code, said[encoding]
    assert letter in said["utf-8"]
    marks = said["utf-8"].count("?") + said["utf-8"].count("\ufffd")
    assert [said["cp1252"].count("?"), said["ascii"].count("?")] == [marks, marks]  # all else has a stand-in


def test_every_command_is_tried():
    assert set(SAID) == {name for commands in COMMANDS.values() for name in commands}
