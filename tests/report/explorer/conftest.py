"""Fixtures that open the explorer in Chromium: one browser per module, one visit per test."""

import pytest
from tests.report.opened_page import BROWSER, FLAGS, Visit

from tiewise.report.explorer.page import explore


@pytest.fixture(scope="module")  # not session: a process can run only one playwright loop
def chromium():
    if BROWSER is None:
        pytest.skip("no chromium on this machine: install it, or name one in TIEWISE_CHROMIUM")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser; it is in [dev]")
    with playwright.sync_playwright() as driver:
        yield (browser := driver.chromium.launch(executable_path=BROWSER, args=FLAGS))
        browser.close()


@pytest.fixture(scope="session")
def plain_page(tmp_path_factory):
    """Return the path of the page without a checkpoint."""
    return explore().write(tmp_path_factory.mktemp("explore") / "page.html")


@pytest.fixture
def visit(chromium, plain_page):
    """Return a function that opens the page: `visit("at=budget", width=390, scheme="dark")`.

    Afterwards, fail if a page logged a message or requested anything external.
    """
    opened = []

    def open_page(at="", path=plain_page, **more):
        opened.append(Visit(chromium, path, ready="[role=tabpanel]", at=f"#{at}" if at else "", **more))
        opened[-1].path = path
        return opened[-1]

    yield open_page
    for each in opened:
        each.context.close()
        assert each.said == []
        assert all(url.split("#")[0] in (each.path.as_uri(),) or url.startswith("blob:") for url in each.asked)


@pytest.fixture(scope="module")
def dropper(chromium, plain_page):
    """Open one page on which all tests of a module drop their checkpoints."""
    with Visit(chromium, plain_page, ready="[role=tabpanel]", at="#at=checkpoint") as shown:
        yield shown
    assert shown.said == []
    assert all(url.startswith((plain_page.as_uri(), "blob:")) for url in shown.asked)
