"""Any JSON value anywhere in any file of a checkpoint: findings, or one clear error, and never anything else."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import bpe_tokenizer, llama, llama_config

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rule import rules

ODD = st.sampled_from([-1, 0, 1, 2**63, 10**400, 1e308, float("inf"), float("nan"), True, "", "32000", "\x1b[2J", None])
VALUES = st.recursive(
    ODD | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    *("model_type", "architectures", "vocab_size", "hidden_size", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "text_config", "decoder", "generator", "quantization_config"),
    *(
        "auto_map",
        "additional_vocab_size",
        "pad_vocab_size_multiple",
        "prompt_types",
        "prompt_length",
        "embedding_size",
    ),
    *("logits_scaling", "tiewise_boundary", "base_model_type", "is_encoder_decoder", "initializer_range"),
]
LEVELS = ["", "text_config", "decoder", "\x1b[2J_config", "\x1b_config"]
TOKENIZERS = ["added_tokens", "model", "version"]


@st.composite
def configs(draw):
    """A Llama's config in which some keys, at the root or below it, hold anything."""
    config = llama_config(draw(st.booleans()))
    config["model_type"] = draw(st.sampled_from(["llama", "t5", "granite", "mllama", "tiewise", "llava", "nobody's"]))
    for level in draw(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=2)):
        part = config if not level else config.setdefault(level, llama_config())
        if level.startswith("\x1b"):
            part["text_config"] = llama_config(draw(st.booleans()), logits_scaling=2.0)
        if isinstance(part, dict):
            part |= draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    return config


def assert_sane(audit):
    for finding in audit.findings:
        assert finding.rule in rules()
        assert len(finding.evidence) < 1500
        assert all(text.isprintable() for text in (finding.where, finding.evidence, finding.repair))
    json.dumps(audit.record(), allow_nan=False)


SLOW_DISK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW_DISK
@given(config=configs(), generation=VALUES, stored_head=st.booleans())
def test_configs(tmp_path, config, generation, stored_head):
    path = llama(tmp_path, not stored_head, files={"generation_config.json": generation})
    (path / "config.json").write_text(json.dumps(config))
    assert_sane(check(path, deep=True))


@SLOW_DISK
@given(whole=st.booleans(), entries=st.dictionaries(st.sampled_from(TOKENIZERS), VALUES), beside=VALUES)
def test_tokenizers(tmp_path, whole, entries, beside):
    record = bpe_tokenizer() | entries if whole else entries
    files = {"added_tokens.json": beside, "tokenizer_config.json": {"added_tokens_decoder": beside}}
    assert_sane(check(llama(tmp_path, tokenizer=record, files=files), deep=True))


@SLOW_DISK
@given(weight_map=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | VALUES, max_size=4), metadata=VALUES)
def test_indexes(tmp_path, weight_map, metadata):
    path = llama(tmp_path, shards=2)
    index = path / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"] |= weight_map
    index.write_text(json.dumps(record | {"metadata": metadata}))
    assert_sane(check(path))
