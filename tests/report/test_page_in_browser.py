"""Test report pages in Chromium, from disk and offline: figures, requests, themes, widths and keyboard."""

from dataclasses import replace

import pytest
from tests.report.comparison_sample import ARMS, sample_comparison
from tests.report.opened_page import Visit, browser, pytestmark, render_page  # noqa: F401 - a fixture, and the skip

from tiewise.core.files import write_result
from tiewise.core.measurement import Listing
from tiewise.planning.plan import plan
from tiewise.report.comparison_page import write_report
from tiewise.report.comparison_panels import training_panels
from tiewise.report.plan_page import write_plan
from tiewise.report.report_page import PageSection
from tiewise.report.training_curves import VALIDATION
from tiewise.training.results import ArmDirectPath

# the longest table of an inspection's evidence
EVIDENCE = Listing(
    "Evidence",
    ["question", "measured", "model", "value [95 %]", "no effect", "speaks for", "how to read it"],
    [
        [
            "What must any symmetric direct path pay for the order of words?",
            "identity map, mean cosine of held-out rows",
            ", ".join(ARMS),
            "−0.0213 [−0.1234, 0.0567]",
            "0.000, permuted up to 0.012",
            "one table",
            "above zero a step for one use helps the other; below zero they work against each other, as in any tied "
            "model where training comes to rest: there the two cancel",
        ]
    ]
    * 3,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(sample_comparison(), tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def plan_report(tmp_path_factory):
    plan_result = plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"))
    return write_plan(plan_result, tmp_path_factory.mktemp("plan") / "plan.html", "tiewise plan --like gpt2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_offline_with_every_figure_and_without_requests(browser, report, plan_report, scheme):  # noqa: F811
    marks = "p => p.querySelectorAll('.scatterlayer .trace, .barlayer .trace, .heatmaplayer image').length"
    for path, many in ((report, 11), (plan_report, 5)):  # no figure of published BERTs and ALBERTs for a GPT-2
        with Visit(browser, path, scheme=scheme) as visit:
            plots = visit.page.locator(".plot")
            assert plots.count() == many
            for plot in plots.all():
                box = plot.locator(".main-svg").first.bounding_box()
                assert box["width"] > 200
                assert box["height"] > 100
                assert plot.evaluate(marks) > 0
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280
            assert visit.asked == [path.as_uri()]
            assert visit.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_system_theme_and_the_toggle_switches_it(browser, report, scheme):  # noqa: F811
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


def change_system_theme(page, scheme):
    """Change the system's theme and wait until the page has handled the event."""
    page.emulate_media(color_scheme=scheme)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_page_follows_a_changed_system_theme_until_the_reader_chooses(browser, report):  # noqa: F811
    with Visit(browser, report, scheme="light") as visit:
        change_system_theme(visit.page, "dark")
        assert visit.page.locator("html").get_attribute("data-theme") == "dark"
        visit.page.locator("#theme").click()  # the reader chooses
        change_system_theme(visit.page, "light")
        change_system_theme(visit.page, "dark")
        assert visit.page.locator("html").get_attribute("data-theme") == "light"


def test_page_is_never_wider_than_the_window(browser, report):  # noqa: F811
    with Visit(browser, report, width=1900) as visit:
        for width in (1280, 800, 400, 1900):
            visit.page.set_viewport_size({"width": width, "height": 900})
            # plotly resizes each figure after a delay
            visit.page.wait_for_function(
                """() => [...document.querySelectorAll(".plot")].every((plot) =>
                    Math.abs(plot.querySelector(".main-svg").getBoundingClientRect().width
                             - plot.getBoundingClientRect().width) < 1)"""
            )
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            rights = visit.page.eval_on_selector_all(
                ".main-svg", "all => all.map(e => e.getBoundingClientRect().right)"
            )
            assert max(rights) <= width


def test_tables_fit_the_window_without_sideways_scrolling(browser, report, tmp_path):  # noqa: F811
    """If a table is wider than its container, its rows become blocks of named values."""
    panels = training_panels(sample_comparison(), VALIDATION)
    sections = [PageSection("One", panels, tables=[EVIDENCE])]
    long = write_result(render_page(*sections, contents=True), tmp_path / "page.html", "--out")
    none_cut = """() => [document.documentElement, ...document.querySelectorAll(".scroll")]
        .every(e => e.scrollWidth <= e.clientWidth)"""
    for path in (report, long):
        with Visit(browser, path, width=1900) as visit:
            visit.page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")
            for width in (1900, 1200, 390, 800):
                visit.page.set_viewport_size({"width": width, "height": 900})
                visit.page.wait_for_function(none_cut)  # tables take a frame to resize, plotly longer
            assert visit.said == []
    with Visit(browser, long, width=390) as visit:
        cell = visit.page.locator(".stacked td").nth(2)
        assert cell.get_attribute("data-name") == "value [95 %]"
        assert visit.page.locator(".modebar-container:visible").count() == 0  # the mode bar would cover the legend
        visit.page.locator("nav a").click()
        assert visit.page.evaluate("location.hash") == "#section-0"


def test_data_tables_open_by_keyboard(browser, report):  # noqa: F811
    with Visit(browser, report) as visit:
        details = visit.page.locator("details").first
        details.locator("summary").focus()
        visit.page.keyboard.press("Enter")
        assert details.locator("table").is_visible()
        assert details.locator("tbody tr").count() == 6  # two arms, three measures


def test_copy_button_copies_or_selects_the_command(browser, report):  # noqa: F811
    with Visit(browser, report) as visit:
        visit.page.locator("#copy").click()
        assert visit.page.evaluate("getSelection().toString()") == sample_comparison().command
        visit.page.locator("#copy", has_text="Copied").or_(visit.page.locator("#copy", has_text="Selected")).wait_for()


def test_page_shows_markup_in_tokens_and_command_as_text(browser, tmp_path):  # noqa: F811
    evil = "<script>alert(1)</script>"
    image = "<img src=x onerror=alert(2)>"
    sample = sample_comparison()
    path = ArmDirectPath(ARMS[0], [evil, image, "c"], [[0.0, 1, 2], [1, 0, 3], [2, 3, 0]])
    target = write_report(replace(sample, command=evil, direct_path=[path]), tmp_path / "report.html")
    with Visit(browser, target) as visit:
        assert visit.said == []
        assert visit.asked == [target.as_uri()]
        assert visit.page.locator("#command").inner_text() == evil
        ticks = visit.page.locator(".maps .ytick text").all_text_contents()
        assert ticks[:2] == [evil, image.replace(" ", "␣")]
