"""B030 to B035: tables, config and tokenizer must count the same tokens."""

import json

import numpy as np
import pytest
from rule_runs import one, run
from tiny_checkpoints import D, V, bpe_tokenizer, llama, llama_config, llama_tensors, table, write_checkpoint

RULES = [f"B03{n}" for n in range(6)]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
ALBERT = {"architectures": ["AlbertForMaskedLM"], "model_type": "albert", "vocab_size": V, "hidden_size": 16}


def bias(length=V):
    return np.ones(length, np.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tied", [True, False])
def test_silent_on_healthy_llamas(tmp_path, rule, tied):
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
