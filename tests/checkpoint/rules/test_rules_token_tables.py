"""Test that B017 and B018 report broken further token tables and are silent on sound ones."""

import pytest
from rule_runs import assert_fires, table_of
from tiny_checkpoints import llama_config, table, with_rows, write_checkpoint

from tiewise.checkpoint.audit import check

E, H = "model.embed_tokens.weight", "lm_head.weight"
PLE, VOCABULARY = "model.embed_tokens_per_layer.weight", "vocab_size_per_layer_input"
NEXT, NEXT_HEAD = "model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight"
HASH = "model.encoder_hash_tok_embedding.weight"
AUDIO, VISION = (f"model.embed_{kind}.embedding.weight" for kind in ("audio", "vision"))
NGRAM = "model.ngram_embeddings.embedders.{}.weight"
GEMMA3N = {"model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"]}
GEMMA4 = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
LONGCAT = {"model_type": "longcat_flash_ngram", "architectures": ["LongcatFlashNgramForCausalLM"]}
LONGCAT |= {"ngram_vocab_size_ratio": 5.5, "num_layers": 1, "vocab_size": 64}
BLT = {"model_type": "nobody", "encoder_hash_byte_group_vocab": 10, "encoder_hash_byte_group_nb_functions": 2}
BLT |= {"encoder_hash_byte_group_size": [3, 4]}
WIDE = {VOCABULARY: 64, "hidden_size_per_layer_input": 4}


def folder_of(config, tensors, tied=True, rows=64):
    """Return a function that writes a folder of 64 tokens with this config and further tensors."""
    ends = {E: table(rows)} | ({} if tied else {H: table(rows, seed=1)})
    return lambda path: write_checkpoint(path, llama_config(tied, rows) | config, ends | tensors)


def ngrams(*rows):
    return {NGRAM.format(i): table(n, 2) for i, n in enumerate(rows)}


def gemma3n_with_audio(offset, rows=4):
    """Return a function that writes a Gemma 3n whose ids from `offset` on are audio tokens."""
    parts = {"vision_config": {"vocab_offset": offset - 4, "vocab_size": 4}}
    parts |= {"audio_config": {"vocab_offset": offset, "vocab_size": rows}}
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], **parts}
    return folder_of(config, {VISION: table(4), AUDIO: table(4)})


SOUND = [
    folder_of(GEMMA3N | WIDE, {PLE: table(64, 12)}),
    folder_of(GEMMA3N | WIDE | {VOCABULARY: 60}, {PLE: table(60, 12)}),  # the last four ids read row 0
    folder_of(GEMMA4 | WIDE, {PLE: table(64, 12)}),
    folder_of(GEMMA4 | WIDE | {"hidden_size_per_layer_input": 0}, {}),  # as in the largest Gemma 4
    folder_of(V3, {NEXT: table(64), NEXT_HEAD: table(64, seed=1)}, tied=False),
    folder_of(V3, {}, tied=False),
    folder_of(LONGCAT, ngrams(353, 355, 357), tied=False),
    folder_of(LONGCAT | {"ngram_vocab_size_ratio": 1e308}, ngrams(353), tied=False),  # no finite number of rows
    folder_of(BLT, {HASH: table(40)}, tied=False),
    gemma3n_with_audio(60),
]


@pytest.mark.parametrize("how", SOUND)
def test_b017_and_b018_are_silent_on_sound_tables(how, tmp_path):
    audit = check(how(tmp_path / "a"), deep=True)
    assert {found.rule for found in audit.findings if found.severity != "info"} <= {"B080"}
    assert not {"B017", "B018"} & {found.rule for found in audit.findings}


MERGED = {NEXT: with_rows(*range(8), of=table(64)), NEXT_HEAD: table(64, seed=1)}
BROKEN = [
    # as transformers before #45335 resized Gemma 4
    ("B017", "error", PLE, False, folder_of(GEMMA4 | WIDE | {VOCABULARY: 60}, {PLE: table(60, 12)}),
     "has 60 rows", "has 64; ids from 60 on read outside it", "tiewise vocab resize PATH --vocab 64"),
    ("B017", "error", PLE, False, folder_of(GEMMA3N | WIDE | {VOCABULARY: 62}, {PLE: table(60, 12)}),
     "has 60 rows, and the config asks for 62"),
    ("B017", "error", "hidden_size_per_layer_input", False, folder_of(GEMMA4 | WIDE, {}),
     "no per-layer table is stored"),
    ("B017", "error", NEXT, False, folder_of(V3, {NEXT: table(60), NEXT_HEAD: table(64, seed=1)}, tied=False),
     "60 rows", "ids from 60 on read outside it", "resize"),
    ("B017", "error", NEXT_HEAD, False, folder_of(V3, {NEXT: table(64), NEXT_HEAD: table(70)}, tied=False),
     f"has 70 rows, and {E} has 64", "from the checkpoint's source"),
    ("B017", "error", NGRAM.format(1), False, folder_of(LONGCAT, ngrams(353, 353, 357), tied=False),
     "has 353 rows, and the config asks for 355, so every n-gram"),
    ("B017", "error", HASH, False, folder_of(BLT, {HASH: table(48)}, tied=False),
     "has 48 rows, and the config asks for 40"),
    ("B017", "error", AUDIO, False, gemma3n_with_audio(58), "ids from 62 to 63 read outside", "Ids from 58 on"),
    ("B017", "error", AUDIO, False, gemma3n_with_audio(60, 6), "the config asks for 6"),
    # a merge that changed eight rows of the main table only, and one that scaled all rows
    ("B018", "warning", NEXT, False, folder_of(V3, MERGED, tied=False),
     f"differs from {E}. ", "8 of 64 rows differ", "were one table once", f"store {E} under that name too"),
    ("B018", "warning", NEXT_HEAD, False, folder_of(V3, {NEXT_HEAD: table(64, seed=1) * 1.01}, tied=False),
     "64 of 64 rows"),
    ("B018", "info", NEXT, False, folder_of(V3, {NEXT: table(64, seed=9)}, tied=False),
     "separate tables. transformers drafts with the main table", "none needed if it was trained so"),
]  # fmt: skip


@table_of(BROKEN)
def test_b017_and_b018_report_broken_tables(case, tmp_path):
    assert_fires(tmp_path, case)


def test_b018_is_skipped_without_scan(tmp_path):
    audit = check(folder_of(V3, {NEXT: table(64, seed=9)}, tied=False)(tmp_path / "a"), scan=False)
    assert "B018" in audit.skipped
    assert all(found.rule != "B018" for found in audit.findings)
