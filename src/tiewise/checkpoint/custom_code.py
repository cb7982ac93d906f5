"""The Python files of a checkpoint, read as text: what their classes say of tying. Nothing is imported or run."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiewise.checkpoint.hf_folder import Fault, Folder
from tiewise.checkpoint.untrusted import inside, read_whole, short
from tiewise.core.errors import CheckpointError

MOST_BYTES, MOST_IN_ALL = 2**18, 2**20  # of one file, and of all; a parsed file takes up to 600 times its bytes
MOST_CLASSES, MOST_ANCESTORS = 2000, 100
KEYS, FLAG = "_tied_weights_keys", "tie_word_embeddings"
_MISNAMED = re.compile(r"_{0,2}(dynamic_)?tied?_(weights?|params?|parameters?)_(keys?|names?)_?")
_ARGUMENTS = ("missing_keys", "recompute_mapping")  # with which transformers 5 calls `tie_weights`
_WORDS = (b"tie", b"get_output_embeddings", b"Config")  # a file with none of these says nothing of tying


@dataclass(frozen=True)
class Tied:
    """An assignment of `_tied_weights_keys`, or of a name that was meant to be it."""

    name: str  # as written
    line: int  # in its file
    kind: str  # "dict", "list" (or tuple, or set), "none" or "other"
    entries: tuple[str, ...] = ()  # the texts of a list


@dataclass(frozen=True)
class Class:
    """One class of a file."""

    file: str  # name of the file in the folder
    line: int  # of the class
    name: str  # of the class
    bases: tuple[str, ...] = ()  # last parts of the names of its bases
    tied: tuple[Tied, ...] = ()  # what it assigns in its body or on `self`
    tie_weights: int | None = None  # line of its own `tie_weights`; None without one
    takes_arguments: bool = True  # that method can be called with `missing_keys` and `recompute_mapping`
    output_embeddings: int | None = None  # line of its own `get_output_embeddings`; None without one
    names_flag: bool = False  # `tie_word_embeddings` stands somewhere in it


@dataclass(frozen=True)
class Code:
    """The classes of all files, by name, and the files that cannot be read."""

    classes: dict[str, Class]
    faults: tuple[Fault, ...] = ()

    def ancestors(self, found: Class) -> list[Class | str]:
        """All classes that this one inherits from, nearest first; by name where they are not in the folder."""
        line: list[Class | str] = []
        names = list(found.bases)
        seen = {found.name}
        while names and len(seen) < MOST_ANCESTORS:
            name = names.pop(0)
            if name in seen:
                continue
            seen.add(name)
            known = self.classes.get(name)
            line.append(name if known is None else known)
            names += () if known is None else known.bases
        return line


def read_code(folder: Folder) -> Code:
    """Read every Python file directly in the folder."""
    classes: dict[str, Class] = {}
    faults = []
    left = MOST_IN_ALL
    for name in folder.files:
        if not name.endswith(".py"):
            continue
        try:
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            left -= len(text)
            if left < 0 or len(classes) > MOST_CLASSES:
                what = f"{folder.path / name}: not read: with those before it, more code than any model has"
                raise CheckpointError(what, "keep only the code of the model in the folder")
            for found in _classes(text, folder.path / name) if any(word in text for word in _WORDS) else ():
                classes.setdefault(found.name, found)  # the first of a name counts
        except CheckpointError as error:
            faults.append(Fault.of(name, error))
            if left < 0:
                break
    return Code(classes, tuple(faults))


def _classes(text: bytes, path: Path) -> list[Class]:
    try:
        tree = ast.parse(text, os.fspath(path))  # a syntax error opens the file that is named, to quote its line
    except (SyntaxError, ValueError, RecursionError, MemoryError, UnicodeError) as error:
        reason = short(getattr(error, "msg", None) or str(error) or type(error).__name__, 80)
        raise CheckpointError(f"{path}: cannot be read as Python ({reason})", "take it from its source again") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [_class(node, path.name) for node in found[:MOST_CLASSES]]


def _class(node: ast.ClassDef, file: str) -> Class:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    tie = methods.get("tie_weights")
    output = methods.get("get_output_embeddings")
    named = set() if tie is None else {one.arg for one in (*tie.args.args, *tie.args.kwonlyargs)}
    return Class(
        file,
        node.lineno,
        node.name,
        bases=tuple(name for base in node.bases if (name := _last(base)) is not None),
        tied=tuple(_assigned(node)),
        tie_weights=None if tie is None else tie.lineno,
        takes_arguments=tie is None or tie.args.kwarg is not None or named.issuperset(_ARGUMENTS),
        output_embeddings=None if output is None else output.lineno,
        names_flag=any(_mentions(item) for item in ast.walk(node)),
    )


def _last(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _assigned(node: ast.ClassDef) -> Iterator[Tied]:
    for item in ast.walk(node):
        if isinstance(item, ast.Assign):
            targets = item.targets
        elif isinstance(item, ast.AnnAssign):
            targets = [item.target]
        else:
            continue
        for target in targets:
            own = not isinstance(target, ast.Attribute) or _last(target.value) in ("self", "cls")
            name = _last(target) if own else None
            if name is not None and (name == KEYS or _MISNAMED.fullmatch(name)):
                yield Tied(name, item.lineno, *_value(item.value))


def _value(node: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    if isinstance(node, ast.Dict):
        return "dict", ()
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        texts = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        return "list", tuple(text for text in texts if isinstance(text, str))
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return "none", ()
    return "other", ()


def _mentions(node: ast.AST) -> bool:
    if isinstance(node, ast.arg | ast.keyword):
        return node.arg == FLAG
    if isinstance(node, ast.Attribute):
        return node.attr == FLAG and isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Constant):
        return node.value == FLAG
    return isinstance(node, ast.Name) and node.id == FLAG
