"""Test every kind of page with axe-core: no violation on a phone with light colours or a desktop with dark ones."""

import pytest
from tests.report.opened_page import Visit, browser, pytestmark  # noqa: F401 - a fixture, and the skip
from tests.report.page_samples import sample_inspection, sample_pages

from tiewise.core.files import write_result
from tiewise.report.explorer.page import explore
from tiewise.report.inspection_page import inspection_page

axe_playwright = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is in [dev]")
REPORTS = ("compare", "albert", "plan", "sweep", "inspect")
TABS = "[role=tab]"
LOOKS = [("light", 390), ("dark", 1280)]  # contrast depends on the theme alone, and the layout on the width alone
AXE = axe_playwright.Axe().axe_script
# axe-core needs seconds for the contrast of hundreds of cells; rows between these have the same elements and styles
KEEP_THREE_ROWS_AND_THE_LAST = """() => document.querySelectorAll("tbody").forEach(
    (body) => [...body.rows].slice(3, -1).forEach((row) => row.remove()))"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return {name: path} of a page of every command.

    The sections of the sample inspection are equal, so its page has one.
    """
    folder = tmp_path_factory.mktemp("pages")
    pages = sample_pages() | {"inspect": inspection_page(sample_inspection(sections=1), "tiewise inspect runs/sample")}
    written = {name: write_result(page, folder / f"{name}.html", "out") for name, page in pages.items()}
    return written | {"explore": explore().write(folder / "explore.html")}


def violations(page):
    """Return the violations that axe-core finds, each as its rule and the first element."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE)
    found = page.evaluate("axe.run({ resultTypes: ['violations'] }).then((results) => results.violations)")
    return [(one["id"], len(one["nodes"]), one["nodes"][0]["html"][:300]) for one in found]


def test_axe_finds_a_button_inside_an_image(browser, tmp_path):  # noqa: F811
    """The check is able to fail."""
    bad = '<!doctype html><html lang="en"><title>t</title><main><h1>t</h1><div role="img" aria-label="a"><a href="#b">b'
    path = write_result(bad, tmp_path / "bad.html", "out")
    with Visit(browser, path, ready="main") as visit:
        assert [rule for rule, _, _ in violations(visit.page)] == ["nested-interactive"]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("name", REPORTS)
def test_report_has_no_violation(browser, paths, name, scheme, width):  # noqa: F811
    with Visit(browser, paths[name], width=width, scheme=scheme) as visit:
        assert violations(visit.page) == []
        visit.open_all()
        visit.make_interactive(0)
        visit.page.evaluate(KEEP_THREE_ROWS_AND_THE_LAST)
        assert violations(visit.page) == []


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
def test_every_step_of_the_explorer_has_no_violation(browser, paths, scheme, width):  # noqa: F811
    with Visit(browser, paths["explore"], width=width, scheme=scheme, ready="[role=tabpanel]") as visit:
        for tab in visit.page.locator(TABS).all():
            tab.click()
            assert violations(visit.page) == []
