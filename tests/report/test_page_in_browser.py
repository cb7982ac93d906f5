"""Test report pages in Chromium, from disk and offline: figures, requests, themes, widths and keyboard."""

import json
from dataclasses import replace

import pytest
from tests.report.comparison_sample import ARMS, sample_comparison
from tests.report.opened_page import (
    Page,
    Visit,
    browser,  # noqa: F401 - a fixture
    pytestmark,  # noqa: F401 - the skip
    render_page,
)
from tests.report.page_samples import sample_inspection, sample_pages

from tiewise.core.files import write_result
from tiewise.core.measurement import NATS, Curve, Listing, Measurement, Quantity
from tiewise.planning.plan import plan
from tiewise.report.comparison_page import write_report
from tiewise.report.comparison_panels import training_panels
from tiewise.report.figures import panels
from tiewise.report.inspection_page import inspection_page
from tiewise.report.plan_page import write_plan
from tiewise.report.report_page import PageSection
from tiewise.report.training_curves import TUNING
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


@pytest.fixture(scope="module")
def page_texts():
    return sample_pages()


def wait_two_frames(page):
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_offline_with_every_figure_and_without_requests(browser, report, plan_report, scheme):  # noqa: F811
    marks = "p => p.querySelectorAll('.line, .interval, .bar, .cells').length"
    for path, many in ((report, 11), (plan_report, 5)):  # no figure of published BERTs and ALBERTs for a GPT-2
        with Visit(browser, path, scheme=scheme) as visit:
            charts = visit.page.locator(".plot .chart")
            assert charts.count() == many
            for chart in charts.all():
                box = chart.locator("svg[role=img]").bounding_box()
                assert box["width"] > 200
                assert box["height"] > 100
                assert chart.evaluate(marks) > 0
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280
            assert visit.page.evaluate("typeof Plotly") == "undefined"
            assert visit.asked == [path.as_uri()]
            assert visit.said == []


# x, y and z of every trace of a drawn figure, as plotly has them; it may keep typed arrays
DATA_OF_PLOT = """place => place.data.map(({ type, x, y, z }) =>
    ({ type, x: [...x], y: [...y], z: z ? z.map(row => [...row]) : null }))"""


def test_a_reader_starts_an_interactive_figure_with_the_same_data(browser, report):  # noqa: F811
    page = report.read_text(encoding="utf-8")
    figures = json.loads(Page(page).scripts[0])["figures"]
    with Visit(browser, report) as visit:
        for index in (1, 8):  # curves, then a map
            visit.make_interactive(index)
            plotted = visit.page.locator(f"#plot-{index}").evaluate(DATA_OF_PLOT)
            wanted = [{key: trace.get(key) for key in ("type", "x", "y", "z")} for trace in figures[index]["data"]]
            assert plotted == wanted
        assert visit.page.locator(".chart").count() == len(figures) - 2
        assert visit.page.locator(".plot .main-svg").first.is_visible()
        ink = visit.style("#plot-1 .xtick text", "fill")
        visit.page.locator("#theme").click()
        visit.page.wait_for_timeout(300)
        assert visit.style("#plot-1 .xtick text", "fill") != ink
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert visit.asked == [report.as_uri()]
        assert visit.said == []


def test_page_without_scripts_shows_text_tables_and_figures(browser, report):  # noqa: F811
    context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 390, "height": 900})
    shown = context.new_page()
    shown.goto(report.as_uri())
    assert shown.locator(".plot .chart svg[role=img]").count() == 11
    assert all(chart.is_visible() for chart in shown.locator(".plot .chart").all())
    assert not any(button.is_visible() for button in shown.locator("button").all())
    table = shown.locator("details table").first
    assert not table.is_visible()
    table.locator("xpath=ancestor::details/summary").click()
    assert table.is_visible()
    context.close()


def test_printed_page_shows_figures_and_tables_without_buttons(browser, report):  # noqa: F811
    with Visit(browser, report, scheme="dark") as visit:
        visit.page.locator("details").first.locator("summary").click()
        visit.page.locator("details table").first.wait_for()
        visit.page.emulate_media(media="print")
        assert visit.page.locator("section > .scroll table").first.is_visible()
        assert visit.page.locator(".panel details table").first.is_visible()  # it was opened
        assert all(chart.is_visible() for chart in visit.page.locator(".chart").all())
        assert not any(button.is_visible() for button in visit.page.locator("button").all())
        assert visit.style("body", "backgroundColor") == "rgba(0, 0, 0, 0)"  # the paper
        assert visit.style("body", "color") == "rgb(34, 37, 43)"  # dark ink, whatever the theme of the screen


def test_folded_parts_are_built_when_they_are_opened(browser, tmp_path):  # noqa: F811
    path = write_result(
        inspection_page(sample_inspection(sections=4, repeats=40), "c"), tmp_path / "page.html", "--out"
    )
    with Visit(browser, path) as visit:
        nodes = "document.querySelectorAll('*').length"
        at_first = visit.page.evaluate(nodes)
        assert at_first <= 2_000
        assert visit.page.locator("details table").count() == 0
        visit.open_all()
        assert visit.page.evaluate(nodes) > 30_000
        assert visit.page.locator("details table").count() > 4 * 3
        charts = visit.page.locator("#section-0 .panel")
        assert charts.count() > 8
        assert all(chart.is_visible() for chart in charts.all())
        assert visit.said == []


# the texts of each chart that overlap another text of it, or leave its figure; turned texts are compared by distance
TEXTS_OUT_OF_PLACE = """() => [...document.querySelectorAll(".chart")].flatMap((chart) => {
    const panel = chart.closest(".panel").getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text, p, li")].filter((text) => text.getClientRects().length);
    const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect(), isTurned(text)]);
    const bad = boxes.filter(([, box]) => box.left < panel.left || box.right > panel.right + 1).map(([text]) => text);
    boxes.forEach(([a, one, aTurned], i) => boxes.slice(i + 1).forEach(([b, other, bTurned]) => {
        if (aTurned && bTurned) {
            if (Math.abs(one.right - other.right) < 10) bad.push(`${a} | ${b}`);
            return;
        }
        const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (across > 1 && down > 4) bad.push(`${a} | ${b}`);  // a line box is taller than its letters
    }));
    return bad;
    function isTurned(text) { return getComputedStyle(text).transform.includes("0.5"); }
})"""


@pytest.mark.parametrize("name", ["compare", "albert", "plan", "sweep", "inspect"])
def test_texts_of_figures_neither_overlap_nor_leave_the_figure(browser, page_texts, tmp_path, name):  # noqa: F811
    """A page is opened in the narrow window of a phone and then widened, which is cheaper than to open it again."""
    path = write_result(page_texts[name], tmp_path / f"{name}.html", "out")
    with Visit(browser, path, width=390) as visit:
        visit.open_all()
        for width in (390, 800, 1280):
            visit.page.set_viewport_size({"width": width, "height": 900})
            wait_two_frames(visit.page)  # tables take a frame to resize
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, width
            assert visit.page.evaluate(TEXTS_OUT_OF_PLACE) == [], width


# texts of an interactive figure that leave it or cover another, and the share of its height that the plot has
INTERACTIVE = """(id) => {
    const whole = document.querySelector(id).getBoundingClientRect();
    const texts = [...document.querySelectorAll(`${id} svg text`)].filter((text) => text.textContent.trim());
    const level = texts.filter((text) => !/rotate\\((?!0)/.test(text.getAttribute("transform") || ""));
    const boxes = level.map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
    const bad = texts.filter((text) => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1);
    }).map((text) => text.textContent);
    boxes.forEach(([one, a], at) => boxes.slice(at + 1).forEach(([other, b]) => {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 4) bad.push(`${one} | ${other}`);
    }));
    const plot = document.querySelector(`${id} .nsewdrag`)?.getBoundingClientRect();
    return { bad, share: plot ? plot.height / whole.height : 1 };
}"""


def figures_with_long_names(at):
    """Return a measurement of one model for three figures."""
    losses = (3.0, 2.0 + 0.1 * at, 1.0)
    curve = Curve("Loss by step", (0, 500, 1000), losses, which="the tuned lens", unit=NATS)
    name = "output − input, by nearest neighbours in common, number"
    rows = [Quantity(f"{name} {row}", 10.0 ** (-4 * row), unit="probability", figure="Rows") for row in range(3)]
    units = {"as they stand": "cosine", "by rank": "correlation of the lengths", "CKA": "share"}
    scores = [Quantity(name, 0.2, 0.1, 0.3, 9, unit=unit, figure="Units") for name, unit in units.items()]
    return Measurement("yes", (*rows, *scores), curves=(curve,)).about(f"models/of-one-family/number-{at}")


def test_interactive_figures_of_a_phone_neither_overlap_nor_leave_the_figure(browser, tmp_path):  # noqa: F811
    measured = {f"models/of-one-family/number-{at}": figures_with_long_names(at) for at in range(4)}
    section = PageSection("Figures", panels=panels(measured))
    path = write_result(render_page(section), tmp_path / "page.html", "out")
    with Visit(browser, path, width=390) as visit:
        visit.open_all()
        count = visit.page.locator(".plot").count()
        assert count == 3
        for index in range(count):
            visit.make_interactive(index)
            found = visit.page.evaluate(INTERACTIVE, f"#plot-{index}")
            assert found["bad"] == [], index
            assert found["share"] > 0.3, index
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert visit.said == []


def test_cards_of_a_phone_leave_out_missing_values(browser, tmp_path):  # noqa: F811
    path = write_result(inspection_page(sample_inspection(), "c"), tmp_path / "page.html", "out")
    with Visit(browser, path, width=390) as visit:
        visit.page.locator(".stacked").first.wait_for()
        cells = visit.page.locator(".stacked").first.locator("tbody td")
        shown = [cell.inner_text() for cell in cells.all() if cell.is_visible()]
        assert cells.count() == 9
        assert len(shown) == 3
        assert not any("–" in text for text in shown)


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
    wait_two_frames(page)


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
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            rights = visit.page.eval_on_selector_all(".chart", "all => all.map(e => e.getBoundingClientRect().right)")
            assert max(rights) <= width


def test_interactive_figures_follow_the_width_of_the_window(browser, report):  # noqa: F811
    with Visit(browser, report, width=1280) as visit:
        visit.make_interactive(0)
        visit.page.set_viewport_size({"width": 400, "height": 900})
        drawn = visit.page.locator("#plot-0 .main-svg").first
        for _ in range(50):  # plotly resizes a figure after a delay
            if drawn.bounding_box()["width"] < 400:
                break
            visit.page.wait_for_timeout(100)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_tables_fit_the_window_without_sideways_scrolling(browser, report, tmp_path):  # noqa: F811
    """If a table is wider than its container, its rows become blocks of named values."""
    panels = training_panels(sample_comparison(), TUNING)
    sections = [PageSection("One", panels, tables=[EVIDENCE])]
    long = write_result(render_page(*sections, contents=True), tmp_path / "page.html", "out")
    none_cut = """() => [document.documentElement, ...document.querySelectorAll(".scroll")]
        .every(e => e.scrollWidth <= e.clientWidth)"""
    for path in (report, long):
        with Visit(browser, path, width=1900) as visit:
            visit.open_all()
            for width in (1900, 1200, 390, 800):
                visit.page.set_viewport_size({"width": width, "height": 900})
                visit.page.wait_for_function(none_cut)  # tables take a frame to resize, plotly longer
            assert visit.said == []
    with Visit(browser, long, width=390) as visit:
        cell = visit.page.locator(".stacked td").nth(2)
        assert cell.get_attribute("data-name") == "value [95 %]"
        visit.make_interactive(0)
        assert visit.page.locator(".modebar-container:visible").count() == 0  # the mode bar would cover the legend
        visit.page.locator("nav a").click()
        assert visit.page.evaluate("location.hash") == "#section-0"


def test_data_tables_open_by_keyboard(browser, report):  # noqa: F811
    with Visit(browser, report) as visit:
        details = visit.page.locator("details").first
        details.locator("summary").focus()
        visit.page.keyboard.press("Enter")
        details.locator("table").wait_for()  # the event that fills it comes after the key
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
        ticks = visit.page.locator(".maps .side").all_text_contents()
        assert [tick[:15] for tick in ticks[:2]] == [evil[:15], image.replace(" ", "␣")[:15]]
        visit.make_interactive(8)
        ticks = visit.page.locator(".maps .ytick text").all_text_contents()
        assert ticks[:2] == [evil, image.replace(" ", "␣")]
