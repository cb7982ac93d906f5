"""Test the output, the files and the error messages of `tiewise inspect`."""

import errno
import json
import shutil
import tempfile

import numpy as np
import pytest
from cli_tiny import assert_refused
from safetensors.numpy import load_file, save_file
from tests.answers import inputs
from tests.inspection.tiny_folders import write_model
from tests.report.opened_page import BROWSER, FLAGS, Visit
from transformers import LlamaForCausalLM

from tiewise.boundary.sharing.share import share_layers

RUNNING = ["bigrams", "gradients", "bottleneck", "precision", "lens", "refinement"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write a tied and an untied model with the same word vocabulary, and a text."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        inputs.word_llama(name == "tied").save_pretrained(folder / name)
        inputs.word_tokenizer().save_pretrained(folder / name)
    draw = np.random.default_rng(0)
    (folder / "text.txt").write_text("\n".join(" ".join(draw.choice(inputs.WORDS, 12)) for _ in range(400)))
    return folder


def parse_strict_json(text):
    """Parse JSON; fail on NaN and infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def run_inspect(tiewise, models, tmp_path):
    """Return a function that runs `tiewise inspect` in a folder with copies of the models."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    return lambda *arguments, **named: tiewise("inspect", *arguments, **named)


def test_inspect_without_text_measures_tables_and_omits_other_sections(run_inspect):
    result = run_inspect("untied", "--json", "--samples", "100", "--held-out", "0")
    assert (result.code, result.err) == (0, "")
    sections = parse_strict_json(result.out)["sections"]
    of_tables = {"evidence", "direct_path", "first_mlp", "alignment", "tokens"}
    assert of_tables <= {name for name in sections if sections[name]["found"]}
    for name in RUNNING:
        assert sections[name]["left_out"] == {"untied": "needs a text; give --text"}
    assert sections["direct_path"]["found"]["untied"]["answer"].startswith("two tables can score")
    alignment = {q["name"]: q for q in sections["alignment"]["found"]["untied"]["quantities"]}
    assert alignment["after the best rotation"]["why"].startswith(
        "tokens that the map was fitted on"
    )  # no token is held out


@pytest.mark.slow
def test_inspect_of_two_models_prints_text_and_writes_page_and_json(run_inspect, tmp_path):
    options = ["-t", "text.txt", "--tokens", "new, york", "--length", "16", "--windows", "40", "--lens-steps", "20"]
    result = run_inspect("tied", "untied", *options, "--samples", "100", "--out", "seen")
    assert result.code == 0, result.err
    assert result.err == "page: seen/report.html\n"
    record = json.loads((tmp_path / "seen/inspection.json").read_text())
    for name in ("direct_path", "first_mlp", "tokens", *RUNNING):
        assert set(record["sections"][name]["found"]) == {"tied", "untied"}, record["sections"][name]["left_out"]
    assert set(record["sections"]["which_end"]["found"]) == {"tied"}
    page = (tmp_path / "seen/report.html").read_text()
    for title in ("Without layers, does the model know", "After which layer can the prediction be read"):
        assert title in result.out
        assert title in page
    advice = "A finished model cannot show which choice is better; `tiewise compare` trains both on your text."
    assert advice in " ".join(result.out.split())
    check_figures_in_browser(tmp_path / "seen/report.html")
    assert "new → york" in {q["name"] for q in record["sections"]["direct_path"]["found"]["tied"]["quantities"]}


def test_inspect_measures_loss_by_number_of_applications_of_shared_layer(run_inspect, tmp_path):
    model = LlamaForCausalLM.from_pretrained(tmp_path / "untied")
    share_layers(model, "all")
    model.save_pretrained(tmp_path / "shared")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "untied" / name, tmp_path / "shared")
    options = ["-t", "text.txt", "--only", "applications", "--length", "16", "--windows", "10", "--out", "seen"]
    result = run_inspect("shared", "untied", *options)
    assert result.code == 0, result.err
    assert "nll of 150 next tokens in 10 windows" in " ".join(result.out.split())
    section = json.loads((tmp_path / "seen/inspection.json").read_text())["sections"]["applications"]
    assert [curve["x"] for curve in section["found"]["shared"]["curves"]] == [list(range(1, 25))] * 3
    assert "every layer has parameters of its own" in section["left_out"]["untied"]
    page = (tmp_path / "seen/report.html").read_text()
    assert "Loss by how often the block is applied" in page


def check_figures_in_browser(path):
    """Check that a browser draws every figure of the page without errors and without network requests."""
    if BROWSER is None:
        return
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        with Visit(chromium, path) as visit:
            visit.open_all()
            plots = visit.page.locator(".plot").count()
            assert plots > 10
            assert visit.page.locator(".plot .chart").count() == plots
            visit.make_interactive(plots - 1)
            assert visit.said == []
            assert visit.asked == [path.as_uri()]
        chromium.close()


def test_inspect_refuses_only_evidence_before_it_reads_any_model(run_inspect):
    assert_refused(run_inspect("nowhere", "--only", "tokens,evidence"), "evidence is drawn from them")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "nowhere: no such file or folder; give a checkpoint folder"),
        (["tied", "--only", "path"], "there is no section 'path'; sections are alignment"),
        (["tied", "--only", "lens"], "needs a text; give --text"),
        (["tied", "-t", "text.txt", "--length=16", "--only=applications"], "every layer has parameters of its own"),
        (["tied", "--tokens", "new"], "is no pair; write two tokens"),
        (["tied", "--tokens", "new, nowhere"], "nowhere is not one token of this vocabulary"),
        (["tied", "-t", "nowhere.txt"], "no file or folder 'nowhere.txt'; check the path"),
        (["tied", "-t", "short.txt"], "the text has 6 tokens, 10 windows of 128 need 1,280; give a longer text"),
        (["tied", "--held-out", "0.7"], "--held-out 0.7; use a share from 0 to 0.5"),
        (["tied", "--out", "text.txt"], "text.txt is a file; choose another --out"),
        (["tied", "tied", "untied"], "unexpected argument: untied; see "),
        (["empty"], "empty: no safetensors that can be read"),
        (["headless"], "headless: a model without an output head"),
    ],
)
def test_inspect_refuses_unusable_input_with_one_line_and_writes_nothing(run_inspect, tree, tmp_path, arguments, line):
    (tmp_path / "short.txt").write_text("new york san diego a")
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "headless", architectures=["LlamaModel"])
    before = tree()
    assert_refused(run_inspect(*arguments), line)
    assert tree() == before


def test_inspect_reads_stdin_for_two_models_and_reports_null_interval_of_one_batch(run_inspect, models):
    options = ["-t", "-", "--windows", "8", "--length", "16", "--only", "gradients", "--json"]
    result = run_inspect("tied", "untied", *options, stdin=(models / "text.txt").read_bytes())
    assert (result.code, result.err) == (0, "")
    results = parse_strict_json(result.out)["sections"]["gradients"]["found"]
    assert results.keys() == {"tied", "untied"}
    for model in results.values():
        share, *others = model["quantities"]
        assert (share["n"], share["low"], 0 < share["value"] < 1) == (1, None, True)
        assert [q["n"] for q in others if q["name"] == "loss"] == [8 * 15]  # each window predicts 15 tokens


def test_inspect_omits_sections_and_tokens_with_nan_values(run_inspect, tmp_path):
    path = tmp_path / "untied/model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][5] = np.nan
    save_file(tensors, path, {"format": "pt"})
    result = run_inspect("untied", "-t", "text.txt", "--length", "16", "--lens-steps", "20", "--json")
    assert result.code == 0, result.err
    sections = json.loads(result.out)["sections"]
    for name in ("direct_path", "first_mlp", "tokens", *RUNNING):
        assert sections[name]["found"] == {}
        assert "number" in sections[name]["left_out"]["untied"]
    left_out = {q["name"]: q["value"] for q in sections["alignment"]["found"]["untied"]["quantities"]}
    assert left_out["tokens left out"] == 1


@pytest.mark.parametrize("where", ["measure_sections", "open_models"])
def test_interrupted_inspect_exits_130_and_writes_nothing(run_inspect, tmp_path, monkeypatch, where):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"tiewise.inspection.inspection.{where}", interrupted)
    result = run_inspect("tied", "--out", "seen")
    assert (result.code, result.out, result.err) == (130, "", "tiewise: interrupted; nothing was written\n")
    assert not (tmp_path / "seen").exists()


def test_inspect_refuses_unwritable_out_before_it_measures(run_inspect, tmp_path, monkeypatch):
    monkeypatch.setattr("tiewise.inspection.inspection.measure_sections", lambda *_: pytest.fail("it was measured"))
    assert_refused(run_inspect("tied", "--out", "text.txt/seen"), "text.txt is a file; choose another --out")

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    line = f"cannot write in {tmp_path}: Read-only file system; mount it for writing, or choose another --out"
    assert_refused(run_inspect("tied", "--out", "a/b"), line)


def test_inspect_replaces_earlier_result_only_with_overwrite(run_inspect, tree, tmp_path):
    options = ["--only", "direct_path", "--samples", "50", "--out", "seen"]
    assert run_inspect("untied", *options).code == 0
    before = tree()
    assert_refused(run_inspect("tied", *options), "seen holds an inspection already; add --overwrite to replace it")
    assert tree() == before
    assert run_inspect("tied", *options, "--overwrite").code == 0
    assert set(json.loads((tmp_path / "seen/inspection.json").read_text())["subjects"]) == {"tied"}
    (tmp_path / "seen/inspection.json").unlink()  # like the report of a comparison
    assert_refused(run_inspect("tied", *options, "--overwrite"), "seen/report.html is no inspection of tiewise")
    (tmp_path / "other/inspection.json").mkdir(parents=True)
    assert_refused(run_inspect("tied", *options[:-1], "other"), "cannot write other/inspection.json")


def test_last_line_of_inspect_names_options_for_tables_and_page(run_inspect):
    result = run_inspect("untied", "--samples=100").out
    assert result.splitlines()[-1].strip() == "--full prints every table; --out DIR writes a page with figures."
    result = run_inspect("untied", "--samples=100", "--out=page").out
    assert "--out DIR" not in result
    assert result.splitlines()[-1].strip() == "--full prints every table; the page has them, with figures."
