"""Test that B001 to B004 report damaged folders and are silent on the intact folder."""

import json
import os

import numpy as np
import pytest
from rule_runs import assert_fires, assert_silent, run_rule, table_of
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import bpe_tokenizer, llama, llama_tensors, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.core.errors import CheckpointError

SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
INDEX = "model.safetensors.index.json"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
REPAIR = "\ntiewise repair PATH --to PATH-fixed\n"


def changed(change, **made):
    """Return a function that writes a Llama and applies `change` to its folder."""

    def write(path):
        change(llama(path, **made))
        return path

    return write


def sharded(part, tied=True, **values):
    """Return a function that writes a Llama in two shards with a changed index; None removes a key."""

    def change(path):
        record = json.loads((path / INDEX).read_text())
        record[part] = {key: value for key, value in (record[part] | values).items() if value is not None}
        (path / INDEX).write_text(json.dumps(record))

    return changed(change, tied=tied, tensors={HEAD: None}, shards=2)


def with_metadata(*values):
    """Return a function that writes a Llama in two shards whose index has another `metadata`, or none."""

    def change(path):
        record = json.loads((path / INDEX).read_text())
        del record["metadata"]
        for value in values:
            record["metadata"] = value
        (path / INDEX).write_text(json.dumps(record))

    return changed(change, shards=2)


def mapped(name, shard, tied=True):
    """Return a function that writes a Llama whose index maps a name to a shard, or lacks it."""
    return sharded("weight_map", tied, **{name: shard})


def holding(name, text, **made):
    return changed(lambda path: (path / name).write_text(text), **made)


def cut(path):
    os.truncate(path / SHARDS[1], (path / SHARDS[1]).stat().st_size - 5)


def renamed(name):
    return changed(lambda path: (path / "model.safetensors").rename(path / name))


def linked(path):
    """Replace the folder's file by a link to a file outside it."""
    (path / "model.safetensors").rename(path.parent / "outside.safetensors")
    (path / "model.safetensors").symlink_to(path.parent / "outside.safetensors")


def gone(name):
    return changed(lambda path: (path / name).unlink(), shards=2)


def one_shard(path):
    """Leave the first of two shards, without the index."""
    for name in (INDEX, SHARDS[1]):
        (path / name).unlink()


def twice(norm):
    """Return a function that writes a folder with the same tensor in both shards."""
    part = {"model.embed_tokens.weight": table(), "model.layers.0.mlp.down_proj.weight": table(8, 16, 1)}
    return changed(lambda path: save_file(part | {NORM: np.full(8, norm, np.float32)}, path / SHARDS[0]), shards=2)


# as `git clone` leaves it where git-lfs is not installed
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 2336927\n"
LFS = "a Git LFS pointer, not the file that it names\nrun `git lfs pull`"


def encoded(name, encoding):
    """Return a function that writes a Llama with a JSON file in another encoding."""

    def change(path):
        (path / name).write_text((path / name).read_text(), encoding=encoding)

    return changed(change, tokenizer=bpe_tokenizer())


BYTES = f"the tensors have {sum(a.nbytes for a in llama_tensors().values()):,} bytes"
# rules, severity, place, whether the repair is safe, how to write the folder, words
FIRES = [
    # missing tensors may be in the damaged file, so neither B010 nor B011 fires
    ("B001", "fatal", SHARDS[1], False, changed(cut, shards=2), "ends 5 bytes before its tensors do"),
    ("B001", "fatal", "config.json", False, holding("config.json", '{"vocab_size": ')),
    ("B001", "warning", "generation_config.json", False, holding("generation_config.json", "{")),
    ("B001", "warning", "tokenizer.json", False, holding("tokenizer.json", "[]")),
    ("B001", "error", "model.safetensors", False, changed(linked), "is a link to a file outside the folder",
     "\nif you trust the link: tiewise check PATH --follow-links; else: "),
    ("B001", "fatal", "model.safetensors", False, holding("model.safetensors", POINTER), LFS),
    ("B001", "fatal", "config.json", False, holding("config.json", POINTER), LFS),
    ("B001", "warning", "tokenizer.json", False, holding("tokenizer.json", POINTER), LFS),
    ("B001", "warning", "vocab.txt", False, holding("vocab.txt", "\ufeff[PAD]\nthe\n"), "part of the first token"),
    ("B001", "warning", "tokenizer.model", False, holding("tokenizer.model", POINTER), LFS),
    *(("B001", severity, name, True, encoded(name, encoding), "begins with the byte order mark of UTF-", REPAIR)
      for name, severity in {"config.json": "fatal", "tokenizer.json": "warning"}.items()
      for encoding in ("utf-8-sig", "utf-16", "utf-32")),
    ("B001", "fatal", "pytorch_model.bin", False, renamed("pytorch_model.bin"), "pytorch_model.bin"),
    ("B002", "fatal", SHARDS[0], False, gone(SHARDS[0]), "2 tensors", "model.embed_tokens.weight"),
    ("B002", "fatal", INDEX, True, holding(INDEX, '{"weight_map": 3}', shards=2), "no weight_map", REPAIR),
    *(("B002", "error", INDEX, True, with_metadata(*values), "has no metadata object", REPAIR)
      for values in ((), (None,), ([],), ("none",))),
    ("B002", "error", INDEX, False, mapped("model.wte", SHARDS[0]), "1 tensor that no shard file stores (model.wte)"),
    # a tied model does not need the head
    ("B002", "error", INDEX, True, mapped(HEAD, SHARDS[0]), f"1 tensor that no shard file stores ({HEAD})", REPAIR),
    ("B002 B011", "error", INDEX, False, mapped(HEAD, SHARDS[0], tied=False),
     f"1 tensor that no shard file stores ({HEAD})"),
    ("B002", "error", SHARDS[0], True, mapped(NORM, SHARDS[0]), f"the wrong shard file for 1 tensor ({NORM})", REPAIR),
    ("B002", "error", SHARDS[1], True, mapped(NORM, None), f"the index lacks 1 stored tensor ({NORM})", REPAIR),
    ("B002", "fatal", INDEX, True, gone(INDEX), SHARDS[0], REPAIR),
    ("B002", "fatal", INDEX, False, changed(one_shard, shards=2), "the index of 1 shard file", "download the index"),
    ("B002", "error", "weights.safetensors", False, renamed("weights.safetensors"), "weights.safetensors"),
    *(("B003", "warning", INDEX, True, sharded("metadata", total_size=wrong), BYTES)
      for wrong in (1, 5, 1.5, "many", True, [1])),
    ("B004", "error", f"{SHARDS[0]}: {NORM}", True, twice(1), "The two are equal; "),
    ("B004", "error", f"{SHARDS[0]}: {NORM}", False, twice(0), "The two differ; "),
]  # fmt: skip


@table_of(FIRES)
def test_integrity_rules_report_damaged_folders(tmp_path, case):
    assert_fires(tmp_path, case)


@pytest.mark.parametrize("shards", [1, 2])
def test_integrity_rules_are_silent_on_intact_checkpoint(tmp_path, shards):
    path = llama(tmp_path / "a", shards=shards, tokenizer=bpe_tokenizer(), files={"generation_config.json": {}})
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        (path / name).write_bytes(b"pickle")
    assert_silent(tmp_path, ("B001 B002 B003 B004", lambda _: path))
    assert_silent(tmp_path / "b", ("B002 B003", sharded("metadata", total_size=None)))


def test_b002_accepts_any_name_of_single_file(tmp_path):
    assert run_rule("B002", renamed("weights.safetensors")(tmp_path) / "weights.safetensors") == []


def test_b003_warns_of_old_shards_and_notes_other_layouts(tmp_path):
    path = llama(tmp_path)
    save_file({"a": table()}, path / "model-00001-of-00002.safetensors")
    save_file({"a": table()}, path / "consolidated.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    old, other = run_rule("B003", path)
    assert (old.severity, other.severity) == ("warning", "info")
    assert "model-00001-of-00002.safetensors" in old.evidence
    assert "consolidated.safetensors, pytorch_model.bin" in other.evidence


@pytest.mark.parametrize(
    ("change", "scan", "severity", "words"),
    [
        (0, True, "info", "store equal tensors"),
        (1, True, "error", "they store different tensors"),
        (0, False, "warning", "their tensors were not compared"),
    ],
)
def test_b003_compares_single_file_with_shards(tmp_path, change, scan, severity, words):
    """transformers opens the single file; its tensors decide whether it is another model."""
    path = llama(tmp_path, shards=2)
    stored = {name: array for file in SHARDS for name, array in load_file(path / file).items()}
    stored[NORM] = stored[NORM] + change  # no tensor of the two ends
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    (finding,) = run_rule("B003", path, scan=scan)
    assert (finding.severity, finding.safe) == (severity, False)
    assert words in finding.evidence


@pytest.mark.parametrize("norm", [0, 1])
def test_b004_reports_without_scan_that_copies_were_not_compared(tmp_path, norm):
    path = twice(norm)(tmp_path)
    (finding,) = run_rule("B004", path, scan=False)
    assert finding.evidence.endswith("The two were not compared; the index names the second")
    (path / INDEX).unlink()
    findings = run_rule("B004", path, scan=False)
    assert all(finding.evidence.endswith("; no index names one of them") for finding in findings)
    assert findings


def test_b002_shows_tensor_names_without_control_characters(tmp_path):
    path = write_checkpoint(tmp_path, {"model_type": "llama"}, {"a\x1b[31m": table()}, shards=2)
    record = {"metadata": {}, "weight_map": {"a\x1b[31m": SHARDS[0], "\x1b[2J" + "x" * 999: SHARDS[0]}}
    (path / INDEX).write_text(json.dumps(record))
    (finding,) = run_rule("B002", path)
    assert "\x1b" not in finding.evidence
    assert len(finding.evidence) < 200


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf", "m.onnx"])
def test_check_refuses_single_file_that_is_git_lfs_pointer(tmp_path, name):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match="a Git LFS pointer, not the file that it names; run `git lfs pull`"):
        check(tmp_path / name)
