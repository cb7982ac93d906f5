"""Test the audits of `check`: their reports, the rules they run, and the inputs they refuse."""

import html
import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.answers.faults import FAULTS
from tiny_checkpoints import (
    ONE,
    D,
    V,
    bpe_tokenizer,
    llama,
    llama_config,
    llama_tensors,
    table,
    write_index,
    write_sparse,
)
from typer.testing import CliRunner

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.audit_view import audit_view
from tiewise.checkpoint.rules import rule as rule_module
from tiewise.checkpoint.rules.rule import SEVERITIES, rules, rules_by_subject
from tiewise.cli.main import command_line
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import listen_to_progress

DOCS = Path(__file__).parents[2] / "docs"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def rule_ids_of(audit):
    return [finding.rule for finding in audit.findings]


@pytest.mark.parametrize("name", [name for name in FAULTS if "." not in name])
def test_b080_speaks_of_other_findings_only_where_there_are_some(tmp_path, name):
    FAULTS[name](tmp_path / "model")
    for select in ("", "B080"):
        findings = check(tmp_path / "model", select=select).findings
        others = [finding for finding in findings if finding.rule != "B080" and finding.severity != "info"]
        for finding in findings:
            if finding.rule == "B080" and not finding.repair.startswith("to make a plain model"):
                assert ("other findings" in finding.repair) == bool(others), finding


def test_rule_table_in_docs_equals_registry_and_every_rule_has_explanation():
    lines = (DOCS / "reference-rules.md").read_text(encoding="utf-8").splitlines()
    table = [line.split("|")[1:5] for line in lines if line.startswith(("| B0", "| B1"))]
    listed = [(rule.id, rule.severity, rule.title, rule.reads) for rule in rules().values()]
    assert [tuple(cell.strip() for cell in row) for row in table] == listed
    subjects = {subject: [rule.id for rule in of_it] for subject, of_it in rules_by_subject().items()}
    assert sorted(id for ids in subjects.values() for id in ids) == list(rules())
    assert subjects["gguf"] == ["B070", "B071"]
    assert len({rule.title for rule in rules().values()}) == len(rules())
    for rule in rules().values():
        assert rule.severity in SEVERITIES
        assert rule.title
        assert rule.sources
        assert 3 <= len(rule.explain.splitlines()) <= 14
        assert "What to do" in rule.explain


def test_check_of_healthy_folder_reports_parts_loaders_and_no_findings(tmp_path):
    path = llama(tmp_path, False, rows=64, tokenizer=bpe_tokenizer(64), shards=2)
    audit = check(path)
    assert (audit.kind, audit.worst, audit.findings, audit.spare) == ("folder", None, (), 0)
    assert (audit.tensors, audit.nbytes) == (5, sum(a.nbytes for a in llama_tensors(False, 64).values()))
    assert {part.role: part.tensor.name for part in audit.parts} == {"input": TABLE, "output": HEAD}
    assert (audit.ends.kind, audit.claims.tied) == ("unrelated", False)
    assert {outcome.loader for outcome in audit.outcomes} == {"transformers", "vLLM", "SGLang", "llama.cpp", "mlx-lm"}
    assert set(audit.ran) | set(audit.skipped) == set(rules())
    deep, drafts, others = "B041 B081", "B083 B084 B085", "B060 B061 B062 B063 B064 B070 B071 B100 B101"
    expected = set(f"{deep} {drafts} {others}".split())
    assert expected <= set(audit.skipped)
    assert all(rules()[name].deep or rules()[name].kind != "folder" for name in audit.skipped)


WRONG = {"head": table(seed=2), "config": {"eos_token_id": 99}}


def test_check_sorts_findings_by_severity_then_by_id(tmp_path):
    audit = check(llama(tmp_path, **WRONG))
    assert rule_ids_of(audit) == ["B012", "B034", "B080", "B042"]
    assert audit.worst == "error"
    for severity, count in {"fatal": 0, "error": 1, "warning": 3, "info": 4}.items():
        assert audit.at_least(severity) == audit.findings[:count]


def test_check_counts_duplicate_bytes_and_compares_nothing_without_scan(tmp_path):
    path = llama(tmp_path, True, head=table())
    assert check(path).spare == V * D * 4
    audit = check(path, scan=False)
    assert (audit.scan, audit.ends, audit.spare) == (False, None, 0)
    assert "B013" not in rule_ids_of(audit)
    assert audit.skipped["B013"] == "compares the two tables, and only headers were read"


@pytest.mark.parametrize(
    ("select", "ignore", "wanted"),
    [
        (("B01",), (), ["B012"]),
        ("B01", "B080", ["B012"]),
        (("b012", "B042"), (), ["B012", "B042"]),
        ((), ("B0",), []),
        (("B0",), ("B01", "B034"), ["B080", "B042"]),
    ],
)
def test_select_and_ignore_take_ids_and_prefixes(tmp_path, select, ignore, wanted):
    audit = check(llama(tmp_path, **WRONG), select=select, ignore=ignore)
    assert rule_ids_of(audit) == wanted
    assert set(wanted) <= set(audit.ran)


KNOWN = r"B001, B002, .*B090"
REFUSED = [(lambda path, wrong=wrong: check(path, select=[wrong]), KNOWN) for wrong in ("B999", "", "X", "B0122")]
REFUSED += [
    (lambda path: check(path).at_least("bad"), "there is no severity 'bad'"),
    (lambda path: check(path, world=0), "world is 0"),
    (lambda path: check(path, target=path / "none"), "no such file or folder"),
]


@pytest.mark.parametrize(("asked", "says"), REFUSED)
def test_check_refuses_unknown_rules_severities_and_targets(tmp_path, asked, says):
    with pytest.raises(CheckpointError, match=says):
        asked(llama(tmp_path))


ELSEWHERE = {"base": "model m.gguf", "original": "model adapter"}
ELSEWHERE |= dict.fromkeys(("as_class", "target", "quantise"), "adapter m.gguf")


@pytest.mark.parametrize("option", ELSEWHERE)
def test_check_refuses_options_for_another_kind_of_checkpoint(tmp_path, option):
    (llama(tmp_path / "model") / "adapter_config.json").write_text("{}")  # still the folder of a model
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for name in ELSEWHERE[option].split():
        with pytest.raises(CheckpointError, match=rf"{option} is given, and this is n\w+ .*; leave {option} out"):
            check(tmp_path / name, **{option: tmp_path})


def test_audit_record_is_strict_json_and_docs_name_every_field(tmp_path):
    head = table(seed=2)
    head[0] = np.nan
    audit = check(llama(tmp_path, True, head=head, config={"model_type": "granite", "logits_scaling": 1e999}))
    text = json.dumps(audit.record(), allow_nan=False)
    record, page = json.loads(text), (DOCS / "reference-schemas.md").read_text()
    named = set(re.findall(r'"(\w+)": ', text)) - {*rules(), *record["scalars"]}
    assert len(named) > 50
    assert {key for key in named if f"`{key}`" not in page} == set()
    assert (record["schema"], record["kind"], record["worst"]) == (1, "folder", "error")
    assert record["claims"]["levels"][0]["written"] is True
    assert (record["ends"]["differing"], record["ends"]["relative"]) == (V, None)
    assert record["parts"][0]["shape"] == [V, D]
    assert {f["rule"] for f in record["findings"]} >= {"B012"}


def test_check_accepts_single_file_and_single_shard(tmp_path):
    path = llama(tmp_path / "one", True, head=table())
    audit = check(path / "model.safetensors")
    assert (audit.kind, audit.claims.tied, rule_ids_of(audit)[0]) == ("file", True, "B013")
    shard = llama(tmp_path / "two", shards=2) / "model-00002-of-00002.safetensors"
    assert check(shard).at_least("info") == ()


MAKE = {
    "text": lambda path: path.write_text("not a checkpoint"),
    "empty folder": lambda path: path.mkdir(),
    "only a config": lambda path: (path.mkdir(), (path / "config.json").write_text("{}")),
    "no permission": lambda path: llama(path).chmod(0),
}


@pytest.mark.parametrize("make", MAKE)
def test_check_raises_checkpoint_error_for_unreadable_input(tmp_path, make):
    if make == "no permission" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    MAKE[make](tmp_path / "x")
    with pytest.raises(CheckpointError, match="x"):
        check(tmp_path / "x")


def test_check_reports_progress_of_long_reads(tmp_path):
    told = []
    with listen_to_progress(lambda *given: told.append(given)):
        check(llama(tmp_path, True, head=table()))
    assert told[-1] == (f"comparing {TABLE}", V * D * 4, V * D * 4)


def test_check_reads_only_headers_of_131_gb_folder(tmp_path):
    """The sparse files have 131 GB by their headers; reading any table would exceed the test's time limit."""
    (tmp_path / "config.json").write_text(json.dumps(llama_config(True, 128256, 8192, dtype="bfloat16")))
    weight_map, total = {}, 0
    for shard in range(30):
        tensors = {f"model.layers.{shard}.mlp.experts.{n}.up_proj.weight": ("BF16", (28672, 8192)) for n in range(9)}
        if shard == 0:
            tensors[TABLE] = ("BF16", (128256, 8192))
        file = f"model-{shard + 1:05d}-of-00030.safetensors"
        total += write_sparse(tmp_path / file, tensors, {TABLE: ONE["BF16"]} if shard == 0 else {})
        weight_map |= dict.fromkeys(tensors, file)
    write_index(tmp_path, weight_map, total)
    audit = check(tmp_path)
    assert audit.nbytes == total > 1.2e11
    assert audit.findings == ()


def test_html_of_audit_equals_terminal_output(tmp_path):
    audit = check(llama(tmp_path, tied=True, head=table(seed=5)))
    shown = html.unescape(re.sub("<.*?>", "", audit._repr_html_()))
    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(audit_view(audit))
    assert shown == console.file.getvalue()
    assert "B012" in shown


RULE = '''
from tiewise.checkpoint.rules.rule import Observation, rule

@rule("B099", "warning", "nobody names a tensor Wanda")
def wanda(facts):
    """Wanda is no name for a tensor.
    What to do: choose another.
    Sources: somebody#1; somebody else
    """
    yield "config.json", "Wanda was seen", "call her otherwise", True
    yield Observation("config.json", "Wanda was heard", "listen again", severity="info")
'''


def test_new_rule_needs_one_new_file_and_no_other_change(tmp_path, monkeypatch):
    (tmp_path / "wanda.py").write_text(RULE)
    folder = import_module("tiewise.checkpoint.rules")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    monkeypatch.setattr(rule_module, "_REGISTERED", dict(rule_module._REGISTERED))
    path = llama(tmp_path / "model", rows=64)
    try:
        audit = check(path)
        found = [("B099", "warning", "Wanda was seen", True), ("B099", "info", "Wanda was heard", False)]
        assert [(f.rule, f.severity, f.evidence, f.safe) for f in audit.findings] == found
        assert [one["rule"] for one in audit.record()["findings"]] == ["B099", "B099"]
        arguments = ["check", "--explain", "b099"]
        explained = CliRunner().invoke(command_line(arguments), arguments).stdout
        said = ("nobody names a tensor Wanda", "What to do: choose another.", "Sources: somebody#1, somebody else")
        assert all(words in explained for words in said)
    finally:
        sys.modules.pop("tiewise.checkpoint.rules.wanda", None)


def test_check_imports_no_torch_transformers_safetensors_or_rich(tmp_path):
    path = llama(tmp_path)
    code = f"import sys; from tiewise.checkpoint.audit import check; check({str(path)!r}, deep=True)"
    code += "; print([m for m in ('torch', 'transformers', 'safetensors', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("rows", "world", "vllm", "megatron"),
    [
        (97, 8, "vLLM gives 16 to each", 1024),
        (97, 3, "vLLM stops, since 3 does not divide the 128 that it pads to", 384),
        (5, 4, "vLLM gives 16 to each", 512),
        (129, 2, "vLLM gives 96 to each", 256),
        (97, 10**12, "vLLM stops, since 1000000000000 does not divide the 128 that it pads to", 128 * 10**12),
    ],
)
def test_b042_reports_vocabulary_shards_of_torch_vllm_and_megatron(tmp_path, rows, world, vllm, megatron):
    """The expected share of torch is that of `chunk`; those of vLLM and Megatron-LM follow their rules by hand."""
    parts = [len(part) for part in torch.empty(rows).chunk(world)]
    (found,) = check(llama(tmp_path, rows=rows), world=world, select=["B042"]).findings
    none = f", {world - len(parts):,} ranks none" if len(parts) < world else ""
    assert f"torch gives {parts[0]} to each, {parts[-1]} to the last{none}; {vllm}" in found.evidence
    assert found.evidence.endswith(f"Megatron-LM pads to {megatron:,}")


def test_b042_is_silent_if_ranks_divide_vocabulary(tmp_path):
    assert check(llama(tmp_path / "a", rows=192), world=3, select=["B042"]).findings == ()
