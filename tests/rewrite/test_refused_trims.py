"""What `trim` does not make: refused in one line that says why, and nothing is left behind; damaged files included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table
from trimmed_words import BYTES

from tiewise.core.errors import CheckpointError
from tiewise.rewrite import trim

CHILD = Path(__file__).with_name("hostile_trims.py")
PLAIN = {"vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]], "type": "BPE"}
ROWS = {"rows": 4, "config": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}}


def model(**parts):
    """A folder whose tokenizer has a model of these parts."""
    return ROWS | {"tokenizer": bpe_tokenizer() | {"model": PLAIN | parts}}


def post(part):
    return ROWS | {"tokenizer": bpe_tokenizer() | {"model": PLAIN, "post_processor": part}}


SIZE = {"size": 3}
FALLBACK = {byte: number for number, byte in enumerate([*BYTES, "a", "<0x41>a"])}
REFUSED = [
    ({}, model(), "nothing says which tokens stay"),
    ({"size": 4}, model(), "size is 4, of 4 rows; choose 3, which must stay, up to 3"),
    ({"size": 2}, model(), "choose 3, which must stay"),
    ({"size": 0}, model(), "size is 0"),
    ({"text": "text.txt"}, model(), "all 4 tokens would stay; give a smaller text, or a size"),
    ({"text": "missing"}, model(), "missing: no file of text; check the path"),
    ({"text": "."}, model(), "no file of text"),
    ({"text": "latin.txt"}, model(), "not UTF-8 text"),
    ({"keep": "missing"}, model(), "no such file"),
    ({"keep": "wrong.txt"}, model(), "'zebra' is no token of this tokenizer; write a token on each line"),
    ({"keep": "ids.txt"}, model(), "'77' is no token of this tokenizer"),
    ({"keep": "empty.txt"}, model(), "empty.txt: empty; write a token"),
    ({"keep": "latin.txt"}, model(), "not UTF-8 text"),
    (SIZE, ROWS, "no tokenizer.json in it; save it with AutoTokenizer"),
    (SIZE, ROWS | {"tokenizer": {"model": 3}}, "no tokenizer ("),
    (SIZE, model(type="WordLevel", unk_token="a"), "its model is WordLevel"),
    (SIZE, model(dropout=0.1), "its BPE has a dropout"),
    (SIZE, model(end_of_word_suffix="</w>"), "its BPE has a end_of_word_suffix"),
    (
        SIZE,
        model(vocab={"a": 0, "b": 1, "ab": 2, "": 3}, merges=[["", "a"]]),
        "merge 0 joins '' and 'a'; nothing is proved",
    ),
    (
        SIZE,
        ROWS | {"rows": 300} | model(vocab=FALLBACK, merges=[["<0x41>", "a"]], byte_fallback=True),
        "merge 0 joins '<0x41>' and 'a'",
    ),
    (SIZE, model(vocab={"a": 0, "b": 0, "ab": 2}), "the library gives its tokens other ids"),
    (SIZE, model(vocab={"a": 0, "b": 1, "ab": 9}), "names token 9, and its tables have 4 rows; tiewise resize"),
    (SIZE, model() | {"config": {"eos_token_id": 4}}, "names token 4, and its tables have 4 rows"),
    (SIZE, model() | {"files": {"generation_config.json": [1]}}, "generation_config.json: no JSON object"),
    (SIZE, model() | {"files": {"vocab.json": {"a": 1}}}, "vocab.json: it gives 'a' another id than tokenizer.json"),
    (SIZE, model() | {"tied": False, "head": table(5)}, "5 rows, not 4"),
    (SIZE, model() | {"tensors": {"model.embed_tokens.weight": np.ones((4, 8), np.int8)}}, "is quantised"),
    (SIZE, model() | {"tensors": {"model.extra_embed.weight": table(4)}}, "has 4 rows too, and plays no part"),
]


@pytest.mark.parametrize(("options", "how", "says"), REFUSED)
def test_what_cannot_be_done_is_said_and_leaves_nothing(tmp_path, monkeypatch, options, how, says):
    monkeypatch.chdir(tmp_path)
    written = {"text.txt": b"ab c a b", "wrong.txt": b"ab\nzebra\n", "ids.txt": b"1\n77", "empty.txt": b"\n"}
    for name, data in (written | {"latin.txt": b"caf\xe9"}).items():
        Path(name).write_bytes(data)
    llama(tmp_path / "a", **how)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as refused:
        trim("a", "b", **options)
    assert says in str(refused.value)
    assert refused.value.fix
    assert sorted(tmp_path.rglob("*")) == before


def test_a_config_without_bottom(tmp_path):
    path = llama(tmp_path / "a", **model())
    (path / "generation_config.json").write_text('{"bad_words_ids": ' + "[" * 980 + "1" + "]" * 980 + "}")
    with pytest.raises(CheckpointError, match=r"nested deeper|not readable"):
        trim(path, tmp_path / "b", **SIZE)


def test_one_file_has_no_tokenizer(tmp_path):
    llama(tmp_path / "a", **model())
    with pytest.raises(CheckpointError, match="no folder with config"):
        trim(tmp_path / "a/model.safetensors", tmp_path / "b", **SIZE)


def test_without_the_library(tmp_path, monkeypatch):
    llama(tmp_path / "a", **model())
    monkeypatch.setattr("tiewise.rewrite.tokenizer_file.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="needs the tokenizers library; pip install"):
        trim(tmp_path / "a", tmp_path / "b", **SIZE)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(1000, 3000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_tokenizers(tmp_path, first, count):
    here = Path(__file__).parents
    paths = [*sys.path, str(here[0]), str(here[1] / "checkpoint")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(CHILD), str(tmp_path / "home"), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr  # Rust would say there that it panicked
    told = json.loads(done.stdout)
    assert not told["failed"], f"{len(told['failed'])} of {count}: " + "\n".join(told["failed"][:20])
    assert told["made"] + told["refused"] == count
    assert min(told["made"], told["refused"]) > count // 8
