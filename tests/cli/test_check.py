"""Test the output and exit codes of `tiewise check`, `repair` and `untie`."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoint.tiny_checkpoints import llama, table


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Write a checkpoint that stores its table twice, and one whose two tables differ."""
    monkeypatch.setenv("COLUMNS", "100")
    llama(tmp_path / "twice", head=table())
    llama(tmp_path / "differ", head=np.where(np.arange(24)[:, None] == 5, table() + 1, table()))


def test_check_reports_table_stored_twice_and_repair_command(tiewise):
    result = tiewise("check", "twice")
    assert (result.code, result.err) == (0, "")
    assert "identical, byte by byte; 768 bytes stored twice" in result.out
    assert "B013 warning" in result.out
    assert "→ tiewise repair twice --to twice-fixed" in " ".join(result.out.split())


def test_check_compares_draft_with_its_target(tiewise, tmp_path):
    ids = np.array([0, 2, 5])
    maps = {"d2t": ids - np.arange(3), "t2d": np.isin(np.arange(24), ids), "lm_head.weight": table(3)}
    llama(tmp_path / "draft", False, config={"draft_vocab_size": 3}, tensors=maps)
    llama(tmp_path / "reset", False, config={"draft_vocab_size": 3}, tensors=maps | {"d2t": ids * 0})
    result = tiewise("check", "draft", "--target", "twice")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Healthy: ")
    result = tiewise("check", "reset", "--target", "twice")
    assert (result.code, result.err) == (1, "")
    assert "d2t is all zeros, so its 3 rows stand for the first 3 tokens" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("", 1),
        ("--fail-on fatal", 0),
        ("--fail-on never", 0),
        ("--ignore B012,B08", 0),
        ("--select B03", 0),
        ("--headers", 0),
    ],
)
def test_check_exits_1_on_error_unless_options_exclude_it(tiewise, options, code):
    result = tiewise("check", "differ", *options.split())
    assert result.code == code
    assert ("not compared (headers only)" in result.out) == (options == "--headers")


def test_check_quantise_reports_problems_of_planned_quantisation(tiewise, tmp_path):
    (tmp_path / "gptq.json").write_text('{"quant_method": "gptq", "lm_head": true}')
    result = tiewise("check", "twice", "--quantise", "gptq.json", "--select", "B053", "--fail-on", "warning")
    assert result.code == 1
    assert "the quantisation converts lm_head and not model.embed_tokens" in " ".join(result.out.split())
    result = tiewise("check", "twice", "--quantise", "absent.json")
    assert (result.code, result.out, result.err) == (2, "", "tiewise: absent.json: no such file; check the path\n")


def test_check_reports_readable_path_despite_unreadable_one(tiewise):
    result = tiewise("check", "none", "twice")
    assert result.code == 2
    assert "no such file" in result.err
    assert "identical" in result.out


def test_check_explain_prints_every_rule(tiewise):
    assert len(tiewise("check", "--explain", "all").out.splitlines()) >= 30
    one = tiewise("check", "--explain", "b013").out
    assert "What to do:" in one
    assert "Sources:" in one


def test_check_prints_markup_in_names_unchanged(tiewise, tmp_path):
    (tmp_path / "twice").rename(tmp_path / "[red]model")
    result = tiewise("check", "[red]model")
    assert not result.err
    assert "[red]model" in result.out


def test_repair_then_untie_restores_tensors_exactly(tiewise, tree, tmp_path):
    before = tree()
    result = tiewise("repair", "twice", "--to", "once", "--dry-run")
    assert (result.code, "would write" in result.out, tree()) == (0, True, before)
    result = tiewise("repair", "twice", "--to", "once")
    assert (result.code, "logits   unchanged" in result.out) == (0, True)
    assert "lm_head.weight" not in load_file(tmp_path / "once/model.safetensors")
    receipt = json.loads(tiewise("untie", "once", "--to", "again", "--json").out)
    assert (receipt["written"], receipt["logit_change"]) == (["lm_head.weight"], 0.0)
    old, new = (load_file(tmp_path / folder / "model.safetensors") for folder in ("twice", "again"))
    assert {name: array.tobytes() for name, array in new.items()} == {n: a.tobytes() for n, a in old.items()}
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False
