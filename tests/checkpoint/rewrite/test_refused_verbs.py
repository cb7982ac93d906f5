"""Test that every verb refuses unsuitable requests with a remedy and leaves no files."""

import json
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from rewrite_models import config_of, saved, tensors
from safetensors.torch import save_file
from tests.checkpoint.tiny_checkpoints import bpe_tokenizer, llama, table, write_checkpoint, written
from trimmed_words import BYTES

from tiewise.checkpoint.rewrite import factor, repair, resize, tie, trim, untie
from tiewise.core.errors import CheckpointError

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUT, IN = "lm_head.out_map.weight", "model.embed_tokens.in_map.weight"
UNTIED, WIDE, SHORT = {"tied": False}, {"rows": 40, "width": 12}, {"tokenizer": bpe_tokenizer(20)}
TO_RANK, TO_ROWS = partial(factor, rank=3), partial(resize, vocab=30)
ASIDE = [tie, untie, TO_RANK]
UNDO = partial(factor, undo=True)
NGRAMS = {"model_type": "longcat_flash_ngram", "ngram_vocab_size_ratio": 5}
NAN = table(40, 12)
NAN[17, 3] = np.nan


def of(tensors, config=None):
    return lambda path: write_checkpoint(path, {"model_type": "llama"} if config is None else config, tensors)


def gguf(path):
    path.with_suffix(".gguf").write_bytes(b"GGUF")
    return path.with_suffix(".gguf")


def t5(path):
    saved(path, "t5")
    return path


def t5_v11(path):
    saved(path, "t5_v11", tied=False)
    # as published and as transformers 5 reads the flag
    (path / "config.json").write_text(json.dumps(config_of(path) | {"tie_word_embeddings": False}))
    return path


def quantised(module, **parts):
    tensors = {f"{module}.weight": None} | {f"{module}.{part}": value for part, value in parts.items()}
    return UNTIED | {"tensors": tensors}


def changed_factored(config=(), values=()):
    """Return a function that writes a factored Llama with changed config and tensors; None removes an entry."""

    def write(path):
        plain = llama(path.parent / "words" / "plain", **WIDE)
        factor(plain, path, rank=4)
        record, made = config_of(path) | dict(config), tensors(path) | dict(values)
        (path / "config.json").write_text(json.dumps({k: v for k, v in record.items() if v is not None}))
        save_file({n: t for n, t in made.items() if t is not None}, path / "model.safetensors")
        return path

    return write


PACKED = {"qweight": np.ones((1, 24), np.int32), "scales": np.ones((1, 24), np.float16)}
INT8 = {"weight": np.ones((24, 8), np.int8), "SCB": np.ones(24, np.float32)}
FP8 = {"weight": np.ones((24, 8), ml_dtypes.float8_e4m3fn), "weight_scale": np.ones(1, np.float32)}
QUANTISED = [
    ("lm_head.qweight is quantised (I32)", quantised("lm_head", **PACKED)),
    ("lm_head.weight is quantised (I8)", quantised("lm_head", **INT8)),
    ("lm_head.weight is quantised (F8_E4M3)", quantised("lm_head", **FP8)),
    ("model.embed_tokens.qweight is quantised (I32)", quantised("model.embed_tokens", **PACKED)),
]


# options of `trim`, how to write the source, words of the refusal
PLAIN = {"vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]], "type": "BPE"}
ROWS = {"rows": 4, "config": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}}


def model(**parts):
    """Return arguments of a Llama whose tokenizer's model has these parts."""
    return ROWS | {"tokenizer": bpe_tokenizer() | {"model": PLAIN | parts}}


SIZE = {"size": 3}
FALLBACK = {byte: number for number, byte in enumerate([*BYTES, "a", "<0x41>a"])}
NO_TRIM = [
    (SIZE, lambda path: llama(path, **model()) / "model.safetensors", "config.json or tokenizer.json is missing"),
    ({}, model(), "the tokens to keep are missing; give text, keep or size"),
    ({"size": 4}, model(), "size is 4, of 4 rows; choose 3, which must stay, up to 3"),
    ({"size": 2}, model(), "choose 3, which must stay"),
    ({"size": 0}, model(), "size is 0"),
    ({"text": "text.txt"}, model(), "all 4 tokens would stay; give a smaller text, or a size"),
    ({"text": "missing"}, model(), "missing: no file of text; check the path"),
    ({"text": "."}, model(), "no file of text"),
    ({"text": "latin.txt"}, model(), "not UTF-8 text"),
    ({"keep": "missing"}, model(), "no such file"),
    ({"keep": "wrong.txt"}, model(), "'zebra' is not a token of this tokenizer; write a token on each line"),
    ({"keep": "ids.txt"}, model(), "'77' is not a token of this tokenizer"),
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
    (SIZE, model(vocab={"a": 0, "b": 1, "ab": 9}), "names token 9, and its tables have 4 rows; tiewise vocab resize"),
    (SIZE, model() | {"config": {"eos_token_id": 4}}, "names token 4, and its tables have 4 rows"),
    (SIZE, model() | {"files": {"generation_config.json": [1]}}, "generation_config.json: not a JSON object"),
    (SIZE, model() | {"files": {"vocab.json": {"a": 1}}}, "vocab.json: it gives 'a' another id than tokenizer.json"),
    (SIZE, model() | {"tied": False, "head": table(5)}, "5 rows, not 4"),
    (SIZE, model() | {"tensors": {"model.embed_tokens.weight": np.ones((4, 8), np.int8)}}, "is quantised"),
    (SIZE, model() | {"tensors": {"model.extra_embed.weight": table(4)}}, "has 4 rows too, and plays no part"),
]


# verb, how to write the source, words of the refusal
REFUSED = [
    *((partial(trim, **options), how, says) for options, how, says in NO_TRIM),
    (tie, {}, "nothing to"),
    (untie, UNTIED, "nothing to"),
    (repair, {}, "reports no fault"),
    *((verb, {"config": {"architectures": ["LlamaModel"]}}, "no output head") for verb in ASIDE),
    *((verb, of({"a.weight": table(3, 3)}), "no input table") for verb in ASIDE),
    *((verb, gguf, "GGUF files cannot be rewritten") for verb in ASIDE),
    *((verb, how, says) for verb in (*ASIDE, TO_ROWS) for says, how in QUANTISED),
    (
        tie,
        UNTIED,
        "24 of 24 rows differ, by 1.4 times their length; choose the values with --keep input, output or mean",
    ),
    (repair, UNTIED, "nothing to repair"),
    (
        partial(factor, text="t.txt"),
        {},
        "no rank to factor to; give rank, the width of the narrow tables, or undo=True",
    ),
    (partial(factor, rank=3, undo=True), {}, "undo=True with rank; leave rank out"),
    (partial(tie, keep="both"), UNTIED, "no choice keep='both'; choose one of input, output, mean"),
    (untie, t5, "this family always ties; the flag false only switches off the scale before the head"),
    (
        partial(tie, keep="input"),
        t5_v11,
        "a true flag also scales hidden states before the head in this family; keep it as it is; --force",
    ),
    # all rows are parallel and longer than the largest fp16 number
    (TO_RANK, WIDE | {"tensors": {TABLE: np.full((40, 12), 60_000, np.float16)}}, "too long for one of rank 3 in F16"),
    (TO_RANK, WIDE | {"tensors": {TABLE: np.full((40, 12), 1e200)}}, "too large"),
    (TO_RANK, WIDE | {"tensors": {TABLE: NAN}}, "NaN or infinity in rows 0 to 39"),
    (partial(factor, rank=8), WIDE, "choose a rank from 1 to 7"),
    (partial(factor, rank=0), WIDE, "does not make tables of"),
    (TO_RANK, {"config": {"model_type": "tiewise", "tiewise_boundary": "factored:4"}}, "factor --undo"),
    (TO_RANK, WIDE | {"config": {"auto_map": {"AutoModel": "x.Y"}}}, "custom code"),
    (TO_RANK, WIDE | {"config": {"architectures": None}}, "model's class"),
    (TO_RANK, WIDE | {"config": {"tie_word_embeddings": False}}, "no head is stored"),
    (TO_RANK, WIDE | {"head": table(40, 12, seed=9)}, "the config says tied, and two different tables"),
    *(
        (partial(resize, **options), SHORT, says)
        for options, says in (
            ({"vocab": 24}, "has 24 rows already"),
            ({"vocab": 20}, "20 rows are fewer than the present 24"),
            ({"vocab": 19, "shrink": True}, "name token 19"),
            ({"tokenizer": "words/shorter", "shrink": True}, "name token 19"),
            ({"tokenizer": "words/shorter"}, "has 24 rows already"),
            ({"tokenizer": "words"}, "no tokenizer was found"),
            ({"tokenizer": "missing"}, "no such file or folder"),
            ({"tokenizer": "words/broken"}, "not readable as JSON"),
            ({"vocab": 30, "tokenizer": "words/shorter"}, "both set"),
            ({}, "the new number of rows is missing; give vocab, multiple_of or tokenizer"),
            ({"vocab": 0}, "vocab=0 is too small"),
            ({"multiple_of": -8}, "multiple_of=-8 is too small"),
            ({"vocab": 30, "seed": -1}, "seed=-1 is too small"),
            ({"vocab": 30, "rows": "none"}, "no choice rows='none'; choose drawn or zero"),
        )
    ),
    *(
        (partial(resize, vocab=70, force=True), UNTIED | {"config": config, "tensors": more}, says)
        for config, more, says in (
            (NGRAMS, {"model.ngram_embeddings.embedders.0.weight": table(121, 2)}, "hash of vocab_size"),
            ({"model_type": "gemma3n"}, {"model.embed_audio.embedding.weight": table(4)}, "last would read outside"),
            ({}, {"t2d": np.ones(24, np.bool_)}, "maps a draft's tokens"),
            ({}, {"mtp.embed_tokens.weight": table(70)}, "is F32 of 70 rows, not 24"),
        )
    ),
    (TO_ROWS, UNTIED | {"head": table(26, 8)}, "26 rows, not 24"),
    (TO_ROWS, {"tensors": {TABLE: np.zeros((24, 8), np.float32)}}, "no row of"),  # all rows are zero
    *(
        (UNDO, changed_factored(config=config), says)
        for config, says in (
            ({"model_type": "llama"}, "plain already"),
            ({"tiewise_boundary": None}, "plain already"),
            ({"tiewise_boundary": "knotted:3"}, "unknown boundary"),
            ({"tiewise_boundary": "spd"}, "does not have the maps"),
            ({"tiewise_boundary": "factored-untied:4"}, "lm_head.weight is missing"),
            ({"base_model_type": None}, "model's family"),
        )
    ),
    *(
        (UNDO, changed_factored(values=values), says)
        for values, says in (
            ({IN: None}, "does not have the maps"),
            ({OUT: torch.ones(3, 12)}, "out_map.weight is F32"),
            ({IN: torch.ones(12, 5)}, "in_map.weight is F32"),
            ({IN: torch.ones(12)}, "in_map.weight is F32"),
            ({OUT: torch.ones(4, 12, dtype=torch.int32)}, "out_map.weight is I32"),
            ({IN: torch.full((12, 4), torch.inf)}, "not finite in F32"),
            ({"other.out_map.weight": torch.ones(4, 12)}, "2 output maps"),
        )
    ),
]


@pytest.mark.parametrize(("verb", "how", "says"), REFUSED)
def test_verb_refuses_request_with_remedy_and_leaves_no_files(tmp_path, monkeypatch, verb, how, says):
    monkeypatch.chdir(tmp_path)
    texts = {"text.txt": b"ab c a b", "wrong.txt": b"ab\nzebra\n", "ids.txt": b"1\n77", "empty.txt": b"\n"}
    for name, data in (texts | {"latin.txt": b"caf\xe9"}).items():
        Path(name).write_bytes(data)
    for name, text in {"shorter": json.dumps(bpe_tokenizer(10)), "broken": "{"}.items():
        (tmp_path / "words" / name).mkdir(parents=True)
        (tmp_path / "words" / name / "tokenizer.json").write_text(text)
    source = written(tmp_path / "a", how)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as refused:
        verb(source, tmp_path / "b")
    assert says in str(refused.value)
    assert refused.value.remedy
    assert sorted(tmp_path.rglob("*")) == before


def test_trim_refuses_deeply_nested_config(tmp_path):
    path = llama(tmp_path / "a", **model())
    (path / "generation_config.json").write_text('{"bad_words_ids": ' + "[" * 980 + "1" + "]" * 980 + "}")
    with pytest.raises(CheckpointError, match=r"nested deeper|not readable"):
        trim(path, tmp_path / "b", **SIZE)
