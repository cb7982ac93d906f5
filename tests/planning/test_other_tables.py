"""Tables beside the two ends in a plan: per-layer ones as transformers builds them, n-gram tables one by one."""

import pytest
from tests.checkpoint import saved_models

from tiewise.core.errors import PlanError
from tiewise.planning.read_config import count_on_meta, read

SIZES = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LONGCAT = SIZES | {"model_type": "longcat_flash_ngram", "ngram_vocab_size_ratio": 5.5}
LONGCAT |= {"emb_split_num": 2, "emb_neighbor_num": 4}


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_per_layer_tables_are_as_transformers_builds_them(name):
    model = saved_models.tiny(name)
    held = {key: value.numel() for key, value in model.named_parameters() if "per_layer" in key and "norm" not in key}
    config, table = model.config.to_dict(), held["model.embed_tokens_per_layer.weight"]
    counted, built = read(config).around["other_tables"], count_on_meta(config)
    assert counted.parameters == sum(held.values())
    assert counted.multiplied == counted.parameters - table
    assert built.around["other_tables"].parameters == table
    assert built.around["other_tables"].multiplied == 0  # it was counted among the matrices that a token meets
    whole = sum(count.parameters for count in built.around.values()) + built.ends.vocab * built.ends.width
    assert whole == sum(value.numel() for value in model.parameters())


def test_n_gram_tables_are_counted_one_by_one():
    found, each = read(LONGCAT).around["other_tables"], 24 // 6
    tables = [(352 + 2 * i + 1) * each for i in range(6)]
    assert found.parameters == sum(tables) + 6 * each * 24
    assert (found.multiplied, found.read) == (6 * each * 24, 6 * each + 6 * each * 24)
    with pytest.raises(PlanError, match="24 is not a multiple of 10"):
        read(LONGCAT | {"emb_split_num": 5, "emb_neighbor_num": 3})
    assert read(LONGCAT | {"hidden_size": 10**12, "emb_split_num": 10**6, "emb_neighbor_num": 10**6 + 1, "head_dim": 4})


def test_none_where_the_config_has_none():
    llama = SIZES | {"model_type": "llama"}
    assert "other_tables" not in read(llama).around
    assert "other_tables" not in read(SIZES | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}).around
    assert not any("further tokens" in note for note in read(llama).notes)
    assert any("further tokens" in note for note in read(llama | {"num_nextn_predict_layers": 1}).notes)
