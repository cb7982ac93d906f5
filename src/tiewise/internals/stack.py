"""A model as a stack: its layers in the order of application, and what it makes of the last one's output.

    stack = find_stack(opened)
    states = stack.states(ids)           # residual stream before each layer, and after the last
    stack.to_logits(states[-1])          # the model's own logits

No family is known by name. Layers are observed: modules of one list, each reading what the one before it wrote. What
follows the last layer (norm, maps, scale, bias, soft-cap) is not rebuilt: the model's own forward is run with every
layer replaced by one that returns the given states. That its logits depend on nothing else is checked on a random
batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.link import computed
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import UnsupportedError
from tiewise.internals.loaded import Opened

TOLERANCE = 1e-5  # of the largest logit, in fp32
_SEED, _ROWS, _LENGTH = 20240229, 2, 7
_FIX = "this measure needs one stack of layers between a table of tokens and a token head"


@dataclass(frozen=True)
class StackedLayer:
    """One application of a layer."""

    name: str  # of the module in its model
    module: nn.Module  # the layer; the same object in every application where layers are shared
    returns: int  # length of the tuple that it returns, 0 for a bare tensor


@dataclass(frozen=True)
class AppliedStack:
    """Layers as they are applied, and the model's own way from the last one's output to logits."""

    opened: Opened  # the model that runs
    applications: tuple[StackedLayer, ...]  # L in order; a layer that is applied repeatedly stands once for each
    after: tuple[str, ...]  # names of the modules without children that run after the last layer, in order
    causal: bool  # whether the logits of a position do not depend on what stands after it
    width: int  # D, of the residual stream
    token: int  # an id without a special meaning: stands in the input where only shapes matter

    @property
    def repeats(self) -> bool:
        """Whether a layer is applied more than once."""
        return len({id(one.module) for one in self.applications}) < len(self.applications)

    def states(self, ids: Tensor, **given: Tensor) -> list[Tensor]:
        """Residual stream of ids [B, T]: L + 1 tensors [B, T, D], before each application and after the last.

        `given` is what else the model's forward takes, as a mask. Where the family can, logits are computed for the
        last position only.
        """
        return self._run(ids, logits_to_keep=1, **given)[0]

    def run(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Residual stream as `states` gives it, and the model's logits [B, T, V], of one forward of ids [B, T]."""
        return self._run(ids)

    @torch.no_grad()
    def _run(self, ids: Tensor, **options: Any) -> tuple[list[Tensor], Tensor]:
        with _recorded({one.name: one.module for one in self.applications}) as calls:
            logits = _logits(self.opened.model, ids, **options)
        return [calls[0].read, *(call.wrote for call in calls)], logits

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the model if its last layer had written `hidden` [..., D]; differentiable in `hidden`."""
        flat = hidden.reshape(-1, 1, hidden.shape[-1])  # one position each: no limit on how many
        ids = torch.full((len(flat), 1), self.token, device=hidden.device)
        with ExitStack() as held:
            for one in {id(one.module): one for one in self.applications}.values():
                held.enter_context(_returning(one, flat))
            logits = _logits(self.opened.model, ids)
        return logits.reshape(*hidden.shape[:-1], -1)


def find_stack(opened: Opened) -> AppliedStack:
    """Find the layers of a model and its way from the last of them to the logits, by running it.

    Raises:
        UnsupportedError: no single chain of layers, or logits that depend on more than the last layer's output.
    """
    model = opened.model
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{kind} has an encoder and a decoder, which read different texts", _FIX)
    ids = _ordinary(opened)
    listed = {
        f"{name}.{i}" if name else str(i): member
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for i, member in enumerate(module)
    }
    with torch.no_grad(), _recorded(listed) as calls, _ended(model) as ended:
        logits = _run(model, ids)
    if not logits.isfinite().all():
        raise UnsupportedError(f"{kind}: its logits are not all numbers", "`tiewise check --deep` names the rows")
    layers = _chain(calls, (_ROWS, _LENGTH))
    if isinstance(layers, str):
        raise UnsupportedError(f"{kind}: {layers}", _FIX)
    applications = tuple(StackedLayer(call.name, call.module, call.returns) for call in layers)
    place = max(i for i, (_, module) in enumerate(ended) if module is applications[-1].module)
    stack = AppliedStack(
        opened,
        applications,
        after=tuple(name for name, module in ended[place + 1 :] if not any(True for _ in module.children())),
        causal=_causal(model, ids, logits),
        width=layers[-1].wrote.shape[-1],
        token=int(ids[0, 0]),
    )
    _verify(stack, layers, logits)
    return stack


def _verify(stack: AppliedStack, layers: list[ObservedCall], logits: Tensor) -> None:
    """Hold `to_logits` of the last layer's output against the model's logits."""
    kind = type(stack.opened.model).__name__
    try:
        with torch.no_grad():
            again = stack.to_logits(layers[-1].wrote)
    except Exception as error:  # whatever a family's forward does without its layers
        what = f"{kind} does not run without its layers ({short(_reason(error))})"
        raise UnsupportedError(what, _FIX) from None
    if again.shape != logits.shape:
        raise UnsupportedError(f"{kind}: logits {list(logits.shape)} become {list(again.shape)} on other shapes", _FIX)
    apart = float((again - logits).abs().max() / logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny))
    if not apart <= TOLERANCE:
        what = f"{kind}: logits depend on more than the last layer's output (relative difference {apart:.1e})"
        raise UnsupportedError(what, _FIX)


def _ordinary(opened: Opened) -> Tensor:
    """Random ids [2, 7] without a special meaning."""
    config = opened.model.config.get_text_config().to_dict()
    special = {value for key, value in config.items() if key.endswith("token_id") and isinstance(value, int)}
    ordinary = torch.tensor([i for i in range(min(opened.vocab, 4096)) if i not in special] or [0])
    source = torch.Generator().manual_seed(_SEED)
    drawn = ordinary[torch.randint(len(ordinary), (_ROWS, _LENGTH), generator=source)]
    return drawn.to(opened.ends.source.weight.device)


def _run(model: Any, ids: Tensor) -> Tensor:
    """Logits of a model that may refuse ids alone."""
    try:
        return _logits(model, ids)
    except Exception as error:  # a family that wants more than ids raises anything
        what = f"{type(model).__name__} does not run on token ids alone ({short(_reason(error))})"
        raise UnsupportedError(what, _FIX) from None


def _logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Logits of a forward without a cache; `options` are given where the family's forward names them."""
    known = inspect.signature(model.forward).parameters
    given = {key: value for key, value in {"use_cache": False, **options}.items() if key in known}
    output = model(input_ids=ids, **given)
    return computed(next(value for key, value in output.items() if "logits" in key))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _causal(model: Any, ids: Tensor, logits: Tensor) -> bool:
    """Whether another last token leaves all earlier logits where they are."""
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    other[ids[:, 0] == ids[:, -1], -1] = ids.max()
    with torch.no_grad():
        moved = (_logits(model, other) - logits)[:, :-1].abs().max()
    return bool(moved <= TOLERANCE * logits.abs().max())


@contextmanager
def _ended(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Names and modules in the order in which their calls end."""
    ended: list[tuple[str, nn.Module]] = []
    with ExitStack() as held:
        for name, module in model.named_modules():
            hook = module.register_forward_hook(lambda module, *_, name=name: ended.append((name, module)))
            held.callback(hook.remove)
        yield ended


@contextmanager
def _returning(layer: StackedLayer, states: Tensor) -> Iterator[None]:
    """Let a layer return `states` without computing anything."""
    made = (states, *([None] * (layer.returns - 1))) if layer.returns else states
    own = vars(layer.module).get("forward")
    layer.module.forward = lambda *_, **__: made
    try:
        yield
    finally:
        del layer.module.forward
        if own is not None:
            layer.module.forward = own


@dataclass(frozen=True)
class ObservedCall:
    """One call of a module that takes a tensor of floats and returns one."""

    name: str
    module: nn.Module
    read: Tensor  # first tensor of floats among its arguments, as it was before the call
    wrote: Tensor  # what it returned, or the first element of the tuple that it returned
    returns: int  # length of that tuple, 0 for a bare tensor
    inside: bool  # whether it was called by another recorded module


@contextmanager
def _recorded(modules: Mapping[str, nn.Module]) -> Iterator[list[ObservedCall]]:
    """Record the calls of some modules in the order in which they end. Tensors are copied: models may work in place."""
    calls: list[ObservedCall] = []
    names = {id(module): name for name, module in modules.items()}
    open_calls: list[Tensor | None] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        found = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        open_calls.append(None if found is None else found.detach().clone())

    def end(module: nn.Module, _: Any, output: Any) -> None:
        read, returns = open_calls.pop(), len(output) if isinstance(output, tuple) else 0
        wrote = output[0] if returns else output
        if read is not None and isinstance(wrote, Tensor):
            wrote = wrote.detach().clone()
            calls.append(ObservedCall(names[id(module)], module, read, wrote, returns, bool(open_calls)))

    with ExitStack() as held:
        for module in {id(module): module for module in modules.values()}.values():
            held.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            held.callback(module.register_forward_hook(end).remove)
        yield calls


def _chain(calls: list[ObservedCall], shape: tuple[int, int]) -> list[ObservedCall] | str:
    """Find the calls of one list's members that hand states [B, T, D] from one to the next, or say why there are none.

    Members are named `<list>.<index>`; `shape` is (B, T).
    """
    lists: dict[str, list[ObservedCall]] = {}
    for call in calls:
        if not call.inside and call.read.shape == call.wrote.shape and call.read.shape[:-1] == shape:
            lists.setdefault(call.name.rpartition(".")[0], []).append(call)
    if not lists:
        return "no list of layers reads and writes states [batch, length, width]"
    if len(lists) > 1:
        return f"several lists of layers, {' and '.join(sorted(lists))}"
    (found,) = lists.values()
    for i, (before, after) in enumerate(pairwise(found), 1):
        if not torch.equal(before.wrote, after.read):
            return f"layer {i} does not read what layer {i - 1} wrote"
    return found
