"""Little checkpoints with tables and a tokenizer, written by hand with numpy and the safetensors library."""

import json

import numpy as np
from safetensors.numpy import save_file

from tiewise.checkpoint.hf_folder import open_folder

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "dtype": "float32",
}
OWN = {"architectures": ["TiewiseLlamaForCausalLM"], "model_type": "tiewise", "base_model_type": "llama"}


def gaussian(rows, width, seed=0):
    """A Gaussian table in fp32."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def write(path, tensors, config, words=()):
    """Write a folder and open it; `words` make a WordLevel tokenizer.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if words:
        model = {"type": "WordLevel", "vocab": {word: row for row, word in enumerate(words)}, "unk_token": words[0]}
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [{"id": 0, "content": words[0], **special}]
        record = {"version": "1.0", "added_tokens": added, "model": model, "decoder": None, "normalizer": None}
        record |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None}
        (path / "tokenizer.json").write_text(json.dumps(record))
    return open_folder(path)


def untied(path, table, head, words=()):
    """A Llama with two tables."""
    config = LLAMA | {"vocab_size": len(table), "hidden_size": table.shape[1], "tie_word_embeddings": False}
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": np.ones(table.shape[1], np.float32)}
    return write(path, tensors | {"lm_head.weight": head}, config, words)


def factored(path, table, into, out, words=()):
    """A Llama with one table [V, k], in_map [D, k] and out_map [k, D]."""
    rank, width = out.shape
    config = LLAMA | OWN | {"vocab_size": len(table), "hidden_size": width, "tie_word_embeddings": True}
    config["tiewise_boundary"] = f"factored:{rank}"
    tensors = {
        "model.embed_tokens.weight": table,
        "model.embed_tokens.in_map.weight": into,
        "lm_head.out_map.weight": out,
        "model.norm.weight": np.ones(width, np.float32),
    }
    return write(path, tensors, config, words)


def opt(path, table, into, out):
    """An OPT with project_in [D, k] and project_out [k, D]."""
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": len(table), "dtype": "float32"}
    config |= {"hidden_size": into.shape[0], "word_embed_proj_dim": table.shape[1], "tie_word_embeddings": True}
    tensors = {
        "model.decoder.embed_tokens.weight": table,
        "model.decoder.project_in.weight": into,
        "model.decoder.project_out.weight": out,
    }
    return write(path, tensors, config)
