"""B030 to B042 and B081: tables, config and tokenizer count the same tokens; types, the content of rows, copies."""

import json

import ml_dtypes
import numpy as np
import pytest
from rule_runs import one, run
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import D, V, bpe_tokenizer, llama, llama_config, llama_tensors, table, write_checkpoint

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def with_rows(rows):
    """A healthy table of 64 rows in which some rows, {number: value}, are replaced."""
    made = table(64)
    for number, value in rows.items():
        made[number] = value
    return made


@pytest.mark.parametrize("rule", ["B040", "B041", "B042", "B081"])
@pytest.mark.parametrize("tied", [True, False])
def test_silent_on_healthy_llamas(tmp_path, rule, tied):
    assert run(rule, llama(tmp_path, tied, rows=64, tokenizer=bpe_tokenizer(64))) == []


def test_b040_two_types_at_the_two_ends(tmp_path):
    finding = one("B040", llama(tmp_path, False, head=table(seed=2).astype(np.float16)))
    assert (finding.severity, finding.where) == ("warning", HEAD)
    assert "F32" in finding.evidence
    assert "F16" in finding.evidence


@pytest.mark.parametrize(
    ("key", "claimed", "severity"),
    [("dtype", "bfloat16", "warning"), ("torch_dtype", "float16", "warning"), ("dtype", "float64", "info")],
)
def test_b040_the_config_against_the_bytes(tmp_path, key, claimed, severity):
    path = llama(tmp_path, config={"dtype": None, key: claimed})
    finding = one("B040", path)
    assert (finding.severity, finding.where) == (severity, key)
    assert "F32 is the type of 100% of the bytes" in finding.evidence


@pytest.mark.parametrize("claimed", ["float32", "torch.float32", "auto", 32, ["float32"], None])
def test_b040_silent_on_the_right_type_and_on_none(tmp_path, claimed):
    assert run("B040", llama(tmp_path, config={"dtype": claimed})) == []


def test_b040_norms_in_fp32_beside_bf16_are_no_finding(tmp_path):
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in llama_tensors().items() if array.ndim == 2}
    assert run("B040", llama(tmp_path, tensors=tensors, config={"dtype": "bfloat16"})) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_b041_rows_that_are_no_numbers(tmp_path, value):
    finding = one("B041", llama(tmp_path, rows=64, tensors={TABLE: with_rows({5: value, 9: value})}))
    assert (finding.severity, finding.where) == ("error", TABLE)
    assert "2 rows (5, 9) hold NaN or infinity" in finding.evidence


def test_b041_one_bad_element_is_enough_and_the_head_is_read_too(tmp_path):
    head = table(64, seed=3)
    head[63, D - 1] = np.nan
    finding = one("B041", llama(tmp_path, False, rows=64, head=head))
    assert finding.where == HEAD
    assert "1 rows (63)" in finding.evidence


@pytest.mark.parametrize(
    ("tokenizer", "severities"),
    [
        (None, ["info"]),
        (bpe_tokenizer(64), ["warning"]),
        (bpe_tokenizer(7), []),  # rows 7 and 40 are padding
        (bpe_tokenizer(7, [(7, "<|reserved_special_token_0|>", True), (40, "<unused3>", False)]), []),
        (bpe_tokenizer(7, [(7, "<tool>", True)]), ["warning"]),
    ],
)
def test_b041_rows_of_zeros_count_where_tokens_use_them(tmp_path, tokenizer, severities):
    rows = with_rows({0: 0.0, 7: 0.0, 40: 0.0})  # row 0 is the config's padding id
    found = run("B041", llama(tmp_path, rows=64, tensors={TABLE: rows}, tokenizer=tokenizer))
    assert [finding.severity for finding in found] == severities
    assert all("7" in finding.evidence and "(0" not in finding.evidence for finding in found)


# Names that published tokenizers give to rows without a use, and words of BERT's vocabulary that contain them.
PLACEHOLDERS = """[PAD] <pad> <|pad|> [PAD151936] [unused12] <unused5> [UNUSED_TOKEN_145] <|reserved_200014|>
<reserved_106> <|reserved_special_token_3|> <extra_id_7>
<|extra_12|> <|dummy_85|> <|placeholder1|> <｜▁pad▁｜> madeupword0001"""
WORDS = "preserved reserved pad unused ##pad dummy extra padding placeholder ▁reserved Ġunused <|im_start|> [SEP]"


@pytest.mark.parametrize("where", ["vocabulary", "added"])
@pytest.mark.parametrize(("texts", "count"), [(PLACEHOLDERS.split(), 0), (WORDS.split(), 13)])
def test_b041_words_are_in_use_and_placeholders_are_not(tmp_path, where, texts, count):
    ids = range(10, 10 + len(texts))
    tokenizer = bpe_tokenizer(10, [(i, text, True) for i, text in zip(ids, texts, strict=True) if where == "added"])
    if where == "vocabulary":
        tokenizer["model"]["vocab"] |= dict(zip(texts, ids, strict=True))
    path = llama(tmp_path, rows=64, tensors={TABLE: with_rows(dict.fromkeys(ids, 0.0))}, tokenizer=tokenizer)
    found = run("B041", path)
    assert [f"{count} rows (" in finding.evidence for finding in found] == [True] * bool(count)


def test_b041_rows_that_occur_twice(tmp_path):
    rows = with_rows({11: table(64)[3], 12: table(64)[3], 50: table(64)[49]})
    finding = one("B041", llama(tmp_path, rows=64, tensors={TABLE: rows}))
    assert finding.severity == "warning"
    assert "5 rows of tokens in use are equal to another (3, 11, 12; 49, 50)" in finding.evidence


def test_b041_rows_much_longer_than_the_rest(tmp_path):
    finding = one("B041", llama(tmp_path, rows=64, tensors={TABLE: with_rows({8: 1e30})}))
    assert finding.severity == "info"
    assert "1 rows (8) are at least ten times as long as the median" in finding.evidence


def test_b041_small_numbers_are_not_zero(tmp_path):
    assert run("B041", llama(tmp_path, rows=64, tensors={TABLE: table(64) * np.float32(1e-38)})) == []


def test_b042_says_what_a_multiple_would_be(tmp_path):
    path = llama(tmp_path, rows=100)
    finding = one("B042", path)
    assert finding.severity == "info"
    assert "100 rows leave 36 over" in finding.evidence
    assert f"tiewise resize {path} --multiple-of 64 --to NEW_DIR makes 128" in finding.repair


def test_b081_names_large_tensors_with_the_same_bytes(tmp_path):
    large = table(512, 512)  # 1 MiB
    other = large.copy()
    other[300, 300] += 1  # in no sample
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": t for n, t in enumerate([large, large, other, large])}
    finding = one("B081", llama(tmp_path / "a", tensors=tensors))
    assert finding.severity == "info"
    assert finding.evidence.startswith(
        "model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, model.layers.3.mlp.up_proj.weight hold"
    )
    assert "2.1 MB stored more than once" in finding.evidence
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.layers.3.mlp.up_proj.weight"]
    assert run("B081", llama(tmp_path / "b", tensors=tensors)) == []


def test_b081_leaves_the_two_ends_to_b013_and_small_tensors_alone(tmp_path):
    path = llama(tmp_path, rows=2**15, head=table(2**15), tensors={"a": np.ones(9), "b": np.ones(9)})
    assert run("B081", path) == []
    assert len(run("B013", path)) == 1


def test_deep_scans_read_every_chunk(tmp_path):
    """More rows than one chunk holds: numbers of rows count from the table's first."""
    rows = 2**18
    path = llama(tmp_path, rows=rows)
    tensors = load_file(path / "model.safetensors")
    tensors[TABLE][[2**17 + 3, rows - 1]] = np.nan
    save_file(tensors, path / "model.safetensors")
    assert f"2 rows ({2**17 + 3}, {rows - 1}) hold NaN" in one("B041", path).evidence


def test_rows_of_padding_ids_in_nested_configs_may_be_zero(tmp_path):
    rows = with_rows({V: 0.0})
    path = llama(
        tmp_path, rows=64, tensors={TABLE: rows}, config={"text_config": {"vocab_size": 64, "pad_token_id": V}}
    )
    assert run("B041", path) == []


RULES = [f"B03{n}" for n in range(6)]
ALBERT = {"architectures": ["AlbertForMaskedLM"], "model_type": "albert", "vocab_size": V, "hidden_size": 16}


def bias(length=V):
    return np.ones(length, np.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tied", [True, False])
def test_silent_where_all_counts_agree(tmp_path, rule, tied):
    generation = {"eos_token_id": [2, 3], "pad_token_id": None}
    path = llama(tmp_path, tied, tokenizer=bpe_tokenizer(), files={"generation_config.json": generation})
    assert run(rule, path) == []


@pytest.mark.parametrize("tied", [True, False])
def test_b030_a_head_of_another_length(tmp_path, tied):
    path = llama(tmp_path, tied, head=table(V + 3))
    finding = one("B030", path)
    assert (finding.severity, finding.where) == ("fatal", HEAD)
    assert f"[{V}, {D}]" in finding.evidence
    assert f"[{V + 3}, {D}]" in finding.evidence
    assert finding.repair == f"tiewise resize {path} --vocab {V + 3} --to NEW_DIR"


def test_b030_two_vocabularies_that_the_config_names(tmp_path):
    path = llama(tmp_path, False, head=table(V + 3), config={"decoder_vocab_size": V + 3})
    assert run("B030", path) == []


def test_b030_a_width_that_nothing_explains(tmp_path):
    finding = one("B030", llama(tmp_path, config={"hidden_size": 10}))
    assert finding.where == TABLE
    assert "is 8 wide, the model 10" in finding.evidence


@pytest.mark.parametrize("explained", ["map", "key", "neither"])
def test_b030_accepts_a_narrow_table_with_its_map_or_its_key(tmp_path, explained):
    tensors = {"albert.embeddings.word_embeddings.weight": table()}
    if explained == "map":
        tensors["albert.encoder.embedding_hidden_mapping_in.weight"] = table(16, D)
    config = ALBERT | ({"embedding_size": D} if explained == "key" else {})
    findings = run("B030", write_checkpoint(tmp_path, config, tensors))
    assert len(findings) == (explained == "neither")


def test_b030_a_factored_table_of_this_package(tmp_path):
    config = llama_config(True, width=16) | {"model_type": "tiewise", "base_model_type": "llama"}
    tensors = {TABLE: table(V, 4), "model.embed_tokens.in_map.weight": table(16, 4)}
    tensors |= {"lm_head.out_map.weight": table(4, 16), "model.norm.weight": np.ones(16, np.float32)}
    config |= {"tiewise_boundary": "factored:4", "architectures": ["TiewiseLlamaForCausalLM"]}
    path = write_checkpoint(tmp_path, config, tensors)
    assert [run(rule, path) for rule in (*RULES, "B010", "B011", "B016", "B020")] == [[]] * 10
    del tensors["model.embed_tokens.in_map.weight"], tensors["lm_head.out_map.weight"]
    assert len(run("B030", write_checkpoint(tmp_path / "broken", config, tensors))) == 1


def test_b030_passes_over_packed_tables(tmp_path):
    assert run("B030", llama(tmp_path, tensors={TABLE: np.zeros((V, 1), np.uint32)})) == []


@pytest.mark.parametrize(
    ("count", "added", "severity", "words"),
    [
        (V + 2, (), "fatal", f"its vocabulary reaches id {V + 1}"),
        (V, [(V, "<image_soft_token>", True), (V + 1, "<audio>", True)], "warning", "2 added tokens"),
        (V, [(V, "<new>", True), (V + 1, "<more>", False)], "error", f"2 added tokens: {V} '<new>', {V + 1} '<more>'"),
    ],
)
def test_b031_tells_the_vocabulary_from_added_tokens(tmp_path, count, added, severity, words):
    path = llama(tmp_path, tokenizer=bpe_tokenizer(count, added))
    finding = one("B031", path)
    assert (finding.severity, finding.where) == (severity, "tokenizer.json")
    assert words in finding.evidence
    assert finding.repair == f"tiewise resize {path} --vocab {V + 2} --to NEW_DIR"


@pytest.mark.parametrize("additional", [2, 1, -5, "2", None])
def test_b031_counts_an_extra_table(tmp_path, additional):
    tokenizer = bpe_tokenizer(V, [(V, "<a>", True), (V + 1, "<b>", True)])
    path = llama(tmp_path, tokenizer=tokenizer, config={"additional_vocab_size": additional})
    assert len(run("B031", path)) == (additional != 2)


def test_b032_counts_the_padding(tmp_path):
    finding = one("B032", llama(tmp_path, tokenizer=bpe_tokenizer(V - 4, [(V - 4, "<a>", True)])))
    assert (finding.severity, finding.where) == ("info", TABLE)
    assert f"{V} rows, ids up to {V - 4}: 3 rows of padding" in finding.evidence
    assert run("B031", tmp_path) == []


def test_b033_names_the_key_and_the_table(tmp_path):
    finding = one("B033", llama(tmp_path, config={"vocab_size": V - 1}))
    assert (finding.severity, finding.where) == ("error", "vocab_size")
    assert f"vocab_size is {V - 1}" in finding.evidence
    assert f"has {V} rows" in finding.evidence


def test_b033_asks_the_level_of_the_text(tmp_path):
    tensors = {f"language_model.{name}": array for name, array in llama_tensors().items()}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vocab_size": 7}
    healthy = config | {"text_config": llama_config(), "vision_config": {"model_type": "clip", "vocab_size": 9}}
    assert run("B033", write_checkpoint(tmp_path / "a", healthy, tensors)) == []
    stale = config | {"text_config": llama_config(vocab_size=V - 1)}
    assert one("B033", write_checkpoint(tmp_path / "b", stale, tensors)).where == "text_config.vocab_size"


@pytest.mark.parametrize(
    ("settings", "fires"),
    [
        ({"pad_vocab_size_multiple": 8}, False),
        ({"pad_vocab_size_multiple": 7}, True),
        ({"decoder_vocab_size": V}, False),
    ],
)
def test_b033_respects_padding_and_other_vocabularies(tmp_path, settings, fires):
    assert len(run("B033", llama(tmp_path, config={"vocab_size": V - 1} | settings))) == fires


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("config.json", V, f"eos_token_id is {V}; ids are whole numbers from 0 to {V - 1}"),
        ("config.json", [1, 999, 77], "eos_token_id is 999, 77; ids"),
        ("config.json", -1, "eos_token_id is -1; ids"),
        ("config.json", "</s>", "eos_token_id is '</s>'; ids"),
        ("config.json", True, "eos_token_id is True; ids"),
        ("config.json", {"id": 1}, "eos_token_id is a dict; ids"),
        ("generation_config.json", 500, "generation_config.json.eos_token_id is 500"),
    ],
)
def test_b034_names_the_id(tmp_path, place, value, words):
    path = llama(tmp_path)
    record = json.loads((path / place).read_text()) if place == "config.json" else {}
    (path / place).write_text(json.dumps(record | {"eos_token_id": value}))
    finding = one("B034", path)
    assert finding.severity == "warning"
    assert words in finding.evidence


def test_b034_counts_the_larger_of_two_vocabularies(tmp_path):
    config = {"decoder_vocab_size": V + 9, "decoder_start_token_id": V + 8}
    assert run("B034", llama(tmp_path, False, head=table(V + 9), config=config)) == []


@pytest.mark.parametrize("name", ["lm_head.bias", "final_logits_bias", "cls.predictions.bias"])
def test_b035_a_bias_of_another_length(tmp_path, name):
    path = llama(tmp_path / "a", False, tensors={name: bias(V - 1)})
    finding = one("B035", path)
    assert (finding.severity, finding.where) == ("warning", name)
    assert f"has {V - 1} entries, the tables {V} rows" in finding.evidence
    assert run("B035", llama(tmp_path / "b", False, tensors={name: bias()})) == []


def test_b035_notes_a_bias_on_a_tied_causal_head(tmp_path):
    finding = one("B035", llama(tmp_path, tensors={"lm_head.bias": bias()}))
    assert finding.severity == "info"
    assert "lm_head.bias" in finding.evidence


def test_tokenizers_of_every_kind_are_counted(tmp_path):
    """One more id than rows, told by each kind of file."""
    kinds = {
        "vocab.json": {f"t{i}": i for i in range(V + 1)},
        "added_tokens.json": {"<new>": V},
        "tokenizer_config.json": {"added_tokens_decoder": {str(V): {"content": "<new>"}}},
        "tokenizer.json": {"model": {"type": "Unigram", "vocab": [[f"t{i}", 0.0] for i in range(V + 1)]}},
    }
    for name, record in kinds.items():
        path = llama(tmp_path / name, files={name: record})
        assert one("B031", path).where == name
    words = "\n".join(f"w{i}" for i in range(V + 1)) + "\n"
    path = llama(tmp_path / "words")
    (path / "vocab.txt").write_text(words)
    assert one("B031", path).where == "vocab.txt"


def test_a_sentencepiece_model_is_counted_by_its_pieces(tmp_path):
    piece = b"\x0a\x08" + b"\x0a\x01a" + b"\x15\x00\x00\x00\x00"  # field 1: {text, score}
    trainer = b"\x12\x02\x08\x01"  # field 2, not a piece
    path = llama(tmp_path)
    (path / "tokenizer.model").write_bytes(piece * (V + 1) + trainer)
    assert f"ids up to {V}" in one("B031", path).evidence
    (path / "tokenizer.model").write_bytes(piece * V + trainer)
    assert run("B031", path) == run("B001", path) == []
    (path / "tokenizer.model").write_bytes(piece * V + trainer[:-1])
    assert one("B001", path).where == "tokenizer.model"


NO_TOKENIZERS = [[], 3, {}, {"model": 1}, {"model": {"vocab": 1}}, {"model": {"vocab": [1, [], [2]]}}]
NO_TOKENIZERS += [{"model": {"vocab": {"a": "b", "c": -1, "d": 1e309, "e": True}}}]
NO_TOKENIZERS += [{"added_tokens": 1}, {"added_tokens": [1, {"id": "x"}, {"id": 2.5}]}]


@pytest.mark.parametrize("record", NO_TOKENIZERS)
def test_tokenizers_of_wrong_types_count_nothing(tmp_path, record):
    assert run("B031", llama(tmp_path, tokenizer=record)) == []
