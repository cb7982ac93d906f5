"""tiewise: tools for the input embedding and the output head of language models.

    tiewise.plan("gpt2")                                  costs and savings before training
    tiewise.compare("my.txt", arms="tied,untied")         trains each choice and reports which is better
    tiewise.check("path/to/checkpoint")                   what is stored, and how each loader reads it
    tiewise.untie("old", "new")                           rewrites a copy; the source is only read
    tiewise.install(model, "tied")                        gives a Hugging Face model exact, fast tied ends
    tiewise.inspect("tied", "untied")                     measures what sharing does inside models
    tiewise.explore(model)                                shows it on one page

`help(tiewise.compare)` describes a function. Other names are in `tiewise.checkpoint` (audits and rewrites, without
torch), `tiewise.boundary` (training library), `tiewise.lab` (experiments), `tiewise.flax`, `tiewise.hf` and
`tiewise.models`. Importing tiewise loads no large library: each name imports its module at first use.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from tiewise.core import result as _result
from tiewise.core.lazy_names import LazyNames as _LazyNames

_NAMESPACES = ("checkpoint", "boundary", "lab")
_REPLACED = {
    "dedupe": "tiewise.dedupe is part of tiewise.repair(source, to)",
    "densify": "tiewise.densify is tiewise.factor(source, to, undo=True)",
}
_names = _LazyNames(__name__)
__dir__ = _names.list
_result.register_drawing(lambda result: _import_module(f"{__name__}.report.result_figures").figures_of(result))


def __getattr__(name: str) -> _Any:
    """Return a public name or a namespace.

    AttributeError: there is none. The message names the new place of a moved name.
    """
    if name not in _names.homes and not name.startswith("_"):
        for namespace in _NAMESPACES:
            if name in _import_module(f"{__name__}.{namespace}")._names.homes:
                raise AttributeError(f"tiewise.{name} is tiewise.{namespace}.{name}")
        if name in _REPLACED:
            raise AttributeError(_REPLACED[name])
    return _names.get(name)
