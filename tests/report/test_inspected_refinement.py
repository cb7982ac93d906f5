"""Sentences of the refinement section say what was measured, and its figures draw it."""

import pytest

from tiewise.analysis.estimates import Estimate
from tiewise.internals.refined import Application, Course, Refinement, Rest
from tiewise.report.inspected.refinement import lines, tables
from tiewise.report.inspected.refinement_figures import panels


def about(value, rows=4):
    return Estimate(value, value - 0.01, value + 0.01, rows)


def application(change, same_as=None, shared=0.0, turn=None):
    turned = None if turn is None else about(turn)
    values = [about(change), about(3.0), about(0.9), turned, about(5.0), about(change / 2), about(0.95)]
    return Application("layers.<0>", *values, shared, same_as)


def rest(**changed):
    settings = {
        "first": 0,
        "period": 1,
        "times": 3,
        "residual": (about(0.5), about(0.25), about(0.125), about(0.0625), about(0.0)),
        "two_steps": (about(0.1),),
        "ratio": about(0.5),
        "growth": about(0.6),
        "windows": 4,
        "converged": 4,
        "alternating": 0,
        "from_end": about(0.2),
    }
    return Rest(**(settings | changed))


def alike(states):
    return tuple(tuple(0.9 ** abs(i - j) for j in range(states)) for i in range(states))


def shared(**changed):
    applications = (application(0.5), application(0.25, 0, 1.0, -0.5), application(0.125, 0, 1.0, -0.25))
    course = Course(applications, (rest(**changed),), alike(4))
    control = Course(applications, (rest(converged=0, from_end=None, growth=about(1.2)),), alike(4))
    return Refinement(64, 4, 2, course, control)


def unshared(fraction=0.0):
    course = Course((application(0.5), application(0.25, None, fraction, 0.3)), (), alike(3))
    return Refinement(64, 4, 2, course, None)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (shared(), "comes to rest in 4 of 4 windows, and the model stops 0.200 [0.190, 0.210] of"),
        (shared(), "0.600 [0.590, 0.610], below 1, so near-by states come together; with fresh weights 1.200"),
        (shared(converged=0, alternating=3, from_end=None), "alternates between two states in 3 of 4 windows"),
        (shared(converged=0, from_end=None), "no fixed point is reached within 2 further applications"),
        (shared(growth=about(1.5)), "above 1, so near-by states are driven apart"),
        (shared(growth=about(1.005)), "not clearly on one side of 1"),
        (shared(period=2), "applies one block of 2 layers 3 times (applications 1 to 6)"),
        (shared(), "2 of 2 go against the one before"),
        (unshared(), "applies each of its 2 layers once, with parameters of its own"),
        (unshared(0.4), "(up to 40% of a layer's), but no whole layer is repeated"),
        (unshared(), "1 of 1 layers of A after the first change it less"),
    ],
)
def test_lines_say_what_was_found(found, said):
    assert any(said in line for line in lines({"A": found})), lines({"A": found})


def test_tables_and_panels_show_every_application_of_both_models_and_their_controls():
    both = {"<i>shared</i>": shared(), "own": unshared()}
    captions = [caption for caption, _ in tables(both)]
    assert len(captions) == 3
    assert [row[-2] for row in tables(both)[0][1].rows] == ["no", "all, as 1", "all, as 1"]
    drawn = panels(both)
    assert drawn[0].title == "Change per application"
    assert len(drawn) == 7
    for panel in drawn:
        assert panel.figure.layout.height
        assert all(len(row) == len(panel.table.header) for row in panel.table.rows)
    change = drawn[0].figure.data
    assert [trace.name for trace in change][:2] == [
        "&lt;i&gt;shared&lt;/i&gt;",
        "&lt;i&gt;shared&lt;/i&gt;, applied twice",
    ]
    assert list(change[0].y) == [0.5, 0.25, 0.125]
    assert [trace.line.dash for trace in change if "untrained" in trace.name] == ["dash"]
    maps = drawn[3:6]  # of both models, and of the control that one of them has
    assert [len(panel.figure.data[0].z) for panel in maps] == [4, 4, 3]
    assert maps[0].table.rows[1] == ["1", "0.900", "1.000", "0.900", "0.810"]
    residual = drawn[6].figure.data
    assert min(residual[0].y) > 0  # a log axis has no place for 0
    assert len(panels({"own": unshared()})) == 4


def test_a_single_window_is_said_without_an_interval():
    one = Estimate(0.25, float("-inf"), float("inf"), 1)
    text = lines({"A": shared(from_end=one)})[0]
    assert "stops 0.250 of" in text
