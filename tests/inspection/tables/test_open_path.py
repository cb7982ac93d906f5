"""A checkpoint's direct path against the logits of transformers' own classes built without layers."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.inspection.running.one_layer_models import V, one_layer
from transformers import AutoModelForCausalLM

import tiewise
from tiewise.checkpoint.families import FAMILIES
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError
from tiewise.inspection.tables.open_path import open_path
from tiewise.inspection.tables.path_matrix import asymmetry, grams, transitions

WITH_NORM = [kind for kind, one in FAMILIES.items() if one.final_norm is not None and one.written_ends is None]


def build_without_layers(family, tied, **settings):
    none = {"num_hidden_layers": 0, "attention_types": [], "attention_layers": []}  # the lists are gpt_neo's
    return one_layer(family, tied, **none, **settings)


WANTED = [(0, 0), (3, 7), (7, 3), (39, 39), (20, 1)]


def select_wanted(values):
    return values[tuple(np.transpose(WANTED))].numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", WITH_NORM)
def test_open_path_matches_the_logits_of_a_model_without_layers(family, tied, tmp_path):
    model = build_without_layers(family, tied)
    model.save_pretrained(tmp_path)
    path = open_path(open_folder(tmp_path))
    assert path.tied == tied
    assert not any("not applied" in note or "not known" in note for note in path.notes)
    with torch.no_grad():
        expected = model(torch.arange(V)[:, None]).logits[:, 0].double()
    logits, logs, _ = transitions(path, WANTED)
    # some classes compute their norm in fp32 for any model dtype
    assert logits == pytest.approx(select_wanted(expected), rel=2e-6, abs=2e-6)
    assert logs == pytest.approx(select_wanted(torch.log_softmax(expected, -1)), abs=1e-5)
    assert (asymmetry(grams(path.linear))[1] == 0) == tied


@pytest.mark.parametrize(
    ("dtype", "scale"), [("bfloat16", 34.0), ("float16", 33.9375), ("float32", 33.941123962402344)]
)
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_open_path_rounds_the_gemma_input_scale_to_the_table_dtype(family, dtype, scale, tmp_path):
    model = build_without_layers(family, True, hidden_size=1152).to(getattr(torch, dtype))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 1  # the scale is what its lookup returns
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == getattr(torch, dtype)
    with torch.no_grad():
        multiplied = loaded.get_input_embeddings()(torch.tensor([3]))[0, 0].item()
    path = open_path(open_folder(tmp_path))
    assert path.input_scale == multiplied == scale
    assert f"input rows times {path.input_scale:g}" in path.notes


def test_open_path_applies_no_final_norm_to_a_post_norm_opt(tmp_path):
    model = build_without_layers("opt", False, do_layer_norm_before=False)
    model.save_pretrained(tmp_path)
    path = open_path(open_folder(tmp_path))
    assert path.notes[0] == "no final norm"
    with torch.no_grad():
        expected = model(torch.tensor([[5]])).logits[0, 0, 9].item()
    assert transitions(path, [(5, 9)])[0].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize(
    "spec",
    [
        *("factored:8", "factored-untied:8", "residual:4", "factored:8+softcap=3"),
        *("tied+input_scale=2+output_scale=0.5", "untied+bias"),
    ],
)
def test_open_path_applies_the_maps_of_an_installed_boundary(spec, family, tmp_path):
    model = build_without_layers(family, True).float()
    tiewise.install(model, spec)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.zeros_like(value) if "wpe" in name else torch.randn_like(value))
    model.eval().save_pretrained(tmp_path)
    path = open_path(open_folder(tmp_path))
    with torch.no_grad():
        expected = torch.as_tensor(model(torch.arange(V)[:, None]).logits[:, 0]).double()
    tolerance = 2e-5 * expected.abs().max().item()  # fp32
    assert transitions(path, WANTED)[0] == pytest.approx(select_wanted(expected), rel=2e-5, abs=tolerance)


def test_open_path_names_a_missing_tensor(tmp_path):
    build_without_layers("llama", False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, said in (
        ("model.norm.weight", r"final norm model\.norm\.weight is not stored"),
        ("model.embed_tokens.weight", "no input table"),
    ):
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            open_path(open_folder(tmp_path))


def test_open_path_notes_that_an_unknown_family_gets_no_norm(tmp_path):
    build_without_layers("mpt", True).save_pretrained(tmp_path)
    path = open_path(open_folder(tmp_path))
    assert path.norm.kind == "none"
    assert "is not known: none is applied" in path.notes[0]
