"""The verbs that compute with rows, on tables far larger than the memory that they may take."""

import json

import ml_dtypes
import numpy as np
import pytest
from rewrite_tools import child
from tests.checkpoint.tiny_checkpoints import llama_config

from tiewise.rewrite.low_rank import memory_needed

ROWS, WIDTH = 65_536, 4096
MOST_MEMORY = 400e6


def mostly_empty(path, shapes, config):
    """A folder of bfloat16 tensors whose first megabyte is random and whose rest takes no place on the disk."""
    path.mkdir()
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(0).normal(size=2**19).astype(ml_dtypes.bfloat16).tobytes()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            start, end = entry["data_offsets"]
            file.seek(8 + len(text) + start)
            file.write(values[: end - start])
        file.truncate(8 + len(text) + at)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.slow
def test_resize(tmp_path):
    shapes = {"model.embed_tokens.weight": (ROWS, WIDTH), "lm_head.weight": (ROWS, WIDTH)}
    source = mostly_empty(tmp_path / "a", shapes, llama_config(False, ROWS, WIDTH))
    result = child("resize", source, tmp_path / "b", vocab=ROWS + 2000)
    assert (tmp_path / "b/model.safetensors").stat().st_size > 4 * (ROWS + 2000) * WIDTH
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"


@pytest.mark.slow
def test_densify(tmp_path):
    shapes = {"model.embed_tokens.weight": (ROWS, 32), "model.embed_tokens.in_map.weight": (WIDTH, 32)}
    shapes |= {"lm_head.out_map.weight": (32, WIDTH)}
    own = {"model_type": "tiewise", "base_model_type": "llama", "tiewise_boundary": "factored:32"}
    source = mostly_empty(tmp_path / "a", shapes, llama_config(True, ROWS, WIDTH, **own))
    result = child("densify", source, tmp_path / "b")
    assert (tmp_path / "b/model.safetensors").stat().st_size > 4 * ROWS * WIDTH
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"


@pytest.mark.slow
def test_factor(tmp_path):
    """It takes what it announces for the decomposition, whatever the number of rows."""
    source = mostly_empty(
        tmp_path / "a", {"model.embed_tokens.weight": (200_000, 1024)}, llama_config(True, 200_000, 1024)
    )
    result = child("factor", source, tmp_path / "b", rank=64)
    assert result["peak"] < memory_needed(1024, 64) + 100e6, f"{result['peak'] / 1e6:.0f} MB"
