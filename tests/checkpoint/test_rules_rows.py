"""B040 to B042 and B081: types, the content of rows, copies."""

import ml_dtypes
import numpy as np
import pytest
from rule_runs import one, run
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import D, V, bpe_tokenizer, llama, llama_tensors, table

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
    assert "2.0 MiB stored more than once" in finding.evidence
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
