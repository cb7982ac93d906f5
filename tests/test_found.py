"""Numbers as people read them."""

import math

import pytest

from tiewise.core.found import count, plain, signed


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (5.28514, 4, "5.2851"),
        (-0.5, 1, "−0.5"),
        (-1e-9, 2, "0.00"),
        (12345.6, 1, "12,345.6"),
        (None, 4, "–"),
        (math.nan, 4, "–"),
    ],
)
def test_plain(value, digits, text):
    assert plain(value, digits) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0123, 4, "+0.0123"), (-0.0123, 4, "−0.0123"), (1e-9, 2, "0.00"), (math.inf, 2, "–")],
)
def test_signed(value, digits, text):
    assert signed(value, digits) == text


def test_count():
    assert count(1_234_567) == "1,234,567"
