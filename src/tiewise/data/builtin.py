"""The prose that every CPython carries: its language reference and its docstrings, for a demo without a download.

`pydoc_data.topics` holds the reference texts behind `help("if")`; the docstrings are read from the source files of
the standard library by `ast`, so no module is imported and nothing runs. One document per topic and per module, in
sorted order: the same Python gives the same text.
"""

from __future__ import annotations

import ast
import importlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tiewise.core.errors import DataError
from tiewise.data.document import Document, paragraphs

# Packages of others, tests (they hold text written to be odd) and a parser kept for Python 2's grammar.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def builtin_documents() -> Iterator[Document]:
    """Yield every reference topic, then every standard-library module's docstrings.

    Raises:
        DataError: where this Python carries neither, as stripped and zipped ones do.
    """
    found = False
    for documents in (_topics(), _modules(Path(sysconfig.get_path("stdlib")))):
        for document in documents:
            found = True
            yield replace(document, text="\n\n".join(paragraphs(document.text)))
    if not found:
        raise DataError(
            f"builtin: the Python at {sys.executable} carries no documentation",
            "name a text of your own with --text FILE, or use a complete CPython",
        )


def _topics() -> Iterator[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions pack it apart; the docstrings alone are still a text
        return
    for name in sorted(topics):
        yield Document(f"topic {name}", topics[name])


def _modules(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED.isdisjoint(name.parts) and (text := _docstrings(path)):
            yield Document(f"module {name.as_posix()}", text)


def _docstrings(path: Path) -> str:
    """All docstrings of one file in reading order; "" where the file is unreadable or not of this Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules are not the user's concern
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    return "\n\n".join(text for node in _nodes(tree) if (text := ast.get_docstring(node)))


def _nodes(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    if isinstance(node, _BODIES):
        yield node
    for child in ast.iter_child_nodes(node):
        # definitions stand in statements only, also in those of `if` and `try`; expressions are most of a tree
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _nodes(child)
