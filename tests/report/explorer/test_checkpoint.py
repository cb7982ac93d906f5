"""Test the checkpoint page by keyboard, drag and drop, and words; test `tiewise explore CKPT` against Python."""

import ast
import json
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.report.explorer.dropping import drop
from tests.report.explorer.test_page import CONTRASTS

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.audit_view import counted_findings, summary_rows
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError, DataError, RunError
from tiewise.inspection.sections.direct_path import direct_path_of
from tiewise.report.explorer.embedded import MOST_BYTES, MOST_ROWS, embedded
from tiewise.report.explorer.page import explore
from tiewise.training.data.tokenizer import make_tokenizer

from tiny_checkpoints import llama, llama_config, table, write_checkpoint  # isort: skip - see dropping.py

V = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of an untied Llama whose tokens are bytes."""
    path = llama(tmp_path_factory.mktemp("folder") / "my model", False, rows=V, config={"rms_norm_eps": 1e-5})
    make_tokenizer("bytes").save_pretrained(path)
    return path


def score_words(page, words):
    page.locator("#words").fill(words)
    page.evaluate("document.getElementById('copy-issue')?.remove()")
    page.locator("#words").press("Enter")
    page.locator("#copy-issue").wait_for()
    return page.evaluate("dropped.result")


def test_page_opens_and_scores_a_checkpoint_by_keyboard(visit, folder):
    page = visit("at=checkpoint").page
    page.on("filechooser", lambda chooser: chooser.set_files(folder))
    page.get_by_role("button", name="Choose a folder").focus()
    page.keyboard.press("Enter")
    page.locator("#copy-issue").wait_for()
    assert page.locator("#status").inner_text() == "Scores are drawn."
    for _ in range(9):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "words":
            break
    page.keyboard.press("Control+a")
    page.keyboard.type("p, q, r")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Direct path of all words").wait_for()
    assert "words=p%2C+q%2C+r" in page.url.replace(",", "%2C")


def drag(page, path):
    """Drag a file or folder onto the page with the browser's own drag and drop."""
    box = page.locator(".drop").bounding_box()
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    devtools = page.context.new_cdp_session(page)
    for step in ("dragEnter", "dragOver", "drop"):
        at = {"type": step, "x": box["x"] + 20, "y": box["y"] + 20, "data": data}
        devtools.send("Input.dispatchDragEvent", at)
    page.locator("#tensors, #refused").first.wait_for()


def test_page_opened_from_disk_accepts_a_dragged_folder_or_file(visit, folder):
    page = visit("at=checkpoint").page
    drag(page, folder)
    page.get_by_text("Two tensors that differ, first in row 0: untied.").wait_for()
    assert page.evaluate("dropped.opened.name") == "my model"
    assert page.locator("#verdict").count() == 0
    assert "for a verdict, run tiewise check" in page.locator("#no-verdict").inner_text()
    assert page.locator(".command pre").first.inner_text() == "tiewise check 'my model'"
    page.evaluate("document.getElementById('tensors').remove()")
    drag(page, folder / "model.safetensors")
    page.get_by_role("heading", name="model.safetensors").wait_for()
    names = page.locator("#tensors tbody th").all_inner_texts()
    assert sorted(names) == sorted(load_file(folder / "model.safetensors"))


def test_page_reads_a_dragged_folder_without_file_system_handles(chromium, plain_page, folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=plain_page.parent)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = chromium.new_page()
        page.add_init_script("delete DataTransferItem.prototype.getAsFileSystemHandle")  # as in Firefox and Safari
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/{plain_page.name}#at=checkpoint")
        drag(page, folder)
        page.get_by_text("Two tensors that differ").wait_for()
        page.close()
        server.shutdown()


def test_page_refuses_words_that_are_not_single_tokens(dropper, folder):
    page = drop(dropper, folder)
    for words, message in (
        ("a, word", "“word” is not one token here"),
        ("", "Write one word"),
        ("#257", "“#257” is not"),
    ):
        page.locator("#words").fill(words)
        page.locator("#words").press("Enter")
        assert message in page.locator("[id^=help]").inner_text()
        assert page.locator("#words").get_attribute("aria-invalid") == "true"
    assert len(score_words(page, "a")["ways"]) == 1


def test_commands_of_the_issue_report_reproduce_its_numbers(dropper, folder, tmp_path):
    page = drop(dropper, folder)
    result = score_words(page, "a, b")
    report = page.locator("#issue").input_value()
    assert "tiewise check 'my model'" in report
    assert "tiewise inspect 'my model' --only direct_path --tokens 'a, b'" in report
    (line,) = [line for line in report.splitlines() if line.startswith("python -c ")]
    run = subprocess.run(
        ["bash", "-c", line.replace("python", sys.executable, 1)], cwd=folder.parent, capture_output=True, text=True
    )
    assert [(way["score"], way["rank"]) for way in result["ways"]] == [
        (pytest.approx(score, abs=1e-12), rank) for score, rank in ast.literal_eval(run.stdout)
    ], run.stderr
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-issue").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == report


def test_embedded_checkpoint_shows_the_verdict_of_check_and_values_of_inspect(visit, folder, tmp_path):
    page = visit(path=explore(folder).write(tmp_path / "page.html")).page
    page.locator("#copy-issue").wait_for()
    audit = check(folder)
    verdict = page.locator("#verdict").inner_text()
    assert verdict.endswith(f"Two tables, one at each end; tiewise check: {counted_findings(audit)}")
    for finding, shown in zip(audit.findings, page.locator(".findings li").all(), strict=True):
        assert f"{finding.rule}, {finding.severity}: {finding.evidence}" in shown.inner_text()
        assert finding.repair.replace(str(folder), folder.name) in shown.inner_text()
    rows = page.locator("dl.said").inner_text()
    assert all(value.replace("  ", " ") in rows for _, value in summary_rows(audit))
    result = score_words(page, "a, b")
    quantities = {q.name: q for q in direct_path_of(open_folder(folder), [("a", "b")]).quantities}
    for name, way in zip(("a → b", "b → a"), result["ways"], strict=True):
        assert way["logit"] == pytest.approx(quantities[name].value, abs=1e-6)
        assert np.exp(way["log"]) == pytest.approx(quantities[f"p({name})"].value, rel=1e-6)
        assert quantities[f"p({name})"].why == f"rank {way['modelRank']:,}"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_opened_checkpoint_fits_the_window_and_meets_wcag_aa_contrast(visit, folder, tmp_path, width, scheme):
    embedding = explore(folder).write(tmp_path / "page.html")
    page = visit(path=embedding, width=width, scheme=scheme).page
    for ready in ("#verdict", "#no-verdict"):
        page.locator(ready).wait_for()
        page.locator("#copy-issue").wait_for()
        page.evaluate("document.querySelectorAll('#checkpoint details').forEach(one => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CONTRASTS) == []
        page.set_input_files("#files", folder / "model.safetensors")


@pytest.mark.parametrize(
    ("made", "sentence", "choice"),
    [
        ({"tied": True}, "One table at both ends", ("model.embed_tokens.weight", "model.embed_tokens.weight")),
        ({"tied": False}, "Two tables, one at each end", ("model.embed_tokens.weight", "lm_head.weight")),
        (
            {"tied": True, "head": table()},
            "One table at both ends",
            ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ),
    ],
)
def test_embedded_verdict_follows_the_bytes_of_both_tables(tmp_path, made, sentence, choice):
    path = llama(tmp_path / "a", **made)
    record = embedded(path)
    assert record["verdict"]["sentence"].startswith(sentence)
    assert (record["choice"]["input"], record["choice"]["output"]) == choice


def test_explore_embeds_checkpoints_without_a_head_or_without_tables(visit, tmp_path):
    """The page shows only rows; without tables, it says that there is none to choose."""
    config = llama_config() | {"architectures": ["LlamaForSequenceClassification"]}
    path = write_checkpoint(tmp_path / "body", config, {"model.embed_tokens.weight": table()})
    record = embedded(path)
    assert record["choice"] == {"input": "model.embed_tokens.weight", "output": ""}
    assert record["verdict"]["sentence"].startswith("An input table, and no output head")
    page = visit(path=explore(path).write(tmp_path / "page.html")).page
    page.get_by_role("heading", name="Nearest rows at the input").wait_for()
    assert page.get_by_role("heading", name="Scores both ways").count() == 0
    path = write_checkpoint(tmp_path / "none", None, {"x": np.ones(3, np.float32)})
    assert embedded(path)["choice"] is None
    page = visit(path=explore(path).write(tmp_path / "empty.html")).page
    page.get_by_text("None of its tensors is a matrix: there is no table to choose.").wait_for()


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory):
    """Return a Llama with more rows than a page embeds."""
    return llama(tmp_path_factory.mktemp("long") / "long", False, rows=6000, width=32)


def test_partly_embedded_checkpoint_is_labelled_and_scored_like_a_dropped_one(visit, large_llama, tmp_path):
    other = llama(tmp_path / "long", False, rows=50, width=32)
    page_file = explore(large_llama, words=["#5999", "#7"]).write(tmp_path / "page.html")
    page = visit(path=page_file).page
    page.locator("#copy-issue").wait_for()
    assert "This page holds 4,096 of 6,000 rows of long" in page.locator(".banner").inner_text()
    assert "and those asked for" in page.locator(".banner").inner_text()
    part = score_words(page, "#5999, #7")
    page.locator("#words").fill("#5998")
    page.locator("#words").press("Enter")
    assert "of those that this page holds" in page.locator("[id^=help]").inner_text()
    verdict = page.evaluate("dropped.opened.verdict")
    assert verdict["sentence"].startswith("Two tables")
    page.set_input_files("#folder", other)  # same name, other tensors: the embedded verdict does not apply
    page.locator("#no-verdict").wait_for()
    page.locator("#copy-issue").wait_for()
    assert page.evaluate("[dropped.opened.verdict, dropped.opened.path]") == [None, None]
    page.set_input_files("#folder", large_llama)
    page.locator("#verdict").wait_for()
    page.locator("#copy-issue").wait_for()
    assert page.evaluate("dropped.opened.verdict") == verdict
    whole = score_words(page, "#5999, #7")
    tensors = load_file(large_llama / "model.safetensors")
    first, second = tensors["model.embed_tokens.weight"].double(), tensors["lm_head.weight"].double()
    for one, other, (a, b) in zip(part["ways"], whole["ways"], ((5999, 7), (7, 5999)), strict=True):
        assert one["score"] == pytest.approx(other["score"]) == pytest.approx((first[a] @ second[b]).item())
        assert one["logit"] == pytest.approx(other["logit"])
        held = [*range(4095), 5999]  # row 7 is among the first
        assert one["rank"] == 1 + (second[held] @ first[a] > first[a] @ second[b] + 1e-9).sum().item()
        assert other["rank"] == 1 + (second @ first[a] > first[a] @ second[b] + 1e-9).sum().item()


def test_embedded_stays_within_its_limits_of_rows_and_bytes(tmp_path, large_llama, folder):
    record = embedded(large_llama, ["#5999"])
    assert len(record["ids"]) == MOST_ROWS
    assert record["ids"][-1] == 5999
    wide = embedded(llama(tmp_path, False, rows=4000, width=1024), ["#3999"])
    assert sum(len(tensor.get("data", "")) * 3 / 4 for tensor in wide["tensors"]) <= MOST_BYTES
    assert 2400 < len(wide["ids"]) < 4000
    assert embedded(folder)["note"] == ""  # every row is embedded
    assert embedded(folder)["texts"][ord("a")] is not None
    json.dumps(record, allow_nan=False)


def test_embedded_stores_frequency_ranks_and_page_plots_row_lengths_by_rank(visit, tmp_path, folder):
    text = tmp_path / "text.txt"
    text.write_text("zzzzzz qqqq aa", encoding="utf-8")
    record = embedded(folder, (), [str(text)])
    ranks = dict(zip(record["ids"], record["ranks"], strict=True))
    # a and the space occur twice; the space ranks first
    assert [ranks[ord(letter)] for letter in "zq a"] == [
        1,
        2,
        3,
        4,
    ]
    assert ranks[ord("b")] == 0

    page_file = explore(folder, texts=[str(text)]).write(tmp_path / "page.html")
    page = visit(path=page_file).page
    page.locator("#copy-issue").wait_for()
    score_words(page, "q, b")
    panel = page.locator("figure", has_text="Lengths of rows")
    assert "frequency rank (logarithmic)" in panel.inner_text()
    panel.get_by_text("Data").click()
    cells = [row.locator("td").all_inner_texts() for row in panel.locator("tbody tr").all()]
    lengths = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double().norm(dim=1)
    assert [cell[0] for cell in cells[-2:]] == ["2", "not in the text"]
    assert float(cells[-2][1]) == pytest.approx(lengths[ord("q")].item(), abs=5e-5)
    bands = page.evaluate("dropped.result.bands.input")
    assert [band["token"] for band in bands] == sorted(band["token"] for band in bands)
    by_rank = [lengths[ord(letter)].item() for letter in "zq a"]
    assert [band["middle"] for band in bands][:3] == pytest.approx(by_rank[:3])


def test_embedded_prefers_the_most_frequent_tokens_to_the_first_rows(large_llama, tmp_path):
    make_tokenizer("bytes").save_pretrained(large_llama)
    text = tmp_path / "text.txt"
    text.write_text("hello", encoding="utf-8")
    record = embedded(large_llama, ["#5999"], [str(text)])
    assert len(record["ids"]) == MOST_ROWS
    # four letters and the end of the document
    assert "the most frequent of the 5 tokens that the text has" in record["note"]
    assert {5999, *map(ord, "hello")} <= set(record["ids"])


def test_explore_refuses_unreadable_checkpoints_words_and_texts(tmp_path, folder):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for kind, message, shown, more in (
        (CheckpointError, "pickled weights alone", [tmp_path], {}),
        (CheckpointError, "no such file", [tmp_path / "nowhere"], {}),
        (DataError, "token 257", [folder], {"words": ["#257"]}),
        (RunError, "text needs a checkpoint, whose tokens are counted in the text", [], {"texts": ["builtin"]}),
        (DataError, "nowhere", [folder], {"texts": [str(tmp_path / "nowhere.txt")]}),
        (DataError, "holds no tokenizer", [llama(tmp_path / "bare", False, rows=V)], {"texts": ["builtin"]}),
    ):
        with pytest.raises(kind, match=message):
            explore(*shown, **more)
