"""Test that `trim` keeps rows bit for bit and splits kept text as before, with transformers as the oracle."""

import json
import os
import random
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_models import FAMILIES, build, config_of, logits, run_child, tensors
from tests.checkpoint import saved_models
from tests.checkpoint.tiny_checkpoints import llama_config, table, write_sparse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trimmed_words import (
    KINDS,
    assert_same_split,
    gpt2,
    ids_of,
    llama3,
    prose,
    qwen,
    random_bpe,
    random_unigram,
    short_texts,
    words_of,
    write_llama,
)

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite import trim
from tiewise.checkpoint.rewrite.tokenizer_file import TokenizerFile
from tiewise.core.errors import CheckpointError
from tiewise.core.spec import BoundarySpec
from tiewise.core.text import cut_pieces

TEXT = prose(60_000)
OTHER = prose(30_000, 200_000)


def load_tokenizer(path):
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def text_file(path, text=TEXT[:20_000]):
    path.write_text(text, encoding="utf-8")
    return path


def kept_ids(old, new):
    """Return the old ids of a trimmed tokenizer's tokens, in the order of the new ids."""
    names, before = {number: token for token, number in new.get_vocab().items()}, old.get_vocab()
    return [before[names[number]] for number in sorted(names)]


def assert_rows(before, after, kept):
    """Assert that every tensor equals the old one or its kept rows bit for bit; return the cut names."""
    old, new = tensors(before), tensors(after)
    assert old.keys() == new.keys()
    cut = [name for name in old if old[name].shape != new[name].shape]
    for name, value in old.items():
        rows = value if name not in cut else value[kept] if len(value) > 1 else value[:, kept]
        assert rows.numpy().tobytes() == new[name].numpy().tobytes(), name
    return cut


# loads with transformers


def assert_same_logits(path, words, model, text):
    """Assert that trimmed and old model give equal logits; return (trimmed model, kept old ids, new input ids)."""
    assert not check(path / "b").at_least("warning")
    kept = kept_ids(words, load_tokenizer(path / "b"))
    assert len(kept) < words.get_vocab_size()
    loaded = type(model).from_pretrained(path / "b")
    ids, mine = (hf.AutoTokenizer.from_pretrained(path / at)(text, return_tensors="pt").input_ids for at in "ab")
    assert [kept[number] for number in mine[0]] == ids[0].tolist()
    assert (logits(loaded, mine) - logits(model, ids)[..., kept]).abs().max() < 1e-6
    return loaded, kept, mine


def test_trim_of_gpt2_keeps_logits_and_tokenizer_files_in_transformers(tmp_path):
    words = gpt2(TEXT)
    model = build("gpt2", vocab_size=words.get_vocab_size(), n_positions=400, bos_token_id=0, eos_token_id=0)
    model.save_pretrained(tmp_path / "a")
    hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(tmp_path / "a")
    words.model.save(str(tmp_path / "a"))  # vocab.json, merges.txt
    receipt = trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt", TEXT[:5_000]))
    loaded, kept, _ = assert_same_logits(tmp_path, words, model, TEXT[:400])
    assert len(kept) > 257
    assert assert_rows(tmp_path / "a", tmp_path / "b", kept) == ["transformer.wte.weight"]
    assert (receipt.logit_change, receipt.input_change) == (0, 0)
    assert loaded.config.vocab_size == len(kept)
    assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == (0, 0)
    # vocab.json and merges.txt agree with tokenizer.json
    vocab = json.loads((tmp_path / "b/vocab.json").read_text())
    merges = json.loads((tmp_path / "b/tokenizer.json").read_text())["model"]["merges"]
    assert vocab == load_tokenizer(tmp_path / "b").get_vocab()
    listed = (tmp_path / "b/merges.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ") for line in listed if not line.startswith("#version")] == merges


def test_trim_of_llama3_keeps_logits_and_maps_config_ids_in_transformers(tmp_path):
    words = llama3(TEXT)
    begin, end, turn = (words.token_to_id(f"<|{name}|>") for name in ("begin_of_text", "end_of_text", "eot_id"))
    ids = {"bos_token_id": begin, "eos_token_id": [end, turn]}
    model = build("llama", tied=False, vocab_size=words.get_vocab_size() + 5, **ids)  # with padding
    model.generation_config.suppress_tokens = [begin]
    model.save_pretrained(tmp_path / "a", max_shard_size="50KB")
    specials = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=words, **specials).save_pretrained(tmp_path / "a")
    receipt = trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt", TEXT[:5_000]))
    assert len(receipt.rewritten) == 2
    loaded, kept, mine = assert_same_logits(tmp_path, words, model, f"<|begin_of_text|>{TEXT[:300]}<|eot_id|>")
    assert set(assert_rows(tmp_path / "a", tmp_path / "b", kept)) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert mine[0, 0] == loaded.config.bos_token_id == len(kept) - 3
    assert loaded.config.eos_token_id == [len(kept) - 2, len(kept) - 1]
    assert loaded.generation_config.eos_token_id == [len(kept) - 2, len(kept) - 1]
    assert loaded.generation_config.suppress_tokens == [len(kept) - 3]
    assert loaded.generate(mine[:, :4], max_new_tokens=3, do_sample=False).shape[1] > 4


def test_trim_of_bert_cuts_bias_and_vocab_txt(tmp_path):
    words = KINDS["wordpiece"](TEXT)
    model = build("bert", vocab_size=words.get_vocab_size(), max_position_embeddings=400)
    model.save_pretrained(tmp_path / "a")
    hf.BertTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "a")
    names = sorted(words.get_vocab(), key=words.token_to_id)
    (tmp_path / "a/vocab.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt", TEXT[:5_000]))
    _, kept, _ = assert_same_logits(tmp_path, words, model, TEXT[:200])
    assert "cls.predictions.bias" in assert_rows(tmp_path / "a", tmp_path / "b", kept)
    assert (tmp_path / "b/vocab.txt").read_text(encoding="utf-8").splitlines() == [names[number] for number in kept]


# families with a head bias [V] or [1, V], with tables of two stacks, and with per-layer tables
BESIDE = {"llama": None, "phi": "lm_head.bias", "bart": "final_logits_bias", "t5": None}
BESIDE |= dict.fromkeys(("Gemma3nForCausalLM", "Gemma4ForCausalLM"), "model.embed_tokens_per_layer.weight")
BESIDE |= {"Gemma4ForConditionalGeneration": "model.language_model.embed_tokens_per_layer.weight"}


@pytest.mark.parametrize(("name", "beside"), BESIDE.items())
def test_trim_cuts_every_table_and_bias_of_family(name, beside, tmp_path):
    model = build(name, tied=name != "phi") if name in FAMILIES else saved_models.tiny(name)
    model.save_pretrained(tmp_path / "a")
    random_bpe(0, size=50).save(str(tmp_path / "a/tokenizer.json"))
    receipt = trim(tmp_path / "a", tmp_path / "b", size=30)
    made = type(model).from_pretrained(tmp_path / "b")
    old, new = (end.get_input_embeddings().weight for end in (model, made))
    kept = [next(number for number, other in enumerate(old) if torch.equal(other, row)) for row in new]
    cut = assert_rows(tmp_path / "a", tmp_path / "b", kept)
    assert set(cut) == set(receipt.written)
    assert {name for name in cut if "bias" in name or "per_layer" in name} == ({beside} if beside else set())
    assert made.config.get_text_config().vocab_size == 30
    ids = torch.arange(40).reshape(2, 20) % 30
    assert (logits(made, ids) - logits(model, torch.tensor(kept)[ids])[..., kept]).abs().max() < 1e-6


# splits of kept text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 500])
def test_trimmed_tokenizer_splits_words_of_kept_tokens_as_before(kind, size, tmp_path):
    words = KINDS[kind](TEXT)
    write_llama(tmp_path / "a", words)
    size = 600 if size and kind == "sentencepiece" else size
    receipt = trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt"), size=size)
    old, new = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    said = [*words_of(TEXT[:20_000]), *words_of(OTHER), " zyzzyva", "é", "日本", "\n\n"]
    kept, gone = assert_same_split(old, new, said)
    assert kept > 1000
    assert old.num_special_tokens_to_add(False) == new.num_special_tokens_to_add(False)
    if size is None:  # every token of the text is kept
        back = kept_ids(old, new)
        assert [back[number] for number in ids_of(new, TEXT[:20_000])] == ids_of(old, TEXT[:20_000])
        assert new.encode("the end").tokens == old.encode("the end").tokens
    else:
        assert gone > 10
        assert len(new.get_vocab()) == size
        assert any("are removed ones" in note for note in receipt.notes)


def keep_tokens(words, kept):
    """Return the tokenizer with the kept tokens only."""
    return Tokenizer.from_buffer(words.without({old: number for number, old in enumerate(sorted(kept))}))


@pytest.mark.parametrize(
    ("draw", "letters"),
    [
        (random_bpe, "abcd"),
        (partial(random_bpe, ignore_merges=True), "abcd"),
        (random_unigram, "abcdx"),  # ties between paths resolve equally; `x` is unknown
    ],
)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), wanted=st.sets(st.integers(0, 39), max_size=12))
def test_closed_token_set_splits_texts_as_before_for_random_tokenizers(tmp_path_factory, draw, letters, seed, wanted):
    """The library splits every text of up to five letters equally with any closed set of tokens."""
    old = draw(seed)
    path = tmp_path_factory.mktemp("words")
    old.save(str(path / "tokenizer.json"))
    words = TokenizerFile(path)
    kept = words.closed(words.always | wanted & set(old.get_vocab().values()))
    new = keep_tokens(words, kept)
    assert {old.id_to_token(number) for number in kept} == set(new.get_vocab())
    assert_same_split(old, new, short_texts(letters, 5))


def test_trim_always_keeps_unigram_piece_with_lowest_score(tmp_path):
    """The library scores an unknown letter 10 below the lowest score: -50 with `aa`, and -19 without it.

    The known pieces of `xabcd` score -36 together, so only without `aa` does its split start with an unknown letter.
    """
    scores = {"<unk>": 0.0, "a": -1.0, "b": -9.0, "c": -9.0, "d": -9.0, "abcd": 0.0, "xa": -9.0, "aa": -40.0}
    old = Tokenizer(models.Unigram(list(scores.items()), unk_id=0))
    old.save(str(tmp_path / "tokenizer.json"))
    words = TokenizerFile(tmp_path)
    ids = old.get_vocab()
    assert ids["aa"] in words.always
    cuts = [old, keep_tokens(words, set(ids.values())), keep_tokens(words, set(ids.values()) - {ids["aa"]})]
    known, unknown = ["xa", "b", "c", "d"], ["x", "abcd"]
    assert [cut.encode("xabcd").tokens for cut in cuts] == [known, known, unknown]


def test_token_set_that_is_not_closed_splits_texts_differently(tmp_path):
    """Without the ancestors of merges the property above fails for some random tokenizers."""
    differing = 0
    for seed in range(30):
        old = random_bpe(seed)
        old.save(str(tmp_path / "tokenizer.json"))
        kept = {number for token, number in old.get_vocab().items() if len(token) != 2}  # without the first merges
        try:
            assert_same_split(old, keep_tokens(TokenizerFile(tmp_path), kept), short_texts(most=5))
        except AssertionError:
            differing += 1
    assert differing > 10


# which tokens stay


def test_trim_by_size_keeps_most_frequent_tokens_and_their_ancestors(tmp_path):
    words = gpt2(TEXT)
    write_llama(tmp_path / "a", words)
    trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt"), size=400)
    kept = set(kept_ids(words, load_tokenizer(tmp_path / "b")))
    count = np.bincount(ids_of(words, TEXT[:20_000]), minlength=words.get_vocab_size())
    free = sorted((number for number in range(257, 700)), key=lambda number: (-count[number], number))
    in_order = [number in kept for number in free]
    assert all(in_order[:60])  # together with ancestors fewer than 143
    assert sum(in_order) == 143


def test_trim_without_text_keeps_smallest_ids_and_tokens_of_keep_file(tmp_path):
    words = qwen(TEXT)
    write_llama(tmp_path / "a", words, config={"bos_token_id": None, "eos_token_id": 700, "image_token_id": 698})
    (tmp_path / "keep.txt").write_text("Ġclass\n690\n")
    trim(tmp_path / "a", tmp_path / "ids", keep=text_file(tmp_path / "ids.txt", "690\n5\n"), size=400)
    kept = kept_ids(words, load_tokenizer(tmp_path / "ids"))
    assert {690, 698, 700, *range(256)} <= set(kept)
    assert kept[:300] == list(range(300))
    assert len(kept) == 400
    assert config_of(tmp_path / "ids")["eos_token_id"] == kept.index(700)
    assert config_of(tmp_path / "ids")["image_token_id"] == kept.index(698)
    trim(tmp_path / "a", tmp_path / "words", keep=text_file(tmp_path / "keep.txt", "Ġclass\r\nĠthe\n"))
    new = load_tokenizer(tmp_path / "words")
    assert {"Ġclass", "Ġthe"} <= new.get_vocab().keys()
    assert new.get_vocab_size() < 285
    trim(tmp_path / "a", tmp_path / "one", keep=text_file(tmp_path / "one.txt", "²"))  # a token, although it is a digit
    assert "²" in load_tokenizer(tmp_path / "one").get_vocab()


def test_trim_maps_token_ids_in_configs(tmp_path):
    def generation(to):
        """Return a generation config with the ids mapped by `to`."""
        return {
            "bos_token_id": to[0],
            "pad_token_id": -1,
            "suppress_tokens": [to[500], to[510]],
            "bad_words_ids": [[to[520], to[521]], [to[522]]],
            "forced_decoder_ids": [[1, to[530]], [600, None]],
            "sequence_bias": [[[to[540], to[541]], 7]],
            "lang_to_id": {"<|en|>": to[550]},
            "max_length": 560,
        }

    words = gpt2(TEXT)
    decoder = {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}, "model_max_length": 590}
    files = {"generation_config.json": generation(range(700)), "tokenizer_config.json": decoder}
    config = {"bos_token_id": 0, "eos_token_id": [0, 570], "text_config": {"vocab_size": 700, "sep_token_id": 580}}
    write_llama(tmp_path / "a", words, files=files, config=config | {"type_vocab_size": 700})
    (tmp_path / "a/tokenizer.model").write_bytes(b"\x0a\x00")
    receipt = trim(tmp_path / "a", tmp_path / "b", keep=text_file(tmp_path / "k.txt", "690"))
    kept = kept_ids(words, load_tokenizer(tmp_path / "b"))
    to = {old: number for number, old in enumerate(kept)}
    assert json.loads((tmp_path / "b/generation_config.json").read_text()) == generation(to)
    assert json.loads((tmp_path / "b/tokenizer_config.json").read_text()) == decoder
    said = config_of(tmp_path / "b")
    assert said["eos_token_id"] == [0, to[570]]
    assert said["text_config"] == {"vocab_size": len(kept), "sep_token_id": to[580]}
    assert (said["vocab_size"], said["type_vocab_size"]) == (len(kept), 700)
    assert not (tmp_path / "b/tokenizer.model").exists()
    assert any(note == "left out, because they have only the old ids: tokenizer.model" for note in receipt.notes)


def test_trim_moves_row_that_only_config_names_behind_tokens(tmp_path):
    words = gpt2(TEXT)
    write_llama(tmp_path / "a", words, rows=720, config={"bos_token_id": 0, "eos_token_id": 0, "image_token_id": 710})
    trim(tmp_path / "a", tmp_path / "b", size=400)
    assert config_of(tmp_path / "b")["image_token_id"] == 399
    rows = tensors(tmp_path / "b")["model.embed_tokens.weight"].numpy()
    assert rows[399].tobytes() == table(720)[710].tobytes()
    assert load_tokenizer(tmp_path / "b").get_vocab_size() == 399


def test_trim_writes_vocab_size_if_config_lacks_or_contradicts_it(tmp_path):
    for name, said in (("silent", None), ("padded", 690)):
        write_llama(tmp_path / name, gpt2(TEXT), config={"vocab_size": said, "bos_token_id": 0, "eos_token_id": 0})
        trim(tmp_path / name, tmp_path / f"{name}-b", size=400)
        assert config_of(tmp_path / f"{name}-b")["vocab_size"] == 400


# reports


def test_trim_measures_cost_on_end_of_text_that_chose_no_tokens(tmp_path):
    """The reported cost equals that of a trim by the first nine tenths on the last tenth."""
    words = gpt2(TEXT + OTHER + prose(30_000, 300_000), 3000)
    write_llama(tmp_path / "a", words)
    text = TEXT[:30_000] * 9 + OTHER
    receipt = trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt", text))
    note = next(note for note in receipt.notes if note.startswith("unseen text: "))
    size = len(text.encode())
    parts = [piece for piece, _ in cut_pieces([(text, True)], size // 50)]
    starts = np.cumsum([0, *(len(piece.encode()) for piece in parts)])[:-1]
    first, last = ("".join(p for p, at in zip(parts, starts, strict=True) if (at < 0.9 * size) == w) for w in (1, 0))
    trim(tmp_path / "a", tmp_path / "c", text=text_file(tmp_path / "first.txt", first))
    new, before = load_tokenizer(tmp_path / "c"), ids_of(words, last)
    missed = sum(len(token) for token in map(words.id_to_token, before) if new.token_to_id(token) is None)
    more = len(ids_of(new, last)) / len(before) - 1
    share = missed / len(last.encode())  # a letter of a token is a byte
    assert 0 < more < share < 0.3
    assert f"{len(last):,} letters" in note
    assert note.endswith(f"; dropped tokens covered {100 * share:.0f} % of them")
    assert receipt.summary.endswith(f"On unseen text the smaller vocabulary needs {100 * more:.1f} % more tokens")
    dry = trim(tmp_path / "a", tmp_path / "d", text=tmp_path / "t.txt", dry_run=True)
    assert dry.notes == receipt.notes
    assert not (tmp_path / "d").exists()


def test_two_trims_give_same_files_as_one_trim(tmp_path):
    write_llama(tmp_path / "a", gpt2(TEXT))
    for source, to, letters in (("a", "b", 9_000), ("b", "c", 3_000), ("a", "d", 3_000)):
        trim(tmp_path / source, tmp_path / to, text=text_file(tmp_path / "t.txt", TEXT[:letters]))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "d" / name).read_bytes()
    operations = json.loads((tmp_path / "c/tiewise.json").read_text())["operations"]
    assert len(operations) == 2
    assert "tokenizer.json" in operations[0]["source"]["sha256"]


# damaged tokenizers


@pytest.mark.parametrize(
    ("first", "count"), [(0, 60), pytest.param(1000, 1500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_trim_and_transplant_survive_damaged_tokenizers(tmp_path, first, count):
    here = Path(__file__).parents
    paths = [*sys.path, str(here[0]), str(here[1] / "checkpoint")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here[0] / "hostile_tokenizers.py"), str(tmp_path / "home"), str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr  # a Rust panic would appear here
    told = json.loads(done.stdout)
    assert not told["failed"], f"{len(told['failed'])} of {count}: " + "\n".join(told["failed"][:20])
    for refused_and_made in (told["trim"], told["transplant"]):
        assert sum(refused_and_made) == count
        assert min(refused_and_made) > count // 8


# large inputs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_trimmed_tokenizer_splits_a_million_unseen_letters_as_before(kind, tmp_path):
    """Words of kept tokens split as before, and every text decodes to itself."""
    text, train, other = prose(300_000), prose(600_000), prose(1_050_000, 1_000_000)
    words = KINDS[kind](train, 12_000)
    write_llama(tmp_path / "a", words)
    trim(tmp_path / "a", tmp_path / "b", text=text_file(tmp_path / "t.txt", text), size=4000)
    old, new = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    left = new.get_vocab()
    to = {number: left[token] for token, number in old.get_vocab().items() if token in left}
    letters = kept = gone = 0
    for piece, _ in cut_pieces([(other, True)]):
        before, after = (tokens_by_word(words.encode(piece, add_special_tokens=False)) for words in (old, new))
        assert before.keys() == after.keys()
        for word, tokens in before.items():
            if all(token in to for token in tokens):
                kept += 1
                assert after[word] == [to[token] for token in tokens]
            else:
                gone += 1
                assert len(after[word]) > 1
        assert new.decode(ids_of(new, piece)) == piece
        letters += len(piece)
    assert letters >= 1_000_000
    assert kept > 3 * gone > 10_000


def tokens_by_word(encoding):
    found = {}
    for word, token in zip(encoding.word_ids, encoding.ids, strict=True):
        found.setdefault(word, []).append(token)
    return found


@pytest.mark.slow
def test_trim_of_100_000_tokens_stays_below_400_mb(tmp_path):
    rng, rows, width = random.Random(0), 100_000, 2048
    tokens = list(pre_tokenizers.ByteLevel.alphabet())
    merges, known = [], set(tokens)
    while len(tokens) < rows:
        a, b = rng.choice(tokens), rng.choice(tokens)
        if len(a + b) < 16 and a + b not in known:
            merges.append((a, b))
            tokens.append(a + b)
            known.add(a + b)
    words = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=True))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    (tmp_path / "a").mkdir()
    words.save(str(tmp_path / "a/tokenizer.json"))
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (rows, width)))
    write_sparse(tmp_path / "a/model.safetensors", shapes)
    (tmp_path / "a/config.json").write_text(json.dumps(llama_config(False, rows, width)))
    text_file(tmp_path / "t.txt", prose(1_000_000))
    result = run_child("trim", tmp_path / "a", tmp_path / "b", text=str(tmp_path / "t.txt"), size=60_000)
    assert (tmp_path / "b/model.safetensors").stat().st_size > 4 * 60_000 * width
    assert result["peak"] < 400e6, f"{result['peak'] / 1e6:.0f} MB"


def test_trim_bounds_the_text_that_it_measures(tmp_path, monkeypatch):
    """Trim measures pieces of the last tenth only up to a bound, so that a text of gigabytes stays cheap."""
    text = TEXT[:40_000]
    write_llama(tmp_path / "a", gpt2(TEXT))
    text_file(tmp_path / "text", text)
    lengths = {}
    for bound in (500, 10**9):
        monkeypatch.setattr(import_module("tiewise.checkpoint.rewrite.retained_tokens"), "MOST_MEASURED", bound)
        notes = trim(tmp_path / "a", tmp_path / "b", text=tmp_path / "text", size=600, dry_run=True).notes
        (note,) = (note for note in notes if "letters, with tokens" in note)
        lengths[bound] = int(re.search(r"last ([\d,]+) letters", note)[1].replace(",", ""))
    longest_piece = len(text) // 50
    assert 500 <= lengths[500] < 500 + longest_piece
    assert lengths[10**9] > 2_500


def test_trim_maps_vocabulary_map_and_keeps_ids_of_other_vocabularies(tmp_path):
    """hf-trim#4 kept old ids in a map from texts; the ids of a codec are not tokens and stay."""
    pieces_ = ["a", "b", "c", "ab", "bc", "ca", "<image>", "<eos>"]
    words = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces_)},
                                 [("a", "b"), ("b", "c"), ("c", "a")]))  # fmt: skip
    words.add_special_tokens(["<image>", "<eos>"])
    config = {"vocabulary_map": {"<image>": 6}, "image_token_id": 6, "bos_token_id": None, "eos_token_id": 7}
    config |= {"codebook_pad_token_id": 2050, "codebook_eos_token_id": 5, "tiewise_boundary": "tied+pad=7+bias"}
    vision = {"vision_config": {"model_type": "clip_vision_model", "pad_token_id": 5, "eos_token_id": 49407}}
    write_llama(tmp_path / "a", words, config=config | vision)
    (tmp_path / "keep").write_text("ab\n")
    trim(tmp_path / "a", tmp_path / "b", keep=tmp_path / "keep")
    left = load_tokenizer(tmp_path / "b").get_vocab()
    assert left == {"a": 0, "b": 1, "c": 2, "ab": 3, "<image>": 4, "<eos>": 5}
    made = config_of(tmp_path / "b")
    assert made["vocabulary_map"] == {"<image>": 4}
    assert (made["image_token_id"], made["eos_token_id"]) == (4, 5)
    assert BoundarySpec.parse(made["tiewise_boundary"]) == BoundarySpec("tied", bias=True, pad=5)
    assert (made["codebook_pad_token_id"], made["codebook_eos_token_id"]) == (2050, 5)
    assert made["vision_config"] == vision["vision_config"]


def test_trim_refuses_config_map_that_names_every_token(tmp_path):
    words = gpt2(TEXT)
    write_llama(tmp_path / "a", words, config={"vocabulary_map": words.get_vocab()})
    text_file(tmp_path / "text")
    with pytest.raises(CheckpointError, match=r"config\.json: vocabulary_map names every token"):
        trim(tmp_path / "a", tmp_path / "b", text=tmp_path / "text")
