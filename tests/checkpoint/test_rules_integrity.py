"""B001 to B004: fire on damaged folders, silent on the same folder whole."""

import json

import numpy as np
import pytest
from rule_runs import one, run
from safetensors.numpy import load_file, save_file
from test_rules_tying import nested
from tiny_checkpoints import bpe_tokenizer, llama, llama_tensors, table, write_checkpoint

from tiewise.checkpoint.audit import check
from tiewise.rewrite import repair

SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
INDEX = "model.safetensors.index.json"


def edit(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("rule", ["B001", "B002", "B003", "B004"])
@pytest.mark.parametrize("shards", [1, 2])
def test_silent_on_a_whole_checkpoint(tmp_path, rule, shards):
    path = llama(tmp_path, shards=shards, tokenizer=bpe_tokenizer(), files={"generation_config.json": {}})
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        (path / name).write_bytes(b"pickle")
    assert run(rule, path) == []


def test_b001_names_a_shard_cut_short_and_what_is_missing(tmp_path):
    path = llama(tmp_path, shards=2)
    data = (path / SHARDS[1]).read_bytes()
    (path / SHARDS[1]).write_bytes(data[:-5])
    finding = one("B001", path)
    assert (finding.severity, finding.where) == ("fatal", SHARDS[1])
    assert "ends 5 bytes before its tensors do" in finding.evidence
    assert run("B010", path) == run("B011", path) == []  # what is absent may lie in that file


@pytest.mark.parametrize(("name", "severity"), [("config.json", "fatal"), ("generation_config.json", "warning")])
def test_b001_names_a_config_that_is_no_json(tmp_path, name, severity):
    path = llama(tmp_path)
    (path / name).write_text('{"vocab_size": ')
    finding = one("B001", path)
    assert (finding.severity, finding.where) == (severity, name)


def test_b001_names_a_damaged_tokenizer(tmp_path):
    path = llama(tmp_path)
    (path / "tokenizer.json").write_text("[]")
    assert one("B001", path).where == "tokenizer.json"


def test_b001_names_pickles_where_they_are_all_there_is(tmp_path):
    path = llama(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    finding = one("B001", path)
    assert finding.severity == "fatal"
    assert "pytorch_model.bin" in finding.evidence


def test_b002_names_a_missing_shard_and_its_tensors(tmp_path):
    path = llama(tmp_path, shards=2)
    (path / SHARDS[0]).unlink()
    finding = one("B002", path)
    assert (finding.severity, finding.where) == ("fatal", SHARDS[0])
    assert "2 tensors" in finding.evidence
    assert "model.embed_tokens.weight" in finding.evidence
    assert run("B001", path) == []


def test_b002_an_index_that_is_none(tmp_path):
    path = llama(tmp_path, shards=2)
    (path / INDEX).write_text('{"weight_map": 3}')
    findings = run("B002", path)
    assert [(f.severity, f.where) for f in findings] == [("fatal", INDEX)]


def test_b002_a_lost_name_is_not_safe_to_forget(tmp_path):
    path = llama(tmp_path, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].update({"model.wte": SHARDS[0]}))
    finding = one("B002", path)
    assert "no shard holds (model.wte)" in finding.evidence
    assert not finding.safe


def test_b002_the_head_of_a_tied_model_is_safe_to_forget(tmp_path):
    path = llama(tmp_path, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].update({"lm_head.weight": SHARDS[0]}))
    finding = one("B002", path)
    assert finding.safe
    assert finding.repair == f"tiewise repair {path} --to NEW_DIR"


def test_b002_the_head_of_an_untied_model_is_lost(tmp_path):
    path = llama(tmp_path, tied=False, tensors={"lm_head.weight": None}, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].update({"lm_head.weight": SHARDS[0]}))
    assert not one("B002", path).safe


def test_b002_a_name_mapped_to_the_wrong_shard(tmp_path):
    path = llama(tmp_path, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].update({"model.norm.weight": SHARDS[0]}))
    finding = one("B002", path)
    assert "1 tensors lie in another shard" in finding.evidence
    assert "model.norm.weight" in finding.evidence
    assert finding.safe


def test_b002_a_name_that_the_index_forgot(tmp_path):
    path = llama(tmp_path, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].pop("model.norm.weight"))
    finding = one("B002", path)
    assert "missing from the index (model.norm.weight)" in finding.evidence
    assert finding.safe


def test_b002_shards_without_an_index(tmp_path):
    path = llama(tmp_path, shards=2)
    (path / INDEX).unlink()
    finding = one("B002", path)
    assert finding.severity == "fatal"
    assert SHARDS[0] in finding.evidence


def test_b002_a_single_file_under_another_name(tmp_path):
    path = llama(tmp_path)
    (path / "model.safetensors").rename(path / "weights.safetensors")
    finding = one("B002", path)
    assert finding.severity == "error"
    assert "weights.safetensors" in finding.evidence
    assert run("B002", path / "weights.safetensors") == []  # given by name, it is what it is


@pytest.mark.parametrize("wrong", [5, 1.5, "many", True, [1], None])
def test_b003_compares_total_size(tmp_path, wrong):
    path = llama(tmp_path, shards=2)
    edit(path / INDEX, lambda record: record["metadata"].update(total_size=wrong))
    if wrong is None:
        assert run("B003", path) == []
        return
    finding = one("B003", path)
    assert finding.safe
    assert f"the tensors have {sum(a.nbytes for a in llama_tensors().values()):,} bytes" in finding.evidence


def test_b003_old_shards_are_a_warning_and_other_layouts_a_note(tmp_path):
    path = llama(tmp_path)
    save_file({"a": table()}, path / "model-00001-of-00002.safetensors")
    save_file({"a": table()}, path / "consolidated.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    old, other = run("B003", path)
    assert (old.severity, other.severity) == ("warning", "info")
    assert "model-00001-of-00002.safetensors" in old.evidence
    assert "consolidated.safetensors, pytorch_model.bin" in other.evidence


@pytest.mark.parametrize("equal", [True, False])
def test_b004_tells_equal_copies_from_different_ones(tmp_path, equal):
    path = llama(tmp_path, shards=2)
    norm = np.ones(8, np.float32) if equal else np.zeros(8, np.float32)
    part = {"model.embed_tokens.weight": table(), "model.layers.0.mlp.down_proj.weight": table(8, 16, 1)}
    save_file(part | {"model.norm.weight": norm}, path / SHARDS[0])
    finding = one("B004", path)
    assert finding.where == f"{SHARDS[0]}: model.norm.weight"
    assert finding.safe is equal
    assert finding.evidence.endswith("equal" if equal else "different")
    assert one("B004", path, scan=False).evidence.endswith("not compared")


def test_names_from_a_file_are_shown_without_control_characters(tmp_path):
    path = write_checkpoint(tmp_path, {"model_type": "llama"}, {"a\x1b[31m": table()}, shards=2)
    edit(path / INDEX, lambda record: record["weight_map"].update({"\x1b[2J" + "x" * 999: SHARDS[0]}))
    finding = one("B002", path)
    assert "\x1b" not in finding.evidence
    assert len(finding.evidence) < 200


SHARD = "model-00001-of-00002.safetensors"


def edited(path, change):
    record = json.loads((path / INDEX).read_text())
    change(record)
    (path / INDEX).write_text(json.dumps(record))
    return path


def copied(path):
    part = {"model.embed_tokens.weight": table(), "model.layers.0.mlp.down_proj.weight": table(8, 16, 1)}
    norm = load_file(path / "model-00002-of-00002.safetensors")["model.norm.weight"]
    save_file(part | {"model.norm.weight": norm}, path / SHARD)
    return path


CASES = {
    "B002 forgotten": lambda p: edited(llama(p, shards=2), lambda r: r["weight_map"].pop("model.norm.weight")),
    "B002 elsewhere": lambda p: edited(
        llama(p, shards=2), lambda r: r["weight_map"].update({"model.norm.weight": SHARD})
    ),
    "B002 spare head": lambda p: edited(
        llama(p, shards=2), lambda r: r["weight_map"].update({"lm_head.weight": SHARD})
    ),
    "B003": lambda p: edited(llama(p, shards=2), lambda r: r["metadata"].update(total_size=1)),
    "B004": lambda p: copied(llama(p, shards=2)),
    "B011": lambda p: nested(p, False, False, generator={"tie_word_embeddings": True}),
    "B012": lambda p: llama(p, True, head=table(seed=2)),
    "B013": lambda p: llama(p, True, head=table()),
    "B013 sharded": lambda p: llama(p, True, head=table(), shards=2),
    "B016": lambda p: llama(p, tensors={"model.embed_tokens.weight": None, "lm_head.weight": table()}),
    "B020": lambda p: llama(p, False, config={"tie_word_embeddings": None}),
    "B020 no flag": lambda p: llama(p, False, config={"tie_word_embeddings": "yes"}),
    "B021 tied": lambda p: nested(p, True, False),
    "B021 untied": lambda p: nested(p, True, False, table(seed=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_repair_does_what_the_finding_says(tmp_path, case):
    path = CASES[case](tmp_path / "broken")
    found = {finding.rule for finding in check(path).findings if finding.safe}
    assert case[:4] in found
    repair(path, tmp_path / "whole")
    left = check(tmp_path / "whole")
    assert found.isdisjoint(finding.rule for finding in left.findings)
    assert left.at_least("warning") == ()
