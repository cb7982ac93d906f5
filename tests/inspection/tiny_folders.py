"""Checkpoint folders of a few kilobytes, written without the code under test."""

import json

import numpy as np
from safetensors.numpy import save_file


def write_model(folder, rows=40, width=8, tied=True, seed=0, **changes):
    """Write a Llama folder that contains only its tables; return the folder."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    tensors = {"model.embed_tokens.weight": draw.normal(size=(rows, width)).astype(np.float32)}
    if not tied:
        tensors["lm_head.weight"] = draw.normal(size=(rows, width)).astype(np.float32)
    save_file(tensors | changes.pop("tensors", {}), folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": rows, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied} | changes))
    return folder
