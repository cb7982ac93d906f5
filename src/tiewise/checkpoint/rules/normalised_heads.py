"""Signs in config and code that a class divides head rows by their lengths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, recording_faults
from tiewise.checkpoint.rules.code_classes import MOST_BYTES, MOST_IN_ALL, last_name, parsed_classes
from tiewise.checkpoint.rules.rule import dotted
from tiewise.checkpoint.untrusted import short

_NORMALISED_HEAD = re.compile(r"\w*Norm(alized|alised)?(LM|Output)?Head")
_HEAD_IN_TEXT = re.compile(b"Head|lm_head")  # a file without these words normalises no head


def normalised_heads(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every sign that the class normalises the rows of its head."""
    for level, record in facts.levels.items():
        if record.get("norm_head") is True:
            problem = "norm_head is true: the class divides the rows of the head by their lengths"
            yield dotted(level, "norm_head"), problem
    if not facts.folder.single:
        yield from _in_code(facts.folder)


def _in_code(folder: Folder) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) for every class in the folder's Python files that normalises its head."""
    bytes_left = MOST_IN_ALL
    for name in folder.files:
        if not name.endswith(".py"):
            continue
        with recording_faults([], name):  # B023 reports a file that cannot be read
            text = folder.source.read_bytes(name, MOST_BYTES)
            bytes_left -= len(text)
            if bytes_left < 0:
                return
            if not _HEAD_IN_TEXT.search(text):
                continue
            for node in filter(_normalises, parsed_classes(text, folder.path / name)):
                where = f"{short(name)}:{node.lineno}"
                problem = f"{node.name} divides the rows of the head by their lengths"
                yield where, short(problem, 200)


def _normalises(node: ast.ClassDef) -> bool:
    """Return whether a class is a normalised head by name, or normalises a head's weight."""
    if _NORMALISED_HEAD.fullmatch(node.name):
        return True
    heads = {"lm_head"}  # owners whose weight is the head's
    if "head" in node.name.lower():
        heads.add("self")
    return not heads.isdisjoint(_normalised_owners(node))


def _normalised_owners(node: ast.ClassDef) -> set[str]:
    """Return the owners of the weights that a class passes to a function `normalize`."""
    owners = set[str]()
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if last_name(call.func) == "normalize":
            owners.add(_owner_of_weight(call.args[0]))
    return owners


def _owner_of_weight(node: ast.expr) -> str:
    """Return the last name before `.weight` or `.weight.data`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    if isinstance(node, ast.Attribute) and node.attr == "weight":
        return last_name(node.value)
    return ""
