"""`locate`: find the lookups and the head of a model, or refuse the model.

    ends = locate(model)        ends.lookups  [("model.embed_tokens", Embedding)]      one per module that looks ids up
                                ends.head     Linear, whose name is ends.head_name     "lm_head"

The model's methods name them (`get_input_embeddings`, `get_output_embeddings`, those of its encoder and decoder). No
model family is treated by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiewise.boundary.sharded_tables import gathered_table_ids, is_row_parallel
from tiewise.boundary.tied_keys import partners
from tiewise.core.errors import InstallError, TiewiseError
from tiewise.core.spec import BoundarySpec

_REFUSED = {  # options of nn.Embedding that nn.Linear lacks: (what they do, remedy)
    "max_norm": ("has max_norm: it rewrites rows during the forward", "build it without max_norm"),
    "sparse": ("has sparse gradients, and the head's are dense", "build it with sparse=False"),
    "scale_grad_by_freq": (
        "divides its gradient by token frequency, and the head's has none",
        "build it without scale_grad_by_freq",
    ),
}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ModelEnds:
    """Lookups and output head of a model, each with its module name.

    Lookups are the modules that look tokens up: the input embedding, and that of a decoder, say.
    """

    lookups: tuple[tuple[str, nn.Embedding], ...]
    head_name: str
    head: nn.Linear

    @property
    def first_lookup(self) -> nn.Embedding:
        """The lookup that stores what all lookups share, such as the input map.

        It is the first one, so it is the same in every copy of a model, tied or not.
        """
        return self.lookups[0][1]

    @property
    def named_modules(self) -> list[tuple[str, nn.Embedding | nn.Linear]]:
        """All lookups, then the head, as (name, module)."""
        return [*self.lookups, (self.head_name, self.head)]

    @property
    def named_main_lookup(self) -> tuple[str, nn.Embedding]:
        """Name and module of the lookup that has the head's table.

        If the tables are untied, it is the last lookup, which is the decoder's.
        """
        for name, module in self.lookups:
            if module.weight is self.head.weight:
                return name, module
        return self.lookups[-1]

    @property
    def main_lookup(self) -> nn.Embedding:
        """The module of `named_main_lookup`."""
        return self.named_main_lookup[1]

    @property
    def tied(self) -> bool:
        """True if the head and a lookup have the same Parameter; equal values do not count."""
        return self.main_lookup.weight is self.head.weight

    @property
    def plain_spec(self) -> BoundarySpec:
        """Spec of the present tables without options: tied or untied."""
        if self.tied:
            return BoundarySpec("tied")
        return BoundarySpec("untied")


def locate(model: nn.Module) -> ModelEnds:
    """Return the lookups and the head of a Hugging Face model.

    Raises:
        InstallError: the model cannot have a boundary, and why.
    """
    class_name = type(model).__name__
    _refuse_pipeline(model)
    table, head = _declared_table(model), _declared_head(model)
    gathered = gathered_table_ids(model)
    _check_class(f"{class_name}: its output head", head, nn.Linear, gathered)
    names = {id(module): name for name, module in model.named_modules()}
    if id(head) not in names or id(table) not in names:
        raise InstallError(f"{class_name} makes its tables anew on each call", "there is no module to install into")
    lookups = _lookups_of(model, table, head, names)
    for name, module in lookups.items():
        label = f"{class_name}: {name}"
        _check_class(label, module, nn.Embedding, gathered)
        _refuse_options(label, module)
    return ModelEnds(tuple(lookups.items()), names[id(head)], head)


def require_module(model: Any, error: type[TiewiseError] = InstallError, remedy: str | None = None) -> None:
    """Raise `error` if a model is no torch module but, say, a path or a tokenizer."""
    if not isinstance(model, nn.Module):
        raise error(f"a {type(model).__name__} is no model", remedy or "load it first, with tiewise.load(path) say")


def call_if_present(model: Any, method: str) -> Any:
    """Return `model.method()`, or None if the model lacks the method or does not implement it."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _declared_table(model: nn.Module) -> Any:
    """Return the module that a transformers model names as its input embedding."""
    class_name = type(model).__name__
    table = call_if_present(model, "get_input_embeddings")
    if table is None:
        remedy = "install works on models of tokens, loaded and before they are wrapped"
        raise InstallError(f"{class_name} has no input embedding table", remedy)
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        remedy = "install asks transformers' classes what they may tie; tiewise.Boundary is for models of your own"
        raise InstallError(f"{class_name} is no model of transformers", remedy)
    return table


def _declared_head(model: nn.Module) -> Any:
    """Return the module that a model names as its output head."""
    head = call_if_present(model, "get_output_embeddings")
    if head is None:
        remedy = "load the model with a language-model head (…ForCausalLM, …ForMaskedLM)"
        raise InstallError(_no_head(model), remedy)
    if isinstance(head, nn.Embedding):
        problem = f"{type(model).__name__}: its output head is an Embedding, whose use as a matrix only the model knows"
        raise InstallError(problem, "install needs a torch.nn.Linear head with a weight [V, E]")
    return head


def _lookups_of(model: nn.Module, table: nn.Module, head: nn.Module, names: dict[int, str]) -> dict[str, Any]:
    """Return the lookups by name: those that may be tied to the head, else the decoder's."""
    head_name = names[id(head)]
    tied_to_head = _partner_modules(model, head_name)
    lookups = {name: module for name, module in tied_to_head.items() if isinstance(module, nn.Embedding)}
    if lookups:
        return lookups
    # no lookup may be tied to this head, whose rows are then tokens of the decoder's table
    decoder_table = call_if_present(call_if_present(model, "get_decoder"), "get_input_embeddings")
    table_name = names.get(id(decoder_table)) or names[id(table)]
    tied_to_table = _partner_modules(model, table_name)
    tied_to_table.pop(head_name, None)
    return tied_to_table


def _partner_modules(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the named module and all that are or may be tied to it, by name."""
    names = partners(model, name)
    return {name: module for name, module in model.named_modules() if name in names}


def _refuse_pipeline(model: Any) -> None:
    """Refuse a pipeline stage that lacks the input embedding or the output head.

    Pipelines remove a module or replace it by an `Identity`. The pipeline of transformers leaves a copy of a tied table
    at the last stage, whose gradient is added to no other.
    """
    declared = getattr(model, "_tied_weights_keys", None) or {}
    names = {*declared.keys(), *declared.values()}
    stage = getattr(model, "_pp_stage", None)
    is_stage = getattr(stage, "pp_size", 1) > 1
    elsewhere = [name for name in names if is_stage or _is_removed(model, name)]
    if elsewhere:
        remedy = "keep both ends on one rank and split the layers between them, or use fully_shard"
        problem = f"{type(model).__name__} is one stage of a pipeline, and its ends are on different ranks"
        raise InstallError(f"{problem}: no rank has both paths of the table's gradient", remedy)


def _is_removed(model: Any, parameter: str) -> bool:
    """Return whether a pipeline removed a parameter's module: it is None or an `Identity`."""
    module = model
    for part in parameter.split(".")[:-1]:
        module = getattr(module, "_modules", {}).get(part, ...)  # `...` if no such module was ever declared
    return module is None or isinstance(module, nn.Identity)


def _no_head(model: nn.Module) -> str:
    """Return a message on the head that a model has instead of a token head."""
    class_name = type(model).__name__
    config = getattr(model, "config", None)
    labels = getattr(config, "num_labels", None)
    for name, module in reversed(list(model.named_modules())):
        if "." in name or not isinstance(module, nn.Linear):
            continue
        if module.out_features == labels:
            return f"{class_name} scores {labels} labels with its head `{name}`, and labels share no table with tokens"
    return f"{class_name} is an encoder or body without a token head"


def _check_class(label: str, module: Any, cls: type[nn.Module], gathered: set[int]) -> None:
    """Refuse a module that is no `cls`, and computed, wrapped, quantised or sharded weights.

    Weights in `gathered`, which FSDP gathers, and weights that tensor parallelism spreads by rows are accepted.
    """
    class_name, home = type(module).__qualname__, type(module).__module__
    remedy = f"install needs a torch.nn.{cls.__name__} with a weight [V, E]: install before adapters or quantisation"
    is_foreign = home.startswith(("bitsandbytes.", "peft."))
    if is_foreign or not isinstance(module, cls):
        raise InstallError(f"{label} is a {class_name} of {home}", remedy)
    is_placed = id(module.weight) in gathered or is_row_parallel(module)
    if not is_placed:
        _check_weight(label, module.weight, remedy)


def _check_weight(label: str, weight: Any, remedy: str) -> None:
    """Refuse a weight that is sharded, quantised or computed.

    `remedy` is the one for quantised weights.
    """
    if hasattr(weight, "full_tensor"):
        remedy = "install before fully_shard or tensor parallelism, and keep what install returned"
        raise InstallError(f"{label} is sharded, its weight a {type(weight).__name__}", remedy)
    # compare classes: isinstance accepts any tensor with `_is_param` as a Parameter, also a quantised one
    weight_class = type(weight)
    is_plain = weight_class is torch.Tensor or issubclass(weight_class, nn.Parameter)
    if weight.dtype not in _DTYPES or not is_plain:
        raise InstallError(f"{label} holds quantised weights ({weight_class.__name__}, {weight.dtype})", remedy)
    if weight_class is torch.Tensor:
        raise InstallError(f"{label} has a weight that is computed, no Parameter", "remove what computes it first")


def _refuse_options(label: str, lookup: nn.Embedding) -> None:
    """Refuse options of a lookup that a head lacks."""
    for option, (effect, remedy) in _REFUSED.items():
        if getattr(lookup, option) not in (None, False):
            raise InstallError(f"{label} {effect}", remedy)
