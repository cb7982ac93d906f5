"""Slow tests of the rewriting verbs: kills at random moments, and tables larger than the memory limit."""

import json
import os
import random
import time

import ml_dtypes
import numpy as np
import pytest
from rewrite_models import hash_files, hash_without_times, release_child, run_child, start_child
from tests.checkpoint.tiny_checkpoints import llama, llama_config, write_index, write_sparse

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rewrite.low_rank import memory_needed

MOST_MEMORY = 400e6
KILLS = 100
ROWS, WIDTH = 65_536, 4096


@pytest.mark.slow
def test_killed_untie_keeps_source_and_leaves_complete_result_or_none(tmp_path):
    """After SIGKILL the source is unchanged, the destination is absent or complete, and the next run cleans up."""
    rows, width = 6016, 512
    source = llama(tmp_path / "a", rows=rows, width=width, shards=2)
    before = hash_files(source)
    process = start_child("untie", source, tmp_path / "good")
    begun = time.monotonic()
    process.communicate("go\n")
    whole = time.monotonic() - begun
    good = hash_without_times(tmp_path / "good")
    dice = random.Random(0)
    seen = {"absent": 0, "debris": 0, "complete": 0}
    for _ in range(KILLS):
        process = start_child("untie", source, tmp_path / "b")
        release_child(process)
        time.sleep(dice.uniform(0, whole))
        process.kill()
        process.wait()
        process.communicate()
        if (tmp_path / "b").exists():
            assert hash_without_times(tmp_path / "b") == good
            assert not check(tmp_path / "b").at_least("warning")
            for file in sorted((tmp_path / "b").iterdir()):
                file.unlink()
            (tmp_path / "b").rmdir()
            seen["complete"] += 1
        else:
            seen["absent"] += 1
        left = {path.name.removesuffix(".lock") for path in tmp_path.iterdir() if path.name.startswith(".b.tiewise-")}
        assert len(left) <= 1  # a run removes leftovers of earlier runs before it writes
        seen["debris"] += bool(left)
        assert hash_files(source) == before
    run_child("untie", source, tmp_path / "b")
    assert hash_without_times(tmp_path / "b") == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "good"]
    assert seen["absent"] > 0
    assert seen["debris"] > 0, seen


def write_sparse_folder(path, shards, config):
    """Write a folder of bfloat16 tensors, {file: {tensor: shape}}, whose zero ends take no disk space."""
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


def write_eight_gigabytes(path, head):
    """Write a Llama of 8.6 GB in ten files: a table of 0.54 GB, an optional head, and layers."""
    shards = {"model-00001.safetensors": {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}}
    if head:
        shards["model-00002.safetensors"] = {"lm_head.weight": (ROWS, WIDTH)}
    for number in range(8):
        layer = {f"model.layers.{number}.mlp.up_proj.weight": (122_880, WIDTH)}
        shards[f"model-{number + 3:05d}.safetensors"] = layer
    return write_sparse_folder(path, shards, llama_config(not head, ROWS, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "head", "options", "rewritten"),
    [
        ("untie", False, {}, ["model-00001.safetensors"]),
        ("tie", True, {}, []),
        ("tie", True, {"keep": "mean"}, ["model-00001.safetensors"]),
        ("repair", True, {}, []),
    ],
)
def test_verbs_rewrite_eight_gigabytes_below_400_mb_of_memory(tmp_path, verb, head, options, rewritten):
    source = write_eight_gigabytes(tmp_path / "a", head)
    assert sum(file.stat().st_size for file in source.iterdir()) > 8e9
    if options or verb == "repair":  # one different value in the last row of the head
        with open(source / "model-00002.safetensors", "r+b") as file:
            file.seek(-2, 2)
            file.write(b"\x80\x3f")
    if verb == "repair":
        (source / "config.json").write_text(json.dumps(llama_config(True, ROWS, WIDTH)))
    result = run_child(verb, source, tmp_path / "b", **options)
    assert result["rewritten"] == rewritten
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"
    for name in result["linked"]:
        shared = os.path.samefile(source / name, tmp_path / "b" / name)
        assert shared or (tmp_path / "b" / name).stat().st_nlink == 1  # a reflink has its own inode
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
        ("factor", FACTORED, llama_config(True, ROWS, WIDTH, **OWN), {"undo": True}, MOST_MEMORY),
        (  # uses the memory that it announces for the decomposition, whatever the number of rows
            "factor",
            {"model.embed_tokens.weight": (200_000, 1024)},
            llama_config(True, 200_000, 1024),
            {"rank": 64},
            memory_needed(1024, 64) + 100e6,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verbs_that_compute_rows_stay_below_memory_limit(tmp_path, verb, shapes, config, options, most):
    source = write_sparse_folder(tmp_path / "a", {"model.safetensors": shapes}, config)
    result = run_child(verb, source, tmp_path / "b", **options)
    size = {"resize": 4 * (ROWS + 2000) * WIDTH, "factor": 4 * ROWS * WIDTH * ("undo" in options)}[verb]
    assert (tmp_path / "b/model.safetensors").stat().st_size > size
    assert result["peak"] < most, f"{result['peak'] / 1e6:.0f} MB"


# adapters of a base of fp32 zeros: one token in 300 MB, and tables of 400 MB

ENDS, R = ("model.embed_tokens.weight", "lm_head.weight"), 16


def write_base(path, rows):
    """Write an untied Llama of fp32 zeros and return its path."""
    path.mkdir()
    down = {"model.layers.0.mlp.down_proj.weight": ("F32", (WIDTH, WIDTH))}
    write_sparse(path / "model.safetensors", dict.fromkeys(ENDS, ("F32", (rows, WIDTH))) | down)
    (path / "config.json").write_text(json.dumps(llama_config(False, rows, WIDTH)))
    return str(path)


def write_adapter(path, tensors, ones, **config):
    """Write an adapter of fp32 tensors, {name: shape}, whose first `ones` numbers are 1 and others 0."""
    path.mkdir()
    record = {"peft_type": "LORA", "r": R, "lora_alpha": 32} | config
    (path / "adapter_config.json").write_text(json.dumps(record))
    named = {f"base_model.model.{name}": ("F32", shape) for name, shape in tensors.items()}
    begun = {name: np.ones(min(ones, np.prod(shape)), np.float32).tobytes() for name, (_, shape) in named.items()}
    write_sparse(path / "adapter_model.safetensors", named, begun)
    return path


@pytest.mark.slow
def test_slim_shrinks_300_mb_adapter_of_one_token_to_100_kb(tmp_path):
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    fat = write_adapter(tmp_path / "a", dict.fromkeys(ENDS, (9_216, WIDTH)), WIDTH, **saved)
    assert (fat / "adapter_model.safetensors").stat().st_size > 300e6
    result = run_child("slim", fat, tmp_path / "b", base=write_base(tmp_path / "base", 9_216))
    assert sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) <= 100_000
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"


@pytest.mark.slow
def test_merge_stays_below_400_mb_of_memory(tmp_path):
    rows = 24_576
    shapes = {"model.embed_tokens.lora_embedding_A": (R, rows), "model.embed_tokens.lora_embedding_B": (WIDTH, R)}
    shapes |= {"lm_head.lora_A.weight": (R, WIDTH), "lm_head.lora_B.weight": (rows, R)}
    path = write_adapter(tmp_path / "a", shapes, ones=R * rows)
    result = run_child("merge", write_base(tmp_path / "base", rows), tmp_path / "b", adapter=str(path))
    assert result["rewritten"] == ["model.safetensors"]
    assert result["peak"] < MOST_MEMORY, f"{result['peak'] / 1e6:.0f} MB"
