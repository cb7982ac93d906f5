"""Tiny checkpoints and chains of token pairs, written with numpy and safetensors."""

import json

import numpy as np
from safetensors.numpy import save_file

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.inspection.tables.bigram_counts import Chain

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
OWN = {"architectures": ["TiewiseLlamaForCausalLM"], "model_type": "tiewise", "base_model_type": "llama"}


def gaussian(rows, width, seed=0):
    """Return a Gaussian table in fp32."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def write_folder(path, tensors, config, words=()):
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


def llama(path, table, head=None, words=(), **changes):
    """Write a Llama with one table, or with a separate head; open it."""
    rows, width = table.shape
    config = LLAMA | {"vocab_size": rows, "hidden_size": width, "tie_word_embeddings": head is None} | changes
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": np.ones(width, np.float32)}
    return write_folder(path, tensors | ({} if head is None else {"lm_head.weight": head}), config, words)


def factored(path, table, into, out, words=(), **changes):
    """Write and open a Llama with table [V, k], in_map [D, k] and out_map [k, D]."""
    rank, width = out.shape
    config = LLAMA | OWN | {"vocab_size": len(table), "hidden_size": width, "tie_word_embeddings": True}
    config |= {"tiewise_boundary": f"factored:{rank}"} | changes
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": np.ones(width, np.float32)}
    tensors |= {"model.embed_tokens.in_map.weight": into, "lm_head.out_map.weight": out}
    return write_folder(path, tensors, config, words)


def opt(path, table, into, out):
    """Write an OPT with project_in [D, k] and project_out [k, D]; open it."""
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": len(table), "dtype": "float32"}
    config |= {"hidden_size": into.shape[0], "word_embed_proj_dim": table.shape[1], "tie_word_embeddings": True}
    decoder = {"embed_tokens": table, "project_in": into, "project_out": out}
    return write_folder(path, {f"model.decoder.{name}.weight": value for name, value in decoder.items()}, config)


def random_chain(states, seed):
    """Return a positive Q [V, V] with equal row and column sums, and its transition matrix."""
    p = np.random.default_rng(seed).dirichlet(np.full(states, 0.5), states) * 0.98 + 0.02 / states
    q = np.linalg.matrix_power(p, 4096)[0][:, None] * p
    return q / q.sum(), p


def exact_chain(q):
    """Return a `Chain` with Q's shares, rounded to 1e-15."""
    counts = np.rint(q * 10**15).astype(np.int64).ravel()
    return Chain(np.flatnonzero(counts), counts[counts > 0], len(q))


def sample_text(p, length, seed):
    """Sample a text from a transition matrix."""
    generator = np.random.default_rng(seed)
    edges, points = p.cumsum(1), generator.random(length)
    text = np.zeros(length, np.int64)
    for t in range(1, length):
        text[t] = min(np.searchsorted(edges[text[t - 1]], points[t]), len(p) - 1)
    return text
