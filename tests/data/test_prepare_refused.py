import io
import sys

import pytest

from tiewise.core.errors import DataError, RunError
from tiewise.core.progress import heard
from tiewise.data.corpus import prepare
from tiewise.data.prepared import load_prepared
from tiewise.data.training_rows import Blocks

SPLITS = ("train", "tune", "heldout")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "standard input is empty; pipe a text"),
        (b"ab\xff", "standard input is not UTF-8 text: byte 2"),
        (b"ab\0", "standard input is a binary file: byte 2"),
        (b"  \n ", "'-' holds no text"),
        (b"too short", "the text makes 1 document without its repetitions; needs at least 3"),
    ],
)
def test_unusable_standard_input_is_not_kept(out, monkeypatch, data, match):
    out.mkdir(parents=True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(DataError, match=match):
        prepare(["-"], "bytes", out, length=8)
    assert list(out.iterdir()) == []


def test_too_short_a_text_says_how_long_it_is(source, out):
    with pytest.raises(DataError) as caught:
        prepare([str(source)], "bytes", out, length=5000)
    message = str(caught.value)
    assert not out.exists()
    fits = int(message.rpartition("a length of at most ")[2])
    prepared = prepare([str(source)], "bytes", out, length=fits)
    tokens = {name: len(prepared.split(name)) for name in SPLITS}
    assert message.startswith(f"the text has {sum(tokens.values())} tokens, {tokens['tune']} of them for tune; ")
    assert "needs at least 5000 there for length 5000; give more text" in message
    assert fits == min(tokens["train"] // 2, tokens["tune"], tokens["heldout"])
    for name, least in (("train", 2), ("tune", 1), ("heldout", 1)):
        assert len(Blocks(prepared.split(name), fits)) >= least
    with pytest.raises(DataError, match=f"for length {fits + 1}"):
        prepare([str(source)], "bytes", out, length=fits + 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"texts": []}, "no text is given; name a file"),
        ({"texts": ["-", "-"]}, "'-' is given twice"),
        ({"texts": ["none.txt"]}, "no file or folder 'none.txt'"),
        ({"tokenizer": "bpe:0"}, "'bpe:0': needs at least 257"),
        ({"tokenizer": "./none"}, "no tokenizer file or folder './none'"),
        ({"length": 0}, "a block of 0 tokens"),
        ({"seed": -1}, "seed -1; use zero or a positive number"),
        ({"fractions": (0.5, 0.6, 0.1)}, "give 3 positive shares that sum to 1"),
        ({"fractions": (0.9, 0.1, 0.0)}, "give 3 positive shares"),
        ({"fractions": (0.9, 0.1)}, "give 3 positive shares"),
    ],
)
def test_bad_requests_leave_nothing_behind(source, out, change, match):
    request = {"texts": [str(source)], "tokenizer": "bytes", "length": 8} | change
    with pytest.raises(DataError, match=match) as caught:
        prepare(request.pop("texts"), request.pop("tokenizer"), out, **request)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_a_tokenizer_is_refused_before_the_text_is_read(source, out):
    stages = []
    with pytest.raises(DataError, match="no tokenizer file"), heard(lambda stage, done, total: stages.append(stage)):
        prepare([str(source)], "./none", out, length=8)
    assert stages == []


def test_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match=r"cannot prepare the text in '.*file.*; choose another folder"):
            prepare([str(source)], "bytes", folder, length=8)
    assert (tmp_path / "file").read_text() == "in the way"


def test_damaged_folders(source, out):
    with pytest.raises(DataError, match=r"no prepared text in '.*' \(data.json is missing\); prepare"):
        load_prepared(out)
    prepared = prepare([str(source)], "bytes", out, length=8)
    with pytest.raises(DataError, match="no split 'test'; choose one of train, tune, heldout"):
        prepared.split("test")
    (out / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"train.bin' does not hold the \d+ tokens"):
        load_prepared(out)
    for damage in ("{}", "[]", "not json", '{"tokenizer": 3}'):
        (out / "data.json").write_text(damage)
        with pytest.raises(DataError, match=r"data.json' is damaged; prepare the text again"):
            load_prepared(out)
