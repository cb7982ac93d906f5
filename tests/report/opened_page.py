"""Helpers that read pages as text, or in Chromium from disk and offline."""

import os
import shutil
from html.parser import HTMLParser

import pytest

from tiewise.report.report_page import PageSection, ReportPage

EVIL = "</script><script>alert('x')</script><img src=http://example.com/x onerror=alert(1)> ]]> $style &amp;"


class Page(HTMLParser):
    """Parsed page: its elements, the text of its body, and its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.scripts, self.inside = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.inside[-1:]:
            self.scripts[-1] += data
        elif "style" not in self.inside[-1:]:
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def render_page(*sections, **more):
    """Render a page of these sections."""
    first = PageSection("Results")
    given = {"answer": (), "results": first, "sections": sections, **more}
    return ReportPage(command_name="test", title="t", subject="s", heading="h", command="c", **given).render()


BROWSER = os.environ.get("TIEWISE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on this machine: install it, or name one in TIEWISE_CHROMIUM"
)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser; it is in [dev]")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


LAST_CHART = ".chart >> nth=-1"  # the last static figure of a report


class Visit:
    """Opened page with its console messages (`said`) and requested addresses (`asked`)."""

    def __init__(self, browser, path, width=1280, scheme="light", ready=LAST_CHART, at=""):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri() + at)
        self.page.locator(ready).first.wait_for(state="attached")  # it may be in a closed <details>

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def style(self, selector, name):
        return self.page.eval_on_selector(selector, f"e => getComputedStyle(e).{name}")

    def open_all(self):
        """Open every folded part, also those inside another."""
        while self.page.locator("details:not([open])").count():
            self.page.eval_on_selector_all("details:not([open])", "all => all.forEach(one => { one.open = true; })")
            self.page.wait_for_timeout(100)  # the event that fills them comes later

    def make_interactive(self, index):
        """Start plotly for a figure, and wait until it is drawn."""
        self.page.locator(f".start[data-figure='{index}']").click()
        self.page.locator(f"#plot-{index} .main-svg").first.wait_for(timeout=60_000)
        self.page.locator(f".start[data-figure='{index}']").wait_for(state="detached", timeout=60_000)

    def colours(self):
        """Return the colours of background, text, figure text and the end of a heat map."""
        return (
            self.style("body", "backgroundColor"),
            self.style(".finding", "color"),
            self.style(".chart .tick", "fill"),
            self.style(".maps .cells", "fill"),
        )
