"""Your checkpoint, as a person would use it: keyboard, drop, words, report; and what `tiewise explore CKPT` embeds."""

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
    """An untied Llama whose tokens are bytes."""
    path = llama(tmp_path_factory.mktemp("folder") / "my model", False, rows=V, config={"rms_norm_eps": 1e-5})
    make_tokenizer("bytes").save_pretrained(path)
    return path


def ask(page, words):
    page.locator("#words").fill(words)
    page.evaluate("document.getElementById('copy-issue')?.remove()")
    page.locator("#words").press("Enter")
    page.locator("#copy-issue").wait_for()
    return page.evaluate("dropped.result")


def test_with_the_keyboard_alone(visit, folder):
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
    """Drag a file or folder from the desktop onto the page, by the browser's own drag and drop."""
    box = page.locator(".drop").bounding_box()
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    devtools = page.context.new_cdp_session(page)
    for step in ("dragEnter", "dragOver", "drop"):
        at = {"type": step, "x": box["x"] + 20, "y": box["y"] + 20, "data": data}
        devtools.send("Input.dispatchDragEvent", at)
    page.locator("#tensors, #refused").first.wait_for()


def test_a_folder_and_a_file_dragged_onto_the_page_that_was_opened_from_the_disk(visit, folder):
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


def test_a_folder_dragged_where_folders_are_read_by_entry(chromium, plain_page, folder):
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


def test_words_that_are_no_tokens_are_named_with_some_that_are(dropper, folder):
    page = drop(dropper, folder)
    for words, said in (("a, word", "“word” is not one token here"), ("", "Write one word"), ("#257", "“#257” is not")):
        page.locator("#words").fill(words)
        page.locator("#words").press("Enter")
        assert said in page.locator("[id^=help]").inner_text()
        assert page.locator("#words").get_attribute("aria-invalid") == "true"
    assert len(ask(page, "a")["ways"]) == 1


def test_every_command_of_the_report_gives_the_numbers_beside_it(dropper, folder, tmp_path):
    page = drop(dropper, folder)
    found = ask(page, "a, b")
    report = page.locator("#issue").input_value()
    assert "tiewise check 'my model'" in report
    assert "tiewise inspect 'my model' --only direct_path --tokens 'a, b'" in report
    (line,) = [line for line in report.splitlines() if line.startswith("python -c ")]
    run = subprocess.run(
        ["bash", "-c", line.replace("python", sys.executable, 1)], cwd=folder.parent, capture_output=True, text=True
    )
    assert [(way["score"], way["rank"]) for way in found["ways"]] == [
        (pytest.approx(score, abs=1e-12), rank) for score, rank in ast.literal_eval(run.stdout)
    ], run.stderr
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy-issue").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == report


def test_an_embedded_checkpoint_has_the_verdict_of_check_and_the_figures_of_inspect(visit, folder, tmp_path):
    page = visit(path=explore(folder).write(tmp_path / "page.html")).page
    page.locator("#copy-issue").wait_for()
    audit = check(folder)
    said = page.locator("#verdict").inner_text()
    assert said.endswith(f"Two tables, one at each end; tiewise check: {counted_findings(audit)}")
    for finding, shown in zip(audit.findings, page.locator(".findings li").all(), strict=True):
        assert f"{finding.rule}, {finding.severity}: {finding.evidence}" in shown.inner_text()
        assert finding.repair.replace(str(folder), folder.name) in shown.inner_text()
    rows = page.locator("dl.said").inner_text()
    assert all(value.replace("  ", " ") in rows for _, value in summary_rows(audit))
    found = ask(page, "a, b")
    told = {q.name: q for q in direct_path_of(open_folder(folder), [("a", "b")]).quantities}
    for name, way in zip(("a → b", "b → a"), found["ways"], strict=True):
        assert way["logit"] == pytest.approx(told[name].value, abs=1e-6)
        assert np.exp(way["log"]) == pytest.approx(told[f"p({name})"].value, rel=1e-6)
        assert told[f"p({name})"].why == f"rank {way['modelRank']:,}"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_an_opened_checkpoint_fits_and_has_the_contrast_that_wcag_aa_asks_for(visit, folder, tmp_path, width, scheme):
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
def test_what_is_said_of_the_tables_follows_their_bytes(tmp_path, made, sentence, choice):
    path = llama(tmp_path / "a", **made)
    found = embedded(path)
    assert found["verdict"]["sentence"].startswith(sentence)
    assert (found["choice"]["input"], found["choice"]["output"]) == choice


def test_a_checkpoint_without_a_head_or_without_tables_is_embedded_too(visit, tmp_path):
    """The page shows rows alone, and where nothing is embedded it says so."""
    config = llama_config() | {"architectures": ["LlamaForSequenceClassification"]}
    path = write_checkpoint(tmp_path / "body", config, {"model.embed_tokens.weight": table()})
    found = embedded(path)
    assert found["choice"] == {"input": "model.embed_tokens.weight", "output": ""}
    assert found["verdict"]["sentence"].startswith("An input table, and no output head")
    page = visit(path=explore(path).write(tmp_path / "page.html")).page
    page.get_by_role("heading", name="Nearest rows at the input").wait_for()
    assert page.get_by_role("heading", name="Scores both ways").count() == 0
    path = write_checkpoint(tmp_path / "none", None, {"x": np.ones(3, np.float32)})
    assert embedded(path)["choice"] is None
    page = visit(path=explore(path).write(tmp_path / "empty.html")).page
    page.get_by_text("None of its tensors is a matrix: there is no table to choose.").wait_for()


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A Llama with more rows than a page holds."""
    return llama(tmp_path_factory.mktemp("long") / "long", False, rows=6000, width=32)


def test_what_is_embedded_says_so_and_is_scored_as_if_dropped(visit, long, tmp_path):
    other = llama(tmp_path / "long", False, rows=50, width=32)
    page_file = explore(long, words=["#5999", "#7"]).write(tmp_path / "page.html")
    page = visit(path=page_file).page
    page.locator("#copy-issue").wait_for()
    assert "This page holds 4,096 of 6,000 rows of long" in page.locator(".banner").inner_text()
    assert "and those asked for" in page.locator(".banner").inner_text()
    part = ask(page, "#5999, #7")
    page.locator("#words").fill("#5998")
    page.locator("#words").press("Enter")
    assert "of those that this page holds" in page.locator("[id^=help]").inner_text()
    verdict = page.evaluate("dropped.opened.verdict")
    assert verdict["sentence"].startswith("Two tables")
    page.set_input_files("#folder", other)  # of the same name, with other tensors: nothing is known of it
    page.locator("#no-verdict").wait_for()
    page.locator("#copy-issue").wait_for()
    assert page.evaluate("[dropped.opened.verdict, dropped.opened.path]") == [None, None]
    page.set_input_files("#folder", long)
    page.locator("#verdict").wait_for()
    page.locator("#copy-issue").wait_for()
    assert page.evaluate("dropped.opened.verdict") == verdict
    whole = ask(page, "#5999, #7")
    tensors = load_file(long / "model.safetensors")
    first, second = tensors["model.embed_tokens.weight"].double(), tensors["lm_head.weight"].double()
    for one, other, (a, b) in zip(part["ways"], whole["ways"], ((5999, 7), (7, 5999)), strict=True):
        assert one["score"] == pytest.approx(other["score"]) == pytest.approx((first[a] @ second[b]).item())
        assert one["logit"] == pytest.approx(other["logit"])
        held = [*range(4095), 5999]  # 7 is one of the first
        assert one["rank"] == 1 + (second[held] @ first[a] > first[a] @ second[b] + 1e-9).sum().item()
        assert other["rank"] == 1 + (second @ first[a] > first[a] @ second[b] + 1e-9).sum().item()


def test_no_more_is_embedded_than_is_promised(tmp_path, long, folder):
    told = embedded(long, ["#5999"])
    assert len(told["ids"]) == MOST_ROWS
    assert told["ids"][-1] == 5999
    wide = embedded(llama(tmp_path, False, rows=4000, width=1024), ["#3999"])
    assert sum(len(tensor.get("data", "")) * 3 / 4 for tensor in wide["tensors"]) <= MOST_BYTES
    assert 2400 < len(wide["ids"]) < 4000
    assert embedded(folder)["note"] == ""  # all of it is there
    assert embedded(folder)["texts"][ord("a")] is not None
    json.dumps(told, allow_nan=False)


def test_rows_of_a_text_are_held_and_their_lengths_stand_against_their_ranks(visit, tmp_path, folder):
    text = tmp_path / "text.txt"
    text.write_text("zzzzzz qqqq aa", encoding="utf-8")
    told = embedded(folder, (), [str(text)])
    ranks = dict(zip(told["ids"], told["ranks"], strict=True))
    assert [ranks[ord(letter)] for letter in "zq a"] == [1, 2, 3, 4]  # a and the space occur twice, the space is first
    assert ranks[ord("b")] == 0

    page_file = explore(folder, texts=[str(text)]).write(tmp_path / "page.html")
    page = visit(path=page_file).page
    page.locator("#copy-issue").wait_for()
    ask(page, "q, b")
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


def test_the_most_frequent_tokens_come_before_the_first(long, tmp_path):
    make_tokenizer("bytes").save_pretrained(long)
    text = tmp_path / "text.txt"
    text.write_text("hello", encoding="utf-8")
    told = embedded(long, ["#5999"], [str(text)])
    assert len(told["ids"]) == MOST_ROWS
    assert "the most frequent of the 5 tokens that the text has" in told["note"]  # and the end of the document
    assert {5999, *map(ord, "hello")} <= set(told["ids"])


def test_what_cannot_be_embedded_or_counted_is_refused(tmp_path, folder):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for kind, said, shown, more in (
        (CheckpointError, "pickled weights alone", [tmp_path], {}),
        (CheckpointError, "no such file", [tmp_path / "nowhere"], {}),
        (DataError, "token 257", [folder], {"words": ["#257"]}),
        (RunError, "a text to count, and no checkpoint", [], {"texts": ["builtin"]}),
        (DataError, "nowhere", [folder], {"texts": [str(tmp_path / "nowhere.txt")]}),
        (DataError, "holds no tokenizer", [llama(tmp_path / "bare", False, rows=V)], {"texts": ["builtin"]}),
    ):
        with pytest.raises(kind, match=said):
            explore(*shown, **more)
