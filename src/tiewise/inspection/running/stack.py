"""A model as a stack: its layers in the order of application, then its logits.

    stack = find_stack(opened)
    states = stack.states(ids)           # residual stream before each layer, and after the last
    stack.to_logits(states[-1])          # the model's own logits

No family is recognised by its name. Layers are observed: modules of one list, each of which reads what the previous one
wrote. The steps after the last layer (norm, maps, scale, bias, soft-cap) are not rebuilt: `to_logits` runs the model's
forward with every layer replaced by one that returns the states to decode. `find_stack` checks on a random batch that
the logits depend on these states alone.

    calls = stack.calls(ids)             # one `LayerCall` per application
    repeats(keys(calls))                 # runs of applications that use the same parameters again
    one_block(calls)                     # the run of all applications, if a model repeats one block and nothing else

Two layers are the same if they use the same Parameter objects under the same names, whichever modules hold them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.lazy_logits import compute_logits
from tiewise.boundary.trial_runs import SEED, ordinary_ids
from tiewise.boundary.undisturbed import undisturbed
from tiewise.core.errors import UnsupportedError, one_line_message
from tiewise.inspection.running.loaded import Opened, leaves_model

LOGITS = 2**24  # V · positions: the most logits in memory
TOLERANCE = 1e-5  # relative to the largest logit, in fp32
_ROWS, _LENGTH = 2, 7
_FIX = "this measure needs one stack of layers between a table of tokens and a token head"


@dataclass(frozen=True)
class AppliedStack:
    """Layers as they are applied, and the model's path from their output to logits."""

    opened: Opened  # the model that runs
    applications: tuple[LayerCall, ...]  # L in order, of a random batch; a repeated layer is listed each time
    causal: bool  # True if the logits of a position do not depend on later tokens
    width: int  # D, of the residual stream
    token: int  # an ordinary token id: the input if only shapes matter

    @torch.no_grad()
    def calls(self, ids: Tensor, **options: Tensor) -> list[LayerCall]:
        """Run ids [B, T] and return the L applications, each of which can be called again.

        `options` are further arguments of the model's forward, such as a mask. If the family can, it computes logits
        for the
        last position only.
        """
        with _recorded({layer.name: layer.module for layer in self.applications}) as calls:
            _logits(self.opened.model, ids, logits_to_keep=1, **options)
        return calls

    def states(self, ids: Tensor) -> list[Tensor]:
        """Return the residual stream around all applications on ids [B, T].

        These are L + 1 states [B, T, D]; the first is the input of the first application.
        """
        return states_of(self.calls(ids))

    def parts(self, count: int) -> Iterator[slice]:
        """Yield slices of `count` positions whose logits fit in memory together."""
        size = max(1, LOGITS // self.opened.vocab)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits [..., V] from outputs `hidden` [..., D] of its last layer.

        They are differentiable in `hidden`.
        """
        flat = hidden.reshape(-1, 1, hidden.shape[-1])  # one position per sequence: no length limit
        ids = torch.full((len(flat), 1), self.token, device=hidden.device)
        with ExitStack() as undo:
            layers = {id(call.module): call for call in self.applications}  # each module once
            for layer in layers.values():
                instance_forward = vars(layer.module).get("forward")
                if instance_forward is not None:
                    undo.callback(setattr, layer.module, "forward", instance_forward)
                layer.module.forward = layer.constant(flat)
                undo.callback(delattr, layer.module, "forward")
            logits: Tensor = _logits(self.opened.model, ids)
        return logits.reshape(*hidden.shape[:-1], -1)


@leaves_model
def find_stack(opened: Opened) -> AppliedStack:
    """Find the layers of a model and its path to the logits by running it.

    Raises:
        UnsupportedError: no single chain of layers, or logits that depend on more than the last layer's output.
    """
    model, class_name = opened.model, type(opened.model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{class_name} has an encoder and a decoder, which read different texts", _FIX)
    ids = ordinary_ids(model, opened.vocab, (_ROWS, _LENGTH), torch.Generator().manual_seed(SEED))
    ids = ids.to(opened.ends.main_lookup.weight.device)
    try:
        with torch.no_grad(), _recorded(_listed_modules(model)) as calls:
            logits = _logits(model, ids)
    except Exception as error:  # a family whose forward needs more than ids raises errors of any type
        raise UnsupportedError(
            f"{class_name} does not run on token ids alone ({one_line_message(error)})", _FIX
        ) from None
    if not logits.isfinite().all():
        raise UnsupportedError(f"{class_name}: its logits are not all numbers", "`tiewise check --deep` names the rows")
    layers = _chain(class_name, calls, (_ROWS, _LENGTH))
    width = layers[-1].wrote.shape[-1]
    stack = AppliedStack(opened, tuple(layers), _is_causal(model, ids, logits), width, token=int(ids[0, 0]))
    _require_same_logits(stack, logits)
    return stack


def _listed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return every member of every list of modules, by its name."""
    members: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        prefix = f"{name}." if name else ""
        for position, member in enumerate(module):
            members[f"{prefix}{position}"] = member
    return members


def _is_causal(model: Any, ids: Tensor, logits: Tensor) -> bool:
    """Return True if a change of the last token changes no earlier logits.

    `logits` are those of ids [B, T].
    """
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    other[ids[:, 0] == ids[:, -1], -1] = ids.max()
    with torch.no_grad():
        change = _logits(model, other) - logits
    moved = change[:, :-1].abs().max()
    return bool(moved <= TOLERANCE * logits.abs().max())


def _require_same_logits(stack: AppliedStack, logits: Tensor) -> None:
    """Refuse a model whose logits depend on more than its last layer's output.

    The check uses the states of a random batch.
    """
    class_name = type(stack.opened.model).__name__
    try:
        with torch.no_grad():
            again = stack.to_logits(stack.applications[-1].wrote)
    except Exception as error:  # a family's forward may fail in any way without its layers
        raise UnsupportedError(
            f"{class_name} does not run without its layers ({one_line_message(error)})", _FIX
        ) from None
    if again.shape != logits.shape:
        raise UnsupportedError(
            f"{class_name}: logits {list(logits.shape)} become {list(again.shape)} on other shapes", _FIX
        )
    largest = logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    difference = float((again - logits).abs().max() / largest)
    if not difference <= TOLERANCE:
        problem = (
            f"{class_name}: logits depend on more than the last layer's output (relative difference {difference:.1e})"
        )
        raise UnsupportedError(problem, _FIX)


def _logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits of a forward without a cache.

    An option is passed only if the family's forward has a parameter of its name.
    """
    parameters = inspect.signature(model.forward).parameters
    options = {"use_cache": False, **options}
    options = {key: value for key, value in options.items() if key in parameters}
    with undisturbed(model):
        output = model(input_ids=ids, **options)
    # the first match: families prefix the name (BERT's `prediction_logits`); heads for sentence pairs come later
    every_logits = [value for key, value in output.items() if "logits" in key]
    logits: Tensor = compute_logits(every_logits[0])
    return logits


@dataclass(frozen=True)
class LayerCall:
    """One call of a module that takes a float tensor and returns one.

    `read` and `wrote` are copies, because models work in place.
    """

    name: str  # of the module in its model
    module: nn.Module
    args: tuple[Any, ...]  # positional arguments, with None for the state
    kwargs: dict[str, Any]  # keyword arguments, with None for the state
    position: int | str  # position of the state: index in `args` or key in `kwargs`
    read: Tensor  # the state: the first float tensor among the arguments
    wrote: Tensor  # the output, or its first element if it is a tuple
    returns: int  # length of that tuple, 0 for a bare tensor
    inside: bool  # True if another recorded module made this call

    def again(self, state: Tensor) -> Tensor:
        """Apply the module to another state [B, T, D], with the other arguments of its call.

        It receives a copy of the state.
        """
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.position, int):
            args[self.position] = state.clone()
        else:
            kwargs[self.position] = state.clone()
        output = self.module(*args, **kwargs)
        wrote: Tensor = output[0] if isinstance(output, tuple) else output
        return wrote

    def constant(self, states: Tensor) -> Callable[..., Tensor | tuple[Tensor | None, ...]]:
        """Return a forward that computes nothing and returns `states`.

        If the module returns a tuple, so does this forward.
        """
        output: Tensor | tuple[Tensor | None, ...] = states
        if self.returns:
            output = (states, *([None] * (self.returns - 1)))
        return lambda *args, **kwargs: output


def states_of(calls: list[LayerCall]) -> list[Tensor]:
    """Return the residual stream around a stack's applications: L + 1 tensors [B, T, D]."""
    return [calls[0].read, *(call.wrote for call in calls)]


def relative(new: Tensor, old: Tensor) -> Tensor:
    """Return the relative change [B] from `old` to `new` states [B, T, D].

    It is the mean over tokens of ‖new − old‖ / ‖old‖. A token whose state did not change counts as 0, also if the state
    is
    zero.
    """
    size = torch.linalg.vector_norm(old, dim=-1)
    change = torch.linalg.vector_norm(new - old, dim=-1)
    return torch.where(change == 0, change, change / size).mean(-1)


@contextmanager
def _recorded(modules: Mapping[str, nn.Module]) -> Iterator[list[LayerCall]]:
    """Record the calls of some modules in the order in which they end."""
    recorder = _Recorder({id(module): name for name, module in modules.items()})
    with ExitStack() as hooks:
        for module in dict.fromkeys(modules.values()):  # each once
            hooks.callback(module.register_forward_pre_hook(recorder.begin, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(recorder.end, with_kwargs=True).remove)
        yield recorder.calls


class _Recorder:
    """Hooks that record calls of modules; a call may be inside another one."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """Store the modules' names by their identity."""
        self.names = names
        self.calls: list[LayerCall] = []
        self._running: list[tuple[int | str, Tensor] | None] = []  # for each unfinished call: position and state

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the first float tensor of a call, and its position among the arguments."""
        positions: list[int | str] = [*range(len(args)), *kwargs]
        for position, value in zip(positions, (*args, *kwargs.values()), strict=True):
            if isinstance(value, Tensor) and value.is_floating_point():
                self._running.append((position, value.detach().clone()))
                return
        self._running.append(None)

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Record a call that read and wrote tensors."""
        noted = self._running.pop()
        returns, wrote = 0, output
        if isinstance(output, tuple) and output:
            returns, wrote = len(output), output[0]
        if noted is None or not isinstance(wrote, Tensor):
            return
        position, read = noted
        # the state is stored once, apart from the other arguments
        other_args: list[Any] = list(args)
        other_kwargs = dict(kwargs)
        if isinstance(position, int):
            other_args[position] = None
        else:
            other_kwargs[position] = None
        call = LayerCall(
            self.names[id(module)],
            module,
            args=tuple(other_args),
            kwargs=other_kwargs,
            position=position,
            read=read,
            wrote=wrote.detach().clone(),
            returns=returns,
            inside=bool(self._running),
        )
        self.calls.append(call)


def _chain(class_name: str, calls: list[LayerCall], shape: tuple[int, int]) -> list[LayerCall]:
    """Return the calls of members of one list, each of which reads the previous output.

    The members are named `<list>.<index>`; states are [*shape, D].
    """
    lists: dict[str, list[LayerCall]] = {}
    for call in calls:
        is_layer = call.read.shape == call.wrote.shape and call.read.shape[:-1] == shape
        if is_layer and not call.inside:
            name, _, _ = call.name.rpartition(".")
            lists.setdefault(name, []).append(call)
    if not lists:
        raise UnsupportedError(f"{class_name}: no list of layers reads and writes states [batch, length, width]", _FIX)
    if len(lists) > 1:
        raise UnsupportedError(f"{class_name}: several lists of layers, {' and '.join(sorted(lists))}", _FIX)
    (layers,) = lists.values()
    for i, (before, after) in enumerate(pairwise(layers), 1):
        if not torch.equal(before.wrote, after.read):
            raise UnsupportedError(f"{class_name}: layer {i} does not read what layer {i - 1} wrote", _FIX)
    return layers


# which applications are the same layer, and which repeat

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Repeat:
    """A run of `times` applications of a block of `period` layers.

    `first` is the number of its first application, counted from 0.
    """

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """Return the number of the application after the last."""
        return self.first + self.period * self.times


def keys(calls: Iterable[LayerCall]) -> list[Key]:
    """Return a key of every application: equal where the same Parameters have the same names."""
    of_calls: list[Key] = []
    for call in calls:
        parameters = call.module.named_parameters(remove_duplicate=False)
        named = tuple((name, id(value)) for name, value in parameters)
        of_calls.append(named or (id(call.module),))
    return of_calls


def repeats(of_calls: list[Key]) -> list[Repeat]:
    """Find runs of applications in which a block is repeated at once.

    The search goes from left to right and takes the shortest block first.
    """
    runs: list[Repeat] = []
    start = 0
    while start < len(of_calls):
        run = _repeat_from(of_calls, start)
        if run is None:
            start += 1
        else:
            runs.append(run)
            start = run.end
    return runs


def _repeat_from(of_calls: list[Key], start: int) -> Repeat | None:
    """Return the run of the shortest block at `start` that is repeated at once."""
    for period in range(1, (len(of_calls) - start) // 2 + 1):
        block = of_calls[start : start + period]
        run = Repeat(start, period, times=1)
        while block == of_calls[run.end : run.end + period]:
            run = Repeat(start, period, run.times + 1)
        if run.times > 1:
            return run
    return None


def one_block(calls: list[LayerCall]) -> Repeat:
    """Return the shortest block that all applications repeat.

    Raises:
        UnsupportedError: there is none; the message says how far the layers share parameters.
    """
    of_calls, count = keys(calls), len(calls)
    for period in range(1, count // 2 + 1):
        if of_calls == of_calls[:period] * (count // period):
            return Repeat(0, period, count // period)
    problem = "every layer has parameters of its own"
    if any(shared_fractions(calls)):
        problem = (
            f"its {count} layers share parameters in part only, and are no one block that is applied again and again"
        )
    elif count == 1:
        problem = "one layer, applied once"
    raise UnsupportedError(problem, "give a model that repeats whole layers")


def shared_fractions(calls: Iterable[LayerCall]) -> list[float]:
    """Return the fraction of each application's parameters that an earlier one used.

    Parameters count by their elements.
    """
    seen: set[int] = set()
    fractions = []
    for call in calls:
        sizes = {id(parameter): parameter.numel() for parameter in call.module.parameters()}
        used = sum(size for key, size in sizes.items() if key in seen)
        fractions.append(used / max(sum(sizes.values()), 1))
        seen |= sizes.keys()
    return fractions
