import hashlib
import json
import sys

import numpy as np
import pytest

from tiewise.core.progress import heard
from tiewise.data.corpus import prepare
from tiewise.data.plain_text import paragraphs
from tiewise.data.prepared import load_prepared

SPLITS = ("train", "tune", "heldout")


def decoded(prepared, name):
    """The documents of a split, from its tokens."""
    tokens = prepared.split(name)
    ends = np.flatnonzero(tokens == prepared.eos_id)
    assert ends[-1] == len(tokens) - 1
    return [prepared.tokenizer().decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]


def test_documents_are_partitioned_and_paragraphs_kept_once(source, out, rows):
    prepared = prepare([str(source)], "bpe:600", out, length=8)
    found = {name: decoded(prepared, name) for name in SPLITS}
    expected = ["Shared  boilerplate.\n\n" + list(paragraphs(rows[1][0]))[1]]
    expected += [list(paragraphs(row))[1] for row in rows[1][1:]]
    assert sorted(text for documents in found.values() for text in documents) == sorted(expected)
    assert prepared.facts["dropped_paragraphs"] == 2 * 100 - 1
    for name, documents in found.items():
        assert documents == [text for text in expected if text in documents]  # in the text's order
        facts = prepared.facts["splits"][name]
        assert facts["documents"] == len(documents)
        assert facts["characters"] == sum(map(len, documents))
        assert facts["bytes"] == sum(len(text.encode()) for text in documents)
        assert facts["tokens"] == len(prepared.split(name))
        assert facts["sha256"] == hashlib.sha256(b"".join(d.encode() + b"\0" for d in documents)).hexdigest()
    whole = b"".join(text.encode() + b"\0" for text in expected)
    assert prepared.facts["sha256"] == hashlib.sha256(whole).hexdigest()
    for key in ("documents", "characters", "bytes", "tokens"):
        assert prepared.facts[key] == sum(prepared.facts["splits"][name][key] for name in SPLITS)
    shares = [prepared.facts["splits"][name]["characters"] / prepared.facts["characters"] for name in SPLITS]
    np.testing.assert_allclose(shares, (0.88, 0.04, 0.08), atol=0.006)


def test_tokenizer_learns_from_the_training_split_only(source, out, rows):
    prepared = prepare([str(source)], "bpe:1500", out, length=8)
    tokenizer = prepared.tokenizer()
    whole_words = {tokenizer.decode([i]).strip() for i in range(len(tokenizer))}
    for name in SPLITS:
        text = "\n".join(decoded(prepared, name))
        own = [name for name in rows[0] if name in text]
        assert own
        learnt = sum(word in whole_words for word in own)
        assert learnt == (len(own) if name == "train" else 0)


def test_files_types_and_facts(source, out):
    prepared = prepare([str(source)], "bytes", out, length=8)
    assert (prepared.vocab, prepared.eos_id) == (257, 256)
    assert prepared.split("train").dtype == np.uint16
    assert isinstance(prepared.split("train"), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        prepared.split("train")[0] = 1
    assert sorted(p.name for p in out.iterdir()) == ["data.json", "heldout.bin", "tokenizer", "train.bin", "tune.bin"]
    facts = json.loads((out / "data.json").read_text())
    assert facts == prepared.facts
    assert facts["texts"] == [str(source)]
    assert facts["demo"] is False
    assert facts["python"] is None
    assert facts["tokenizer"] == {"vocab": 257, "eos_id": 256, "dtype": "uint16", "kind": "bytes"}


def test_loaded_equals_prepared(source, out):
    prepared = prepare([str(source)], "bpe:400", out, length=8)
    loaded = load_prepared(out)
    assert loaded == prepared
    assert loaded.tokenizer().get_vocab() == prepared.tokenizer().get_vocab()
    assert loaded.tokenizer() is loaded.tokenizer()


def test_progress_runs_through_three_stages(source, out):
    seen = []
    with heard(lambda *step: seen.append(step)):
        prepare([str(source)], "bytes", out, length=8)
    assert list(dict.fromkeys(stage for stage, *_ in seen)) == ["reading", "tokenizer", "tokens"]
    for stage in ("reading", "tokenizer", "tokens"):
        parts = [done / total for at, done, total in seen if at == stage]
        assert parts == sorted(parts)
        assert 0 <= parts[0] <= parts[-1] <= 1
    assert seen[-1][1] == seen[-1][2]


def test_builtin_is_a_demo(out):
    prepared = prepare(["builtin"], "bpe:4096", out, length=128)
    facts = prepared.facts
    assert facts["demo"] is True
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert prepared.vocab == 4096
    assert facts["characters"] > 1_000_000
    text = {name: "\n\n".join(decoded(prepared, name)) for name in SPLITS}
    train = {" ".join(p.split()) for p in paragraphs(text["train"])}
    heldout = {" ".join(p.split()) for p in paragraphs(text["heldout"])}
    assert heldout
    assert train.isdisjoint(heldout)
