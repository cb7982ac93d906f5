"""Long bars of the rewriting verbs: killed at any moment, and tables far larger than the memory that they may take."""

import json
import os
import random
import time

import ml_dtypes
import numpy as np
import pytest
from rewrite_models import child, go, listing, start, untimed
from tests.checkpoint.tiny_checkpoints import llama, llama_config, write_index, write_sparse

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite.low_rank import memory_needed

MOST_MEMORY = 400e6
KILLS = 100
ROWS, WIDTH = 65_536, 4096


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """After SIGKILL the source is as it was, and the destination is absent or complete; the next run clears up."""
    rows, width = 6016, 512
    source = llama(tmp_path / "a", rows=rows, width=width, shards=2)
    before = listing(source)
    process = start("untie", source, tmp_path / "good")
    begun = time.monotonic()
    process.communicate("go\n")
    whole = time.monotonic() - begun
    good = untimed(tmp_path / "good")
    dice = random.Random(0)
    seen = {"absent": 0, "debris": 0, "complete": 0}
    for _ in range(KILLS):
        process = start("untie", source, tmp_path / "b")
        go(process)
        time.sleep(dice.uniform(0, whole))
        process.kill()
        process.wait()
        process.communicate()
        if (tmp_path / "b").exists():
            assert untimed(tmp_path / "b") == good
            assert not check(tmp_path / "b").at_least("warning")
            for file in sorted((tmp_path / "b").iterdir()):
                file.unlink()
            (tmp_path / "b").rmdir()
            seen["complete"] += 1
        else:
            seen["absent"] += 1
        left = {path.name.removesuffix(".lock") for path in tmp_path.iterdir() if path.name.startswith(".b.tiewise-")}
        assert len(left) <= 1  # what the run before left is gone as soon as a run begins to write
        seen["debris"] += bool(left)
        assert listing(source) == before
    child("untie", source, tmp_path / "b")
    assert untimed(tmp_path / "b") == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "good"]
    assert seen["absent"] > 0
    assert seen["debris"] > 0, seen


def mostly_empty(path, shards, config):
    """A folder of bfloat16 tensors, {file: {tensor: shape}}, random at first and zero after: they take no disk."""
    path.mkdir()
    values = np.random.default_rng(0).normal(size=2**19).astype(ml_dtypes.bfloat16).tobytes()
    weight_map, total = {}, 0
    for file, shapes in shards.items():
        begun = {name: values[: 2 * int(np.prod(shape))] for name, shape in shapes.items()}
        total += write_sparse(path / file, {name: ("BF16", shape) for name, shape in shapes.items()}, begun)
        weight_map |= dict.fromkeys(shapes, file)
    if len(shards) > 1:
        write_index(path, weight_map, total)
    (path / "config.json").write_text(json.dumps(config))
    return path


def eight_gigabytes(path, head):
    """Llama-like, 8.6 GB in ten files: a table of 0.54 GB, a head where asked for, and layers."""
    shards = {"model-00001.safetensors": {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}}
    if head:
        shards["model-00002.safetensors"] = {"lm_head.weight": (ROWS, WIDTH)}
    for number in range(8):
        layer = {f"model.layers.{number}.mlp.up_proj.weight": (122_880, WIDTH)}
        shards[f"model-{number + 3:05d}.safetensors"] = layer
    return mostly_empty(path, shards, llama_config(not head, ROWS, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "head", "options", "rewritten"),
    [
        ("untie", False, {}, ["model-00001.safetensors"]),
        ("dedupe", True, {}, []),
        ("tie", True, {"keep": "mean"}, ["model-00001.safetensors"]),
        ("repair", True, {}, []),
    ],
)
def test_eight_gigabytes_in_little_memory(tmp_path, verb, head, options, rewritten):
    source = eight_gigabytes(tmp_path / "a", head)
    assert sum(file.stat().st_size for file in source.iterdir()) > 8e9
    if verb in ("tie", "repair"):  # one value that differs, in the last row of the head
        with open(source / "model-00002.safetensors", "r+b") as file:
            file.seek(-2, 2)
            file.write(b"\x80\x3f")
    if verb == "repair":
        (source / "config.json").write_text(json.dumps(llama_config(True, ROWS, WIDTH)))
    result = child(verb, source, tmp_path / "b", **options)
    assert result["rewritten"] == rewritten
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"
    for name in result["linked"]:
        shared = os.path.samefile(source / name, tmp_path / "b" / name)
        assert shared or (tmp_path / "b" / name).stat().st_nlink == 1  # a reflink is a file of its own
    assert len(result["linked"]) >= 8


OWN = {"model_type": "tiewise", "base_model_type": "llama", "tiewise_boundary": "factored:32"}
FACTORED = {"model.embed_tokens.weight": (ROWS, 32), "model.embed_tokens.in_map.weight": (WIDTH, 32)}
FACTORED |= {"lm_head.out_map.weight": (32, WIDTH)}
UNTIED = {"model.embed_tokens.weight": (ROWS, WIDTH), "lm_head.weight": (ROWS, WIDTH)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "shapes", "config", "options", "most"),
    [
        ("resize", UNTIED, llama_config(False, ROWS, WIDTH), {"vocab": ROWS + 2000}, MOST_MEMORY),
        ("densify", FACTORED, llama_config(True, ROWS, WIDTH, **OWN), {}, MOST_MEMORY),
        (  # takes what it announces for the decomposition, whatever the number of rows
            "factor",
            {"model.embed_tokens.weight": (200_000, 1024)},
            llama_config(True, 200_000, 1024),
            {"rank": 64},
            memory_needed(1024, 64) + 100e6,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verbs_that_compute_with_rows_take_little_memory(tmp_path, verb, shapes, config, options, most):
    source = mostly_empty(tmp_path / "a", {"model.safetensors": shapes}, config)
    result = child(verb, source, tmp_path / "b", **options)
    size = {"resize": 4 * (ROWS + 2000) * WIDTH, "densify": 4 * ROWS * WIDTH, "factor": 0}[verb]
    assert (tmp_path / "b/model.safetensors").stat().st_size > size
    assert result["peak"] < most, f"{result['peak'] / 1e6:.0f} MB"


# adapters, of a base of fp32 zeros: one token in 300 MB, and tables of 400 MB

ENDS, R = ("model.embed_tokens.weight", "lm_head.weight"), 16


def base(path, rows):
    """An untied Llama."""
    path.mkdir()
    down = {"model.layers.0.mlp.down_proj.weight": ("F32", (WIDTH, WIDTH))}
    write_sparse(path / "model.safetensors", dict.fromkeys(ENDS, ("F32", (rows, WIDTH))) | down)
    (path / "config.json").write_text(json.dumps(llama_config(False, rows, WIDTH)))
    return str(path)


def adapter(path, tensors, ones, **config):
    """An adapter of fp32 tensors, {name: shape}, each zero but for so many `ones` at its beginning."""
    path.mkdir()
    record = {"peft_type": "LORA", "r": R, "lora_alpha": 32} | config
    (path / "adapter_config.json").write_text(json.dumps(record))
    named = {f"base_model.model.{name}": ("F32", shape) for name, shape in tensors.items()}
    begun = {name: np.ones(min(ones, np.prod(shape)), np.float32).tobytes() for name, (_, shape) in named.items()}
    write_sparse(path / "adapter_model.safetensors", named, begun)
    return path


@pytest.mark.slow
def test_300_megabytes_of_one_token(tmp_path):
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    fat = adapter(tmp_path / "a", dict.fromkeys(ENDS, (9_216, WIDTH)), WIDTH, **saved)
    assert (fat / "adapter_model.safetensors").stat().st_size > 300e6
    told = child("slim", fat, tmp_path / "b", base=base(tmp_path / "base", 9_216))
    assert sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) <= 100_000
    assert told["peak"] < MOST_MEMORY, f"{told['peak'] / 1e6:.0f} MB"


@pytest.mark.slow
def test_a_merge_takes_little_memory(tmp_path):
    rows = 24_576
    shapes = {"model.embed_tokens.lora_embedding_A": (R, rows), "model.embed_tokens.lora_embedding_B": (WIDTH, R)}
    shapes |= {"lm_head.lora_A.weight": (R, WIDTH), "lm_head.lora_B.weight": (rows, R)}
    path = adapter(tmp_path / "a", shapes, ones=R * rows)
    told = child("merge", base(tmp_path / "base", rows), tmp_path / "b", adapter=str(path))
    assert told["rewritten"] == ["model.safetensors"]
    assert told["peak"] < MOST_MEMORY, f"{told['peak'] / 1e6:.0f} MB"
