"""Where a model touches its vocabulary, or the reason why a boundary has no meaning there.

    ends = locate(model)        ends.lookups  [("model.embed_tokens", Embedding)]      one per place that looks ids up
                                ends.head     ("lm_head", Linear)

The places are asked of the model itself (`get_input_embeddings`, `get_output_embeddings`, its encoder and decoder);
no family is known by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiewise.boundary.keys import partners
from tiewise.errors import InstallError


@dataclass(frozen=True)
class Ends:
    """The lookups and the head of a model, each with its name in it."""

    lookups: tuple[tuple[str, nn.Embedding], ...]
    head_name: str
    head: nn.Linear

    @property
    def owner(self) -> nn.Embedding:
        """The lookup that owns what all lookups share; the same one in every copy of a model, tied or not."""
        return self.lookups[0][1]

    @property
    def source(self) -> nn.Embedding:
        """The lookup beside the head: the one with the head's table if any has it, else the decoder's."""
        tied = [module for _, module in self.lookups if module.weight is self.head.weight]
        return (tied or [self.lookups[-1][1]])[0]

    @property
    def tied(self) -> bool:
        """Whether the head's table is a lookup's: the same Parameter, not equal values."""
        return self.source.weight is self.head.weight


def locate(model: nn.Module) -> Ends:
    """Find the ends of a Hugging Face model.

    Raises:
        InstallError: the model has no input table or no token head, or one that cannot be trained as a matrix [V, E].
    """
    kind = type(model).__name__
    table = _ask(model, "get_input_embeddings")
    if table is None:
        fix = "install works on models of tokens, before they are wrapped"
        raise InstallError(f"{kind} has no input embedding table", fix)
    head = _ask(model, "get_output_embeddings")
    if head is None:
        raise InstallError(_no_head(model), "load the model with a language-model head (…ForCausalLM, …ForMaskedLM)")
    _check_head(kind, head)
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    if id(head) not in names or id(table) not in names:
        raise InstallError(f"{kind} makes its tables anew on each call", "there is no module to install into")
    partnered = partners(model, names[id(head)])
    lookups = {name: m for name, m in modules.items() if name in partnered and isinstance(m, nn.Embedding)}
    if not lookups:  # a head that nothing may be tied to: the table beside it is the decoder's
        decoder = _ask(_ask(model, "get_decoder"), "get_input_embeddings")
        name = names.get(id(decoder)) or names[id(table)]
        lookups = {n: m for n, m in modules.items() if n in partners(model, name) and m is not head}
    for name, module in lookups.items():
        _check_lookup(f"{kind}: {name}", module)
    return Ends(tuple(lookups.items()), names[id(head)], head)


def _ask(model: Any, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _no_head(model: nn.Module) -> str:
    kind = type(model).__name__
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Linear) and module.out_features == labels and "." not in name:
            return f"{kind} scores {labels} labels with its head `{name}`, and labels share no table with tokens"
    return f"{kind} is an encoder or body without a token head"


def _check_head(kind: str, head: Any) -> None:
    fix = "install needs a torch.nn.Linear head with a weight [V, E]"
    if isinstance(head, nn.Embedding):
        raise InstallError(f"{kind}: its output head is an Embedding, whose use as a matrix only the model knows", fix)
    if not isinstance(head, nn.Linear):
        raise InstallError(f"{kind}: its output head is a {type(head).__name__}", fix)
    if not isinstance(head.weight, nn.Parameter) or not head.weight.is_floating_point():
        fix = "quantise after training, or keep the head in bf16 or fp32"
        raise InstallError(f"{kind}: its output head holds quantised weights", fix)
    if type(head).__module__.startswith(("bitsandbytes", "peft")):
        fix = "install before adapters are added, and do not quantise the head"
        raise InstallError(f"{kind}: its output head is a {type(head).__module__}.{type(head).__name__}", fix)


def _check_lookup(where: str, module: Any) -> None:
    if not isinstance(module, nn.Embedding):
        fix = "install needs a torch.nn.Embedding with a weight [V, E]"
        raise InstallError(f"{where} is a {type(module).__name__}", fix)
    if not torch.is_floating_point(module.weight):
        raise InstallError(f"{where} holds quantised weights", "keep the table in bf16 or fp32")
    if module.max_norm is not None:
        raise InstallError(f"{where} has max_norm: it rewrites rows during the forward", "build it without max_norm")
    if module.sparse:
        raise InstallError(f"{where} has sparse gradients, and the head's are dense", "build it with sparse=False")
    if module.scale_grad_by_freq:
        fix = "build it without scale_grad_by_freq"
        raise InstallError(f"{where} divides its gradient by token frequency, and the head's has none", fix)
