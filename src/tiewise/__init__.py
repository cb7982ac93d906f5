"""tiewise: the two places where a language model touches its vocabulary.

    import tiewise
    installed = tiewise.install(model, "tied")         # any Hugging Face model with a token head
    boundary = tiewise.Boundary("factored:128", vocab=50_304, width=768)
    loss = tiewise.linear_cross_entropy(hidden, table, targets)
    audit = tiewise.check("path/to/checkpoint")        # what it really holds at its two ends
    receipt = tiewise.untie("old", "new")               # a rewritten copy; the source is only read
    shared = tiewise.share_layers(model, "ffn")         # one feed-forward layer for the whole depth
    found = tiewise.inspect("tied", "untied")           # what tying does inside a model

Importing this package loads nothing heavy: names arrive with their module at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiewise.core.version import __version__ as __version__

if TYPE_CHECKING:
    from tiewise.boundary.boundary import Boundary as Boundary
    from tiewise.boundary.install import install as install
    from tiewise.checkpoint.audit import check as check
    from tiewise.core.spec import BoundarySpec as BoundarySpec
    from tiewise.core.vocabulary import Vocabularies as Vocabularies
    from tiewise.hf import load as load
    from tiewise.inspection.whole import inspect as inspect
    from tiewise.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tiewise.ops.path_gradient import path_norms as path_norms
    from tiewise.ops.path_gradient import tied_lookup as tied_lookup
    from tiewise.planning.plan import plan as plan
    from tiewise.rewrite.factor import densify as densify
    from tiewise.rewrite.factor import factor as factor
    from tiewise.rewrite.resize import resize as resize
    from tiewise.rewrite.ties import dedupe as dedupe
    from tiewise.rewrite.ties import repair as repair
    from tiewise.rewrite.ties import tie as tie
    from tiewise.rewrite.ties import untie as untie
    from tiewise.sharing.share import share_layers as share_layers
    from tiewise.training.callbacks import tie_at as tie_at
    from tiewise.training.callbacks import untie_at as untie_at

_HOMES = {
    "Boundary": "tiewise.boundary.boundary",
    "BoundarySpec": "tiewise.core.spec",
    "Vocabularies": "tiewise.core.vocabulary",
    "check": "tiewise.checkpoint.audit",
    **dict.fromkeys(("dedupe", "densify", "factor", "repair", "resize", "tie", "untie"), "tiewise.rewrite"),
    "tied_lookup": "tiewise.ops.path_gradient",
    "inspect": "tiewise.inspection.whole",
    "install": "tiewise.boundary.install",
    "linear_cross_entropy": "tiewise.ops.cross_entropy",
    "load": "tiewise.hf",
    "path_norms": "tiewise.ops.path_gradient",
    "plan": "tiewise.planning.plan",
    "share_layers": "tiewise.sharing.share",
    "tie_at": "tiewise.training.callbacks",
    "untie_at": "tiewise.training.callbacks",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiewise' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tiewise"):
            raise
        raise ImportError(
            f"tiewise.{name} needs {error.name}: pip install 'tiewise[torch]'", name=error.name
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
