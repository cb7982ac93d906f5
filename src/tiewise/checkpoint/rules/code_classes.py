"""Reader of the Python files of a checkpoint, for code that ties tables.

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
from tiewise.checkpoint.hf_folder import Fault, Folder, recording_faults
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

# limits in bytes for one file and for all files; a parsed file takes up to 600 times its size in memory
MOST_BYTES, MOST_IN_ALL = 2**18, 2**20
MOST_CLASSES = 2000
KEYS = "_tied_weights_keys"
_MISNAMED = re.compile(r"_{0,2}(dynamic_)?tied?_(weights?|params?|parameters?)_(keys?|names?)_?")
ARGUMENTS = ("missing_keys", "recompute_mapping")  # arguments with which transformers 5 calls `tie_weights`
_WORDS = re.compile(b"tie|get_output_embeddings|Config")  # a file with none of these words has no code on tying


class Assigned(NamedTuple):
    """An assignment of `_tied_weights_keys`, or of a name that was meant to be it."""

    name: str  # name as written in the file
    line: int  # number of the line in the file
    entries: tuple[str, ...]  # strings of a list, tuple or set; empty for other values
    is_list: bool  # True if the value is a list, tuple or set

    @property
    def is_list_of_keys(self) -> bool:
        """True if it sets the keys in the form of transformers 4."""
        return self.is_list and self.name == KEYS


@dataclass(frozen=True)
class CodeClass:
    """Facts about one class of a file, stored instead of its large syntax tree.

    `bases` and `methods` belong to the class itself. All other facts come from its full text, including nested
    functions and classes.
    """

    file: str  # name of the file in the folder
    line: int  # line of the class
    name: str  # name of the class
    bases: tuple[str, ...]  # names of its bases, without modules
    tied: tuple[Assigned, ...]  # assignments of `_tied_weights_keys`, or of a name that was meant to be it
    tie_weights: int | None  # line of its `tie_weights` if that lacks an argument of transformers 5; else None
    methods: frozenset[str]  # names of its methods, without inherited ones
    names_flag: bool  # True if it names or sets `tie_word_embeddings`; reading the attribute does not count

    @property
    def keyed(self) -> bool:
        """True if the class assigns `_tied_weights_keys`."""
        return any(assigned.name == KEYS for assigned in self.tied)


def read_code(folder: Folder) -> tuple[dict[str, CodeClass], list[Fault]]:
    """Return the classes of the folder's Python files, and the files that cannot be read."""
    classes, faults = dict[str, CodeClass](), list[Fault]()
    bytes_left = MOST_IN_ALL
    for name in folder.files:
        if bytes_left < 0 or not name.endswith(".py"):
            continue
        path = folder.path / name
        with recording_faults(faults, name):
            text = folder.source.read_bytes(name, MOST_BYTES)
            bytes_left -= len(text)
            if bytes_left < 0 or len(classes) > MOST_CLASSES:
                problem = f"{path}: not read: with those before it, more code than any model has"
                raise CheckpointError(problem, "keep only the code of the model in the folder")
            for summary in _summaries(text, path):
                classes.setdefault(summary.name, summary)  # the first class with a name counts
    return classes, faults


def _summaries(text: bytes, path: Path) -> list[CodeClass]:
    """Return facts about the classes of one file.

    A file without a word on tying is not parsed.
    """
    if not _WORDS.search(text):
        return []
    return [_summary(node, path.name) for node in parsed_classes(text, path)]


def parsed_classes(text: bytes, path: Path) -> list[ast.ClassDef]:
    """Return the syntax trees of all classes of a file."""
    try:
        with warnings.catch_warnings():
            # else Python prints a line of the untrusted file, for example one with an invalid escape
            warnings.simplefilter("ignore")
            tree = ast.parse(
                text, os.fspath(path)
            )  # with the path, since a syntax error opens the file to quote a line
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        problem = f"{path}: cannot be read as Python ({_reason(error)})"
        raise CheckpointError(problem, "take it from its source again") from None
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)][:MOST_CLASSES]


def _reason(error: BaseException) -> str:
    """Return in a few words why a text is no Python code."""
    reason = getattr(error, "msg", None) or str(error)
    if not reason:
        reason = type(error).__name__
    return short(reason, 80)


def _summary(node: ast.ClassDef, file: str) -> CodeClass:
    """Return facts about one class."""
    nodes = list(ast.walk(node))
    bases = map(last_name, node.bases)
    methods = _methods(node)
    return CodeClass(
        file,
        node.lineno,
        node.name,
        bases=tuple(filter(None, bases)),
        tied=_assigned_keys(nodes),
        tie_weights=_line_of_old_form(methods.get("tie_weights")),
        methods=frozenset(methods),
        names_flag=any(map(_is_flag, nodes)),
    )


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Return the functions in the body of a class by name."""
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def _assigned_keys(nodes: Iterable[ast.AST]) -> tuple[Assigned, ...]:
    """Return the assignments of `_tied_weights_keys`, and of names that were meant to be it."""
    assignments = list[Assigned]()
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in _targets(node):
            name = _attribute_name(target)
            if name == KEYS or _MISNAMED.fullmatch(name):
                is_list = isinstance(node.value, ast.List | ast.Tuple | ast.Set)
                assignments.append(Assigned(name, node.lineno, _texts(node.value), is_list))
    return tuple(assignments)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """Return the expressions that an assignment sets."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target]


def _attribute_name(target: ast.expr) -> str:
    """Return the attribute of the class that an assignment sets; empty for another object's."""
    if isinstance(target, ast.Attribute) and last_name(target.value) not in ("self", "cls"):
        return ""
    return last_name(target)


def _texts(value: ast.expr | None) -> tuple[str, ...]:
    """Return the texts of a list, tuple or set; empty for any other value."""
    texts = list[str]()
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        for item in value.elts:
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                texts.append(item.value)
    return tuple(texts)


def _is_flag(node: ast.AST) -> bool:
    """Return whether a node names `tie_word_embeddings`.

    It may be a variable, a string, an argument, or an attribute that is set.
    """
    match node:
        case ast.arg(arg=word) | ast.keyword(arg=word) | ast.Constant(value=word) | ast.Name(id=word):
            return bool(word == FLAG)
        case ast.Attribute(attr=word, ctx=ast.Store()):
            return word == FLAG
    return False


def _line_of_old_form(tie_weights: ast.FunctionDef | None) -> int | None:
    """Return the line of a `tie_weights` that refuses the arguments of transformers 5."""
    if tie_weights is None or tie_weights.args.kwarg is not None:
        return None
    arguments = (*tie_weights.args.args, *tie_weights.args.kwonlyargs)
    names = {argument.arg for argument in arguments}
    if names.issuperset(ARGUMENTS):
        return None
    return tie_weights.lineno


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return ""
