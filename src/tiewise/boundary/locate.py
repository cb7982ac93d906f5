"""Where a model touches its vocabulary, what it ties there, or the reason why a boundary has no meaning.

    ends = locate(model)        ends.lookups  [("model.embed_tokens", Embedding)]      one per place that looks ids up
                                ends.head     ("lm_head", Linear)
    allowed_keys(model)         {"lm_head.weight": "model.embed_tokens.weight"}        whatever is tied now

The places are asked of the model itself (`get_input_embeddings`, `get_output_embeddings`, its encoder and decoder);
no family is known by name.

transformers ties by `config.tie_word_embeddings` (may anything be tied?) and `_tied_weights_keys` (what to what). The
flag often rules more than the head: T5 and BART share their input tables by it, BERT its head's bias. Where such
neighbours are shared, untying keeps the flag and takes the head's key away; elsewhere the flag says the whole truth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.sharded_tables import spread, tables_of_units
from tiewise.boundary.undisturbed import undisturbed
from tiewise.core.errors import InstallError

FLAG = "tie_word_embeddings"
SEED = 20240229  # of every batch that a model is asked with
_REFUSED = {  # options of a lookup that a head has no counterpart of
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


def locate(model: nn.Module) -> ModelEnds:
    """Find the ends of a Hugging Face model."""
    kind = type(model).__name__
    _refuse_pipeline(model)
    table = ask(model, "get_input_embeddings")
    if table is None:
        fix = "install works on models of tokens, loaded and before they are wrapped"
        raise InstallError(f"{kind} has no input embedding table", fix)
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        fix = "install asks transformers' classes what they may tie; tiewise.Boundary is for models of your own"
        raise InstallError(f"{kind} is no model of transformers", fix)
    head = ask(model, "get_output_embeddings")
    if head is None:
        raise InstallError(_no_head(model), "load the model with a language-model head (…ForCausalLM, …ForMaskedLM)")
    if isinstance(head, nn.Embedding):
        what = f"{kind}: its output head is an Embedding, whose use as a matrix only the model knows"
        raise InstallError(what, "install needs a torch.nn.Linear head with a weight [V, E]")
    gathered = tables_of_units(model)
    _check_kind(f"{kind}: its output head", head, nn.Linear, gathered)
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    if id(head) not in names or id(table) not in names:
        raise InstallError(f"{kind} makes its tables anew on each call", "there is no module to install into")
    partnered = partners(model, names[id(head)])
    lookups = {name: m for name, m in modules.items() if name in partnered and isinstance(m, nn.Embedding)}
    if not lookups:  # a head that nothing may be tied to: the table beside it is the decoder's
        decoder = ask(ask(model, "get_decoder"), "get_input_embeddings")
        name = names.get(id(decoder)) or names[id(table)]
        lookups = {n: m for n, m in modules.items() if n in partners(model, name) and m is not head}
    for name, module in lookups.items():
        where = f"{kind}: {name}"
        _check_kind(where, module, nn.Embedding, gathered)
        for option, (does, fix) in _REFUSED.items():
            if getattr(module, option) not in (None, False):
                raise InstallError(f"{where} {does}", fix)
    return ModelEnds(tuple(lookups.items()), names[id(head)], head)


def ask(model: Any, method: str) -> Any:
    """What a model's `method` returns; None where it has none, or none for its kind."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None


def _refuse_pipeline(model: Any) -> None:
    """Refuse a stage of a pipeline whose ends are not both here, told by what stands in their place.

    Pipelines take a module away or put an `Identity` there; transformers' own keeps a copy of a tied table at the last
    stage too, and adds its gradient to nobody's.
    """
    split = getattr(getattr(model, "_pp_stage", None), "pp_size", 1) > 1
    for key in {name for pair in (getattr(model, "_tied_weights_keys", None) or {}).items() for name in pair}:
        place: Any = model
        for part in key.split(".")[:-1]:
            place = getattr(place, "_modules", {}).get(part, ...)
        if split or place is None or isinstance(place, nn.Identity):
            fix = "keep both ends on one rank and split the layers between them, or use fully_shard"
            what = f"{type(model).__name__} is one stage of a pipeline, and its ends are on different ranks"
            raise InstallError(f"{what}: no rank has both paths of the table's gradient", fix)


def _no_head(model: nn.Module) -> str:
    """Say what a model has in place of a token head."""
    kind = type(model).__name__
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Linear) and module.out_features == labels and "." not in name:
            return f"{kind} scores {labels} labels with its head `{name}`, and labels share no table with tokens"
    return f"{kind} is an encoder or body without a token head"


def _check_kind(where: str, module: Any, wanted: type[nn.Module], gathered: set[int]) -> None:
    """Refuse what is wrapped, quantised or sharded, no `wanted` with a plain weight or one that is `gathered`."""
    kind, home = type(module).__qualname__, type(module).__module__
    fix = f"install needs a torch.nn.{wanted.__name__} with a weight [V, E]: install before adapters or quantisation"
    if not isinstance(module, wanted) or home.startswith(("bitsandbytes.", "peft.")):
        raise InstallError(f"{where} is a {kind} of {home}", fix)
    weight = module.weight
    if id(weight) in gathered or spread(module):
        return
    if hasattr(weight, "full_tensor"):
        fix = "install before fully_shard or tensor parallelism, and keep what install returned"
        raise InstallError(f"{where} is sharded, its weight a {type(weight).__name__}", fix)
    made = type(weight)  # isinstance calls a Parameter what only has such a mark, a quantised tensor's class say
    if weight.dtype not in _DTYPES or not (made is torch.Tensor or issubclass(made, nn.Parameter)):
        raise InstallError(f"{where} holds quantised weights ({made.__name__}, {weight.dtype})", fix)
    if made is torch.Tensor:
        raise InstallError(f"{where} has a weight that is computed, no Parameter", "remove what computes it first")


# what may be tied: {target: source}, names of Parameters


def depth_keys(model: Any) -> dict[str, str]:
    """Keys that lists of layers declare for themselves: what layers share across depth, whatever the flag says."""
    found = {}
    for name, module in model.named_modules():
        own = vars(module).get("_tied_weights_keys") if isinstance(module, nn.ModuleList) else None
        found.update({f"{name}.{target}": f"{name}.{source}" for target, source in (own or {}).items()})
    return found


def allowed_keys(model: Any, *, parts: bool = True) -> dict[str, str]:
    """Every key that the model (and its `parts`) may tie, whatever the flag says; not what layers share."""
    across, journal = depth_keys(model), Journal()
    journal.set(model.config, FLAG, True)
    try:
        keys = model.get_expanded_tied_weights_keys(all_submodels=parts)
    finally:
        journal.undo()
    return {target: source for target, source in keys.items() if target not in across}


def partners(model: Any, module: str) -> set[str]:
    """Names of the modules whose weights are, or may be, tied to that of `module`, itself included.

    partners(bart, "lm_head")   {"lm_head", "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"}
    """
    pairs = [(target.rpartition(".")[0], source.rpartition(".")[0]) for target, source in allowed_keys(model).items()]
    owners: dict[int, str] = {}
    for name, part in model.named_modules():
        weight = vars(part).get("_parameters", {}).get("weight")
        if weight is not None:
            pairs.append((name, owners.setdefault(id(weight), name)))
    group: set[str] = set()
    grown = {module}
    while group != grown:
        group = grown
        grown = group.union(*(pair for pair in pairs if group & set(pair)))
    return group


# changes that are taken back


class _Absent:
    """The old value of an attribute that was not there; a class, which copies of a journal keep."""


class Journal:
    """Attribute changes in the order they were made, with the old values; `undo` takes them back in reverse."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name`, remembering what its own value was (class attributes show again after `undo`)."""
        stores = [{"__class__": type(target)}, vars(target)]
        if isinstance(target, nn.Module):
            stores += [target._parameters, target._modules, target._buffers]
        old = next((store[name] for store in stores if name in store), _Absent)
        self.later(*((delattr, target, name) if old is _Absent else (setattr, target, name, old)))
        setattr(target, name, value)

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Remember a step of another kind: `step(*arguments)` is called by `undo`."""
        self._steps.append((step, *arguments))

    def undo(self) -> None:
        """Take everything back and forget it."""
        while self._steps:
            step, *arguments = self._steps.pop()
            step(*arguments)


def ordinary_ids(model: Any, rows: int, shape: tuple[int, int], source: torch.Generator) -> Tensor:
    """Draw token ids [*shape] of so many rows, without the special ones, on the device of `source`."""
    config = model.config.get_text_config().to_dict()
    special = {v for k, v in config.items() if k.endswith("token_id") and isinstance(v, int)}
    ordinary = torch.tensor([i for i in range(min(rows, 4096)) if i not in special] or [0], device=source.device)
    return ordinary[torch.randint(len(ordinary), shape, generator=source, device=source.device)]


def untraced(model: Any, batch: dict[str, Any], *, training: bool = False) -> Any:
    """Output of one forward with fixed randomness, and no trace left in the model."""
    # fixed, since some families sample in their forward
    with undisturbed(model, training=training, seed=SEED), torch.set_grad_enabled(training):
        return model(**batch)


# what config and tied keys say


def own_config(model: Any, journal: Journal) -> Any:
    """Give the model and its parts a copy of their config, so that no other model built from it changes."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) in memo:
            journal.set(module, "config", memo[id(config)])
    return copied


def declare_tying(model: Any, ends: ModelEnds, journal: Journal, *, loading: bool = False) -> bool:
    """Set flag and keys to what the tables are; False where the family's own class would not load them so."""
    key = f"{ends.head_name}.weight"
    allowed, own = allowed_keys(model), allowed_keys(model, parts=False)
    neighbours = {target: source for target, source in allowed.items() if target != key}
    table = model.get_parameter_or_buffer
    native = True
    if ends.tied:
        flag = True
        if not loading:  # tie what else the flag ties, as the next `tie_weights` will
            for target, source in neighbours.items():
                # the value in use, the target's, wins
                if "." in source and table(target) is not table(source):
                    owner, _, name = source.rpartition(".")
                    journal.set(model.get_submodule(owner), name, table(target))
        if key not in allowed:
            native = False
            name = next(name for name, module in ends.lookups if module is ends.source)
            journal.set(model, "_tied_weights_keys", {**own, key: f"{name}.weight"})
    else:
        shared = any(table(target) is table(source) for target, source in neighbours.items())
        flag = shared
        # a model that is being built may not have tied yet; in a class that ties nothing the flag has no meaning
        if loading or not allowed:
            flag = getattr(model.config, FLAG, False)
        if flag and key in allowed:
            kept = {target: source for target, source in own.items() if target != key}
            journal.set(model, "_tied_weights_keys", kept)
    if getattr(model.config, FLAG, False) != flag:
        journal.set(own_config(model, journal), FLAG, flag)
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    if (key in keys) != ends.tied:
        fix = "install into the part that holds the head"
        raise InstallError(f"{type(model).__name__}: a part of it decides by itself whether {key} is tied", fix)
    journal.set(model, "all_tied_weights_keys", keys)
    return native
