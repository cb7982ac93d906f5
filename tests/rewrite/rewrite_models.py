"""Tiny models saved by transformers, and what it computes from what a verb made of them."""

import torch
from safetensors.torch import load_file
from tests.boundary.tiny_models import FAMILIES, V, build

SHARING = ("t5", "t5_v11", "bart", "marian", "bert", "roberta")

__all__ = ["FAMILIES", "V", "build", "ends", "logits", "same_table", "saved", "tensors"]


def saved(path, name, tied=True, dtype=torch.float32, shard="1GB", **settings):
    """Save a tiny model of a family under `path`, and return it in evaluation mode.

    Where the flag shares more than the head (the stacks' input tables, the bias), only the head is untied.
    """
    model = build(name, tied or name in SHARING, **settings).to(dtype).eval()
    model.requires_grad_(False)
    if not tied and name in SHARING:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.flip(0).clone(), requires_grad=False)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def ends(model):
    """Modules of the two ends."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def same_table(model):
    """Whether both ends use one table."""
    lookup, head = ends(model)
    return lookup.weight is head.weight


def logits(model, ids=None):
    """Logits of fixed token ids, of the decoder given the same where there are two stacks."""
    ids = torch.arange(3, 43).reshape(2, 20) % 61 if ids is None else ids
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **extra).logits


def tensors(path):
    """Every tensor of a folder, read by the safetensors library."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}
