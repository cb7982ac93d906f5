"""Signs in config and code that a class divides head rows by their lengths."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, noting
from tiewise.checkpoint.rules.code_classes import MOST_BYTES, MOST_IN_ALL, last_name, parsed_classes
from tiewise.checkpoint.rules.rule import dotted
from tiewise.checkpoint.untrusted import inside, read_whole, short

_NORMALISED_HEAD = re.compile(r"\w*Norm(alized|alised)?(LM|Output)?Head")


def normalised_heads(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every sign that the class normalises the rows of its head."""
    for level, record in facts.levels.items():
        if record.get("norm_head") is True:
            what = "norm_head is true: the class divides the rows of the head by their lengths"
            yield dotted(level, "norm_head"), what
    if not facts.folder.single:
        yield from _in_code(facts.folder)


def _in_code(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every class in the folder's Python files that normalises its head."""
    left = MOST_IN_ALL
    for name in folder.files:
        if not name.endswith(".py"):
            continue
        with noting([], name):  # B023 reports a file that cannot be read
            text = read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
            left -= len(text)
            if left < 0:
                return
            if b"Head" not in text and b"lm_head" not in text:
                continue
            for node in parsed_classes(text, folder.path / name):
                if _normalises(node):
                    what = f"{node.name} divides the rows of the head by their lengths"
                    yield f"{short(name)}:{node.lineno}", short(what, 200)


def _normalises(node: ast.ClassDef) -> bool:
    """Return whether a class is a normalised head by name, or normalises a head's weight."""
    if _NORMALISED_HEAD.fullmatch(node.name):
        return True
    is_head = "head" in node.name.lower()
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or last_name(call.func) != "normalize" or not call.args:
            continue
        owner = _owner_of_weight(call.args[0])
        if owner == "lm_head" or (owner == "self" and is_head):
            return True
    return False


def _owner_of_weight(node: ast.expr) -> str | None:
    """Return the last name before `.weight` or `.weight.data`; None for any other expression."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        return last_name(node.value)
    return None
