"""Numbers of the page are printed digit for digit as Python prints them."""

import numpy as np

from tiewise.core.found import plain


def test_plain_prints_what_pythons_does(visit):
    draw = np.random.default_rng(0)
    values = [0.125, 0.375, 2.5, 3.5, 1.005, 0.005, -0.004, 0.0, -0.0, 999.995, 1e15 + 0.3, -1234567.891, float("nan")]
    values += (draw.normal(size=300) * 10.0 ** draw.integers(-4, 9, 300)).tolist()
    values += (draw.integers(-10_000, 10_000, 300) / 64).tolist()  # many of them lie half way
    digits = [0, 1, 2, 3, 6]
    asked = "([values, digits]) => digits.map(d => values.map(v => [plain(v, d), plain(v, d, '+')]))"
    told = visit().page.evaluate(asked, [values, digits])
    assert told == [[[plain(value, d), plain(value, d, "+")] for value in values] for d in digits]
