"""Small checkpoints written with json and the safetensors library, without any code of tiewise."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

V, D = 24, 8
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I8": 1, "U8": 1}


def table(rows=V, width=D, seed=0, dtype=np.float32):
    """Return a random table whose rows all differ."""
    return np.random.default_rng(seed).normal(0, 0.5, (rows, width)).astype(dtype)


def with_rows(*rows, of=None):
    """Return a copy of `of`, by default the tied Llama's table, with some rows changed."""
    made = table() if of is None else of.copy()
    made[list(rows)] += 1
    return made


def write_checkpoint(path, config=None, tensors=None, *, shards=1, tokenizer=None, metadata=None, files=None):
    """Write a Hugging Face folder and return its path.

    Args:
        path: the folder; made where missing.
        config: of config.json; None writes none.
        tensors: {name: array}, spread over `shards` files in the given order.
        shards: number of files; more than one writes an index too.
        tokenizer: of tokenizer.json; None writes none.
        metadata: `__metadata__` of every file of tensors.
        files: {name: JSON-able value} of further files.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {} if tensors is None else tensors
    wanted = {"config.json": config, "tokenizer.json": tokenizer} | (files or {})
    for name, record in wanted.items():
        if record is not None:
            (path / name).write_text(json.dumps(record))
    names = list(tensors)
    metadata = {"format": "pt"} if metadata is None else metadata
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata)
        return path
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, path / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    return write_index(path, dict(sorted(weight_map.items())), sum(array.nbytes for array in tensors.values()))


def write_index(path, weight_map, total):
    """Write the index of a folder's shards and return the folder's path."""
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


ONE = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}  # the bytes of 1.0


def write_sparse(path, tensors, data=()):
    """Write a safetensors file with consecutive tensors, {name: (dtype, shape)}; return their total bytes.

    `data`, {name: bytes}, holds the first bytes of some tensors. All other bytes are a hole that takes no disk space.
    """
    entries, at = {}, 0
    for name, (kind, shape) in tensors.items():
        size = BYTES[kind] * math.prod(shape)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + at)
        for name, raw in dict(data).items():
            out.seek(8 + len(text) + entries[name]["data_offsets"][0])
            out.write(raw)
    return at


def llama_config(tied=True, rows=V, width=D, **settings):
    """Return the config of a one-layer Llama; a setting of None omits its key."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
        "tie_word_embeddings": tied,
    }
    return {key: value for key, value in (config | settings).items() if value is not None}


def llama_tensors(tied=True, rows=V, width=D, dtype=np.float32, head=None):
    """Return the tensors of such a Llama, with a separate head if it is untied or `head` is given."""
    tensors = {
        "model.embed_tokens.weight": table(rows, width, 0, dtype),
        "model.layers.0.input_layernorm.weight": np.ones(width, dtype),
        "model.layers.0.mlp.down_proj.weight": table(width, 2 * width, 1, dtype),
        "model.norm.weight": np.ones(width, dtype),
    }
    if head is not None or not tied:
        tensors["lm_head.weight"] = table(rows, width, 2, dtype) if head is None else head
    return tensors


def llama(path, tied=True, *, config=None, tensors=None, head=None, rows=V, width=D, **written):
    """Write a healthy tiny Llama, changed by `config` and `tensors` (a value of None removes the entry)."""
    made = llama_tensors(tied, rows, width, head=head) | (tensors or {})
    made = {name: array for name, array in made.items() if array is not None}
    return write_checkpoint(path, llama_config(tied, rows, width, **(config or {})), made, **written)


def bpe_tokenizer(count=V, added=()):
    """Return a tokenizer.json of `count` entries and the added tokens (id, text, special)."""
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": special} for i, text, special in added],
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(count)}, "merges": []},
    }


def written(path, how):
    """Write a folder with the function `how`, or a Llama with the arguments `how`; return its path."""
    return how(path) if callable(how) else llama(path, **how)
