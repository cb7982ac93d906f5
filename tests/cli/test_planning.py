"""`tiewise plan` and `tiewise models`: their tables, JSON and page, and what they refuse."""

import json
import subprocess
import sys

import pytest

import tiewise as package
from tiewise.planning.catalogue import BETTER, models
from tiewise.planning.costs import Setting


@pytest.fixture
def shown(tiewise, monkeypatch):
    """Run the command on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: tiewise("plan", *arguments)


def cells(said, label):
    (line,) = [line for line in said.out.splitlines() if line.strip().startswith(label + " ")]
    return line.strip().removeprefix(label).split()


def test_a_model_of_the_catalogue_side_by_side(shown):
    said = shown("--like", "GPT2", "--boundary", "tied,untied,factored:128")
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 100
    assert said.out.startswith("gpt2: V 50,257, D 768, L 12; as it is tied\n")
    assert cells(said, "input table") == ["38,597,376", "38,597,376", "6,432,896"]
    assert cells(said, "output table") == ["–", "38,597,376", "–"]
    assert cells(said, "total") == ["124,439,808", "163,037,184", "92,471,936"]
    assert cells(said, "saved") == ["38,597,376", "0", "70,565,248"]
    assert cells(said, "float32") == ["498", "MB", "652", "MB", "370", "MB"]
    assert "roberta-base" in said.out
    assert "tying changes no FLOPs" in said.out


def test_what_it_prints_is_what_python_gives(shown, tmp_path):
    choices = ["--like=qwen3-0.6b", "--boundary=tied,factored:64", "--share=none,all:groups=2"]
    choices += ["--world=8", "--tp=4", "--batch=2", "--length=256", "--dtype=bfloat16", "--init=0.01"]
    record = json.loads(shown(*choices, "--json").out)
    setting = Setting(2, 256, "bfloat16", 8, 4, 0.01)
    made = package.plan("qwen3-0.6b", ("tied", "factored:64"), ("none", "all:groups=2"), setting)
    assert record == json.loads(json.dumps(made.record()))
    assert len(record["neighbours"]) == 6


def test_a_config_its_folder_and_the_same_sizes(shown, tmp_path):
    config = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file, by_folder = (json.loads(shown(path, "--json").out) for path in ("config.json", "."))
    assert by_file["choices"] == by_folder["choices"]
    options = ["--vocab=1000", "--width=64", "--layers=2", "--heads=4", "--kv-heads=2", "--ffn=128", "--gated"]
    by_sizes = json.loads(shown(*options, "--json").out)
    norms = 64 * 5  # which sizes do not tell
    totals = [[c["parameters"]["total"] for c in found["choices"]] for found in (by_file, by_sizes)]
    assert totals[0] == [total + norms for total in totals[1]]


def test_many_choices_stand_below_each_other(shown):
    said = shown("--like=gpt2", "--boundary=tied,untied,factored:64,spd", "--share=none,attention,ffn,all")
    assert max(map(len, said.out.splitlines())) <= 100
    totals = [line for line in said.out.splitlines() if line.strip().startswith("total")]
    assert len(totals) > 1
    assert sum(len(line.split()) - 1 for line in totals) == 16


def test_what_is_estimated_is_said(shown):
    assert "matrices alone are counted" in shown("--vocab=1000", "--width=64", "--layers=2").out


def test_a_family_that_no_reader_knows_can_be_built(shown, tmp_path):
    """XGLM is estimated from its config, and exact once built."""
    import torch
    from transformers import AutoModelForCausalLM, XGLMConfig

    config = XGLMConfig(vocab_size=300, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        exact = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    built = json.loads(shown("config.json", "--build", "--json").out)
    own = next(c for c in built["choices"] if c["boundary"] == built["model"]["boundary"])
    assert own["parameters"]["total"] == exact
    assert not built["model"]["estimated"]
    said = shown("config.json", "--build", "--plot=plan.html")
    assert said.code == 0
    assert "built on the meta device" in said.out


def test_a_page(shown, tmp_path):
    said = shown("--like=gpt2", "--plot=plan.html", "--json")
    assert said.code == 0
    assert said.err == "page: plan.html\n"
    json.loads(said.out)
    said = shown("--like=gpt2-xl", "--plot=plan.html")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("tiewise: plan.html exists already; add --overwrite to replace it")
    assert "--overwrite" not in (tmp_path / "plan.html").read_text()
    assert shown("--like=gpt2", "--plot=plan.html", "--json", "--quiet", "--overwrite").err == ""
    assert (
        "tiewise plan --like=gpt2 --plot=plan.html --json --quiet --overwrite" in (tmp_path / "plan.html").read_text()
    )


@pytest.fixture
def listed(tiewise, monkeypatch):
    """Run the command on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: tiewise("models", *arguments)


def test_every_model_on_one_line_of_a_hundred_columns(listed):
    said = listed()
    assert (said.code, said.err) == (0, "")
    lines = [line.rstrip() for line in said.out.splitlines()]
    assert max(map(len, lines)) <= 100
    for model in models():
        (line,) = [line for line in lines if line.split()[:1] == [model.name]]
        assert f" {model.width:,} " in line
        assert f" {model.checked} " in line
        assert f" { {True: 'yes', False: 'no', None: '?'}[model.tied] } " in line
        if model.vocab:
            assert f" {model.vocab:,} " in line
    assert lines[-1] == BETTER


def test_eighty_columns_cut_no_figure(tiewise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = tiewise("models")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "…" not in said.out
    assert " 262,144 " in said.out


def test_a_row_says_what_it_should(listed):
    (line,) = [line for line in listed("--family", "pythia").out.splitlines() if line.startswith("pythia-70m")]
    assert line.split()[:11] == ["pythia-70m", "50,304", "512", "6", "98.2", "70.4", "M", "73.1", "%", "no", "verified"]


def test_filters_and_sort_reach_the_rows(listed):
    record = json.loads(
        listed("--tied", "--family=gemma", "--min-vocab=262000", "--max-size=5", "--sort=size", "--json").out
    )
    assert [row["name"] for row in record["models"]] == ["gemma-3-270m", "gemma-3-1b", "gemma-3-4b"]
    untied = json.loads(listed("--untied", "--min-size", "600", "--json").out)["models"]
    assert {row["name"] for row in untied} == {"deepseek-v3", "kimi-k2"}


def test_json_holds_everything_once(listed):
    said = listed("--json")
    record = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert record["note"] == BETTER
    assert [row["name"] for row in record["models"]] == [model.name for model in models()]
    gpt2 = record["models"][0]
    assert gpt2["table_share"] == pytest.approx(50_257 * 768 / 124_439_808)
    assert gpt2["class_default"] == ["vocab", "width", "layers", "tied"]
    assert {"status", "source", "checked", "config", "config_source"} <= gpt2.keys()


def test_nothing_found_is_said(listed):
    said = listed("--family=nobody")
    assert said.code == 0
    assert "0 models" in said.out


@pytest.mark.parametrize(
    "arguments", [["plan", "--like=gpt2", *more] for more in ([], ["--json"], ["--plot=p.html"])] + [["models"]]
)
def test_no_torch(tmp_path, arguments):
    code = (
        f"import sys; sys.argv = ['tiewise', *{arguments}]; from tiewise.cli.main import command_line; "
        f"command_line({arguments})({arguments}, standalone_mode=False); "
        "assert not {'torch', 'transformers', 'jax'} & set(sys.modules); "
        "assert 'plotly' in sys.modules or 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
