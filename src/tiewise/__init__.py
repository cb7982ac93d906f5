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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiewise.core import __version__ as __version__

if TYPE_CHECKING:
    from tiewise.analysis.row_changes import diff as diff
    from tiewise.boundary.boundary import Boundary as Boundary
    from tiewise.boundary.install import Installed as Installed
    from tiewise.boundary.install import install as install
    from tiewise.boundary.install import installed as installed
    from tiewise.boundary.parallel_plan import keep_tables as keep_tables
    from tiewise.boundary.parallel_plan import parallel_plan as parallel_plan
    from tiewise.boundary.param_groups import param_groups as param_groups
    from tiewise.boundary.probe import Probe as Probe
    from tiewise.boundary.probe import probe as probe
    from tiewise.checkpoint.audit import Audit as Audit
    from tiewise.checkpoint.audit import check as check
    from tiewise.checkpoint.lora_config import lora_config as lora_config
    from tiewise.core.backends import LossOptions as LossOptions
    from tiewise.core.backends import PathNorms as PathNorms
    from tiewise.core.errors import CheckpointError as CheckpointError
    from tiewise.core.errors import DataError as DataError
    from tiewise.core.errors import InstallError as InstallError
    from tiewise.core.errors import Interrupted as Interrupted
    from tiewise.core.errors import PlanError as PlanError
    from tiewise.core.errors import RunError as RunError
    from tiewise.core.errors import SpecError as SpecError
    from tiewise.core.errors import TiewiseError as TiewiseError
    from tiewise.core.errors import TiewiseWarning as TiewiseWarning
    from tiewise.core.errors import UnsupportedError as UnsupportedError
    from tiewise.core.sharing_spec import SharingSpec as SharingSpec
    from tiewise.core.spec import BoundarySpec as BoundarySpec
    from tiewise.core.spec import Vocabularies as Vocabularies
    from tiewise.explorer.page import Explorer as Explorer
    from tiewise.explorer.page import explore as explore
    from tiewise.hf import load as load
    from tiewise.inspection.inspection import Inspection as Inspection
    from tiewise.inspection.inspection import inspect as inspect
    from tiewise.ops.augmented_loss import AugmentedOptions as AugmentedOptions
    from tiewise.ops.augmented_loss import augmented_cross_entropy as augmented_cross_entropy
    from tiewise.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from tiewise.ops.divergence import linear_divergence as linear_divergence
    from tiewise.ops.exact_top import ExactTop as ExactTop
    from tiewise.ops.fast_products import fast_products as fast_products
    from tiewise.ops.log_prob import linear_log_prob as linear_log_prob
    from tiewise.ops.path_gradient import LookupOptions as LookupOptions
    from tiewise.ops.path_gradient import PathRecord as PathRecord
    from tiewise.ops.path_gradient import path_norms as path_norms
    from tiewise.ops.path_gradient import tied_lookup as tied_lookup
    from tiewise.ops.vocabulary_shard import VocabularyShard as VocabularyShard
    from tiewise.planning.plan import Plan as Plan
    from tiewise.planning.plan import plan as plan
    from tiewise.planning.read_config import Sizes as Sizes
    from tiewise.rewrite.engine import Receipt as Receipt
    from tiewise.rewrite.factor import densify as densify
    from tiewise.rewrite.factor import factor as factor
    from tiewise.rewrite.merge import merge as merge
    from tiewise.rewrite.resize import resize as resize
    from tiewise.rewrite.slim import slim as slim
    from tiewise.rewrite.ties import dedupe as dedupe
    from tiewise.rewrite.ties import repair as repair
    from tiewise.rewrite.ties import tie as tie
    from tiewise.rewrite.ties import untie as untie
    from tiewise.rewrite.transplant import transplant as transplant
    from tiewise.rewrite.trim import trim as trim
    from tiewise.runs import compare as compare
    from tiewise.runs import heal as heal
    from tiewise.runs import train as train
    from tiewise.sharded.export import export_sharded as export_sharded
    from tiewise.sharded.load import load_sharded as load_sharded
    from tiewise.sharded.save import save_sharded as save_sharded
    from tiewise.sharing.share import Shared as Shared
    from tiewise.sharing.share import share_layers as share_layers
    from tiewise.training.results import Comparison as Comparison
    from tiewise.training.results import SingleRun as SingleRun
    from tiewise.training.trainer import tie_at as tie_at
    from tiewise.training.trainer import untie_at as untie_at

# module below tiewise → what it offers here; a test holds it against the imports above
_OFFERS = {
    "analysis.row_changes": "diff",
    "boundary.boundary": "Boundary",
    "boundary.install": "Installed install installed",
    "boundary.parallel_plan": "keep_tables parallel_plan",
    "boundary.param_groups": "param_groups",
    "boundary.probe": "Probe probe",
    "checkpoint.audit": "Audit check",
    "checkpoint.lora_config": "lora_config",
    "core.backends": "LossOptions PathNorms",
    "core.errors": "CheckpointError DataError InstallError Interrupted PlanError RunError SpecError TiewiseError "
    "TiewiseWarning UnsupportedError",
    "core.sharing_spec": "SharingSpec",
    "core.spec": "BoundarySpec Vocabularies",
    "explorer.page": "Explorer explore",
    "hf": "load",
    "inspection.inspection": "Inspection inspect",
    "ops.augmented_loss": "AugmentedOptions augmented_cross_entropy",
    "ops.cross_entropy": "linear_cross_entropy",
    "ops.divergence": "linear_divergence",
    "ops.exact_top": "ExactTop",
    "ops.fast_products": "fast_products",
    "ops.log_prob": "linear_log_prob",
    "ops.path_gradient": "LookupOptions PathRecord path_norms tied_lookup",
    "ops.vocabulary_shard": "VocabularyShard",
    "planning.plan": "Plan plan",
    "planning.read_config": "Sizes",
    "rewrite.engine": "Receipt",
    "rewrite.factor": "densify factor",
    "rewrite.merge": "merge",
    "rewrite.resize": "resize",
    "rewrite.slim": "slim",
    "rewrite.ties": "dedupe repair tie untie",
    "rewrite.transplant": "transplant",
    "rewrite.trim": "trim",
    "runs": "compare heal train",
    "sharded.export": "export_sharded",
    "sharded.load": "load_sharded",
    "sharded.save": "save_sharded",
    "sharing.share": "Shared share_layers",
    "training.results": "Comparison SingleRun",
    "training.trainer": "tie_at untie_at",
}
_HOMES = {name: f"tiewise.{home}" for home, names in _OFFERS.items() for name in names.split()}
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
