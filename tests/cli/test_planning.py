"""Test the tables, the JSON, the page and the error messages of `tiewise plan` and `tiewise plan --list`."""

import json

import pytest
from cli_tiny import assert_refused

import tiewise as package
from tiewise.planning.catalogue import BETTER, models
from tiewise.planning.costs import Setting


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def cells(result, label):
    (line,) = [line for line in result.out.splitlines() if line.strip().startswith(label + " ")]
    return line.strip().removeprefix(label).split()


def test_plan_prints_boundaries_of_catalogue_model_in_columns(tiewise):
    result = tiewise("plan", "--like", "GPT2", "--boundary", "tied,untied,factored:128", "--full")
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 100
    assert "\ngpt2: vocabulary 50,257, width 768, 12 layers; as it is: tied\n" in result.out
    for label, shown in {
        "input table": "38,597,376 38,597,376 6,432,896",
        "output table": "– 38,597,376 –",
        "total": "124,439,808 163,037,184 92,471,936",
        "saved": "38,597,376 0 70,565,248",
        "float32": "498 MB 652 MB 370 MB",
    }.items():
        assert cells(result, label) == shown.split()
    assert "roberta-base" in result.out
    assert "Tying changes no FLOPs" in result.out


def test_plan_like_model_accepts_other_sizes(tiewise):
    result = tiewise("plan", "--like=gpt2", "--width=1024", "--layers=24", "--heads=16", "--boundary=tied")
    assert "\nlike gpt2: vocabulary 50,257, width 1,024, 24 layers; as it is: tied\n" in result.out
    assert cells(result, "parameters") == ["354,823,168"]
    assert (
        "\n  gpt2 " in tiewise("plan", "--like=gpt2", "--layers=13", "--full").out
    )  # the model itself is one of the neighbours


def test_plan_and_python_name_models_alike(tiewise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"llama-3-8b": {}, "gpt2 --width=1024 --heads=16": {"width": 1024, "heads": 16}}
    for line, sizes in asked.items():
        name, *options = line.split()
        records = [json.loads(tiewise("plan", *way, *options, "--json").out) for way in ([name], ["--like", name])]
        plans = [package.plan(name, **sizes), package.plan(like=name, **sizes)]
        assert records == [json.loads(json.dumps(plan.record())) for plan in plans]
        assert records[0] == records[1]
    (tmp_path / "gpt2").mkdir()  # a folder without a config is no model
    assert package.plan("gpt2").architecture.width == 768
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    widths = [json.loads(tiewise("plan", *way, "--json").out)["model"]["width"] for way in (["gpt2"], ["--like=gpt2"])]
    assert (
        widths == [64, 768] == [package.plan(**way).architecture.width for way in ({"model": "gpt2"}, {"like": "gpt2"})]
    )


def test_plan_with_named_sharing_opens_with_what_it_saves(tiewise):
    layer = 12 * 768**2 + 13 * 768  # parameters of one layer of GPT-2
    first = tiewise("plan", "gpt2", "--share=none,all").out.splitlines()[0]
    assert round(11 * layer / 1e6) == 78
    assert first == "Sharing all saves 78 M of 124 M parameters (63 %), compared with separate layers."
    both = tiewise("plan", "gpt2", "--share=all,ffn", "--json").out
    assert json.loads(both)["recommendation"]["sentences"][0] == (
        "Sharing all saves 78 M of 124 M parameters (63 %), ffn saves 52 M of 124 M parameters (42 %), "
        "compared with separate layers."
    )
    assert "Sharing" not in tiewise("plan", "albert-base-v2").out.splitlines()[0]
    assert "Sharing" not in tiewise("plan", "gpt2", "--share=none").out.splitlines()[0]


def test_plan_json_equals_record_of_python_plan(tiewise):
    choices = "--like=qwen3-0.6b --boundary=tied,factored:64 --share=none,all:groups=2 --init=0.01 "
    choices += "--world=8 --tp=4 --fsdp=2 --batch=2 --length=256 --dtype=bfloat16"
    record = json.loads(tiewise("plan", *choices.split(), "--json").out)
    setting = Setting(2, 256, "bfloat16", 8, 4, 0.01, 2)
    python_plan = package.plan("qwen3-0.6b", ("tied", "factored:64"), ("none", "all:groups=2"), setting)
    assert record == json.loads(json.dumps(python_plan.record()))
    assert len(record["neighbours"]) == 6


def test_plan_counts_config_file_folder_and_size_options_alike(tiewise, tmp_path):
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file, by_folder = (json.loads(tiewise("plan", path, "--json").out) for path in ("config.json", "."))
    assert by_file["choices"] == by_folder["choices"]
    options = ["--vocab=1000", "--width=64", "--layers=2", "--heads=4", "--kv-heads=2", "--ffn=128", "--gated"]
    assert "estimated from the sizes alone" in tiewise("plan", *options).out
    by_sizes = json.loads(tiewise("plan", *options, "--json").out)
    norms = 64 * 5  # the size options do not describe norms
    totals = [[c["parameters"]["total"] for c in plan["choices"]] for plan in (by_file, by_sizes)]
    assert totals[1] == [float(f"{total - norms:.3g}") for total in totals[0]]


def test_plan_wraps_many_choices_into_tables_of_100_columns(tiewise):
    result = tiewise("plan", "--like=gpt2", "--boundary=tied,untied,factored:64,spd", "--share=none,attention,ffn,all")
    assert max(map(len, result.out.splitlines())) <= 100
    totals = [line for line in result.out.splitlines() if line.strip().startswith("parameters")]
    assert len(totals) > 1
    assert sum(len(line.split()) - 1 for line in totals) == 16


def test_plan_build_counts_family_without_reader_exactly(tiewise, tmp_path):
    """`plan` estimates XGLM from its config and counts it exactly with --build."""
    import torch
    from transformers import AutoModelForCausalLM, XGLMConfig

    config = XGLMConfig(vocab_size=300, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        exact = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    built = json.loads(tiewise("plan", "config.json", "--build", "--json").out)
    built_choice = next(c for c in built["choices"] if c["boundary"] == built["model"]["boundary"])
    assert built_choice["parameters"]["total"] == exact
    assert not built["model"]["estimated"]
    full = " ".join(tiewise("plan", "config.json", "--build", "--full").out.split())
    assert "XGLMForCausalLM of the installed transformers was built without weights" in full


def test_plan_plot_writes_page_and_replaces_it_only_with_overwrite(tiewise, tmp_path):
    result = tiewise("plan", "--like=gpt2", "--plot=plan.html", "--json")
    assert (result.code, result.err) == (0, "page: plan.html\n")
    json.loads(result.out)
    result = tiewise("plan", "--like=gpt2-xl", "--plot=plan.html")
    assert_refused(result, "plan.html exists already; add --overwrite to replace it")
    assert "--overwrite" not in (tmp_path / "plan.html").read_text()
    again = "plan --like=gpt2 --plot=plan.html --json --quiet --overwrite"
    assert tiewise(*again.split()).err == ""
    assert f"tiewise {again}" in (tmp_path / "plan.html").read_text()


def test_models_prints_every_model_on_one_line_of_100_columns(tiewise):
    result = tiewise("plan", "--list")
    assert (result.code, result.err) == (0, "")
    lines = [line.rstrip() for line in result.out.splitlines()]
    assert max(map(len, lines)) <= 100
    for model in models():
        (line,) = [line for line in lines if line.split()[:1] == [model.name]]
        assert f" {model.width:,} " in line
        assert f" {model.checked} " in line
        assert f" { {True: 'yes', False: 'no', None: '?'}[model.tied] } " in line
        if model.vocab:
            assert f" {model.vocab:,} " in line
    assert lines[-1] == BETTER


def test_models_cuts_no_figure_in_80_columns(tiewise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = tiewise("plan", "--list").out
    assert max(map(len, result.splitlines())) <= 80
    assert ("…" in result, " 262,144 " in result) == (False, True)


def test_models_row_of_pythia_70m_has_its_sizes_shares_and_status(tiewise):
    result = tiewise("plan", "--list", "--family", "pythia").out
    (line,) = [line for line in result.splitlines() if line.startswith("pythia-70m")]
    assert line.split()[10] == "verified"
    assert line.split()[:10] == ["pythia-70m", "50,304", "512", "6", "98.2", "70.4", "M", "73.1", "%", "no"]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("--tied --family=gemma --min-vocab=262000 --max-size=5 --sort=size", "gemma-3-270m gemma-3-1b gemma-3-4b"),
        (
            "--untied --min-size 600 --sort=name",
            "deepseek-r1 deepseek-v3 deepseek-v3.1 deepseek-v3.2 deepseek-v4-pro "
            "glm-5 glm-5.1 glm-5.2 kimi-k2 kimi-k2.5 kimi-k2.6",
        ),
    ],
)
def test_models_filters_and_sorts_rows(tiewise, chosen, names):
    record = json.loads(tiewise("plan", "--list", *chosen.split(), "--json").out)
    assert [row["name"] for row in record["models"]] == names.split()


def test_models_json_is_one_line_with_every_model_and_field(tiewise):
    result = tiewise("plan", "--list", "--json")
    record = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert record["note"] == BETTER
    assert [row["name"] for row in record["models"]] == [model.name for model in models()]
    gpt2 = record["models"][0]
    assert gpt2["table_share"] == pytest.approx(50_257 * 768 / 124_439_808)
    assert gpt2["class_default"] == ["vocab", "width", "layers", "tied"]
    assert {"status", "source", "checked", "config", "config_source"} <= gpt2.keys()


@pytest.mark.parametrize(
    ("width", "left_out"), [(60, "status"), (50, "tables, V/D, status"), (40, "tied, tables, V/D, status")]
)
def test_models_drops_whole_columns_and_no_digit_on_narrow_terminal(tiewise, monkeypatch, width, left_out):
    monkeypatch.setenv("COLUMNS", str(width))
    result = tiewise("plan", "--list", "--family=pythia").out
    lines = result.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result
    (line,) = [line for line in lines if line.startswith("pythia-70m")]
    assert {"50,304", "512", "6", "70.4"} <= set(line.split())
    assert f"also show: {left_out}." in " ".join(result.split())
    every = tiewise("plan", "--list").out
    assert "…" not in every
    assert all(f" {model.width:,} " in every for model in models())


def test_models_reports_zero_matches_and_refuses_unknown_family(tiewise):
    assert "0 models" in tiewise("plan", "--list", "--family=pythia", "--tied").out
    result = tiewise("plan", "--list", "--family=lama")
    assert_refused(result, "no model's name or type begins with 'lama'; did you mean llama?")


def test_plan_no_build_keeps_the_estimate_and_excludes_build(tiewise, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEWISE_NO_BUILD", "0")
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "helium", **sizes, "intermediate_size": 64}))
    assert json.loads(tiewise("plan", "config.json", "--no-build", "--json").out)["model"]["estimated"]
    assert_refused(tiewise("plan", "gpt2", "--build", "--no-build"), "--build and --no-build at once")
