"""Test the first line of `check`: the verdict, its fix, and the groups of loaders below it."""

import io
import shlex

import pytest
from rich.console import Console
from tiny_checkpoints import D, V, llama, llama_config, table, write_checkpoint
from tiny_classes import t5gemma

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.audit_view import audit_view
from tiewise.cli.main import command_line

OTHER = table(seed=2)
HEALTHY = f"[{V}, {D}]; all 7 loaders read it."
VERDICTS = [
    ({}, f"Healthy: tied, one table {HEALTHY}"),
    ({"tied": False}, f"Healthy: untied, two tables {HEALTHY}"),
    (
        {"tied": False, "tensors": {"lm_head.weight": None}},
        "BROKEN: the config says untied, and no head is stored; transformers draws it at random. "
        "Fix, if it was trained tied: tiewise tie PATH --keep input --to PATH-fixed",
    ),
    (
        {"head": OTHER},
        "BROKEN: the config says tied, and two different tables are stored. "
        "Fix, to keep both tables: tiewise repair PATH --to PATH-fixed",
    ),
]


def shown(audit, **options):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(audit_view(audit, **options), crop=False)
    return console.file.getvalue()


@pytest.mark.parametrize(("how", "verdict"), VERDICTS)
def test_first_line_states_verdict_and_fix(tmp_path, how, verdict):
    path = llama(tmp_path / "m", **how)
    audit = check(path)
    assert audit.verdict == audit.record()["verdict"] == verdict.replace("PATH", str(path))
    assert " ".join(shown(audit).split()).startswith(audit.verdict)


@pytest.mark.parametrize(("flag", "tables"), [(True, "tied, two tables"), (False, "untied, 3 tables")])
def test_verdict_of_class_whose_stacks_have_separate_tables(tmp_path, flag, tables):
    t5gemma(tie_word_embeddings=flag).save_pretrained(tmp_path)
    assert check(tmp_path, build=False).verdict.startswith(f"Healthy: {tables} [24, 16]")


def test_verdict_counts_warnings_and_restricts_itself_to_headers(tmp_path):
    path = llama(tmp_path / "m", head=table())
    assert check(path).verdict.startswith("Works, with 1 warning: the one table is stored twice")
    assert check(path, scan=False).verdict.startswith("Healthy as far as headers show: ")


def test_file_behind_link_is_unreadable_and_command_that_reads_it_is_given(tmp_path):
    path = llama(tmp_path / "m")
    (path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (path / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    audit = check(path)
    assert audit.verdict.startswith("UNREADABLE: model.safetensors is a link to a file outside the folder")
    assert audit.verdict.endswith(f"Fix, if you trust the link: tiewise check {path} --follow-links")
    assert check(path, follow_links=True).verdict.startswith("Healthy")


def test_verdict_on_folder_of_tiewise_type_names_import_that_it_needs(tmp_path):
    own = {"model_type": "tiewise", "base_model_type": "llama", "architectures": ["TiewiseLlamaForCausalLM"]}
    config = llama_config(width=16) | own | {"tiewise_boundary": "factored:4"}
    ends = {"model.embed_tokens.in_map.weight": table(16, 4), "lm_head.out_map.weight": table(4, 16)}
    path = write_checkpoint(tmp_path / "m", config, {"model.embed_tokens.weight": table(V, 4), **ends})
    audit = check(path)
    assert audit.worst == "error"
    assert audit.verdict.startswith("NEEDS TIEWISE: only transformers loads the type `tiewise`")


def test_loaders_are_grouped_and_full_lists_each_with_its_source(tmp_path):
    audit = check(llama(tmp_path / "m", head=OTHER))
    lines = [" ".join(line.split()) for line in shown(audit).splitlines()]
    assert "right load both tables as stored llama.cpp" in lines
    (wrong,) = [line for line in lines if line.startswith("WRONG drop the stored head")]
    assert wrong == "WRONG drop the stored head transformers 4, vLLM before August 2026,"
    assert "transformers#42612" not in shown(audit)
    assert "transformers#42612" in shown(audit, full=True)


def test_command_of_fix_is_on_one_line_at_any_width(tmp_path):
    path = llama(tmp_path / ("long-" * 30), head=OTHER)
    audit = check(path)
    command = audit.findings[0].fixes[0].partition(": ")[2]
    assert command in shown(audit)


def test_path_with_special_characters_is_quoted_in_fix(tmp_path):
    path = llama(tmp_path / "a; echo b", head=OTHER)
    words = shlex.split(check(path).findings[0].fixes[0].partition(": ")[2])
    assert words == ["tiewise", "repair", str(path), "--to", f"{path}-fixed"]


def test_path_is_before_verdict_if_several_are_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("a", "b"):
        llama(tmp_path / name)
    with pytest.raises(SystemExit):
        command_line(["check"])(["check", "a", "b"])
    printed = capsys.readouterr().out
    assert f"a: Healthy: tied, one table {HEALTHY}" in printed
    assert f"b: Healthy: tied, one table {HEALTHY}" in printed
