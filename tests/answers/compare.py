"""Compare two answers in both directions, numbers with a tolerance."""

import math
from dataclasses import dataclass

from tests.answers import texts


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may differ.

    Attributes:
        relative: to the larger of two numbers.
        absolute: of numbers near 0, where rounding is all there is.
        rounds: whether a written number may differ by one unit of its last place.
        verbatim: whether text is compared letter by letter.
    """

    relative: float
    absolute: float
    rounds: bool = True
    verbatim: bool = False


# committed answers: processors round differently
COMMITTED = {
    "words": Tolerance(1e-8, 0.0, rounds=False, verbatim=True),
    "exact": Tolerance(1e-5, 5e-6),  # a gradient that is 0 was 1.4e-6 on one processor, and 0 on another
    "trained": Tolerance(1e-2, 1e-3),
}
# answers of two revisions on one machine
ONE_MACHINE = {
    "words": Tolerance(0.0, 0.0, rounds=False, verbatim=True),
    "exact": Tolerance(1e-9, 1e-12, rounds=False),
    "trained": Tolerance(1e-3, 1e-6),
}
UNROUNDED = 12  # a number with more digits is not rounded for readers
TEXTS = ("stdout", "stderr", "text")  # leaves that are lists of lines
MOST = 40  # differences that a message lists


def differences(was, now, tolerance, path=""):
    """Yield one line for each missing, changed or new leaf."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was | now:
            yield from _entry_differences(was, now, key, tolerance, f"{path} {key}".strip())
    elif path.endswith(TEXTS) and _all_texts(was) and _all_texts(now):
        yield from _line_differences(was, now, tolerance, path)
    elif not same(was, now, tolerance):
        yield f"{path}: was {_short(was)}\n{' ' * len(path)}   is {_short(now)}"


def _entry_differences(was, now, key, tolerance, path):
    """Yield the differences of one entry of two dictionaries."""
    if key not in now:
        yield f"{path}: gone, was {_short(was[key])}"
    elif key not in was:
        yield f"{path}: new, is {_short(now[key])}"
    else:
        yield from differences(was[key], now[key], tolerance, path)


def _all_texts(value):
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _line_differences(was, now, tolerance, path):
    """Yield the lines of a text that differ."""
    if not tolerance.verbatim:
        was, now = ([line for line in text if line.strip(" ─━")] for text in (was, now))
    if len(was) != len(now):
        yield f"{path}: {len(was)} lines, is {len(now)} lines"
    for number, (old, new) in enumerate(zip(was, now, strict=False), 1):
        if not same(old, new, tolerance):
            yield f"{path} line {number}: was {old}\n{' ' * len(path)} {' ' * len(str(number))}       is {new}"
    for line in was[len(now) :]:
        yield f"{path}: gone {line}"
    for line in now[len(was) :]:
        yield f"{path}: new {line}"


def same(was, now, tolerance):
    """Return whether two leaves agree."""
    if isinstance(was, str) and isinstance(now, str):
        return was == now or (not tolerance.verbatim and _same_text(was, now, tolerance))
    if isinstance(was, list) and isinstance(now, list):
        return _same_list(was, now, tolerance)
    if type(was) is not type(now):  # also 1 and 1.0, which JSON prints differently
        return False
    if _is_float(was):
        return _close(was, now, tolerance)
    return was == now


def _same_list(was, now, tolerance):
    if len(was) != len(now):
        return False
    if _are_sums(was) and _are_sums(now):
        return was[0] == now[0] and _same_sums(was, now, tolerance)
    return all(same(old, new, tolerance) for old, new in zip(was, now, strict=True))


def _is_float(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_sums(value):
    return len(value) == 4 and all(map(_is_float, value)) and value[2] >= abs(value[1])


def _same_sums(was, now, tolerance):
    """Compare sums by the sum of magnitudes: terms of either sign cancel."""
    allowed = tolerance.relative * max(was[2], now[2]) + tolerance.absolute * max(1, was[0])
    return all(abs(old - new) <= allowed for old, new in zip(was[1:], now[1:], strict=True))


def _close(was, now, tolerance):
    if isinstance(was, int) and isinstance(now, int) and tolerance.relative < 1e-4:
        return was == now
    if math.isnan(was) or math.isnan(now):
        return math.isnan(was) and math.isnan(now)
    return math.isclose(was, now, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)


def _same_text(was, now, tolerance):
    old, new = texts.parts(was), texts.parts(now)
    if old.words.strip() != new.words.strip() or len(old.numbers) != len(new.numbers):
        return False
    return all(_same_number(*pair, tolerance) for pair in zip(old.numbers, new.numbers, strict=True))


def _same_number(was, now, tolerance):
    if was == now:
        return True
    difference = abs(texts.value(was) - texts.value(now))
    size = max(abs(texts.value(was)), abs(texts.value(now)))
    places = texts.last_place(was), texts.last_place(now)
    if _is_shorter(was, now) and size > 10 * tolerance.absolute:
        return difference <= min(filter(None, places)) * 1.001
    if tolerance.rounds and difference <= max(places) * 1.001:
        return True
    return difference <= max(tolerance.relative * size, tolerance.absolute)


def _is_shorter(was, now):
    """Return whether one of two plain numbers has fewer decimals: another format, or zeros at its end are left out."""
    if _is_unrounded(was) and _is_unrounded(now):
        return False  # one digit more or less is how Python writes the nearest number
    return "e" not in (was + now).lower() and texts.last_place(was) != texts.last_place(now)


def _is_unrounded(number):
    """Return whether a number is written in full, as in a CSV file."""
    return sum(map(str.isdecimal, number)) > UNROUNDED


def _short(value):
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}…"
