"""Sentences of the lens section say what was measured, and its figures draw it."""

import math
from dataclasses import replace

import pytest

from tiewise.analysis.estimates import Estimate
from tiewise.internals.lens_results import Layer, Lenses, Read
from tiewise.report.inspected.lens import lines, tables
from tiewise.report.inspected.lens_figures import panels


def about(value, rows=8):
    return Estimate(value, value - 0.02, value + 0.02, rows)


def read(kl, agreement=0.4):
    return Read(about(kl), about(kl + 3), about(agreement))


def layer(depth, logit, tuned, improvement=0.005, fitted=None):
    curve = (logit, 2 * tuned, tuned / (1 - improvement), tuned)
    reads = read(logit, 0.1), read(tuned, 0.3 + 0.3 * depth)
    return Layer(depth, "h.<0>" if depth else "input", *reads, curve, fitted or tuned, improvement)


def found(**changed):
    last = Layer(2, "h.1", Read(about(0.0), about(3.0), about(1.0)), None, (), None, None)
    values = {
        "layers": (layer(0, 7.0, 0.5), layer(1, 0.8, 0.2), last),
        "nll": about(3.0),
        "uniform": about(2.5),
        "unigram": about(1.6),
        "constant": about(1.5),
        "tied": True,
        "steps": 100,
        "marks": (0, 50, 90, 100),
        "batch": 4,
        "rate": 0.01,
        "windows": 50,
        "held_out": 8,
        "length": 64,
        "seed": 0,
    }
    return Lenses(**(values | changed))


def slow():
    one = found()
    return replace(one, layers=(layer(0, 7.0, 0.5, 0.04), *one.layers[1:]))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (found(), "m (tied) has a tuned lens 0.500 [0.480, 0.520] nats (0.72 bits)"),
        (found(), "the logit lens there is 7.000 [6.980, 7.020] nats (10.10 bits) away"),
        (found(), "Each of m's 2 tuned lenses changed its held-out KL by less than 1% in the last tenth of 100 steps"),
        (slow(), "1 of 2 tuned lenses of m had not converged after 100 steps"),
        (slow(), "at depth 0 still fell by 4.0%"),
        (found(), "At 1 of 2 places of m the logit lens is further from the final distribution"),
        (found(), "at more than half of the positions after layer 1 of 2 (0.600"),
        (found(layers=(layer(0, 7.0, 0.5, fitted=0.3), *found().layers[1:])), "At 1 places of m the tuned lens fits"),
    ],
)
def test_sentences_say_what_was_measured(one, said):
    assert any(said in line for line in lines({"m": one}))


def test_an_overfit_is_not_claimed_where_there_is_none():
    assert not any("fits its training windows" in line for line in lines({"m": found()}))


def test_tables_hold_every_place_chance_and_the_published_figures():
    (_, places), (_, chance), (_, published) = tables({"m": slow()})
    assert [row[0] for row in places.rows] == ["input", "1 · h.<0>", "2 · h.1"]
    assert places.rows[0][-2:] == ["−4.00%", "no"]
    assert places.rows[2][-1] == "–"
    assert chance.rows[2][1] == "1.500 [1.480, 1.520]"
    assert ["OLMo-1B", "tied, 500 steps", "9.2"] in [row[:3] for row in published.rows]
    assert float(published.rows[0][3]) == pytest.approx(9.2 * math.log(2), abs=0.05)


def test_figures_draw_both_lenses_of_every_model_and_escape_its_name():
    both = {"a<b": found(), "m": slow()}
    distance, same, training = panels(both)
    names = {trace.name for trace in distance.figure.data}
    assert {"a&lt;b, tuned lens", "a&lt;b, logit lens", "m, mean distribution"} <= names
    drawn = next(trace for trace in distance.figure.data if trace.name == "m, tuned lens")
    assert list(drawn.y) == [0.5, 0.2]  # the last place is the model itself: 0 has no place on a log axis
    agreement = next(trace for trace in same.figure.data if trace.name == "m, tuned lens")
    assert list(agreement.y) == [0.3, 0.6, 1.0]
    assert list(training.figure.data[0].x) == [0, 50, 90, 100]
    for panel in (distance, same, training):
        assert panel.figure.layout.title.text
        assert panel.figure.layout.height
        assert panel.table.rows
        assert all(len(row) == len(panel.table.header) for row in panel.table.rows)


def test_models_of_different_depth_stand_side_by_side():
    deep = found()
    deep = replace(
        deep, layers=(deep.layers[0], layer(1, 2.0, 0.4), layer(2, 0.8, 0.2), replace(deep.layers[2], depth=3))
    )
    table = panels({"m": found(), "deep": deep})[0].table
    assert len(table.rows) == 4
    assert table.rows[3][1:3] == ["–", "–"]


def test_a_lens_that_is_exact_is_drawn_and_recorded():
    one = replace(found(), layers=(layer(0, 0.0, 0.0), *found().layers[1:]))
    assert panels({"m": one})
    assert one.record()["layers"][0]["tuned"]["kl"]["nats"]["value"] == 0
