"""Claims of configs, against what transformers makes of them and against hostile values."""

import itertools
import json
import random

import pytest
import saved_models as saved
import transformers as tr

from tiewise.checkpoint.claims import FLAG, MOST_LEVELS, read_claims

QUICK = ["LlamaForCausalLM", "GPT2LMHeadModel", "GemmaForCausalLM", "OPTForCausalLM", "MarianMTModel"]
NESTED = ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Blip2ForConditionalGeneration"]


def tied(name, record):
    """Whether transformers ties a model built from a config as it is written."""
    model_class = getattr(tr, name)
    model = model_class(model_class.config_class.from_dict(json.loads(json.dumps(record))))
    tables, head = saved.ends(model)
    return any(head.weight is table.weight for table in tables)


def shrunk(name):
    return saved.without(saved.shrink(getattr(tr, name)).to_dict(), FLAG) | {"architectures": [name]}


FLAGS = (True, False, None)
CASES = [(n, root, None) for n in QUICK for root in FLAGS] + list(itertools.product(NESTED, FLAGS, FLAGS))


@pytest.mark.parametrize(("name", "root", "text"), CASES)
def test_as_the_class_reads_it(name, root, text):
    record = shrunk(name)
    for level, value in ((record, root), (record.get("text_config"), text)):
        if value is not None:
            level[FLAG] = value
    claims = read_claims(record)
    assert claims.known
    assert claims.tied == tied(name, record)


def test_levels_and_values():
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


def test_a_part_without_a_type_has_the_type_its_root_expects():
    claims = read_claims({"model_type": "blip-2", "text_config": {"vocab_size": 5}})
    assert claims.deciding.level == "text_config"
    assert claims.deciding.default is True  # OPT's


def test_a_deciding_level_that_is_not_written_counts_with_its_default():
    claims = read_claims({"model_type": "blip-2"})
    assert claims.deciding.level == "text_config"
    assert claims.tied is True


def test_one_true_is_enough_where_the_root_lifts():
    record = {"model_type": "llava", FLAG: False, "text_config": {"model_type": "llama", FLAG: True}}
    assert read_claims(record).deciding.level == "text_config"
    assert read_claims(record).tied is True


def test_t5_ties_whatever_the_flag_says_and_rembert_never():
    t5 = read_claims({"model_type": "t5", FLAG: False})
    assert (t5.tied, t5.t5_like, t5.fixed) == (True, True, True)
    rembert = read_claims({"model_type": "rembert", FLAG: True})
    assert (rembert.tied, rembert.t5_like, rembert.fixed) == (False, False, False)
    assert read_claims({"model_type": "switch_transformers"}).t5_like
    assert not read_claims({"model_type": "bart"}).t5_like


def test_own_keys_of_sizes():
    (claim,) = read_claims({"model_type": "gpt2", "n_embd": 12, "vocab_size": 30}).levels
    assert (claim.hidden_size, claim.vocab_size) == (12, 30)
    (claim,) = read_claims({"model_type": "whisper", "d_model": 8}).levels
    assert claim.hidden_size == 8


def test_this_packages_own_checkpoints_count_as_their_base():
    record = {"model_type": "tiewise", "base_model_type": "gpt2", "architectures": ["TiewiseGPT2LMHeadModel"]}
    claims = read_claims(record)
    assert (claims.levels[0].model_type, claims.known, claims.tied) == ("gpt2", True, True)


def test_an_unknown_family_is_asked_where_it_speaks():
    claims = read_claims({"model_type": "nobody", "llm_config": {"vocab_size": 3, FLAG: True}})
    assert (claims.known, claims.deciding.level, claims.tied) == (False, "llm_config", True)
    assert read_claims({"model_type": "nobody"}).tied is None
    assert read_claims(None).tied is None


@pytest.mark.parametrize("flag", ["true", 1, 0, [], {}, 1.5, None])
def test_a_malformed_flag_is_absent_but_noticed(flag):
    (claim,) = read_claims({"model_type": "llama", FLAG: flag}).levels
    assert claim.written is None
    assert claim.malformed == str(flag)
    (claim,) = read_claims({"model_type": "llama", FLAG: True}).levels
    assert claim.malformed is None


VALUES = [None, True, 0, -1, 2**70, 1.5, float("nan"), "", "x" * 999, "\x1b[31m"]
VALUES += [[], [[]], {}, {"": {}}, [None], ["\0"]]
KEYS = [FLAG, "model_type", "base_model_type", "architectures", "text_config", "decoder", "vocab_size", "hidden_size"]


def hostile(source, depth):
    record = {key: source.choice(VALUES) for key in source.sample(KEYS, 5)}
    if depth:
        record |= {key: hostile(source, depth - 1) for key in source.sample([*KEYS, "x_config"], 3)}
    if source.random() < 0.3:
        record["model_type"] = source.choice(["llama", "llava", "blip-2", "t5", "tiewise", "gpt2"])
    return record


def test_any_json_is_taken():
    source = random.Random(0)
    for _ in range(2000):
        claims = read_claims(hostile(source, source.randrange(4)))
        assert claims.tied in (True, False, None)
        for claim in claims.levels:
            assert claim.written in (True, False, None)
            assert claim.vocab_size is None or claim.vocab_size > 0
            assert (claim.malformed or "").isprintable()


def test_levels_are_bounded():
    record = {}
    for _ in range(50_000):
        record = {"text_config": record}
    assert len(read_claims(record).levels) <= 8
    wide = {f"part{i}_config": {FLAG: True} for i in range(10_000)}
    assert len(read_claims(wide).levels) <= MOST_LEVELS
