"""tiewise: tools for the input embedding and the output head of language models.

    import tiewise
    installed = tiewise.install(model, "tied")         # any Hugging Face model with a token head
    tiewise.installed(model).untie(optimizer)          # a live model is changed through its handle
    boundary = tiewise.Boundary("factored:128", vocab=50_304, width=768)
    loss = tiewise.linear_cross_entropy(hidden, table, targets)
    audit = tiewise.check("path/to/checkpoint")        # which tables it stores, and which faults it has
    tiewise.probe(model, "path/to/checkpoint")          # whether a loaded model has the tables of its files
    receipt = tiewise.untie("old", "new")               # a rewritten copy of a folder; the source is only read
    shared = tiewise.share_layers(model, "ffn")         # one feed-forward layer for the whole depth
    comparison = tiewise.compare("runs/mine", text="my.txt")   # trains several tying choices and compares them
    inspection = tiewise.inspect("tied", "untied")      # the effects of tying inside a model
    tiewise.explore(model)                             # one page to see it, in a notebook or a browser

Importing this package loads no large dependency: each name imports its module at first use.
"""

import pkgutil
import re
from importlib import import_module
from typing import Any

# public name → its module, as `__init__.pyi` declares them for type checkers
_STUB = (pkgutil.get_data(__name__, "__init__.pyi") or b"").decode()
_MODULES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tiewise' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tiewise"):
            raise
        message = f"tiewise.{name} needs {error.name}: pip install 'tiewise[torch]'"
        raise ImportError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
