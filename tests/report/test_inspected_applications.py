"""Sentences on other numbers of applications say what was measured, and the figures draw it."""

import pytest

from tiewise.analysis.estimates import Estimate
from tiewise.internals.application_sweep import Applied, Sweep
from tiewise.internals.sharing_costs import Cost, SharingCosts, packaged_costs
from tiewise.report.inspected.applications import lines, tables
from tiewise.report.inspected.applications_figures import panels
from tiewise.report.sharing_costs import panel


def about(value, rows=4, half=0.25):
    return Estimate(value, value - half, value + half, rows)


def sweep(nlls=(4.0, 3.0, 2.0, 2.5), trained=3, unigram=3.5, half=0.25, rows=4, **changed):
    own = nlls[trained - 1]
    course = tuple(
        Applied(
            n,
            None if nll is None else about(nll),
            None if nll is None else about(nll - own, rows, half),
            None if nll is None else about(0.5**n, half=0.01),
        )
        for n, nll in enumerate(nlls, 1)
    )
    facts = {"objective": "hidden", "predicted": 1200, "windows": 4, "layers": 1, "parameters": 1000, "separate": 3000}
    return Sweep(**(facts | changed), trained=trained, unigram=about(unigram), course=course)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            sweep(),
            "A applies one layer 3 times; the nll of 1,200 hidden tokens in 4 windows is then 2.000 [1.750, 2.250]",
        ),
        (sweep(objective="next token", layers=2), "one block of 2 layers 3 times; the nll of 1,200 next tokens"),
        (sweep(), "The tokens' frequencies alone give 3.500 [3.250, 3.750]."),
        (sweep(), "No other number of applications from 1 to 4 gives A a lower nll."),
        (
            sweep(trained=2),
            "lowest after 3 applications: 2.000 [1.750, 2.250], a difference of −1.000 [−1.250, −0.750] to its own",
        ),
        (sweep(trained=2), "its interval leaves out 0"),
        (sweep(trained=2, half=1.5), "its interval holds 0"),
        (sweep(trained=2, rows=1), "a difference of −1.000 to its own, window by window; one window gives no interval"),
        (sweep((2.0, 2.0, 2.0)), "No other number of applications from 1 to 3 gives A a lower nll."),
        (sweep(), "4.000 [3.750, 4.250] after one application and 2.500 [2.250, 2.750] after 4 applications"),
        (sweep(), "frequencies alone do no worse than 1 application."),
        (
            sweep((4.0, 3.0, 2.0, None)),
            "and – after 4 applications; frequencies alone do no worse than 1, 4 applications",
        ),
        (sweep((4.0, 3.6, 2.0, 2.5, 5.0, 6.0)), "no worse than 1 to 2, 5 to 6 applications."),
        (sweep(unigram=9.0), "frequencies alone do worse than any."),
        (sweep(trained=4), "is 4.000 [3.750, 4.250] after one application; "),
        (
            sweep(),
            "1,000 parameters, 3,000 if each application had its own: weights, gradients and AdamW's moments take",
        ),
        (sweep(), "16 kB in fp32 instead of 48 kB"),
    ],
)
def test_lines_say_what_was_found(found, said):
    assert any(said in line for line in lines({"A": found})), lines({"A": found})


def test_tables_and_panels_show_every_number_of_applications():
    both = {"<i>one</i>": sweep(), "two": sweep((4.0, None, 2.0, 2.5, 3.0), trained=1, unigram=3.4)}
    first = tables(both)[0][1].rows
    assert [row[0] for row in first] == ["1", "2", "3 (as trained)", "4", "token frequencies"]
    assert first[2][1:] == ["2.000 [1.750, 2.250]", "–", "0.125 [0.115, 0.135]"]
    drawn = panels(both)
    for one in drawn:
        assert one.figure.layout.height
        assert all(len(row) == len(one.table.header) for row in one.table.rows)
    nll = drawn[0].figure.data
    named = {trace.name: trace for trace in nll if trace.name}
    assert set(named) == {
        f"{label}{end}" for label in ("&lt;i&gt;one&lt;/i&gt;", "two") for end in ("", ", frequencies")
    }
    assert list(named["two"].x) == [1, 3, 4, 5]
    assert list(named["two"].y) == [4.0, 2.0, 2.5, 3.0]
    assert [set(named[f"{label}, frequencies"].y) for label in ("&lt;i&gt;one&lt;/i&gt;", "two")] == [{3.5}, {3.4}]
    alike = panels({"one": sweep(), "two": sweep()})[0].figure.data
    assert [trace.name for trace in alike if "frequencies" in (trace.name or "")] == ["token frequencies"]
    marked = [(trace.x[0], trace.y[0]) for trace in nll if trace.mode == "markers"]
    assert marked == [(3, 2.0), (1, 4.0)]
    band = next(trace for trace in nll if trace.fill)
    assert list(band.y) == [4.25, 3.25, 2.25, 2.75, 2.25, 1.75, 2.75, 3.75]
    assert drawn[0].table.rows[4] == ["5", "–", "3.000 [2.750, 3.250]"]


def costs():
    """Twice the time of `none` in one round and half of it in the other; a quarter of its parameters."""
    none = Cost("none", 1000, 16000, 500, 10**9, [0.1, 0.2], [0.3, 0.4])
    whole = Cost("all", 250, 4000, 500, 10**9, [0.2, 0.1], [0.3, 0.4])
    return SharingCosts("a <processor>", 1, 4, 128, 256, 12, 64, 8192, True, [none, whole])


def test_what_sharing_saves_is_drawn_beside_the_unshared_model():
    made = panel(costs())
    none, whole = made.figure.data
    assert list(none.y) == [1] * 6
    assert list(whole.y) == pytest.approx([1.25, 1, 1, 1, 0.25, 0.25])
    assert whole.error_y.array[0] == pytest.approx(0.75)  # 2 and ½: each round by itself
    assert whole.error_y.arrayminus[0] == pytest.approx(0.75)
    assert "the same logits to the bit" in made.caption
    assert "1 thread, fp32" in made.caption
    assert made.table.rows[1][1] == "150.0 ms (100.0 ms to 200.0 ms)"
    assert made.table.rows[1][5:] == ["4 kB", "250"]


def test_the_record_of_the_package_is_one_function_shared_in_four_ways():
    found = packaged_costs()
    if not found:
        pytest.skip("no record yet: python -m benchmarks.run sharing")
    for size in found:
        assert [cost.sharing for cost in size.costs] == ["none", "attention", "ffn", "all"]
        assert size.equal
        assert len({(cost.flops, cost.kept) for cost in size.costs}) == 1
        assert all(cost.state == 16 * cost.parameters for cost in size.costs)


def test_a_package_without_a_record_draws_none(monkeypatch):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("tiewise.internals.sharing_costs.packaged_json", absent)
    assert packaged_costs() == []
    assert len(panels({"A": sweep()})) == 3
