"""A plan's page in a real browser: every figure is drawn in both themes, nothing is asked for, nothing complains."""

import pytest
from tests.report.opened_page import Visit, browser, pytestmark  # noqa: F401 - a fixture, and the skip

from tiewise.planning.plan import plan
from tiewise.report.plan_page import write_plan

MARKS = "p => p.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    made = plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"))
    return write_plan(made, tmp_path_factory.mktemp("plan") / "plan.html", "tiewise plan --like gpt2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_offline(browser, page, scheme):  # noqa: F811
    with Visit(browser, page, scheme=scheme) as visit:
        plots = visit.page.locator(".plot")
        assert plots.count() == 5  # of published BERTs and ALBERTs none: nobody asked
        for index in range(5):
            box = plots.nth(index).locator(".main-svg").first.bounding_box()
            assert box["width"] > 200
            assert box["height"] > 100
            assert plots.nth(index).evaluate(MARKS) > 0
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert visit.asked == [page.as_uri()]
        assert visit.said == []
