"""`probe` on loaded models of many families, sound and damaged, compared with their folders."""

import pytest
import torch
from tests.boundary.tiny_models import FAMILIES, V, build
from torch import nn

import tiewise
from tiewise.boundary.probing import FROM_TABLE, SAME, ZERO
from tiewise.core.errors import CheckpointError, InstallError, UnsupportedError


@pytest.fixture
def saved(tmp_path):
    def save(name="llama", tied=True):
        build(name, tied=tied).save_pretrained(tmp_path / "model")
        return FAMILIES[name][0].from_pretrained(tmp_path / "model"), tmp_path / "model"

    return save


def with_separate_head(model, head):
    """Return the model with a separate head, as if a launcher had cleared its tie flag."""
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(nn.Linear(16, len(head), bias=False))
    model.get_output_embeddings().weight = nn.Parameter(head)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt_350m", "t5", "bart", "bert"])
def test_probe_reports_models_loaded_by_transformers_as_sound(saved, name, tied):
    model, folder = saved(name, tied)
    found = tiewise.probe(model, folder)
    assert (found.sound, found.lookup, found.head, found.tied) == (True, SAME, SAME, tied)
    assert tiewise.probe(model.bfloat16(), folder).sound  # rounded after it was loaded


@pytest.mark.parametrize(
    ("head", "sound", "said"),
    [
        (torch.zeros_like, "Wrong", "all zero"),
        (torch.randn_like, "Wrong", "unrelated to the file's, as if drawn at random"),
        (torch.clone, "Sound", "the file's"),
    ],
)
def test_probe_describes_a_separate_head_where_the_config_ties(saved, head, sound, said):
    model, folder = saved()
    for seed in range(3):
        torch.manual_seed(seed)
        found = tiewise.probe(with_separate_head(model, head(model.get_input_embeddings().weight.detach())), folder)
        two = "two tables here, and the config ties them."
        assert repr(found) == f"{sound}: the lookup is the file's, the head {said}; {two}"
        assert (found.sound, found.head, found.claimed) == (sound == "Sound", said, True)


def test_probe_reports_a_head_overwritten_by_the_table(saved):
    model, folder = saved(tied=False)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    found = tiewise.probe(model, folder)
    assert (found.sound, found.head, found.tied, found.claimed) == (False, FROM_TABLE, True, False)


def test_probe_reports_changed_rows_and_accepts_padding_rows(saved):
    model, folder = saved(tied=False)
    model.resize_token_embeddings(64, mean_resizing=False)
    assert tiewise.probe(model, folder).sound
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 1
        model.get_output_embeddings().weight[5, 0] = torch.nan
    found = tiewise.probe(model, folder)
    assert (found.lookup, found.head) == (f"other than the file's in 1 of {V} rows", "not all numbers")
    assert not found.sound
    model.resize_token_embeddings(40)
    assert tiewise.probe(model, folder).lookup == f"of another shape, [40, 16] where the file has [{V}, 16]"


def test_probe_finds_the_tables_of_an_engine_by_their_names_in_the_file(saved):
    model, folder = saved()
    engine = nn.Module()
    engine.runner = nn.Module()
    engine.runner.embed_tokens, engine.lm_head = nn.Module(), nn.Module()
    engine.runner.embed_tokens.weight = model.get_input_embeddings().weight
    engine.lm_head.weight = nn.Parameter(torch.zeros(V, 16))
    assert tiewise.probe(engine, folder).head == ZERO
    del engine.lm_head
    with pytest.raises(InstallError, match=r"has no table lm_head\.weight; probe the whole model"):
        tiewise.probe(engine, folder)


def test_probe_refuses_what_it_cannot_compare_with_a_file(saved, tmp_path):
    model, folder = saved()
    with pytest.raises(CheckpointError, match="absent"):
        tiewise.probe(model, tmp_path / "absent")
    with pytest.raises(UnsupportedError, match="a str is no model"):
        tiewise.probe("model", folder)
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(UnsupportedError, match="no values yet"):
        tiewise.probe(empty, folder)
    weight = nn.Parameter(torch.zeros(V, 16, dtype=torch.int8), requires_grad=False)
    model.get_input_embeddings().weight = weight
    with pytest.raises(UnsupportedError, match=r"packed numbers \(torch.int8\)"):
        tiewise.probe(model, folder)
