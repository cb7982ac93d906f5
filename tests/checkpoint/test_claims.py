"""Test the claims read from configs against transformers' models and on hostile values."""

import itertools
import json
import random

import pytest
import saved_models as saved
import transformers as tr

from tiewise.checkpoint.boundary_scalars import SCALARS, read_scalars
from tiewise.checkpoint.claims import FLAG, MOST_LEVELS, read_claims

QUICK = ["LlamaForCausalLM", "GPT2LMHeadModel", "GemmaForCausalLM", "OPTForCausalLM", "MarianMTModel"]
NESTED = ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Blip2ForConditionalGeneration"]


def is_tied(name, record):
    """Return whether transformers ties a model built from a config exactly as written."""
    model_class = getattr(tr, name)
    model = model_class(model_class.config_class.from_dict(json.loads(json.dumps(record))))
    tables, head = saved.ends(model)
    return any(head.weight is table.weight for table in tables)


FLAGS = (True, False, None)
CASES = [(n, root, None) for n in QUICK for root in FLAGS] + list(itertools.product(NESTED, FLAGS, FLAGS))


@pytest.mark.parametrize(("name", "root", "text"), CASES)
def test_claims_agree_with_tie_of_transformers_model(name, root, text):
    record = saved.without(saved.shrink(getattr(tr, name)).to_dict(), FLAG) | {"architectures": [name]}
    for level, value in ((record, root), (record.get("text_config"), text)):
        if value is not None:
            level[FLAG] = value
    claims = read_claims(record)
    assert claims.has_family_data
    assert claims.tied == is_tied(name, record)


OLDER = "tie_embedding"  # key of the flag in published configs of LFM2
OLDER_CASES = [  # class, level of the older key, its value, flag at the root
    ("Lfm2ForCausalLM", "", False, True),
    ("Lfm2ForCausalLM", "", True, None),
    ("Lfm2MoeForCausalLM", "", True, False),
    ("Lfm2VlForConditionalGeneration", "", False, True),
    ("Lfm2VlForConditionalGeneration", "", True, False),
    ("Lfm2VlForConditionalGeneration", "text_config", False, True),
    ("Lfm2VlForConditionalGeneration", "text_config", True, False),
    ("LlamaForCausalLM", "", False, True),  # its class does not know the key
]


@pytest.mark.parametrize(("name", "level", "older", "flag"), OLDER_CASES)
def test_older_flag_counts_as_in_transformers_model(name, level, older, flag):
    record = saved.without(saved.shrink(getattr(tr, name)).to_dict(), FLAG) | {"architectures": [name]}
    record.get(level, record)[OLDER] = older
    if flag is not None:
        record[FLAG] = flag
    assert read_claims(record).tied == is_tied(name, record)


def test_read_claims_returns_levels_with_flags_and_sizes():
    record = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": {"model_type": "qwen3_omni_moe_text", "vocab_size": 7, FLAG: True}},
        "audio_config": {FLAG: True},
        "quantization_config": {FLAG: True},
        "decoder": {"vocab_size": 9, "d_model": 4},
    }
    record["thinker_config"]["model_type"] = "qwen3_omni_moe_thinker"
    levels = {claim.level: claim for claim in read_claims(record).levels}
    assert list(levels) == ["", "thinker_config", "thinker_config.text_config", "decoder"]
    text = levels["thinker_config.text_config"]
    assert (text.written, text.vocab_size, levels["decoder"].hidden_size) == (True, 7, 4)


# {(key, content) of a config level: whether the level configures a model over tokens}
LEVELS = {
    ("text_config", "flag"): True,
    ("text_config", "size"): True,
    ("text_config", "type"): True,
    ("text_config", "other"): False,
    ("thinker_config", "type"): True,
    ("vision_config", "size"): False,
    ("visual_config", "flag"): False,
    ("audio_config", "flag"): False,
    ("image_config", "type"): False,
    ("speech_config", "size"): False,
    ("video_config", "size"): False,
    ("codec_config", "size"): False,
    ("vq_config", "size"): False,
    ("backbone_config", "type"): False,
    ("quantization_config", "flag"): False,
    ("decoder", "other"): True,
    ("encoder", "other"): True,
    ("generator", "other"): True,
    ("question_encoder", "other"): True,
    ("llm_config", "other"): True,
    ("language_config", "other"): True,
    ("text_model", "flag"): False,
    ("rope_scaling", "type"): False,
}
CONTENTS = {"flag": {FLAG: False}, "size": {"vocab_size": 5}, "type": {"model_type": "llama"}, "other": {"dropout": 0}}


@pytest.mark.parametrize(("key", "content"), LEVELS)
def test_read_claims_keeps_only_levels_of_token_models(key, content):
    levels = [claim.level for claim in read_claims({"model_type": "nobody", key: CONTENTS[content]}).levels]
    assert levels == (["", key] if LEVELS[key, content] else [""])
    inner = [claim.level for claim in read_claims({"text_config": {"vocab_size": 3, key: CONTENTS[content]}}).levels]
    assert (f"text_config.{key}" in inner) is LEVELS[key, content]


# {key: (neutral value, value that changes the model)}, from the code of each family
NUMBERS = {
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "scale_emb"), (1.0, 12.0)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale"), (1.0, 0.0625)),
    **dict.fromkeys(("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"), (0.0, 30.0)),
    "dim_model_base": (0.0, 256.0),
    **dict.fromkeys(("scale_embedding", "scale_decoder_outputs", "mup_enabled", "rescale_embeddings"), (False, True)),
    "logits_mup_width_multiplier": (1.0, 4.0),
    # modeling_phi3_small.py multiplies the rows unless `mup_embedding_multiplier` is 0, and divides logits by the width
    "mup_width_multiplier": (1.0, 8.0),
    "mup_embedding_multiplier": (0.0, 10.0),
}


def test_neutral_values_cover_all_scalars():
    assert set(NUMBERS) == set(SCALARS)


@pytest.mark.parametrize("key", NUMBERS)
def test_read_scalars_omits_neutral_values(key):
    neutral, other = NUMBERS[key]
    assert read_scalars([("", {key: neutral})]) == {}
    assert read_scalars([("", {key: other})]) == {key: float(other)}
    assert read_scalars([("text_config", {key: other})]) == {f"text_config.{key}": float(other)}
    if key == "mup_embedding_multiplier":
        assert read_scalars([("", {key: 1.0})]) == {key: 1.0}


OWN = {"model_type": "tiewise", "base_model_type": "gpt2", "architectures": ["TiewiseGPT2LMHeadModel"]}
# config, deciding level, whether it ties, and further claims of the config or of that level
CLAIMED = [
    # a part without a type has the type its root expects; an absent part has its class's default, OPT
    ({"model_type": "blip-2", "text_config": {"vocab_size": 5}}, "text_config", True, {"default": True}),
    ({"model_type": "blip-2"}, "text_config", True, {}),
    # one true flag is enough, because transformers 5 lifts the flag of text_config to the root
    ({"model_type": "llava", FLAG: False, "text_config": {"model_type": "llama", FLAG: True}}, "text_config", True, {}),
    ({"model_type": "t5", FLAG: False}, "", True, {"t5_like": True, "fixed": True}),
    ({"model_type": "rembert", FLAG: True}, "", False, {"t5_like": False, "fixed": False}),
    ({"model_type": "switch_transformers"}, "", True, {"t5_like": True}),
    ({"model_type": "bart"}, "", True, {"t5_like": False}),
    ({"model_type": "gpt2", "n_embd": 12, "vocab_size": 30}, "", True, {"hidden_size": 12, "vocab_size": 30}),
    ({"model_type": "whisper", "d_model": 8}, "", True, {"hidden_size": 8}),
    (OWN, "", True, {"has_family_data": True, "model_type": "gpt2"}),  # has the claims of its base
    # for an unknown family the level with a flag decides
    (
        {"model_type": "nobody", "llm_config": {"vocab_size": 3, FLAG: True}},
        "llm_config",
        True,
        {"has_family_data": False},
    ),
    ({"model_type": "nobody"}, "", None, {}),
    (None, "", None, {}),
]


@pytest.mark.parametrize(("record", "level", "ties", "also"), CLAIMED)
def test_read_claims_finds_deciding_level_tie_and_sizes(record, level, ties, also):
    claims = read_claims(record)
    assert (claims.deciding.level, claims.tied) == (level, ties)
    assert {key: (vars(claims) | vars(claims.deciding))[key] for key in also} == also


@pytest.mark.parametrize("flag", ["true", 1, 0, [], {}, 1.5, None])
def test_read_claims_treats_malformed_flag_as_absent_and_records_it(flag):
    (claim,) = read_claims({"model_type": "llama", FLAG: flag}).levels
    assert (claim.written, claim.malformed) == (None, str(flag))


VALUES = [None, True, 0, -1, 2**70, 1.5, float("nan"), "", "x" * 999, "\x1b[31m"]
VALUES += [[], [[]], {}, {"": {}}, [None], ["\0"]]
KEYS = [FLAG, "model_type", "base_model_type", "architectures", "text_config", "decoder", "vocab_size", "hidden_size"]


def hostile_config(source, depth):
    record = {key: source.choice(VALUES) for key in source.sample(KEYS, 5)}
    if depth:
        record |= {key: hostile_config(source, depth - 1) for key in source.sample([*KEYS, "x_config"], 3)}
    if source.random() < 0.3:
        record["model_type"] = source.choice(["llama", "llava", "blip-2", "t5", "tiewise", "gpt2"])
    return record


def test_read_claims_accepts_any_json():
    source = random.Random(0)
    for _ in range(2000):
        claims = read_claims(hostile_config(source, source.randrange(4)))
        assert claims.tied in (True, False, None)
        for claim in claims.levels:
            assert claim.written in (True, False, None)
            assert claim.vocab_size is None or claim.vocab_size > 0
            assert (claim.malformed or "").isprintable()


def test_read_claims_bounds_number_of_levels():
    record = {}
    for _ in range(50_000):
        record = {"text_config": record}
    assert len(read_claims(record).levels) <= 8
    wide = {f"part{i}_config": {FLAG: True} for i in range(10_000)}
    assert len(read_claims(wide).levels) <= MOST_LEVELS
