"""Normalise text output, and split it into words and numbers so that numbers compare with a tolerance."""

import json
import math
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version

import tiewise

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# a number, with thousands separators and either minus sign; "B012" and "w7" are words
NUMBER = re.compile(r"(?<![\w.])[-−+]?\d(?:[\d,]*\d)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
SPEED = re.compile(r"tokens/s {2,}.*\d.*")
SPACES = re.compile(r"[ ─━]+")
HUGE = 1e100  # larger numbers are not summed
LIBRARIES = ("torch", "transformers", "jax", "flax", "numpy", "safetensors")
# text that depends on the clock, the machine or the temporary folder
PLACEHOLDERS = (
    (re.compile(rf"(?<![\d.]){re.escape(platform.python_version())}(?![\d.])"), "VERSION"),  # of Python
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?"), "DATE"),  # dates
    (re.compile(r"\d+(\.\d+)? (s|seconds|min|minutes|h)\b"), "TIME"),  # durations
    (re.compile(r"\b\d+ cores? need"), "CORES need"),  # numbers of cores
    (re.compile(r"gradient left: [\d.e-]+"), "gradient left: RESIDUE"),  # where rounding ends an optimisation
    (re.compile(r"\b[0-9a-f]{40,64}\b"), "HASH"),  # of files that hold a date
)


@cache
def versions():
    """Return the version of tiewise's source and of each library installed."""
    found = {"tiewise": tiewise.__version__}  # an editable installation may state an older one
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


@cache
def version_patterns():
    """Return patterns of a library's name with its version; the name is the first group."""
    return [
        re.compile(rf"(?i)\b({library}(?:\[\w+\])?[ =/\-]+){re.escape(number)}")
        for library, number in versions().items()
    ]


def normalised(text, folder):
    """Replace text that differs between runs by placeholders."""
    text = ESCAPES.sub("", text)
    for path, name in ((folder.parent / "temporary", "TEMPORARY"), (folder, "FOLDER"), (folder.parent, "ABOVE")):
        text = text.replace(str(path), name)
    text = re.sub(r"TEMPORARY/[\w-]+", "TEMPORARY/NAME", text)
    return _without_environment(text)


@lru_cache(maxsize=10_000)  # most strings of a tokenizer and of a result are in every run
def _without_environment(text):
    """Replace the interpreter, versions, dates, durations and names of the machine by placeholders."""
    text = text.replace(sys.executable, "PYTHON")  # batch scripts name the interpreter
    for pattern in version_patterns():
        text = pattern.sub(r"\1VERSION", text)
    for pattern, placeholder in PLACEHOLDERS:
        text = pattern.sub(placeholder, text)
    return without_machine(text)


@cache
def machine_names():
    """Return the names of this machine in reports and results, with their placeholders."""
    from tiewise.training.compare import environment  # imports torch, which the patterns above do not need

    machine = environment()
    return {machine["platform"]: "PLATFORM", machine["processor"]: "PROCESSOR"}


def parsed(text, folder):
    """Return what a JSON text says, with its strings normalised.

    The text itself cannot be: in a token such as `\\u0120 s`, the escape and what follows look like a duration.
    """
    return _in_strings(json.loads(text), folder)


def _in_strings(value, folder):
    """Return a JSON value with each string and each key normalised."""
    if isinstance(value, str):
        return normalised(value, folder)
    if isinstance(value, list):
        return [_in_strings(item, folder) for item in value]
    if isinstance(value, dict):
        return {normalised(key, folder): _in_strings(item, folder) for key, item in value.items()}
    return value


def without_machine(text):
    """Replace the names of the machine, and the table row with the trained tokens per second."""
    for name, placeholder in machine_names().items():
        text = text.replace(name, placeholder)
    return SPEED.sub("tokens/s SPEED", text)


def words(text):
    """Return the words of a text: a short way to write a list of names."""
    return text.split()


def lines(text):
    """Return the lines of a text without the blanks at their ends."""
    return [line.rstrip() for line in text.rstrip().split("\n")] if text.strip() else []


@dataclass(frozen=True)
class Parts:
    """Words of a text with a placeholder for each number, and the numbers as written."""

    words: str
    numbers: tuple[str, ...]


def parts(text):
    """Split a text; runs of blanks and rules count as one, because a table is as wide as its longest number."""
    return Parts(SPACES.sub(" ", NUMBER.sub("#", text)), tuple(NUMBER.findall(text)))


def value(number):
    """Return the value of a written number."""
    return float(number.replace(",", "").replace("−", "-"))


def last_place(number):
    """Return one unit of the last written place of a number; 0 of a whole number."""
    mantissa, _, exponent = number.lower().partition("e")
    _, point, decimals = mantissa.partition(".")
    if not point and not exponent:
        return 0.0
    return math.pow(10.0, int(exponent or 0) - len(decimals))


class Sums(list):
    """Sums of a list of numbers, which are compared together and not one by one."""


def sums(numbers):
    """Return length, sum, sum of magnitudes and sum weighted by position; they record a long list."""
    finite = [float(number) for number in numbers if abs(number) < HUGE]
    weighted = math.fsum((place + 1) / len(finite) * number for place, number in enumerate(finite))
    return Sums([len(numbers), math.fsum(finite), math.fsum(map(abs, finite)), weighted])
