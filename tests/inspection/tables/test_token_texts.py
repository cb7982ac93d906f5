"""Conversion of words to token ids, and scripts of tokens, on tokenizers with known vocabularies."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError, DataError
from tiewise.inspection.tables.token_texts import find_tokens, read_texts, script_of, tokens_of_words


def write_byte_level_tokenizer(path):
    vocabulary = {c: i for i, c in enumerate(["N", "e", "w", "Ġ", "k", "Ne", "New", "ĠNew", "ĠN", "ĠNe"])}
    merges = [("N", "e"), ("Ne", "w"), ("Ġ", "New")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return open_folder(path)


def test_find_tokens_prefers_the_token_with_a_leading_space(tmp_path):
    folder = write_byte_level_tokenizer(tmp_path)
    assert find_tokens(folder, ["New", "ĠN", " New"]) == [7, 8, 7]
    assert find_tokens(folder, ["k"]) == [4]  # there is no " k"


def test_find_tokens_refuses_a_word_of_several_tokens_and_lists_its_pieces(tmp_path):
    with pytest.raises(DataError, match=r"not one token .* 'New' \+ 'k'|not one token .*New.* \+ .*k"):
        find_tokens(write_byte_level_tokenizer(tmp_path), ["Newk"])


def test_find_tokens_refuses_a_word_that_maps_to_the_unknown_token(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "new": 1, "york": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = open_folder(tmp_path)
    assert find_tokens(folder, ["New", "York"]) == [1, 2]
    with pytest.raises(DataError, match="not one token"):
        find_tokens(folder, ["city"])


WITH_MISSING_IDS = {f"t{number}": number for number in range(20)} | {"<lang>": 30}


def test_read_texts_keeps_each_token_at_its_id_when_ids_are_missing(tmp_path):
    """The vocabulary has fewer tokens than the table has rows; the last token keeps its id."""
    tokenizer = Tokenizer(models.WordLevel(WITH_MISSING_IDS, unk_token="t0"))
    tokenizer.add_special_tokens(["<lang>", "<new>"])  # <new> gets id 21, which had no token
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = read_texts(open_folder(tmp_path), 32)
    named = WITH_MISSING_IDS | {"<new>": tokenizer.token_to_id("<new>")}
    assert {text: row for row, text in enumerate(texts.of) if text is not None} == named
    assert (len(texts.of), texts.special) == (32, {30, named["<new>"]})
    assert read_texts(open_folder(tmp_path), 25).of == texts.of[:25]


def test_find_tokens_refuses_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        find_tokens(open_folder(tmp_path), ["New"])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        find_tokens(open_folder(tmp_path), ["New"])


@pytest.mark.parametrize(
    ("script", "texts"),
    {
        "Latin": (" the", "Ａ"),
        "Cyrillic": ("ё",),
        "Greek": ("λό",),
        "Han": ("漢字", "a漢字"),
        "Kana": ("のは", "カ", "ｶ"),
        "Hangul": ("한국",),
        "Arabic": ("ال",),
        "Hebrew": ("של",),
        "Devanagari": ("का",),
        "other letters": ("ไทย",),
        "digits": (" 12",),
        "punctuation": ("), ",),
        "white space": ("\n\t ", ""),
        "parts of characters": ("\ufffd",),
        "no token": (None,),
    }.items(),
)
def test_script_of_names_the_script_of_a_token(script, texts):
    assert {script_of(text) for text in texts} == {script}


def test_tokens_of_words_takes_the_shorter_encoding_and_refuses_dropped_characters(tmp_path):
    folder = write_byte_level_tokenizer(tmp_path)
    found = tokens_of_words(folder, ["New", "k", "Newk", "Nex", "New"])
    assert found == {"New": (7,), "k": (4,), "Newk": (7, 4), "Nex": ()}


def test_tokens_of_words_has_none_for_a_word_with_an_unknown_part(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "new": 1, "york": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = tokens_of_words(open_folder(tmp_path), ["york", "new york", "new city"])
    assert found == {"york": (2,), "new york": (1, 2), "new city": ()}
