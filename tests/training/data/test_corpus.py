"""Tests of `prepare`: splits, facts, reuse, refusals, interruptions, and memory use on large texts."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tiewise.core.errors import DataError, RunError
from tiewise.core.progress import listen_to_progress
from tiewise.training.data import corpus
from tiewise.training.data.corpus import load_prepared, prepare
from tiewise.training.data.documents import paragraphs

SPLITS = ("train", "tune", "heldout")


def random_word(generator):
    return "".join(generator.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(7))


@pytest.fixture(scope="session")
def rows():
    """Return 100 words and 100 documents. Each document repeats one word 40 times; all share a paragraph."""
    generator = random.Random(0)
    own, filler = ([random_word(generator)[:size] for _ in range(count)] for size, count in ((7, 100), (3, 50)))
    bodies = [" ".join(x for _ in range(40) for x in (name, generator.choice(filler))) for name in own]
    return own, [f"Shared  boilerplate.\n\n{body}\n\nShared boilerplate." for body in bodies]


@pytest.fixture
def source(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows[1]))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "data"


def fail_on_progress(stage, done, total):
    raise AssertionError("there is nothing to do")


def decoded_documents(prepared, name):
    """Return the documents of a split, decoded from its tokens."""
    tokens = prepared.split(name)
    ends = np.flatnonzero(tokens == prepared.eos_id)
    assert ends[-1] == len(tokens) - 1
    return [prepared.tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]


def document_facts(documents):
    """Return the facts that a prepared folder records about documents."""
    whole = [text.encode() for text in documents]
    digest = hashlib.sha256(b"".join(text + b"\0" for text in whole)).hexdigest()
    sizes = {"characters": sum(map(len, documents)), "bytes": sum(map(len, whole))}
    return {"documents": len(documents), "sha256": digest} | sizes


def test_prepare_partitions_documents_and_keeps_paragraphs_once(source, out, rows):
    prepared = prepare([str(source)], "bpe:600", out, length=8)
    facts, splits = prepared.facts, prepared.facts["splits"]
    found = {name: decoded_documents(prepared, name) for name in SPLITS}
    bodies = [list(paragraphs(row))[1] for row in rows[1]]
    expected = [f"Shared  boilerplate.\n\n{bodies[0]}", *bodies[1:]]
    assert sorted(text for documents in found.values() for text in documents) == sorted(expected)
    assert facts["dropped_paragraphs"] == 2 * 100 - 1
    for name, documents in found.items():
        assert documents == [text for text in expected if text in documents]  # documents keep the order of the text
        assert splits[name] == document_facts(documents) | {"tokens": len(prepared.split(name))}
    assert facts.items() >= document_facts(expected).items()
    assert facts["tokens"] == sum(splits[name]["tokens"] for name in SPLITS)
    shares = [splits[name]["characters"] / facts["characters"] for name in SPLITS]
    np.testing.assert_allclose(shares, (0.88, 0.04, 0.08), atol=0.006)


def test_tokenizer_learns_from_the_training_split_only(source, out, rows):
    prepared = prepare([str(source)], "bpe:1500", out, length=8)
    tokenizer = prepared.tokenizer
    whole_words = {tokenizer.decode([i]).strip() for i in range(len(tokenizer))}
    for name in SPLITS:
        text = "\n".join(decoded_documents(prepared, name))
        own = [name for name in rows[0] if name in text]
        assert own
        assert sum(word in whole_words for word in own) == (len(own) if name == "train" else 0)


def test_prepare_writes_files_dtypes_and_facts(source, out):
    prepared = prepare([str(source)], "bytes", out, length=8)
    assert (prepared.vocab, prepared.eos_id) == (257, 256)
    assert prepared.split("train").dtype == np.uint16
    assert isinstance(prepared.split("train"), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        prepared.split("train")[0] = 1
    assert sorted(p.name for p in out.iterdir()) == ["data.json", "heldout.bin", "tokenizer", "train.bin", "tune.bin"]
    facts = json.loads((out / "data.json").read_text())
    assert facts == prepared.facts
    assert [facts[key] for key in ("texts", "demo", "python")] == [[str(source)], False, None]
    assert facts["tokenizer"] == {"vocab": 257, "eos_id": 256, "dtype": "uint16", "kind": "bytes"}
    assert load_prepared(out) == prepared
    assert prepared.tokenizer is prepared.tokenizer


def test_prepare_reports_progress_of_three_stages(source, out):
    seen = []
    with listen_to_progress(lambda *step: seen.append(step)):
        prepare([str(source)], "bytes", out, length=8)
    assert list(dict.fromkeys(stage for stage, *_ in seen)) == ["reading", "tokenizer", "tokens"]
    for stage in ("reading", "tokenizer", "tokens"):
        parts = [done / total for at, done, total in seen if at == stage]
        assert [0, *parts, 1] == sorted([0, *parts, 1])
    assert seen[-1][1] == seen[-1][2]


def test_prepare_marks_builtin_text_as_demo_with_disjoint_splits(out):
    prepared = prepare(["builtin"], "bpe:4096", out, length=128)
    facts = prepared.facts
    assert (facts["demo"], facts["python"]) == (True, ".".join(map(str, sys.version_info[:3])))
    assert prepared.vocab == 4096
    assert facts["characters"] > 1_000_000
    texts = ("\n\n".join(decoded_documents(prepared, name)) for name in ("train", "heldout"))
    train, heldout = ({" ".join(p.split()) for p in paragraphs(text)} for text in texts)
    assert heldout
    assert train.isdisjoint(heldout)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "standard input is empty; pipe a text"),
        (b"ab\xff", "standard input is not UTF-8 text: byte 2"),
        (b"  \n ", "'-' holds no text"),
        (b"too short", "too little text: 1 document once repetitions are left out, and at least 3"),
    ],
)
def test_prepare_refuses_unusable_standard_input_and_leaves_no_file(out, pipe_in, data, match):
    out.mkdir(parents=True)
    pipe_in(data)
    with pytest.raises(DataError, match=match):
        prepare(["-"], "bytes", out, length=8)
    assert list(out.iterdir()) == []


def test_prepare_reports_largest_possible_length_for_short_text(source, out):
    with pytest.raises(DataError) as caught:
        prepare([str(source)], "bytes", out, length=5000)
    message = str(caught.value)
    assert not out.exists()
    fits = int(message.rpartition("a length of at most ")[2])
    prepared = prepare([str(source)], "bytes", out, length=fits)
    train, tune, heldout = (len(prepared.split(name)) for name in SPLITS)
    assert message.startswith(f"the text has {train + tune + heldout} tokens, {tune} of them for tune; ")
    assert "needs at least 5000 there for length 5000; give more text" in message
    assert fits == min(train // 2, tune, heldout)
    with pytest.raises(DataError, match=f"for length {fits + 1}"):
        prepare([str(source)], "bytes", out, length=fits + 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"texts": []}, "no text is given; name a file"),
        ({"texts": ["-", "-"]}, "'-' is given twice"),
        ({"texts": ["none.txt"]}, "no file or folder 'none.txt'"),
        ({"tokenizer": "./none"}, "no tokenizer file or folder './none'"),
        ({"length": 0}, "a block of 0 tokens"),
        ({"split": "last"}, "split = 'last'; choose random or contiguous"),
    ],
)
def test_prepare_refuses_bad_requests_before_reading_text(source, out, change, match):
    request = {"texts": [str(source)], "tokenizer": "bytes", "length": 8} | change
    # `prepare` fails before it reads the text
    with pytest.raises(DataError, match=match) as caught, listen_to_progress(fail_on_progress):
        prepare(request.pop("texts"), request.pop("tokenizer"), out, **request)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_prepare_refuses_unwritable_folder(source, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match=r"cannot prepare the text in '.*file.*; choose another folder"):
            prepare([str(source)], "bytes", folder, length=8)
    assert (tmp_path / "file").read_text() == "in the way"


def test_load_prepared_refuses_missing_and_damaged_files(source, out):
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


MEGABYTE = 1 << 20
SCRIPT = """
import json, resource, sys
from pathlib import Path
from tiewise.training.data.corpus import prepare

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

Path(sys.argv[2], "small.txt").write_text("\\n\\n".join(f"paragraph {i} of a small text" for i in range(9999)))
prepare([str(Path(sys.argv[2], "small.txt"))], sys.argv[3], Path(sys.argv[2], "small"), length=8)  # loads all code
before = peak()
prepared = prepare([sys.argv[1]], sys.argv[3], Path(sys.argv[2], "big"), length=128)
print(json.dumps({"grown": peak() - before, "facts": prepared.facts}))
"""


def write_large(path, megabytes):
    """Write a text of random words, in which every paragraph is another pair of halves."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(20_000)]
    halves = [" ".join(generator.choices(words, k=30)) for _ in range(1000)]
    with path.open("w") as file:
        for first in halves:
            file.write("".join(f"{first} {second}\n\n" for second in halves))
            if file.tell() >= megabytes * MEGABYTE:
                return path
    raise AssertionError(f"all pairs of halves are less than {megabytes} MiB")


@pytest.mark.slow
@pytest.mark.parametrize(("tokenizer", "megabytes"), [("bpe:4096", 40), ("bytes", 30)])
def test_prepare_memory_does_not_grow_with_text(tmp_path, tokenizer, megabytes):
    large = write_large(tmp_path / "large.txt", megabytes)
    command = [sys.executable, "-c", SCRIPT, large, tmp_path, tokenizer]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    size = large.stat().st_size
    assert result["facts"]["bytes"] > 0.99 * size  # no paragraph repeats, so none is dropped
    assert result["facts"]["tokens"] > size / 3
    # buffers and the hashes of paragraphs take 45 MiB, at 200 MiB of text as at 64; the file would add 30 or 40, its
    # paragraphs as Python strings more, and its tokens at least 27 (a third of 40, or all of 30, two bytes each)
    assert result["grown"] < 65 * MEGABYTE


KILLED_AND_WHOLE = """
import os, signal, sys
from pathlib import Path
from tiewise.core.progress import listen_to_progress
from tiewise.training.data.corpus import prepare

source, killed, whole = sys.argv[1:]

def kill_at_tokens(stage, done, total):
    if stage == "tokens":
        os.kill(os.getpid(), signal.SIGKILL)

child = os.fork()
if child == 0:
    with listen_to_progress(kill_at_tokens):
        prepare([source], "bpe:400", Path(killed), length=8)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
prepare([source], "bpe:400", Path(whole), length=8)
"""


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_killed_prepare_leaves_unprepared_folder_and_next_call_reproduces_files(source, out, tmp_path):
    command = [sys.executable, "-c", KILLED_AND_WHOLE, source, out, tmp_path / "other"]
    environment = os.environ | {"PYTHONHASHSEED": "1"}  # another one than this process has
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) == -signal.SIGKILL
    assert not (out / "data.json").exists()
    with pytest.raises(DataError, match="no prepared text"):
        load_prepared(out)
    prepare([str(source)], "bpe:400", out, length=8)
    assert contents(out) == contents(tmp_path / "other")


@pytest.mark.parametrize("stage", ["reading", "tokenizer", "tokens"])
def test_interrupted_prepare_keeps_existing_files(source, out, stage):
    def interrupt(at, done, total):
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listen_to_progress(interrupt):
        prepare([str(source)], "bytes", out, length=8)
    assert list(out.iterdir()) == []
    prepare([str(source)], "bytes", out, length=8)
    before = contents(out)
    with pytest.raises(KeyboardInterrupt), listen_to_progress(interrupt):
        prepare([str(source)], "bytes", out, length=8, split="contiguous")
    assert contents(out) == before


def test_load_prepared_refuses_folder_interrupted_while_moving_files(source, out, monkeypatch):
    prepare([str(source)], "bytes", out, length=8)
    monkeypatch.setattr("tiewise.training.data.corpus.sync_to_disk", lambda folder: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], "bytes", out, length=8, split="contiguous")
    with pytest.raises(DataError, match="no prepared text"):
        load_prepared(out)


def test_prepare_reuses_folder_of_equal_request(source, out, monkeypatch):
    prepared = prepare([str(source)], "bpe:400", out, length=8)
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "9.9.9")  # the Python version affects `builtin` only
    with listen_to_progress(fail_on_progress):
        assert prepare([str(source)], "bpe:400", out, length=16) == prepared
    with pytest.raises(DataError, match="needs at least"), listen_to_progress(fail_on_progress):
        prepare([str(source)], "bpe:400", out, length=1_000_000)
    assert load_prepared(out) == prepared


CHANGES = {
    "a file's time": lambda source, out: os.utime(source, ns=(0, 0)),
    "another split": lambda source, out: prepare([str(source)], "bytes", out, length=8, split="contiguous"),
    "another tokenizer": lambda source, out: prepare([str(source)], "bpe:400", out, length=8),
    "a short file": lambda source, out: (out / "tune.bin").write_bytes(b"short"),
    "no JSON": lambda source, out: (out / "data.json").write_text("{"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_prepare_repeats_work_for_other_request_or_changed_files(source, out, change):
    first, stages = prepare([str(source)], "bytes", out, length=8), set()
    CHANGES[change](source, out)
    with listen_to_progress(lambda stage, done, total: stages.add(stage)):
        prepared = prepare([str(source)], "bytes", out, length=8)
    assert stages == {"reading", "tokenizer", "tokens"}
    assert load_prepared(out) == prepared
    assert prepared.facts["sha256"] == first.facts["sha256"]


def test_prepare_detects_changed_tokenizer_file(source, out, tmp_path):
    mine = tmp_path / "mine"
    for size in (400, 500):
        prepare([str(source)], f"bpe:{size}", tmp_path / "a", length=8)
        shutil.copytree(tmp_path / "a" / "tokenizer", mine, dirs_exist_ok=True)
        assert prepare([str(source)], str(mine), out, length=8).vocab == size


PIPED = "\n\n".join(f"Paragraph {i} of the piped text, which is not long." for i in range(200))


def test_prepare_stores_standard_input_for_later_calls(out, pipe_in):
    pipe_in(PIPED.encode())
    prepared = prepare(["-"], "bytes", out, length=8)
    assert prepared.facts["texts"] == ["-"]
    assert prepared.facts["characters"] > 0.9 * len(PIPED)
    pipe_in(b"")
    with listen_to_progress(fail_on_progress):
        assert prepare(["-"], "bytes", out, length=8) == prepared
    (out / "data.json").unlink()  # as after a kill before the end
    again = prepare(["-"], "bytes", out, length=8)
    assert again.facts == prepared.facts


@pytest.fixture
def prepare_tokens(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} is no {i * i} but {i % 7}" for i in range(400)))
    text, out = [str(tmp_path / "text.txt")], tmp_path / "d"
    return lambda tokens: prepare(text, "bpe:300", out, length=8, train_tokens=tokens)


def test_train_tokens_selects_evenly_spread_blocks_and_keeps_heldout_text(prepare_tokens):
    whole = prepare_tokens(None)
    train, heldout, words = np.array(whole.split("train")), np.array(whole.split("heldout")), whole.tokenizer
    assert len(train) > 200
    less = prepare_tokens(100)
    kept = np.array(less.split("train")).reshape(-1, 8)
    blocks = train[: len(train) // 8 * 8].reshape(-1, 8)
    places = [next(i for i, block in enumerate(blocks) if (block == own).all()) for own in kept]
    assert len(kept) == 12
    assert less.facts["splits"]["train"]["tokens"] == 96
    assert set(np.diff(places)) <= {len(blocks) // 12, len(blocks) // 12 + 1}
    assert (np.array(less.split("heldout")) == heldout).all()
    assert less.tokenizer.get_vocab() == words.get_vocab()
    assert less.counts.sum() == 96
    assert len(prepare_tokens(200).split("train")) == 200  # another amount prepares the text again


def test_train_tokens_refuses_too_many_tokens_and_fewer_than_two_blocks(prepare_tokens):
    with pytest.raises(DataError, match=r"training tokens, 999,999 are asked for; give more text, or a smaller"):
        prepare_tokens(999_999)
    with pytest.raises(DataError, match="8 of them for train"):
        prepare_tokens(15)
