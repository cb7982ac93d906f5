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
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def edited(path, part, **values):
    """Change one part of a folder's index; a value of None takes its key away."""
    record = json.loads((path / INDEX).read_text())
    record[part] |= values
    record[part] = {key: value for key, value in record[part].items() if value is not None}
    (path / INDEX).write_text(json.dumps(record))
    return path


def mapped(path, tied=True, **names):
    """A Llama in two shards, whose index maps some names elsewhere (None: nowhere)."""
    path = llama(path, tied, tensors={HEAD: None}, shards=2)
    return edited(path, "weight_map", **names)


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


@pytest.mark.parametrize(
    ("tied", "names", "words", "safe"),
    [
        (True, {"model.wte": SHARDS[0]}, "no shard holds (model.wte)", False),
        (True, {HEAD: SHARDS[0]}, "no shard holds (lm_head.weight)", True),  # of a tied model: it may be forgotten
        (False, {HEAD: SHARDS[0]}, "no shard holds (lm_head.weight)", False),
        (True, {NORM: SHARDS[0]}, "1 tensors lie in another shard than the index says (model.norm.weight)", True),
        (True, {NORM: None}, "missing from the index (model.norm.weight)", True),
    ],
)
def test_b002_an_index_that_maps_otherwise(tmp_path, tied, names, words, safe):
    path = mapped(tmp_path, tied, **names)
    finding = one("B002", path)
    assert words in finding.evidence
    assert finding.safe is safe
    assert (finding.repair == f"tiewise repair {path} --to NEW_DIR") is safe


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


@pytest.mark.parametrize("wrong", [5, 1.5, "many", True, [1]])
def test_b003_compares_total_size(tmp_path, wrong):
    path = llama(tmp_path, shards=2)
    assert run("B003", edited(path, "metadata", total_size=None)) == []
    finding = one("B003", edited(path, "metadata", total_size=wrong))
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
    save_file(part | {NORM: norm}, path / SHARDS[0])
    finding = one("B004", path)
    assert finding.where == f"{SHARDS[0]}: model.norm.weight"
    assert finding.safe is equal
    assert finding.evidence.endswith("equal" if equal else "different")
    assert one("B004", path, scan=False).evidence.endswith("not compared")


def test_names_from_a_file_are_shown_without_control_characters(tmp_path):
    path = write_checkpoint(tmp_path, {"model_type": "llama"}, {"a\x1b[31m": table()}, shards=2)
    finding = one("B002", edited(path, "weight_map", **{"\x1b[2J" + "x" * 999: SHARDS[0]}))
    assert "\x1b" not in finding.evidence
    assert len(finding.evidence) < 200


def copied(path):
    part = {"model.embed_tokens.weight": table(), "model.layers.0.mlp.down_proj.weight": table(8, 16, 1)}
    norm = load_file(path / SHARDS[1])[NORM]
    save_file(part | {NORM: norm}, path / SHARDS[0])
    return path


CASES = {
    "B002 forgotten": lambda p: mapped(p, **{NORM: None}),
    "B002 elsewhere": lambda p: mapped(p, **{NORM: SHARDS[0]}),
    "B002 spare head": lambda p: mapped(p, **{HEAD: SHARDS[0]}),
    "B003": lambda p: edited(llama(p, shards=2), "metadata", total_size=1),
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
