"""The page in a notebook: a frame that reaches nothing outside of it, a picture where no script runs, live models."""

import re
from xml.dom.minidom import parseString

import pytest
from tests.boundary.tiny_models import build
from tests.report.comparison_sample import sample_comparison
from tests.report.explorer.test_compared_runs import write

import tiewise
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.report.explorer.embedded import embedded, live
from tiewise.report.explorer.page import explore


@pytest.fixture
def cell(chromium, tmp_path):
    """Open a cell's output, as notebooks put it into a page: the notebook and the frame in it, which may say nothing
    and ask for nothing."""
    context, path = chromium.new_context(offline=True), tmp_path / "notebook.html"
    said, asked = [], []

    def opened(html):
        path.write_text(f"<!doctype html><body><p>Out</p>{html}", encoding="utf-8")
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page, page.frame_locator("iframe")

    yield opened
    context.close()
    assert [word for word in said if not word.startswith("Blocked script execution")] == []  # where a test forbids it
    assert all(url.startswith(("file:", "blob:", "about:srcdoc")) for url in asked)


def test_the_frame_works_and_can_reach_nothing_of_the_notebook(cell):
    page, frame = cell(explore()._repr_mimebundle_()["text/html"])
    frame.locator("#tab-gradients").click()
    frame.get_by_role("button", name="One step").click()
    assert frame.locator(".finding").inner_text().startswith("Step 1:")  # kept without an address to keep it in
    inside = page.frames[1]
    assert inside.evaluate("self.origin") == "null"
    outside = inside.evaluate("(() => { try { return parent.document.title } catch (e) { return e.name } })()")
    assert outside == "SecurityError"
    worker = "new Worker(URL.createObjectURL(new Blob(['postMessage(7)'], { type: 'text/javascript' })))"
    assert inside.evaluate(f"new Promise(done => {{ {worker}.onmessage = ({{ data }}) => done(data) }})") == 7


def test_a_live_model_answers_in_the_frame(cell):
    model = build("llama")
    _, frame = cell(tiewise.explore(model)._repr_mimebundle_()["text/html"])
    assert "One table at both ends; tiewise check: " in frame.locator("#verdict").inner_text()
    box = frame.get_by_role("textbox").first
    box.fill("#5, #7")
    box.press("Enter")
    row = model.get_input_embeddings().weight.detach().double()
    frame.get_by_text("#5 → #7").first.wait_for()
    assert f"{(row[5] @ row[7]).item():.4f}".replace("-", "−") in frame.locator("#checkpoint").inner_text()


def test_where_no_script_runs_there_is_a_picture(cell, tmp_path):
    shown = explore(write(tmp_path / "run", sample_comparison()))
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/svg+xml", "text/plain"}
    _, frame = cell(re.sub(r'sandbox="[^"]*"', 'sandbox=""', bundle["text/html"]))
    assert frame.locator("noscript svg").is_visible()
    assert "validation loss is higher (worse) for factored:64" in frame.locator("noscript svg").text_content()
    for made in (shown, explore(), tiewise.explore(build("gpt2"))):
        root = parseString(made.picture).documentElement
        assert root.tagName == "svg"
        assert not root.getElementsByTagName("script")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_live_model_shows_what_its_folder_would(tmp_path, name, tied):
    model = build(name, tied=tied)
    model.save_pretrained(tmp_path)
    shown, saved = live(model), embedded(tmp_path)
    for of in (shown, saved):
        name = of.pop("name")
        del of["count"], of["verdict"]["rows"]  # tensors of layers are not looked at, nor is their type
        for finding in of["verdict"]["findings"]:
            finding["repair"] = finding["repair"].replace(name, "NAME")
    assert shown == saved


def test_a_boundary_that_tables_do_not_show_and_what_is_no_model_are_refused():
    model = build("llama")
    tiewise.install(model, "factored:4")
    with pytest.raises(UnsupportedError, match=r"more at its ends.*save_pretrained"):
        tiewise.explore(model)
    with pytest.raises(InstallError):
        tiewise.explore(model.model)
