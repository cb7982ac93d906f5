"""The path with the first MLP is what transformers' own class says when its one layer's attention gives nothing."""

import json

import numpy as np
import pytest
import torch
from one_layer_models import E, V, one_layer
from tokenizers import Tokenizer, models, pre_tokenizers

from tiewise.analysis.bigrams import Chain
from tiewise.analysis.final_norms import FAMILIES
from tiewise.analysis.path_tokens import transitions
from tiewise.errors import CheckpointError, DataError, InstallError
from tiewise.internals.first_layers import BLOCKS, first_block
from tiewise.internals.first_mlp import AfterMlp, first_mlp_of, through_first_mlp
from tiewise.internals.loaded import open_model

VARIANTS = [
    *((family, {}) for family in BLOCKS),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": False, "parallel_attn": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
]


def opened(model, folder, words=()):
    """Save a model, with a tokenizer of whole words, and open it in fp64."""
    model.save_pretrained(folder)
    if words:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
    return open_model(folder, torch.float64)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(V)[:, None]).logits[:, 0].double().numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "settings"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_one_layer_without_attention_is_the_path(family, settings, tied, tmp_path):
    model = one_layer(family, tied, **settings)
    expected = logits_of(model)
    found = opened(model, tmp_path)
    path = through_first_mlp(first_mlp_path(found), first_block(found.model))
    wanted = [(0, 0), (3, 7), (7, 3), (39, 39), (20, 1)]
    for one in transitions(path, wanted):
        # some classes compute their norm in fp32, whatever the model's type
        assert one.logit == pytest.approx(expected[one.before, one.after], rel=4e-6, abs=4e-6)
    assert not path.tied


def first_mlp_path(found):
    from tiewise.analysis.open_path import open_path

    return open_path(found.folder)


def test_every_known_family_has_a_block_or_experts():
    assert set(FAMILIES) - set(BLOCKS) == {"mixtral", "olmoe"}
    assert set(BLOCKS) <= set(FAMILIES)
