"""tiewise: the two places where a language model touches its vocabulary.

    import tiewise
    installed = tiewise.install(model, "tied")         # any Hugging Face model with a token head
    tiewise.installed(model).untie(optimizer)          # a live model is changed through its handle
    boundary = tiewise.Boundary("factored:128", vocab=50_304, width=768)
    loss = tiewise.linear_cross_entropy(hidden, table, targets)
    audit = tiewise.check("path/to/checkpoint")        # what it really holds at its two ends
    tiewise.probe(model, "path/to/checkpoint")          # whether a loaded model holds at its ends what the files do
    receipt = tiewise.untie("old", "new")               # a rewritten copy of a folder; the source is only read
    shared = tiewise.share_layers(model, "ffn")         # one feed-forward layer for the whole depth
    comparison = tiewise.compare("runs/mine", text="my.txt")   # trained under several tying choices: what differs
    found = tiewise.inspect("tied", "untied")           # what tying does inside a model
    tiewise.explore(model)                             # one page to see it, in a notebook or a browser

Importing this package loads nothing heavy: names arrive with their module at first use.
"""

import pkgutil
import re
from importlib import import_module
from typing import Any

# name → the module that it comes from, as `__init__.pyi` says for type checkers
_OFFERED = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _OFFERED, re.MULTILINE)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiewise' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tiewise"):
            raise
        what = f"tiewise.{name} needs {error.name}: pip install 'tiewise[torch]'"
        raise ImportError(what, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
