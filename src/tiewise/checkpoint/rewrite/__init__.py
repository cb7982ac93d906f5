"""Functions that rewrite a checkpoint into a new folder: the verbs.

A verb only reads its source. Its result appears complete or not at all.

@verb
def untie(facts, *, force) -> Change: ...         a verb: from the facts of a checkpoint to its change
untie(source, to, dry_run=True) -> Receipt        the function that users call: the engine carries the change out

Each file of `verbs/` is one verb. A verb is imported when its name is first used. `tools/make_stubs.py` writes the
signatures of the verbs into `__init__.pyi`, for type checkers and editors.
"""

from importlib import import_module
from typing import Any

from tiewise.checkpoint.rewrite.listing import VERBS_PACKAGE, verb_names

_HOMES = {"Option": "registry", "Receipt": "engine", "rewrite": "engine", "verb": "registry"}


def __getattr__(name: str) -> Any:
    """Import a verb, or a name of `_HOMES`, when it is first used."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if not name.startswith("_") and name in verb_names():
        return getattr(import_module(f"{VERBS_PACKAGE}.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that this package offers, without importing a verb."""
    return sorted([*_HOMES, *verb_names()])
