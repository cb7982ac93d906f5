"""Test `compare` and `train` end to end: their output, their files, and models that other programs load."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from cli_tiny import TINY, write_text
from tests.answers import running
from tests.public_names import homes, public
from transformers import Qwen2Config

import tiewise
from tiewise.cli.commands import commands
from tiewise.core.spec import split_specs
from tiewise.training.folder import folder_name
from tiewise.training.results import Comparison

LOAD_SCRIPT = """
import sys, torch
from importlib import import_module
from transformers import pipeline
logits, *folders = sys.argv[1:]
for folder in folders:
    if folder.startswith("import "):
        import_module(folder.removeprefix("import "))
        continue
    generate = pipeline("text-generation", folder)
    generate("abc", max_new_tokens=3, do_sample=False)
    model = generate.model
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    print(type(model).__name__, "tied" if tied else "untied", "with" if "tiewise" in sys.modules else "without")
    torch.save(model(input_ids=torch.arange(16).view(2, 8)).logits, f"{logits}/{folders.index(folder)}")
"""


def load_in_new_process(tmp_path, *folders):
    """Load folders in turn in a process that imports only transformers; "import NAME" imports a module between them.

    Return for each a line (class, tied or untied, with or without tiewise) and the logits.
    """
    code = [sys.executable, "-c", LOAD_SCRIPT, str(tmp_path), *map(str, folders)]
    result = subprocess.run(code, capture_output=True, text=True, check=True)
    numbers = [number for number, folder in enumerate(folders) if not str(folder).startswith("import ")]
    return result.stdout.splitlines(), [torch.load(tmp_path / str(number)) for number in numbers]


@dataclass
class Compared:
    """A finished comparison with its printed text, and its models as a new process loads them."""

    ended: running.Ended
    run: Path
    loaded: list[str]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Compare three arms, and load their models in one new process, which imports tiewise for the last alone."""
    folder = tmp_path_factory.mktemp("compared") / "here"
    folder.mkdir()
    words = ["compare", "-t", write_text(folder), *TINY, "--arms=tied,untied,factored:8", "--seeds=1", "--out=run"]
    ended = running.run(words, folder)
    assert ended.code == 0, ended.err
    run = folder / "run"
    models = [run / place for place in ("tied/seed-1/final", "untied/seed-1/final", "factored-8/seed-1/dense")]
    last = ["import tiewise.hf", run / "factored-8/seed-1/final"]
    return Compared(ended, run, *load_in_new_process(tmp_path_factory.mktemp("logits"), *models, *last))


def check_dense_copy(printed, run, name, logits):
    """Check the printed line about the dense copy of an arm, and that the copy has the model's logits."""
    folder = run / name / "seed-1"
    size = sum(path.stat().st_size for path in (folder / "dense").iterdir())
    assert printed.splitlines()[-2] == (
        f"models: run/ARM/seed-N/final; {name} loads with tiewise.load; "
        f"its copy with plain tables in dense/ ({size / 1000:.1f} kB) loads with any transformers"
    )
    assert not (run / "tied" / "seed-1" / "dense").exists()
    with torch.no_grad():
        expected = tiewise.load(folder / "final").eval()(input_ids=torch.arange(16).view(2, 8)).logits
    torch.testing.assert_close(logits, expected[:], atol=1e-5, rtol=1e-5)


def test_compare_writes_models_that_transformers_loads_and_a_dense_copy_of_the_other(compared):
    assert compared.loaded == [
        "LlamaForCausalLM tied without",
        "LlamaForCausalLM untied without",
        "LlamaForCausalLM untied without",
        "TiewiseLlamaForCausalLM tied with",
    ]
    check_dense_copy(compared.ended.out, compared.run, "factored-8", compared.logits[2])
    torch.testing.assert_close(compared.logits[3][:], compared.logits[2], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compare_exports_dense_copy_with_scale_of_logits(compare, tmp_path):
    arm = "residual:4+output_scale=0.5"
    result = compare(f"--arms=tied,{arm}", "--seeds=1", "--out=run")
    run, name = tmp_path / "run", folder_name(arm)
    loaded, (logits,) = load_in_new_process(tmp_path, run / name / "seed-1" / "dense")
    assert loaded == ["LlamaForCausalLM untied without"]
    check_dense_copy(result.out, run, name, logits)


def test_compare_writes_report_and_results(compared):
    result, run = compared.ended, compared.run
    assert re.search(r"validation nll +\d\.\d{4}", result.out)
    assert "report: run/report.html" in result.out
    lines = result.err.splitlines()
    assert lines[0].startswith("text: text.txt; tokens (bytes, vocabulary ")
    assert [line.partition(":")[0] for line in lines[1:3]] == ["1/3 tied seed 1", "2/3 untied seed 1"]
    assert len(lines) == 4

    comparison = Comparison.from_dict(json.loads((run / "results.json").read_text()))
    assert comparison.arms == ["tied", "untied", "factored:8"]
    assert comparison.command.startswith("tiewise compare -t text.txt --set=width=16")
    page = (run / "report.html").read_text()
    assert "<html" in page
    assert comparison.finding.splitlines()[0][:40] in page
    assert {path.name for path in run.iterdir()} == {
        *("run.yaml", "env.json", "data", "results.json", "report.html"),
        *("tied", "untied", "factored-8"),
    }
    assert {"\x1b", "\r"}.isdisjoint(result.out + result.err)


def test_quiet_prints_result_alone_and_json_prints_one_object(compare, tiewise, text):
    result = compare("--arms=tied,untied", "--seeds=1", "--quiet")
    assert result.err == ""
    assert "validation nll" in result.out
    assert "report: runs/compare/report.html" in result.out
    resume = ("compare", "--out=runs/compare", "--resume", "-q")  # prints the result of a finished run
    again = tiewise(*resume)
    assert (again.code, again.out, again.err) == (0, result.out, "")
    as_json = tiewise(*resume, "--json")
    assert (as_json.code, as_json.out.count("\n"), as_json.err) == (0, 1, "")
    assert Comparison.from_dict(json.loads(as_json.out)).arms == ["tied", "untied"]
    result = tiewise("train", "-t", text, *TINY, "--json", "-q", "--out=b")
    assert (result.code, result.err) == (0, "")
    record = json.loads(result.out)
    assert (record["arm"], record["model"], record["dense"]) == ("tied", "b/tied/seed-1/final", None)


def test_train_prints_validation_loss_and_writes_model(tiewise, text, tmp_path):
    result = tiewise("train", "-t", text, *TINY, "-b", "factored:8+bias", "--seed=4", "--out=run")
    assert result.code == 0
    assert re.match(
        r"validation loss \d\.\d{4} nats/token \(perplexity [\d.]+, \d\.\d{3} bits per byte\), training loss",
        result.out,
    )
    assert result.out.splitlines()[-2:] == [
        "model: run/factored-8+bias/seed-4/final; it loads with tiewise.load",
        "Next: tiewise inspect run/factored-8+bias/seed-4/final",
    ]
    assert not (tmp_path / "run" / "factored-8+bias" / "seed-4" / "dense").exists()  # Llama's head has no bias
    assert (tmp_path / "run" / "factored-8+bias" / "seed-4" / "final" / "model.safetensors").is_file()
    again = tiewise("train", "--out=run", "--resume")
    assert again.out == result.out


def test_next_commands_quote_folders_with_blanks(compare, tiewise, text):
    result = compare("--arms=tied,untied", "--seeds=1", "--out=my run")
    assert result.out.splitlines()[-1] == "Next: tiewise inspect 'my run'"
    result = tiewise("train", "-t", text, *TINY, "--out=my model")
    assert result.out.splitlines()[-1] == "Next: tiewise inspect 'my model/tied/seed-1/final'"


def test_compare_and_train_report_divergence(compare, tiewise, text):
    result = compare("--arms=tied,untied", "--seeds=1", "--set=learning_rate=1e30", "--out=run")
    assert result.code == 0
    assert result.out.count("diverged") >= 4
    again = tiewise("compare", "--out=run", "--resume", "--json")
    assert [run["heldout_nll"] for run in json.loads(again.out)["runs"]] == [None, None]
    result = tiewise("train", "-t", text, *TINY, "--set=learning_rate=1e30")
    assert result.out.startswith("Diverged")


def test_compare_reads_several_text_files_and_stdin(tiewise, text, tmp_path):
    rows = "".join(json.dumps({"body": f"row number {i} of some rows that are all alike"}) + "\n" for i in range(200))
    (tmp_path / "rows.jsonl").write_text(rows)
    result = tiewise("compare", "-t", text, "-t", "rows.jsonl:body", *TINY, "--arms=tied", "--seeds=1", "--out=a")
    assert result.code == 0
    assert json.loads((tmp_path / "a" / "data" / "data.json").read_text())["texts"] == [text, "rows.jsonl:body"]
    piped = (tmp_path / text).read_bytes()
    result = tiewise("compare", "-t", "-", *TINY, "--arms=tied", "--seeds=1", "--out=b", "--json", stdin=piped)
    assert result.code == 0
    again = tiewise("compare", "--out=b", "--resume", "--json")
    assert json.loads(again.out)["runs"] == json.loads(result.out)["runs"]


def test_kernels_are_compiled_only_on_demand(tiewise, monkeypatch):
    builds = []
    monkeypatch.setattr("tiewise.boundary.ops.compiled_kernels.build", lambda: builds.append("compiled"))
    assert tiewise("kernels").code == 0
    assert builds == []
    assert tiewise("kernels", "build").code == 0
    assert builds == ["compiled"]


def test_compare_refuses_too_few_minutes_and_runs_tuning_trials(tiewise, compare, text, tmp_path, monkeypatch):
    monkeypatch.setattr("tiewise.training.short_trials.CALIBRATION_STEPS", (2, 3))
    monkeypatch.setattr("tiewise.training.tuning.FACTORS", (1.0, 2.0, 4.0))
    monkeypatch.setattr("tiewise.training.tuning.MOST_FACTOR", 4.0)
    monkeypatch.setattr("tiewise.training.least_time.refuse_impossible_minutes", lambda settings: None)
    tiny = [item for item in TINY if not item.startswith("--steps")]
    arms = ["--arms=tied,untied", "--seeds=1"]
    result = tiewise("compare", "-t", text, *tiny, *arms, "--minutes=0.005", "--tune", "--out=a")
    assert result.code == 2
    assert re.search(
        r"--minutes 0.005 does not hold 6 tuning runs and 2 runs.*give --minutes [\d.]+ or more", result.err
    )
    assert not (tmp_path / "a").exists()
    result = compare("--arms=tied", "--seeds=1", "--tune", "--steps=4", "--out=b")
    assert result.code == 0
    assert result.err.count("tune tied: lr ") == 3


def test_compare_builds_model_from_config_json(compare, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_key_value_heads": 1}
    Qwen2Config(**sizes, num_attention_heads=2).save_pretrained(tmp_path / "qwen2")
    arms = ["--arms=tied,untied,factored:8", "--seeds=1"]
    result = compare(*arms, "--json", "--model=qwen2/config.json", "--match=parameters")
    assert result.code == 0
    assert json.loads(result.out)["runs"][0]["parameters"]["shared table"] == 257 * 32


def test_options_override_set_and_set_overrides_yaml_settings(tiewise, text, tmp_path):
    (tmp_path / "mine.yaml").write_text("arms: [untied]\nwidth: 8\nlearning_rate: 1e-3\nsteps: 3\nseeds: 1\n")
    result = tiewise(
        *("compare", "-t", text, *TINY[1:5], "--tokenizer=bytes", "--config=mine.yaml"),
        *("--set=width=32", "--set=learning_rate=2e-3", "--steps=5", "--out=run"),
    )
    assert result.code == 0
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    expected_settings = {"arms": ["untied"], "width": 32, "learning_rate": 0.002, "steps": 5, "seeds": 1}
    assert {name: record[name] for name in expected_settings} == expected_settings
    result = tiewise("train", "--config=run/run.yaml", "--out=single", "--json")  # the settings of `compare`
    assert json.loads(result.out)["arm"] == "untied"


@pytest.mark.parametrize(
    ("text", "arms"),
    [
        ("tied,glued:in=4", ["tied", "glued:in=4"]),
        ("projected:300,in=none,untied,tied", ["projected:300,in=none", "untied", "tied"]),
        ("projected:untied,k=300,penalty=0.1+bias,tied", ["projected:untied,k=300,penalty=0.1+bias", "tied"]),
        ("factored-untied:in=64, out=128 , tied", ["factored-untied:in=64,out=128", "tied"]),
        ("tied+share=all:groups=2,ends=1,untied", ["tied+share=all:groups=2,ends=1", "untied"]),
        ("none,all:cycle=2,ends=1+rank=4,sandwich,ffn", ["none", "all:cycle=2,ends=1+rank=4", "sandwich", "ffn"]),
    ],
)
def test_split_specs_separates_specs_but_not_their_arguments(text, arms):
    assert split_specs(text) == arms


def test_every_command_has_json_and_quiet():
    for name, command in commands().items():
        assert {"json_", "quiet"} <= set(inspect.signature(command.function()).parameters), name


def test_every_command_of_the_help_has_a_function():
    other_names = {"vocab hot": "hot_vocabulary"}
    functions = {name: other_names.get(name, command.words[-1]) for name, command in commands().items()}
    without = {name for name, function in functions.items() if function not in homes()}
    assert without == {"data show", "kernels"}  # the help lists neither
    assert all(callable(public(functions[name])) for name in functions.keys() - without)


def test_readme_names_the_test_command_that_ci_runs():
    root = Path(__file__).parents[2]
    for text in ((root / ".ci/run").read_text(), (root / "README.md").read_text(encoding="utf-8")):
        assert re.search(r"^make test\b", text, re.M)


@pytest.mark.parametrize("screen", [True, False])
@pytest.mark.parametrize("no_open", [True, False])
def test_explore_opens_browser_if_display_exists_unless_no_open_is_given(tiewise, monkeypatch, screen, no_open):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(sys, "platform", "linux")
    result = tiewise("explore", "--out=page.html", "--json", *["--no-open"] * no_open)
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["opened"] == (screen and not no_open)
    assert [address.rpartition("/")[2] for address in opened] == ["page.html"] * record["opened"]


@pytest.mark.parametrize(
    ("answer", "right"),
    [("v * d, v * d / (2 * v * d + 12 * layers * d * d)", True), ("v * d, 7.0", False)],
)
def test_exercise_json_reports_whether_answer_is_right(tiewise, tmp_path, answer, right):
    """The right answer is V·D of 2·V·D + 12·L·D², the formula of docs/dev/errata.md."""
    (tmp_path / "answer.py").write_text(f"def saved(v, d, layers):\n    return {answer}\n")
    result = tiewise("exercise", "1", "answer.py", "--json")
    record = json.loads(result.out)
    assert (result.code, record["exercise"], record["right"]) == (int(not right), 1, right)
    assert (record["wrong"] is None) == right
