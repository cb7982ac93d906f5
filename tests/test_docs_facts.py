"""Test that no fact of the documentation gets lost when pages are merged or moved.

`docs_facts.txt` records every measured number with its source, every command that measures something, and every erratum
of the pages at commit eb5f3e92. Each must still be on some page. Numbers of performance.md alone are left out, because
`benchmarks.performance` renders that page from results, and every new measurement changes them.

List what is missing, by page at that commit:

    python -m tests.test_docs_facts            all
    python -m tests.test_docs_facts trim.md    of this page
"""

import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("docs_facts.txt")
HOLD = runpy.run_path(str(ROOT / "tools" / "hold_numbers.py"))
COMMAND = re.compile(r"python -m (?:benchmarks|tests)[\w.]*[^`\n>]*|python tools/[^`\n>]*|tiewise sweep [^`\n>]*")
ERRATUM = re.compile(r"^### (.+)$", re.MULTILINE)
# pages that were merged into another one, or moved
RENAMED: dict[str, str] = {"symmetry.md": "direct-path.md"}


class Fact(NamedTuple):
    """A fact of a page: a number with the file name of its source, a command, or an erratum."""

    kind: str
    text: str
    source: str = ""


def source_files(sources: str | None) -> list[str]:
    """Return the file names in a `from` comment; `here` and commands count as an empty name."""
    names = [source.split(" > ")[0].strip() for source in (sources or "").split(";")]
    return ["" if name == "here" or name.startswith("$ ") else Path(name).name for name in names]


def facts(page: str, text: str) -> set[Fact]:
    """Return the facts of a page."""
    is_checked = not HOLD["UNCHECKED_PAGES"].fullmatch(Path(page).stem)
    numbers = [n for n in HOLD["measured_numbers"](text) if n.sources != "choice" and (n.sources or not is_checked)]
    found = {Fact("number", n.printed, name) for n in numbers for name in source_files(n.sources)}
    found |= {Fact("command", " ".join(command.split())) for command in COMMAND.findall(text)}
    if Path(page).name == "errata.md":
        found |= {Fact("erratum", number) for number in ERRATUM.findall(text)}
    return found


def pages_now() -> dict[str, str]:
    """Return the text of each page by its path below docs, except the generated reference."""
    paths = [path for path in (ROOT / "docs").rglob("*.md") if not path.name.startswith("reference-")]
    return {path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8") for path in paths}


def recorded() -> dict[Fact, list[str]]:
    """Return each recorded fact with the pages that stated it."""
    rows = [line.split("\t") for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    return {Fact(kind, text, source): pages.split(",") for kind, text, source, pages in rows}


def missing() -> dict[Fact, list[str]]:
    """Return the recorded facts that no page states, with the pages that stated them."""
    now = {fact for page, text in pages_now().items() for fact in facts(page, text)}
    numbers = {fact.text for fact in now if fact.kind == "number"}

    def is_stated(fact: Fact) -> bool:
        if fact.kind == "number" and not fact.source:
            return fact.text in numbers
        return fact in now or fact._replace(source=RENAMED.get(fact.source, fact.source)) in now

    return {fact: pages for fact, pages in recorded().items() if not is_stated(fact)}


def test_every_recorded_fact_is_on_a_page():
    assert missing() == {}


def test_facts_finds_numbers_commands_and_errata():
    text = "### Points\n\n<!-- from: x.json > a; here -->\n| 3 | 1.25 s |\n\nRun `python -m benchmarks.scale --x`.\n"
    assert facts("errata.md", text) == {
        Fact("number", "1.25", "x.json"),
        Fact("number", "1.25", ""),
        Fact("command", "python -m benchmarks.scale --x"),
        Fact("erratum", "Points"),
    }


if __name__ == "__main__":
    for fact, pages in sorted(missing().items(), key=lambda item: item[1]):
        if not sys.argv[1:] or any(name in pages for name in sys.argv[1:]):
            print(*fact, ",".join(pages), sep="\t")
