"""Test the page in a notebook: its sandboxed frame, its picture without scripts, and live models."""

import re
from xml.dom.minidom import parseString

import pytest
from tests.boundary.tiny_models import build
from tests.report.comparison_sample import sample_comparison
from tests.report.explorer.test_compared_runs import write_run

import tiewise
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.report.explorer.embedded import embedded, live
from tiewise.report.explorer.page import explore


@pytest.fixture
def open_output(chromium, tmp_path):
    """Return a function that opens a cell's output in a page: (notebook page, frame).

    Afterwards, fail if the page logged a message or requested anything external.
    """
    context, path = chromium.new_context(offline=True), tmp_path / "notebook.html"
    messages, requests = [], []

    def open_html(html):
        path.write_text(f"<!doctype html><body><p>Out</p>{html}", encoding="utf-8")
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page, page.frame_locator("iframe")

    yield open_html
    context.close()
    # a test blocks scripts on purpose
    assert [word for word in messages if not word.startswith("Blocked script execution")] == []
    assert all(url.startswith(("file:", "blob:", "about:srcdoc")) for url in requests)


def test_frame_works_and_cannot_reach_the_notebook(open_output):
    page, frame = open_output(explore()._repr_mimebundle_()["text/html"])
    frame.locator("#tab-gradients").click()
    frame.get_by_role("button", name="One step").click()
    assert frame.locator(".finding").inner_text().startswith("Step 1:")  # state works without an address bar
    inside = page.frames[1]
    assert inside.evaluate("self.origin") == "null"
    outside = inside.evaluate("(() => { try { return parent.document.title } catch (e) { return e.name } })()")
    assert outside == "SecurityError"
    worker = "new Worker(URL.createObjectURL(new Blob(['postMessage(7)'], { type: 'text/javascript' })))"
    assert inside.evaluate(f"new Promise(done => {{ {worker}.onmessage = ({{ data }}) => done(data) }})") == 7


def test_live_model_answers_words_in_the_frame(open_output):
    model = build("llama")
    _, frame = open_output(tiewise.explore(model)._repr_mimebundle_()["text/html"])
    assert "One table at both ends; tiewise check: " in frame.locator("#verdict").inner_text()
    box = frame.get_by_role("textbox").first
    box.fill("#5, #7")
    box.press("Enter")
    row = model.get_input_embeddings().weight.detach().double()
    frame.get_by_text("#5 → #7").first.wait_for()
    assert f"{(row[5] @ row[7]).item():.4f}".replace("-", "−") in frame.locator("#checkpoint").inner_text()


def test_notebook_shows_a_picture_if_scripts_are_blocked(open_output, tmp_path):
    shown = explore(write_run(tmp_path / "run", sample_comparison()))
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    _, frame = open_output(re.sub(r'sandbox="[^"]*"', 'sandbox=""', bundle["text/html"]))
    assert frame.locator("noscript svg").is_visible()
    assert "Undecided: no difference detected, nor equivalence" in frame.locator("noscript svg").text_content()
    for notebook_page in (shown, explore(), tiewise.explore(build("gpt2"))):
        root = parseString(notebook_page.picture).documentElement
        assert root.tagName == "svg"
        assert not root.getElementsByTagName("script")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("tied", [True, False])
def test_live_model_shows_the_same_as_its_saved_folder(tmp_path, name, tied):
    model = build(name, tied=tied)
    model.save_pretrained(tmp_path)
    shown, saved = live(model), embedded(tmp_path)
    for of in (shown, saved):
        name = of.pop("name")
        del of["count"], of["verdict"]["rows"]  # `live` skips the tensors of layers and their dtype
        for finding in of["verdict"]["findings"]:
            for key in ("repair", "where"):
                finding[key] = finding[key].replace(name, "NAME")
    assert shown == saved


def test_explore_refuses_a_factored_boundary_and_a_bare_backbone():
    model = build("llama")
    tiewise.install(model, "factored:4")
    with pytest.raises(UnsupportedError, match=r"more at its ends.*save_pretrained"):
        tiewise.explore(model)
    with pytest.raises(InstallError):
        tiewise.explore(model.model)
