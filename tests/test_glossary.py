"""Test that `docs/glossary.md` defines every term of the project once, after the terms that its definition uses.

The candidates for terms come from the code: names of classes, sections, verbs, kinds of run and kinds of boundary. A
candidate that pages use needs an entry, unless `STANDARD` lists it as a word of English, PyTorch or statistics.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tiewise.checkpoint.rewrite.registry import verbs
from tiewise.core.spec import KINDS as BOUNDARY_KINDS
from tiewise.inspection.inspection import sections
from tiewise.training.settings import kinds as run_kinds

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^\| (?P<terms>\*\*.+?) \| (?P<definition>.+) \|$", re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)\n]*\)", re.DOTALL)
COMMON = 3  # a candidate that pages use fewer times is no term
STANDARD = frozenset((ROOT / "tests" / "standard_words.txt").read_text(encoding="utf-8").splitlines())


class Entry(NamedTuple):
    terms: tuple[str, ...]
    definition: str


def entries(page: str) -> list[Entry]:
    """Return the rows of all tables of the glossary."""
    rows = []
    for match in ENTRY.finditer(page):
        terms = tuple(term.lower() for term in re.findall(r"\*\*(.+?)\*\*", match["terms"]))
        rows.append(Entry(terms, match["definition"]))
    return rows


def singular(word: str) -> str:
    """Return a plural's singular: rows → row, studies → study."""
    if word.endswith("ies"):
        return word[:-3] + "y"
    return word.removesuffix("s")


@cache
def prose() -> str:
    """Return the text of all pages that a person wrote, without code, links and comments, in lower case."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    others = (GLOSSARY.name, "changes.md", "testing.md")
    written = [page for page in pages if not page.name.startswith("reference-") and page.name not in others]
    return "\n".join(CODE.sub(" ", page.read_text(encoding="utf-8")) for page in written).lower()


@cache
def class_names() -> list[str]:
    """Return the words of every public class of the package: `StoredTable` as "stored table"."""
    names = []
    for path in sorted((ROOT / "src" / "tiewise").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|\d+", node.name)
                names.append(" ".join(words).lower())
    return names


def word_pattern(word: str) -> str:
    """Return the pattern of a word, or of its plural, between other words."""
    return rf"(?<![\w-]){re.escape(word)}s?(?![\w-])"


def times(word: str, text: str) -> int:
    if word not in text:  # far faster than the pattern, and true of most candidates
        return 0
    return len(re.findall(word_pattern(word), text))


def missing(page: str, candidates: Iterable[str], text: str) -> list[str]:
    """Return the candidates that `text` uses often and the glossary `page` does not define."""
    defined = {singular(term) for entry in entries(page) for term in entry.terms}
    words = {word for word in map(singular, candidates) if word not in defined and word not in STANDARD}
    return sorted(word for word in words if times(word, text) >= COMMON)


def registered_names() -> list[str]:
    sorts = (BOUNDARY_KINDS, [section.name for section in sections()], list(verbs()), list(run_kinds()))
    return sorted({name for names in sorts for name in names})


def test_the_glossary_defines_every_term_that_the_pages_use():
    assert missing(GLOSSARY.read_text(encoding="utf-8"), class_names(), prose()) == []


def test_every_standard_word_is_a_candidate_that_the_pages_use():
    candidates, text = set(map(singular, class_names())), prose()
    assert [word for word in STANDARD if word not in candidates or times(word, text) < COMMON] == []


@pytest.mark.parametrize("name", registered_names())
def test_the_glossary_has_every_kind_section_and_verb(name):
    page = GLOSSARY.read_text(encoding="utf-8")
    assert f"`{name}`" in page or f"**{name.replace('_', ' ')}**" in page


def test_a_term_without_an_entry_is_reported():
    page = GLOSSARY.read_text(encoding="utf-8")
    without = page.replace("| **receipt** |", "| receipt |")
    assert without != page
    assert missing(without, ["receipt", "row"], "a receipt. every receipt has a row. receipts, rows, row") == [
        "receipt"
    ]


def test_each_term_is_defined_once():
    terms = [term for entry in entries(GLOSSARY.read_text(encoding="utf-8")) for term in entry.terms]
    assert len(terms) > 100
    assert sorted(terms) == sorted(set(terms))


def test_definitions_use_terms_that_are_defined_above_them():
    defined: set[str] = set()
    early = []
    for entry in entries(GLOSSARY.read_text(encoding="utf-8")):
        used = [word.lower() for word in re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", entry.definition)]
        early += [(entry.terms[0], word) for word in used if singular(word) not in defined]
        defined |= {singular(term) for term in entry.terms}
    assert early == []


def test_every_term_occurs_in_the_pages_or_the_code():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "tiewise").rglob("*.py")).lower()
    text = "\n".join([prose(), code.replace("_", " "), *class_names()])
    terms = [term for entry in entries(GLOSSARY.read_text(encoding="utf-8")) for term in entry.terms]
    assert [term for term in terms if len(term) > 2 and not re.search(word_pattern(singular(term)), text)] == []
