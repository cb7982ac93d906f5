"""Test how numbers are formatted for people."""

import math

import pytest

from tiewise.core.measurement import plain, signed


@pytest.mark.parametrize(
    ("told", "value", "digits", "text"),
    [
        (plain, 5.28514, 4, "5.2851"),
        (plain, -0.5, 1, "−0.5"),
        (plain, -1e-9, 2, "0.00"),
        (plain, 12345.6, 1, "12,345.6"),
        (plain, None, 4, "–"),
        (plain, math.nan, 4, "–"),
        (signed, 0.0123, 4, "+0.0123"),
        (signed, -0.0123, 4, "−0.0123"),
        (signed, 1e-9, 2, "0.00"),
        (signed, math.inf, 2, "–"),
    ],
)
def test_plain_and_signed_format_numbers(told, value, digits, text):
    assert told(value, digits) == text
