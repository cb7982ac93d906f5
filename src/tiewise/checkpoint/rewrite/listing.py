"""List of the verbs, read from the text of their files.

It imports no verb, so `tiewise --help` starts fast.
"""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from inspect import cleandoc
from typing import Any

VERBS_PACKAGE = "tiewise.checkpoint.rewrite.verbs"
LAST = 1000  # order of a verb that sets none
# matches decorator, function name and docstring, in the layout of `ruff format`
VERB_PATTERN = re.compile(
    r'^@verb\b(?P<facts>.*?)^def (?P<name>\w+)\(.*?^    """(?P<docstring>.*?)"""', re.MULTILINE | re.DOTALL
)
ORDER_PATTERN = re.compile(r"\border=(\d+)")
GROUP_PATTERN = re.compile(r'\bgroup="(\w+)"')


@dataclass(frozen=True)
class ListedVerb:
    """A verb in the help of all commands."""

    name: str
    order: int
    summary: str  # first paragraph of its docstring
    group: str = ""  # command that it is a part of, such as "vocab"; "" for none

    @property
    def command(self) -> str:
        """Words that a user types, such as "vocab resize"."""
        return f"{self.group} {self.name}".strip()


def verb_names() -> list[str]:
    """Return the names of all verbs, which are the names of their files."""
    return [module.name for module in pkgutil.iter_modules(_folders())]


def list_verbs() -> list[ListedVerb]:
    """Return all verbs in the order of the help."""
    verbs = [_read_verb(name) for name in verb_names()]
    return sorted(verbs, key=lambda verb: (verb.order, verb.name))


def paragraph(docstring: str) -> str:
    """Return the first paragraph of a docstring, on one line."""
    first, _, _ = cleandoc(docstring).partition("\n\n")
    return " ".join(first.split())


def _folders() -> Any:
    """Return the search path of the package of verbs."""
    return import_module(VERBS_PACKAGE).__path__


def _read_verb(name: str) -> ListedVerb:
    """Return order and summary of a verb, from the text of its file."""
    spec: Any = PathFinder.find_spec(f"{VERBS_PACKAGE}.{name}", _folders())
    source = spec.loader.get_source(spec.name)
    for head in VERB_PATTERN.finditer(source):
        if head["name"] == name:
            facts = head["facts"]
            return ListedVerb(name, _order(facts), paragraph(head["docstring"]), _group(facts))
    return ListedVerb(name, LAST, "")


def _order(facts: str) -> int:
    """Return the order in a decorator's arguments, `LAST` if there is none."""
    order = ORDER_PATTERN.search(facts)
    if order is None:
        return LAST
    return int(order[1])


def _group(facts: str) -> str:
    """Return the group in a decorator's arguments, "" if there is none."""
    group = GROUP_PATTERN.search(facts)
    if group is None:
        return ""
    return group[1]
