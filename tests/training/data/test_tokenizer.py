"""Tests of making, loading and refusing tokenizers, and of encoding texts in pieces."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.core.progress import listen_to_progress, progress_of
from tiewise.training.data.corpus import token_type
from tiewise.training.data.tokenizer import StreamEncoder, make_tokenizer, write_tokens

TEXTS = ["the cat sat on the mat. " * 30, "the dog ate the cat's hat. " * 30, "naïve café — 日本語 " * 10]


def train_texts():
    return iter(TEXTS)


def fail_if_trained():
    raise AssertionError("only bpe:N is trained")


def encode_documents(tokenizer, *documents):
    return StreamEncoder(tokenizer, np.dtype("<u2")).encode([(document, True) for document in documents]).tolist()


@pytest.fixture(scope="module")
def byte_tokenizer():
    return make_tokenizer("bytes", fail_if_trained)


@given(st.text(max_size=80))
def test_byte_tokenizer_encodes_utf8_bytes(byte_tokenizer, text):
    found = encode_documents(byte_tokenizer, text)
    assert found == [*text.encode("utf-8"), 256]
    assert byte_tokenizer.decode(found[:-1]) == text
    assert (len(byte_tokenizer), byte_tokenizer.eos_token) == (257, "<eos>")


def test_stream_encoder_reads_end_markers_in_text_as_text(byte_tokenizer):
    assert encode_documents(byte_tokenizer, "a<eos>b", "c") == [*b"a<eos>b", 256, *b"c", 256]
    trained = make_tokenizer("bpe:290", train_texts)
    assert encode_documents(trained, "a<eos>b").count(trained.eos_token_id) == 1


def test_make_tokenizer_trains_reproducible_and_reversible_bpe():
    one, two = (make_tokenizer("bpe:290", train_texts) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    assert len(one) == 290
    for text in [*TEXTS, "unseen ü𝄞\r\n\t  spaces  ."]:
        assert one.decode(one.encode(text)) == text
    assert len(one.encode(TEXTS[0])) < len(TEXTS[0]) / 2  # the tokenizer learnt merges
    assert len(make_tokenizer("bpe:257", train_texts)) == 257  # bytes alone
    assert 257 < len(make_tokenizer("bpe:4096", lambda: iter(["abab abab"]))) < 270


def test_make_tokenizer_loads_folder_file_and_bare_file(tmp_path):
    saved, bare = tmp_path / "saved", tmp_path / "bare.json"
    expected = make_tokenizer("bpe:290", train_texts)
    expected.save_pretrained(saved)
    shutil.copy(saved / "tokenizer.json", bare)
    for kind in (saved, saved / "tokenizer.json", bare):
        found = make_tokenizer(str(kind), fail_if_trained)
        assert (found.get_vocab(), found.eos_token_id) == (expected.get_vocab(), expected.eos_token_id)
        assert found.encode(TEXTS[1]) == expected.encode(TEXTS[1])


def word_level(words):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    ("words", "declared", "end", "number", "size"),
    [
        (["[UNK]", "a", "[SEP]", "<|endoftext|>"], {}, "<|endoftext|>", 3, 4),
        (["[UNK]", "a"], {}, "<eos>", 2, 3),
        (["[UNK]", "a", "<stop>", "</s>"], {"sep_token": "<stop>"}, "<stop>", 2, 4),
    ],
)
def test_make_tokenizer_detects_or_adds_end_token(tmp_path, words, declared, end, number, size):
    PreTrainedTokenizerFast(tokenizer_object=word_level(words), **declared).save_pretrained(tmp_path)
    tokenizer = make_tokenizer(str(tmp_path), fail_if_trained)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == (end, number, size)


def test_stream_encoder_ignores_truncation_and_padding_of_tokenizer_file(tmp_path):
    engine = word_level(["[UNK]", "a", "</s>", "<s>"])
    engine.enable_truncation(max_length=4)
    engine.enable_padding(length=16)
    engine.save(str(tmp_path / "t.json"))
    assert encode_documents(make_tokenizer(str(tmp_path / "t.json"), fail_if_trained), "a " * 9, "a") == [
        *[1] * 9,
        2,
        1,
        2,
    ]


def test_write_tokens_joins_pieces_of_long_documents(tmp_path, byte_tokenizer):
    text = ["".join(f"line {i}\n" for i in range(150_000)), "x" * 1_200_000, "", "end"]
    done, encoder = [], StreamEncoder(byte_tokenizer, np.dtype("<u2"))
    with listen_to_progress(lambda *told: done.append(told[1])), progress_of("tokens", 1):
        count = write_tokens(tmp_path / "t.bin", [(part, True) for part in text], encoder)
    tokens = np.fromfile(tmp_path / "t.bin", "<u2").tolist()
    assert tokens == [token for part in text for token in (*part.encode(), 256)]
    assert (count, done[-1]) == (len(tokens), sum(map(len, text)))


def test_token_type_is_smallest_dtype_for_vocabulary():
    assert token_type(65_535) == np.uint16
    assert token_type(65_536) == np.uint32


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("bpe:256", r"'bpe:256': needs at least 257 tokens .*; write bpe:4096, say"),
        ("bpe:abc", r"'bpe:abc': the size must be a whole number; write bpe:4096"),
        *((kind, "must be a whole number") for kind in ("bpe:-5", "bpe:", "bpe")),
        ("./none", r"no tokenizer file or folder './none'; choose"),
        ("none/tokenizer.json", r"no tokenizer file or folder 'none/tokenizer.json'; choose"),
        ("what is this?", r"unknown tokenizer 'what is this\?'; choose bpe:4096"),
        ("owner/none", r"no tokenizer 'owner/none' in the cache or on the Hugging Face Hub .*; check the name"),
    ],
)
def test_make_tokenizer_refuses_invalid_names(kind, match):
    with pytest.raises(DataError, match=match) as caught:
        make_tokenizer(kind, train_texts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "not json", "{}", json.dumps({"model": {"type": "Nonsense"}}), "\0\0"])
def test_make_tokenizer_refuses_files_that_hold_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer.json' is not a tokenizer.json \(.*\); choose") as caught:
        make_tokenizer(str(path), fail_if_trained)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match=r"the folder '.*' holds no tokenizer"):
        make_tokenizer(str(tmp_path), fail_if_trained)


def test_make_tokenizer_refuses_custom_code_without_running_it(tmp_path):
    saved = tmp_path / "saved"
    make_tokenizer("bpe:290", train_texts).save_pretrained(saved)
    (saved / "evil.py").write_text(f"open({str(saved / 'ran')!r}, 'w')\nclass Evil: pass\n")
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}, "tokenizer_class": "Evil"}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="custom code") as caught:
        make_tokenizer(str(saved), fail_if_trained)
    assert "\n" not in str(caught.value)
    assert not (saved / "ran").exists()
