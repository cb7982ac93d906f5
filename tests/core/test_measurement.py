"""Test how numbers are formatted for people."""

import math

import pytest

from tiewise.core.measurement import loss_digits, magnitudes, plain, signed


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


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.043, 0.062, "0.043–0.062"), (-0.062, -0.043, "0.043–0.062"), (9.5, 10.25, "9.500–10.250")],
)
def test_magnitudes_put_the_smaller_limit_first(low, high, text):
    assert magnitudes(low, high, 3) == text


@pytest.mark.parametrize(("losses", "digits"), [((0.005, -0.02), 3), ((-0.002, 0.009), 5), ((0.0,), 3)])
def test_loss_digits_are_more_for_small_differences(losses, digits):
    assert loss_digits(*losses) == digits
