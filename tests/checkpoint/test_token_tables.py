"""Test that further tables indexed by token ids are identified by config, names and shapes together."""

from pathlib import Path

import pytest

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.stored import Stored

V, D = 32, 8
E, H = "model.embed_tokens", "lm_head"
ENDS = {E: (V, D), H: (V, D)}
V3 = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 3, "vocab_size": V}
FURTHER = {"model.layers.3.embed_tokens": (V, D), "model.layers.3.shared_head.head": (V, D)}
NAMED = "MTP input", "MTP output"


def facts_of(config, modules):
    """Return the facts of a folder with these matrices by module; vectors have complete names."""
    tensors = {}
    for module, shape in modules.items():
        name = module if len(shape) == 1 else f"{module}.weight"
        tensors[name] = Stored(name, Path("m.safetensors"), "F32", shape, 0, 4)
    return Facts(Folder(Path("a"), (), config, {}, tensors), scan=False)


@pytest.mark.parametrize(
    ("config", "modules", "found"),
    [
        (V3, FURTHER, dict(zip(FURTHER, NAMED, strict=True))),
        # norm and projection of a further layer are not tables
        (V3, {"model.layers.3.shared_head.norm": (D,), "model.layers.3.eh_proj": (D, 2 * D)}, {}),
        (V3, {"model.layers.2.embed_tokens": (V, D)}, {"model.layers.2.embed_tokens": "per-layer table"}),
        ({}, {"mtp.embed_tokens": (V, D), "mtp.head": (V, D)}, {"mtp.embed_tokens": NAMED[0], "mtp.head": NAMED[1]}),
        ({}, {"model.mtp_layers.0.embed_tokens": (V, D)}, {"model.mtp_layers.0.embed_tokens": NAMED[0]}),
        ({}, {"mtp.lm_head": (V - 2, D)}, {"mtp.lm_head": NAMED[1]}),  # it has other rows and is still a table
        ({}, {"mtp.head": (5, 6), "mtp.fc": (D, 2 * D)}, {}),  # neither the rows nor the width of an end
        ({}, {"model.embed_tokens_per_layer": (V, 12)}, {"model.embed_tokens_per_layer": "per-layer table"}),
        ({}, {"model.ngram_embeddings.embedders.1": (163, 2), "model.ngram_embeddings.post_projs.1": (D, 2)},
         {"model.ngram_embeddings.embedders.1": "n-gram table"}),
        ({}, {"model.layers.1.ple.ple_embedding.ngram_embedding.shard_7": (163, 2)},
         {"model.layers.1.ple.ple_embedding.ngram_embedding.shard_7": "n-gram table"}),
        ({}, {"prophetnet.decoder.ngram_embeddings": (2, D)}, {}),
        ({}, {"model.encoder_hash_tok_embedding": (600, D)}, {"model.encoder_hash_tok_embedding": "n-gram table"}),
        ({}, {"model.embed_vision.embedding": (4, D)}, {"model.embed_vision.embedding": "modality table"}),
        ({}, {"d2t": (16,), "t2d": (V,)}, {"d2t": "draft map", "t2d": "draft map"}),
        ({}, {f"model.layers.{'9' * 5000}.embed_tokens": (V, D)}, {}),  # an implausible layer number
    ],
)  # fmt: skip
def test_indexed_tensors_are_identified_by_config_name_and_shape(config, modules, found):
    others = facts_of(config, ENDS | modules).roles.indexed_tensors
    assert {other.module or other.tensor.name: other.role for other in others} == found


def test_indexed_tensors_exclude_both_ends():
    """mlx-lm stores LongCat's word table next to its n-gram tables."""
    word = "model.ngram_embeddings.word_embeddings"
    roles = facts_of({}, {word: (V, D), H: (V, D), "model.ngram_embeddings.embedders.0": (161, 2)}).roles
    assert (roles.input.name, roles.output.name) == (f"{word}.weight", f"{H}.weight")
    assert [other.role for other in roles.indexed_tensors] == ["n-gram table"]


def test_indexed_tensors_keep_wrapper_prefix_and_row_per_token_mark():
    found = facts_of({}, {f"_orig_mod.{name}": shape for name, shape in (ENDS | FURTHER | {"t2d": (V,)}).items()})
    assert {other.module: other.has_row_per_token for other in found.roles.indexed_tensors} == dict.fromkeys(
        FURTHER, True
    ) | {"": False}
    assert all(other.tensor.name.startswith("_orig_mod.") for other in found.roles.indexed_tensors)


def test_matrices_without_role_exclude_per_layer_table():
    assert not facts_of({"vocab_size": V}, {E: (V, D), "model.embed_tokens_per_layer": (V, 12)}).matrices_without_role
