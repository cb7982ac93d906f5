"""Reader of the Python files of a checkpoint: the statements of their classes on tying.

The reader parses each file as text. It imports and runs nothing.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.hf_folder import Fault, Folder, noting
from tiewise.checkpoint.untrusted import inside, read_whole, short
from tiewise.core.errors import CheckpointError

MOST_BYTES, MOST_IN_ALL = 2**18, 2**20  # of one file, and of all; a parsed file takes up to 600 times its bytes
MOST_CLASSES = 2000
KEYS = "_tied_weights_keys"
_MISNAMED = re.compile(r"_{0,2}(dynamic_)?tied?_(weights?|params?|parameters?)_(keys?|names?)_?")
ARGUMENTS = ("missing_keys", "recompute_mapping")  # with which transformers 5 calls `tie_weights`
_WORDS = re.compile(b"tie|get_output_embeddings|Config")  # a file with none of these says nothing of tying


class Assigned(NamedTuple):
    """An assignment of `_tied_weights_keys`, or of a name that was meant to be it."""

    name: str  # as written
    line: int  # in its file
    entries: tuple[str, ...] | None  # the texts of a list, tuple or set; None where the value is something else


@dataclass(frozen=True)
class CodeClass:
    """The facts that are kept of one class of a file, whose tree is large."""

    file: str  # name of the file in the folder
    line: int  # of the class
    name: str  # of the class
    bases: tuple[str, ...]  # last parts of the names of its bases
    tied: tuple[Assigned, ...]  # what it assigns in its body or on `self`
    tie_weights: int | None  # line of its own `tie_weights` of the old form, which takes no arguments; else None
    methods: frozenset[str]  # names of its own
    names_flag: bool  # `tie_word_embeddings` stands somewhere in it
    keyed: bool  # it assigns `_tied_weights_keys`


def read_code(folder: Folder) -> tuple[dict[str, CodeClass], list[Fault]]:
    """Return the classes of the folder's Python files, and the files that cannot be read."""
    classes, faults = dict[str, CodeClass](), list[Fault]()
    bytes_left = MOST_IN_ALL
    for name in folder.files:
        if bytes_left < 0 or not name.endswith(".py"):
            continue
        path = folder.path / name
        with noting(faults, name):
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            bytes_left -= len(text)
            if bytes_left < 0 or len(classes) > MOST_CLASSES:
                what = f"{path}: not read: with those before it, more code than any model has"
                raise CheckpointError(what, "keep only the code of the model in the folder")
            for summary in _summaries(text, path):
                classes.setdefault(summary.name, summary)  # the first of a name counts
    return classes, faults


def _summaries(text: bytes, path: Path) -> list[CodeClass]:
    """Return the facts of the classes of one file. A file without a word on tying is not parsed."""
    if not _WORDS.search(text):
        return []
    return [_summary(node, path.name) for node in parsed_classes(text, path)]


def parsed_classes(text: bytes, path: Path) -> list[ast.ClassDef]:
    """Return the syntax trees of all classes of a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python would print a stranger's line, an invalid escape in it
            tree = ast.parse(text, os.fspath(path))  # a syntax error opens the file that is named, to quote its line
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        reason = short(getattr(error, "msg", None) or str(error) or type(error).__name__, 80)
        raise CheckpointError(f"{path}: cannot be read as Python ({reason})", "take it from its source again") from None
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)][:MOST_CLASSES]


def _summary(node: ast.ClassDef, file: str) -> CodeClass:
    """Return the facts of one class."""
    nodes = list(ast.walk(node))
    tied = _assigned_keys(nodes)
    bases = [last_name(base) for base in node.bases]
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    return CodeClass(
        file,
        node.lineno,
        node.name,
        bases=tuple(base for base in bases if base is not None),
        tied=tied,
        tie_weights=_line_of_old_form(methods.get("tie_weights")),
        methods=frozenset(methods),
        names_flag=any(map(_is_flag, nodes)),
        keyed=KEYS in [assigned.name for assigned in tied],
    )


def _assigned_keys(nodes: Iterable[ast.AST]) -> tuple[Assigned, ...]:
    """Return the assignments of `_tied_weights_keys`, and of names that were meant to be it."""
    assignments = list[Assigned]()
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for name in map(_attribute_name, _targets(node)):
            if name == KEYS or _MISNAMED.fullmatch(name):
                assignments.append(Assigned(name, node.lineno, _texts(node.value)))
    return tuple(assignments)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return the expressions that an assignment sets."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target]


def _attribute_name(target: ast.expr) -> str:
    """Return the attribute that an assignment sets on the class or its object; empty for another object's."""
    if isinstance(target, ast.Attribute) and last_name(target.value) not in ("self", "cls"):
        return ""
    return last_name(target) or ""


def _texts(value: ast.expr | None) -> tuple[str, ...] | None:
    """Return the texts of a list, tuple or set; None for any other value."""
    if not isinstance(value, ast.List | ast.Tuple | ast.Set):
        return None
    constants = (item.value for item in value.elts if isinstance(item, ast.Constant))
    return tuple(text for text in constants if isinstance(text, str))


def _is_flag(node: ast.AST) -> bool:
    """Return whether a node names `tie_word_embeddings`: as a variable, text, argument, or attribute that is set."""
    match node:
        case ast.arg(arg=word) | ast.keyword(arg=word) | ast.Constant(value=word) | ast.Name(id=word):
            return bool(word == FLAG)
        case ast.Attribute(attr=word, ctx=ast.Store()):
            return word == FLAG
    return False


def _line_of_old_form(tie_weights: ast.FunctionDef | None) -> int | None:
    """Return the line of a method `tie_weights` that does not take the arguments that transformers 5 passes."""
    if tie_weights is None or tie_weights.args.kwarg is not None:
        return None
    arguments = (*tie_weights.args.args, *tie_weights.args.kwonlyargs)
    names = {argument.arg for argument in arguments}
    if names.issuperset(ARGUMENTS):
        return None
    return tie_weights.lineno


def last_name(node: ast.expr) -> str | None:
    """Return the last part of a dotted name; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return None
