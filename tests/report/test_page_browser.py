"""The page in a real browser, from disk and with the network off: it draws, it asks for nothing, its toggle works."""

import os
import shutil
from dataclasses import replace

import pytest
from tests.report.comparison_sample import ARMS, sample_comparison

from tiewise.inspection.evidence import Evidence, TieOrNot
from tiewise.report import faces, figures
from tiewise.report.page import write_report
from tiewise.report.sheet import Panel, Section, Sheet, table, write
from tiewise.training.results import DirectPath

BROWSER = os.environ.get("TIEWISE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
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


class Visit:
    """One opened page with everything it said and asked for."""

    def __init__(self, browser, path, width=1280, scheme="light"):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.locator(".plot").last.locator(".main-svg").first.wait_for()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def style(self, selector, name):
        return self.page.eval_on_selector(selector, f"e => getComputedStyle(e).{name}")

    def colours(self):
        """Background, text, figure text and the middle of a heat map's colours."""
        return (
            self.style("body", "backgroundColor"),
            self.style(".finding", "color"),
            self.style(".plot .xtick text", "fill"),
            self.page.evaluate("document.querySelector('.maps .plot')._fullLayout.coloraxis.colorscale[1][1]"),
        )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(sample_comparison(), tmp_path_factory.mktemp("report") / "report.html")


def test_opens_offline_with_every_figure_and_no_request_or_complaint(browser, report):
    with Visit(browser, report) as visit:
        plots = visit.page.locator(".plot")
        assert plots.count() == 11
        drawn = [plots.nth(i).locator(".main-svg").first.bounding_box() for i in range(11)]
        assert all(box["width"] > 200 and box["height"] > 100 for box in drawn)
        marks = "p => p.querySelectorAll('.scatterlayer .trace, .barlayer .trace, .heatmaplayer image').length"
        assert all(plots.nth(i).evaluate(marks) > 0 for i in range(11))
        assert visit.asked == [report.as_uri()]
        assert visit.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_system_and_the_first_press_of_the_toggle_works(browser, report, scheme):
    other = {"light": "dark", "dark": "light"}[scheme]
    with Visit(browser, report, scheme=scheme) as visit, Visit(browser, report, scheme=other) as elsewhere:
        toggle = visit.page.locator("#theme")
        before = visit.colours()
        assert toggle.inner_text() == f"Theme: {scheme}"
        assert toggle.get_attribute("aria-pressed") == str(scheme == "dark").lower()
        toggle.focus()
        visit.page.keyboard.press("Enter")
        after = visit.colours()
        assert toggle.inner_text() == f"Theme: {other}"
        assert after == elsewhere.colours()
        assert all(a != b for a, b in zip(before, after, strict=True))
        visit.page.keyboard.press("Space")
        assert visit.colours() == before
        assert visit.said == []


def _system_turns(page, scheme):
    """Change the system's theme, and wait for the frame after the one in which a page is told of it."""
    page.emulate_media(color_scheme=scheme)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_system_theme_may_change_while_the_page_is_open(browser, report):
    with Visit(browser, report, scheme="light") as visit:
        _system_turns(visit.page, "dark")
        assert visit.page.locator("html").get_attribute("data-theme") == "dark"
        visit.page.locator("#theme").click()  # now the reader has chosen
        _system_turns(visit.page, "light")
        _system_turns(visit.page, "dark")
        assert visit.page.locator("html").get_attribute("data-theme") == "light"


def test_never_wider_than_the_window_whatever_its_width(browser, report):
    with Visit(browser, report, width=1900) as visit:
        for width in (1280, 800, 400, 1900):
            visit.page.set_viewport_size({"width": width, "height": 900})
            last = visit.page.locator(".plot").last
            # plotly follows a resize after a pause of its own
            for _ in range(50):
                drawn, room = (last.locator(".main-svg").first.bounding_box(), last.bounding_box())
                if abs(drawn["width"] - room["width"]) < 1:
                    break
                visit.page.wait_for_timeout(50)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            rights = visit.page.eval_on_selector_all(
                ".main-svg", "all => all.map(e => e.getBoundingClientRect().right)"
            )
            assert max(rights) <= width


def evidence_page(folder):
    """A page with the table of an inspection's evidence, as long as it gets."""
    row = Evidence(
        "What must any symmetric direct path pay for the order of words?",
        "identity map, mean cosine of held-out rows",
        ", ".join(ARMS),
        *(-0.0213, -0.1234, 0.0567, 0.0, 0.0123),
        "one table",
        "above zero a step for one use helps the other; below zero they work against each other, as in any tied model "
        "where training comes to rest: there the two cancel",
        "gradients",
    )
    caption, found = "Evidence", faces.evidence(TieOrNot((row,) * 3, "no verdict"))
    panel = Panel(figures.held_out_loss(sample_comparison()), "A figure.", found)
    words = dict.fromkeys(("command_name", "title", "subject", "heading", "lead", "note", "command"), "")
    made = Sheet(**words, results=table(found, caption), sections=[Section("One", [panel])], contents=True)
    return write(made.render(), folder / "page.html", "--out")


def test_evidence_is_cut_at_no_width_and_a_phone_says_that_it_scrolls(browser, tmp_path):
    path, cut = evidence_page(tmp_path), "e => e.scrollWidth > e.clientWidth"
    with Visit(browser, path, width=2560) as visit:
        for width in (2560, 1920, 1400, 1200):
            visit.page.set_viewport_size({"width": width, "height": 900})
            assert not visit.page.eval_on_selector("[aria-label=Evidence]", cut)
            assert not visit.page.locator(".more").first.is_visible()
        visit.page.locator("nav a").click()
        assert visit.page.evaluate("location.hash") == "#section-0"
    with Visit(browser, path, width=390) as visit:
        assert visit.page.eval_on_selector("[aria-label=Evidence]", cut)
        visit.page.locator(".more").first.wait_for(state="visible")
        assert visit.page.locator(".modebar-container:visible").count() == 0  # nothing over the legend
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_data_tables_open_by_keyboard(browser, report):
    with Visit(browser, report) as visit:
        details = visit.page.locator("details").first
        details.locator("summary").focus()
        visit.page.keyboard.press("Enter")
        assert details.locator("table").is_visible()
        assert details.locator("tbody tr").count() == 6  # two arms, three measures


def test_the_command_can_be_copied(browser, report):
    with Visit(browser, report) as visit:
        visit.page.locator("#copy").click()
        assert visit.page.evaluate("getSelection().toString()") == sample_comparison().command
        visit.page.locator("#copy", has_text="Copied").or_(visit.page.locator("#copy", has_text="Selected")).wait_for()


def test_markup_in_tokens_and_command_is_shown_not_run(browser, tmp_path):
    evil = "<script>alert(1)</script>"
    image = "<img src=x onerror=alert(2)>"
    sample = sample_comparison()
    path = DirectPath(ARMS[0], [evil, image, "c"], [[0.0, 1, 2], [1, 0, 3], [2, 3, 0]])
    target = write_report(replace(sample, command=evil, direct_path=[path]), tmp_path / "report.html")
    with Visit(browser, target) as visit:
        assert visit.said == []
        assert visit.asked == [target.as_uri()]
        assert visit.page.locator("#command").inner_text() == evil
        ticks = visit.page.locator(".maps .ytick text").all_text_contents()
        assert ticks[:2] == [evil, image.replace(" ", "␣")]
