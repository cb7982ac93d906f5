"""Little checkpoints written by hand: a config, tensors by the safetensors library, and nothing that we wrote."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

V, D = 24, 8
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I8": 1, "U8": 1}


def table(rows=V, width=D, seed=0, dtype=np.float32):
    """A random table with no two rows alike."""
    return np.random.default_rng(seed).normal(0, 0.5, (rows, width)).astype(dtype)


def with_rows(*rows, of=None):
    """A table, the tied Llama's where none is given, of which some rows are others."""
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
    """Write the index of a folder's shards; its path."""
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


ONE = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}  # the bytes of 1.0


def write_sparse(path, tensors, data=()):
    """Write a safetensors file by hand: {name: (dtype, shape)}, one behind the other; how many bytes they take.

    What does not begin with the bytes that `data`, {name: bytes}, has for it is a hole, and takes no disk.
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
    """The config of a Llama without layers; a setting of None leaves its key out."""
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
    """The tensors of such a Llama: with a head of its own where it is not tied, or where one is given."""
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
    """Write a healthy tiny Llama, changed by `config` and `tensors` (a value of None takes the entry away)."""
    made = llama_tensors(tied, rows, width, head=head) | (tensors or {})
    made = {name: array for name, array in made.items() if array is not None}
    return write_checkpoint(path, llama_config(tied, rows, width, **(config or {})), made, **written)


def bpe_tokenizer(count=V, added=()):
    """A tokenizer.json of `count` entries, then (id, text, special) added ones."""
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": special} for i, text, special in added],
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(count)}, "merges": []},
    }


def written(path, how):
    """A folder by a row of a table: a Llama with what is said of it, or what the function makes; its path."""
    return how(path) if callable(how) else llama(path, **how)
