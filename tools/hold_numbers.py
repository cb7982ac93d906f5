"""Hold the measured numbers of a page to their source: `problems(page)` names each that is not in it.

A comment <!-- from: SOURCE --> stands before what it speaks of, a paragraph, a list, a table or an output:

    <!-- from: results/sharing.md -->                        a file of docs, benchmarks, the catalogue, or from the root
    <!-- from: recorded.md > ALBERT > control -->            of it the section of that heading, there lines with that
    <!-- from: ledger.json > Table 4 > share {} -->          {} is the first cell of a row of a table
    <!-- from: atlas.md > Which rank > factored:32 > #3 -->  of each line the third number
    <!-- from: here -->                                      outputs of the same section; for a sentence its tables, too
    <!-- from: $ python -m benchmarks.scale -->              what a quick command prints
    <!-- from: choice -->                                    settings, thresholds and limits: chosen, not measured

Several sources are parted by a semicolon. Held are all numbers with a decimal point, where a source is named also whole
ones before a unit or in a cell of a table. All of a row must stand in one line of each source, in the row's order; a
number in a sentence may stand in any line that the source leaves, so it should leave few. A source may be more precise.

No measurements: what is in code, links, addresses; versions, numbers of sections, what follows "x =" or "x <".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# written by a command that `make docs` runs; a source of other pages; records of past versions
WRITTEN = re.compile(r"performance|reference-\w+|recorded|changes-[\d.]+")
KNOWN = r"Python|[Tt]orch|transformers|vLLM|SGLang|PEFT|gguf|mlx-lm|accelerate|Liger|TRL|T5|SQuAD|Apache|Releases"
NAMED = (
    r"^<!-- rows of .*?^<!-- end -->|<!--.*?-->",
    r"^```(?!text).*?^```|`[^`\n]*`|\]\([^)\n]*\)|\bhttps?://\S+",  # code, links
    r"arXiv:\S+|\b\d{4}\.\d{5}\b|\d+(?:\.\d+){2,}\S*|[\w-]+ \d+:[\d.]\S*|\b95 %",
    rf"\b(?:{KNOWN})[ -]\d+\.\d+\b(?:(?:,| and| to| or|/) \d+\.\d+\b(?! %))*",
    r"(?:§|[Ss]ection |eq\. |Table |[Ee]xercise |App\. )\d+(?:\.\d+)*|(?:^\| |· )\d\.\d(?:–\d\.\d)?(?= [A-Z])",
    r"[\w'}|‖)]\*? [=≈≤<>≥] [−±]?\d+(?:\.\d+)?(?:(?:,| and| to| or) \d+\.\d+)*",
)
NUMBER = re.compile(r"(?<![\w.,])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+−-]?\d+)?(?![\w²³⁰-⁹])(?!\.\d)")
UNIT = re.compile(r" ?(?:%|×|ms|s|MB|GB|TB|GB/s|nats|bits)(?!\w)")


class Held(NamedTuple):
    """One number that is measured: where it stands in the text, its line, and what the mark before it says."""

    start: int
    said: str
    line: int
    sources: str | None
    row: str | None  # of a table: its first cell


def masked(text: str) -> str:
    """Return the text with all that is no measurement blanked, letter for letter."""
    text = re.sub(r"\S+<!-- = [^>]+ -->", lambda found: "~" * len(found[0]), text)  # held by run_docs
    for named in NAMED:
        text = re.sub(named, lambda m: re.sub(r"[^\n]", "~", m[0]), text, flags=re.S | re.M)
    return text


def held(text: str) -> list[Held]:
    """Return all measured numbers of a page."""
    found: list[Held] = []
    sources, fresh, start, lines = None, False, 0, masked(text).splitlines(keepends=True)
    for index, (line, plain) in enumerate(zip(text.splitlines(keepends=True), lines, strict=True)):
        if mark := re.match(r"<!-- from: (.+) -->$", line):
            sources, fresh = mark[1], True
        elif line.isspace():
            sources = sources if fresh else None
        else:
            fresh = False
        body = plain.startswith("|") and "|---" not in "".join(lines[index + 1 : index + 2])
        first = re.split(r"(?<!\\)\|", line)[1].strip(" *·") if body else None
        for number in NUMBER.finditer(plain) if body or not line.startswith(("#", "|")) else ():
            cell = body and re.fullmatch(r".*\|.*\|[^|A-Za-z]*", plain[: number.start()])  # which begins with a number
            whole = sources not in (None, "choice") and (cell if body else UNIT.match(plain, number.end()))
            if "." in number[0] or whole:
                found.append(Held(start + number.start(), number[0], index + 1, sources, first))
        start += len(line)
    return found


def is_printed(said: str, source: str, per_cent: bool) -> bool:
    """Whether a number of a source, rounded as it is printed, is `said`; one without a sign is a size."""
    printed, exact = (float(one.replace(",", "").replace("−", "-")) for one in (said, source))
    exact = exact if said[0] in "+−-" else abs(exact)
    mantissa, _, power = said.partition("e")
    half = 0.5000001 * 10.0 ** (int(power.replace("−", "-") or 0) - len(mantissa.partition(".")[2]))
    return abs(printed - exact) <= half or (per_cent and abs(exact) <= 1 and abs(printed - 100 * exact) <= half)


@cache
def numbers_of(path: Path, text: str, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the numbers of each line that keys leave of a text; of a page of the book its tables and outputs count."""
    if path.suffix == ".md" and path.parent.name != "results":
        fences = r"^```(?:text|console|python(?=\n>>>))\n(?s:.*?)^```\n"
        kept = re.findall(rf"^(?:#|\|(?!.*\n\|---)).*\n|{fences}", text, re.M)  # headings part them
        text = re.sub(r"^(?:```|\$ |>>> |\.\.\. ).*\n", "", "".join(kept), flags=re.M)
    words, nth = [key for key in keys if key[0] != "#"], [int(key[1:]) - 1 for key in keys if key[0] == "#"]
    for key in words:
        section = re.search(rf"^(#+) .*{re.escape(key)}.*\n(?s:.*?)(?=^##? |\Z)", text, re.M)
        text = section[0] if section else "\n".join(line for line in text.splitlines() if key in line)
    found = [tuple(NUMBER.findall(line)) for line in text.splitlines() if not line.startswith("#")]
    return [tuple(numbers[n] for n in nth if n < len(numbers)) if nth else numbers for numbers in found if numbers]


@cache
def said_by(command: str) -> str:
    """Return what a quick command prints."""
    settings = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    words = [sys.executable, *command.removeprefix("python ").split()]
    return subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=True, timeout=60).stdout


def left(source: str, number: Held, page: Path, text: str) -> list[tuple[str, ...]]:
    """Return what a source leaves for a number: of each line its numbers."""
    name, *keys = (key.replace("{}", number.row or "{}") for key in source.strip().split(" > "))
    if name == "here":
        start, end = text.rfind("\n#", 0, number.start), text.find("\n#", number.start) % (len(text) + 1)
        mine = text[max(start, 0) : end]
        mine = re.sub(r"^\|.*", "", mine, flags=re.M) if number.row is not None else mine  # no table is its own source
        return numbers_of(page, mine, tuple(keys))
    if name.startswith("$ "):
        return numbers_of(ROOT, said_by(name[2:]), tuple(keys))
    places = (ROOT / "docs", ROOT / "benchmarks", ROOT / "src" / "tiewise" / "planning" / "data", ROOT, page.parent)
    path = next((path / name for path in places if (path / name).is_file()), None)
    return numbers_of(path, path.read_text(encoding="utf-8"), tuple(keys)) if path else []


def in_order(row: list[tuple[str, bool]], line: tuple[str, ...]) -> bool:
    """Return whether a line contains all numbers of a row, in order."""
    rest = iter(line)
    return all(any(is_printed(said, source, per_cent) for source in rest) for said, per_cent in row)


def faults(mine: list[Held], page: Path, text: str) -> list[str]:
    """Return what is wrong with the numbers of one line of a page, a line for each fault."""
    sources, line = mine[0].sources, f"line {mine[0].line}"
    said = [(n.said, text[n.start + len(n.said) :].lstrip()[:1] == "%") for n in mine]
    told = ", ".join(number for number, _ in said)
    if sources is None:
        return [f"{line}: {told}: no source is named, as tools/hold_numbers.py describes"]
    if sources == "choice":
        return []
    found = [(left(source, mine[0], page, text), "{}" in source) for source in sources.split(";")]
    lines = [numbers for numbers, optional in found if numbers or not optional]
    if not lines or not all(lines):
        return [f"{line}: {told}: nothing is left of {sources}"]
    if mine[0].row is not None:
        there = any(in_order(said, sum(row, ())) for row in product(*lines))
        return [] if there else [f"{line}: {told}: no such row in {sources}"]
    every = [source for numbers in lines for one in numbers for source in one]
    lacking = [n for n, per_cent in said if not any(is_printed(n, source, per_cent) for source in every)]
    return [f"{line}: {n} is not in {sources}" for n in lacking]


def problems(page: Path, text: str) -> list[str]:
    """Return a line for each measured number of a page without a source, or that it lacks."""
    numbers = [] if WRITTEN.fullmatch(page.stem) else held(text)
    lines = [list(mine) for _, mine in groupby(numbers, lambda number: number.line)]
    return [fault for mine in lines for fault in faults(mine, page, text)]
