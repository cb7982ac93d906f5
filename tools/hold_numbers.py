"""Compare the measured numbers of a page with their sources: `problems(page, text)` lists the faults.

A comment <!-- from: SOURCE --> names the source of the paragraph, list, table or output below it:

    <!-- from: results/sharing.md -->                        a file of docs, benchmarks, the catalogue, or from the root
    <!-- from: recorded.md > ALBERT > control -->            of it the section with that heading, there lines with that
    <!-- from: ledger.json > Table 4 > share {} -->          {} is the first cell of a row of a table
    <!-- from: atlas.md > Which rank > factored:32 > #3 -->  of each line the third number
    <!-- from: here -->                                      outputs of the same section; for a sentence also its tables
    <!-- from: $ python -m benchmarks.scale -->              the output of a quick command
    <!-- from: choice -->                                    settings, thresholds and limits: chosen, not measured

A semicolon separates several sources. Every number with a decimal point is checked. If a source is named, integers
before a unit or in a cell of a table are checked as well. All numbers of a table's row must be in one line of each
source, in the row's order. A number of a sentence may be in any line that the keys select, so they should select few.
A source may be more precise than the page.

Not measurements: numbers in code, links and addresses; versions, numbers of sections, and values after "x =" or "x <".
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
# pages that `make docs` generates, that are sources of other pages, or that describe past versions
UNCHECKED_PAGES = re.compile(r"claims|performance|reference-\w+|recorded|changes")
PRODUCTS = r"Python|[Tt]orch|transformers|vLLM|SGLang|PEFT|gguf|mlx-lm|accelerate|Liger|TRL|T5|SQuAD|Apache|Releases"
NOT_MEASURED = (
    r"^<!-- rows of .*?^<!-- end -->|<!--.*?-->",
    r"^```\w*\n.*?^```$|`[^`\n]*`|\]\([^)\n]*\)|\bhttps?://\S+",  # code, links
    r"arXiv:\S+|\b\d{4}\.\d{5}\b|\d+(?:\.\d+){2,}\S*|[\w-]+ \d+:[\d.]\S*|\b95 %",
    rf"\b(?:{PRODUCTS})[ -]\d+\.\d+\b(?:(?:,| and| to| or|/) \d+\.\d+\b(?! %))*",
    r"(?:§|[Ss]ection |eq\. |Table |[Ee]xercise |App\. )\d+(?:\.\d+)*|(?:^\| |· )\d\.\d(?:–\d\.\d)?(?= [A-Z])",
    r"[\w'}|‖)]\*? [=≈≤<>≥] [−±]?\d+(?:\.\d+)?(?:(?:,| and| to| or) \d+\.\d+)*",
)
NUMBER = re.compile(r"(?<![\w.,])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+−-]?\d+)?(?![\w²³⁰-⁹])(?!\.\d)")
UNIT = re.compile(r" ?(?:%|×|ms|s|MB|GB|TB|GB/s|nats|bits)(?!\w)")


class MeasuredNumber(NamedTuple):
    """A measured number of a page, with its position and its sources."""

    start: int  # offset in the text
    printed: str
    line: int
    sources: str | None  # as the comment above it names them
    row: str | None  # first cell of its table row; None outside tables


def masked(text: str) -> str:
    """Return the text with a `~` for each character that belongs to no measurement."""
    text = re.sub(r"\S+<!-- = [^>]+ -->", lambda match: "~" * len(match[0]), text)  # run_docs checks it
    # outputs stay; without this, the closing line of a text block would start another block
    text = re.sub(r"^```text\n(.*?)^```$", lambda match: f"~~~~~~~\n{match[1]}~~~", text, flags=re.S | re.M)
    for pattern in NOT_MEASURED:
        text = re.sub(pattern, lambda match: re.sub(r"[^\n]", "~", match[0]), text, flags=re.S | re.M)
    return text


def measured_numbers(text: str) -> list[MeasuredNumber]:
    """Return all measured numbers of a page."""
    measured: list[MeasuredNumber] = []
    sources, is_new, start, lines = None, False, 0, masked(text).splitlines(keepends=True)
    for index, (line, plain) in enumerate(zip(text.splitlines(keepends=True), lines, strict=True)):
        if mark := re.match(r"<!-- from: (.+) -->$", line):
            sources, is_new = mark[1], True
        elif line.isspace():
            sources = sources if is_new else None
        else:
            is_new = False
        is_row = plain.startswith("|") and "|---" not in "".join(lines[index + 1 : index + 2])
        first = re.split(r"(?<!\\)\|", line)[1].strip(" *·") if is_row else None
        for number in NUMBER.finditer(plain) if is_row or not line.startswith(("#", "|")) else ():
            starts_cell = is_row and re.fullmatch(r".*\|.*\|[^|A-Za-z]*", plain[: number.start()])
            is_quantity = starts_cell if is_row else UNIT.match(plain, number.end())
            if "." in number[0] or (sources not in (None, "choice") and is_quantity):
                measured.append(MeasuredNumber(start + number.start(), number[0], index + 1, sources, first))
        start += len(line)
    return measured


def is_rounded(printed: str, source: str, per_cent: bool) -> bool:
    """Return whether a printed number is a number of a source, rounded to as many digits.

    A printed number without a sign is compared with the absolute value. If `per_cent` is true, the source may also have
    the share of 1.
    """
    value, exact = (float(number.replace(",", "").replace("−", "-")) for number in (printed, source))
    exact = exact if printed[0] in "+−-" else abs(exact)
    mantissa, _, power = printed.partition("e")
    half = 0.5000001 * 10.0 ** (int(power.replace("−", "-") or 0) - len(mantissa.partition(".")[2]))
    return abs(value - exact) <= half or (per_cent and abs(exact) <= 1 and abs(value - 100 * exact) <= half)


@cache
def numbers_of(path: Path, text: str, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the numbers of each line that the keys select in a text.

    In a Markdown page outside `results`, only headings, tables and outputs count. The path is that of the text's file.
    """
    if path.suffix == ".md" and path.parent.name != "results":
        fences = r"^```(?:text|console|python(?=\n>>>))\n(?s:.*?)^```\n"
        blocks = re.findall(rf"^(?:#|\|(?!.*\n\|---)).*\n|{fences}", text, re.M)  # headings separate sections
        text = re.sub(r"^(?:```|\$ |>>> |\.\.\. ).*\n", "", "".join(blocks), flags=re.M)
    words = [key for key in keys if key[0] != "#"]
    columns = [int(key[1:]) - 1 for key in keys if key[0] == "#"]
    for key in words:
        section = re.search(rf"^(#+) .*{re.escape(key)}.*\n(?s:.*?)(?=^##? |\Z)", text, re.M)
        text = section[0] if section else "\n".join(line for line in text.splitlines() if key in line)
    rows = [tuple(NUMBER.findall(line)) for line in text.splitlines() if not line.startswith("#")]
    rows = [numbers for numbers in rows if numbers]
    if not columns:
        return rows
    return [tuple(numbers[column] for column in columns if column < len(numbers)) for numbers in rows]


@cache
def output_of(command: str) -> str:
    """Return the output of a quick command."""
    settings = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "120"}
    words = [sys.executable, *command.removeprefix("python ").split()]
    return subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, check=True, timeout=60).stdout


def source_rows(source: str, number: MeasuredNumber, page: Path, text: str) -> list[tuple[str, ...]]:
    """Return the numbers of each source line that may contain a number of the page."""
    name, *keys = (key.replace("{}", number.row or "{}") for key in source.strip().split(" > "))
    if name == "here":
        start, end = text.rfind("\n#", 0, number.start), text.find("\n#", number.start) % (len(text) + 1)
        section = text[max(start, 0) : end]
        if number.row is not None:
            section = re.sub(r"^\|.*", "", section, flags=re.M)  # no table is its own source
        return numbers_of(page, section, tuple(keys))
    if name.startswith("$ "):
        return numbers_of(ROOT, output_of(name[2:]), tuple(keys))
    folders = (
        ROOT / "docs",
        ROOT / "docs" / "dev",
        ROOT / "benchmarks",
        ROOT / "src" / "tiewise" / "planning" / "data",
        ROOT,
        page.parent,
    )
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return numbers_of(path, path.read_text(encoding="utf-8"), tuple(keys)) if path else []


def in_order(row: list[tuple[str, bool]], line: tuple[str, ...]) -> bool:
    """Return whether a line of a source contains all numbers of a row, in order."""
    rest = iter(line)
    return all(any(is_rounded(printed, source, per_cent) for source in rest) for printed, per_cent in row)


def faults(measured: list[MeasuredNumber], page: Path, text: str) -> list[str]:
    """Return a message for each fault of the numbers of one line of a page."""
    sources, line = measured[0].sources, f"line {measured[0].line}"
    row = [(n.printed, text[n.start + len(n.printed) :].lstrip()[:1] == "%") for n in measured]
    listed = ", ".join(number for number, _ in row)
    if sources is None:
        return [f"{line}: {listed}: no source is named, as tools/hold_numbers.py describes"]
    if sources == "choice":
        return []
    candidates = [(source_rows(source, measured[0], page, text), "{}" in source) for source in sources.split(";")]
    lines = [rows for rows, is_optional in candidates if rows or not is_optional]
    if not lines or not all(lines):
        return [f"{line}: {listed}: nothing is left of {sources}"]
    if measured[0].row is not None:
        is_there = any(in_order(row, sum(joined, ())) for joined in product(*lines))
        return [] if is_there else [f"{line}: {listed}: no such row in {sources}"]
    numbers = [number for rows in lines for source_row in rows for number in source_row]
    lacking = [n for n, per_cent in row if not any(is_rounded(n, number, per_cent) for number in numbers)]
    return [f"{line}: {n} is not in {sources}" for n in lacking]


def problems(page: Path, text: str) -> list[str]:
    """Return a message for each measured number that names no source or is not in it."""
    numbers = [] if UNCHECKED_PAGES.fullmatch(page.stem) else measured_numbers(text)
    lines = [list(measured) for _, measured in groupby(numbers, lambda number: number.line)]
    return [fault for measured in lines for fault in faults(measured, page, text)]
