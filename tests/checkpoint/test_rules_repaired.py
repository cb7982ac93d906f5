"""What a finding calls safe, `tiewise repair` does: the finding is gone, and nothing new has come."""

import json

import pytest
from safetensors.numpy import load_file, save_file
from test_rules_tying import nested
from tiny_checkpoints import llama, table

from tiewise.checkpoint.audit import check
from tiewise.rewrite import repair

INDEX = "model.safetensors.index.json"
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
