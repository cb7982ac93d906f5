"""Long bars of `slim` and `merge`: one token in 300 MB, and a base far larger than the memory that a merge may take."""

import json

import numpy as np
import pytest
from rewrite_models import child
from tests.checkpoint.tiny_checkpoints import llama_config, write_sparse

MOST_MEMORY = 400e6
ROWS, WIDTH, R = 24_576, 4096, 16  # a table of 400 MB


def adapter(path, tensors, data, **config):
    """An adapter of fp32 tensors, {name: shape}, zero but for what `data` has for the beginning of each."""
    path.mkdir()
    record = {"peft_type": "LORA", "r": R, "lora_alpha": 32} | config
    (path / "adapter_config.json").write_text(json.dumps(record))
    names = {f"base_model.model.{name}": ("F32", shape) for name, shape in tensors.items()}
    data = {f"base_model.model.{name}": values.tobytes() for name, values in data.items()}
    write_sparse(path / "adapter_model.safetensors", names, data)
    return path


def base(path, tied, rows, width):
    """A Llama of fp32 zeros, which take no disk."""
    path.mkdir()
    names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    down = {"model.layers.0.mlp.down_proj.weight": ("F32", (width, width))}
    write_sparse(path / "model.safetensors", dict.fromkeys(names, ("F32", (rows, width))) | down)
    (path / "config.json").write_text(json.dumps(llama_config(tied, rows, width)))
    return path


@pytest.mark.slow
def test_300_megabytes_of_one_token(tmp_path):
    rows = 9_216
    tables = {f"{end}.weight": (rows, WIDTH) for end in ("model.embed_tokens", "lm_head")}
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    one = np.ones(WIDTH, np.float32)
    fat = adapter(tmp_path / "a", tables, dict.fromkeys(tables, one), **saved)
    assert (fat / "adapter_model.safetensors").stat().st_size > 300e6
    told = child("slim", fat, tmp_path / "b", base=str(base(tmp_path / "base", False, rows, WIDTH)))
    assert sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) <= 100_000
    assert told["peak"] < MOST_MEMORY, f"{told['peak'] / 1e6:.0f} MB"


@pytest.mark.slow
def test_a_merge_takes_little_memory(tmp_path):
    modules = {"model.embed_tokens": ("lora_embedding_", ""), "lm_head": ("lora_", ".weight")}
    shapes, data = {}, {}
    for module, (lora, end) in modules.items():
        a, b = (R, ROWS if "embedding" in lora else WIDTH), (WIDTH if "embedding" in lora else ROWS, R)
        shapes |= {f"{module}.{lora}A{end}": a, f"{module}.{lora}B{end}": b}
        data |= {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    path = adapter(tmp_path / "a", shapes, data)
    told = child("merge", base(tmp_path / "base", False, ROWS, WIDTH), tmp_path / "b", adapter=str(path))
    assert told["rewritten"] == ["model.safetensors"]
    assert told["peak"] < MOST_MEMORY, f"{told['peak'] / 1e6:.0f} MB"
