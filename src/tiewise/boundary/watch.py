"""`watch`: checks of the first steps while several processes train one table.

    first training forward    tied ends hold one Parameter
    first optimizer step      the optimizer holds each table once, as the sharded Parameter, not the gathered one
    fourth step               processes compare: under DDP their tables are bitwise equal; under FSDP2 no process has
                              only unchanged rows while rows of others change

All of these faults are silent. If a table is made after DDP has wrapped the model, its gradient is not averaged. If an
optimizer is built between a forward and its backward, it updates a copy that is thrown away. If sharding broke a tie,
one end is never updated. Every row of an output table has a gradient, also that of a token that no text has. So rows
that never change are cut off from training, not rare. With a learning rate of 0 no rows change, and the comparison is
repeated at later steps.

The checks run in hooks that torch calls around every optimizer's step, and the hooks are removed after the verdict.
The cost is two passes over the local rows and one exchange of a few bytes. The host waits for the device in those
steps only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tiewise.boundary.sharded_tables import parameter_records
from tiewise.core.errors import UnsupportedError

_FIRST, _LAST = 4, 64  # optimizer steps of the first and last comparison: powers of two, until some row has changed
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_AFTER = "shard or wrap the model first, build the optimizer from model.parameters() afterwards"
_watched: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # not an attribute, which copies would share


def watch(model: nn.Module, link: Any) -> None:
    """Start to watch the tables of `link`, once, if DDP or FSDP2 trains the model."""
    if model in _watched:
        return
    active_wrapper: Callable[[], Any] = DistributedDataParallel._get_active_ddp_module
    wrapper = active_wrapper()
    if wrapper is None and not hasattr(model, "_get_fsdp_state"):
        return
    if link.spec.tables == 1 and not link.ends.tied:
        remedy = (
            "load and tie the model first, then shard it by torch's fully_shard or wrap it, then build the optimizer"
        )
        raise UnsupportedError(f"a {link.spec} boundary whose ends hold two Parameters", remedy)
    replicas = getattr(wrapper, "process_group", None)
    _watched[model] = _Watch(model, link, replicas)


def unwatch(model: nn.Module) -> None:
    """Stop watching a model permanently."""
    watching = _watched.get(model)
    if watching is not None:
        watching.stop()
    _watched[model] = None


class _Verdict(NamedTuple):
    """Result of a comparison of processes. `problem` is "" if nothing is wrong."""

    is_final: bool  # False if no table has changed yet
    problem: str = ""
    remedy: str = ""


_UNDECIDED, _SOUND = _Verdict(False), _Verdict(True)


class _Watch:
    """Hooks around every optimizer's step that check the tables of one model."""

    def __init__(self, model: nn.Module, link: Any, replicas: Any) -> None:
        self.model, self.link = ref(model), ref(link)  # weak: the hooks must not keep them alive
        self.replicas = replicas  # the process group of DDP; None under FSDP2
        self.optimizer: Any = None  # weak reference to the first optimizer that holds the head's table
        self.steps = 0
        # these two stay on their device until a comparison: reading them would make each step wait
        self.saw_gradient: Tensor | None = None  # whether any gradient was not 0
        self.digest: Tensor | None = None  # digest of the local rows before the first step
        self.hooks = (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        )
        finalize(model, self.stop)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()

    def tables(self, records: list[Any]) -> list[Any]:
        """Return the tables that an optimizer must hold, the head's first.

        Modules may have gathered copies, so sharded Parameters come from the `records`.
        """
        link: Any = self.link()
        sharded = {}
        for record in records:
            module_info = record._module_info
            for module in (module_info.module, *module_info.shared_modules):
                sharded[id(module), module_info.param_name] = record.sharded_param
        tables = {}
        for module in (link.head, *link.lookups):
            table = sharded.get((id(module), "weight"), module.weight)
            tables[id(table)] = table
        return list(tables.values())

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Compare the optimizer's Parameters with the tables, and note a gradient."""
        model = self.model()
        if model is None:
            return
        records = parameter_records(model)
        tables = self.tables(records)
        entries = _count_entries(optimizer)
        name = type(optimizer).__name__
        _refuse_gathered(name, entries, records)
        _refuse_repeated(name, entries, tables)
        table = tables[0]
        if self.optimizer is None and entries[id(table)]:
            self.optimizer, self.digest = ref(optimizer), _digest(_local(table))
        if self.is_watched_optimizer(optimizer) and table.grad is not None:
            self.note_gradient(_local(table.grad))

    def note_gradient(self, gradient: Tensor) -> None:
        """Note whether a gradient of the head's table was not 0, now or earlier."""
        has_gradient = gradient.any()
        if self.saw_gradient is not None:
            has_gradient = self.saw_gradient | has_gradient
        self.saw_gradient = has_gradient

    def is_watched_optimizer(self, optimizer: Any) -> bool:
        """Return whether an optimizer is the one that holds the head's table."""
        return self.optimizer is not None and self.optimizer() is optimizer

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Count the step, and compare processes after the steps 4, 8, …, 64."""
        model = self.model()
        if model is None or not self.is_watched_optimizer(optimizer):
            return
        self.steps += 1
        is_power_of_two = self.steps & (self.steps - 1) == 0
        if self.steps < _FIRST or not is_power_of_two:
            return
        verdict = self.compare(model)
        if verdict.is_final or self.steps >= _LAST:
            unwatch(model)
        if verdict.problem:
            raise UnsupportedError(f"after {self.steps} steps {verdict.problem}", verdict.remedy)

    def compare(self, model: nn.Module) -> _Verdict:
        """Compare the tables of all processes, under DDP or FSDP2."""
        tables = self.tables(parameter_records(model))
        if self.replicas is None:
            return self.check_rows_move(tables[0])
        return self.check_copies(tables)

    def check_copies(self, tables: list[Tensor]) -> _Verdict:
        """Check that all DDP processes have equal tables."""
        digests = _gather_values([int(_digest(table.detach())) for table in tables], self.replicas)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                remedy = "install, tie and untie before DistributedDataParallel wraps the model"
                remedy += ", and step all processes alike"
                return _Verdict(True, f"the table of process {rank} is not that of process 0", remedy)
        return _SOUND

    def check_rows_move(self, table: Any) -> _Verdict:
        """Check that no FSDP2 process has only unchanged rows while others' rows change."""
        if not hasattr(table, "device_mesh"):
            return _SOUND  # FSDP2 ignores this table
        mesh = table.device_mesh
        moves = [self._has_moved(_local(table))]
        for dimension in reversed(range(mesh.ndim)):
            moves = list(chain.from_iterable(_gather_values(moves, mesh.get_group(dimension))))
        if True not in moves:
            return _UNDECIDED
        if False not in moves:
            return _SOUND
        why = "and others' move: they have no gradient, or the optimizer moves something else"
        remedy = f"tie, then shard with torch's fully_shard; {_AFTER}"
        process = int(mesh.mesh.flatten()[moves.index(False)])
        return _Verdict(True, f"all rows of process {process} stand still, {why}", remedy)

    def _has_moved(self, rows: Tensor) -> bool | None:
        """Return whether this process's rows have changed, or None if there are too few rows."""
        if len(rows) <= 1:  # a single row may be the padding row
            return None
        if self.saw_gradient is None or not bool(self.saw_gradient):
            return False
        is_narrow = rows.element_size() < 4  # in 16 bits a small step may round to no change
        return is_narrow or bool(_digest(rows) != self.digest)


def _count_entries(optimizer: Any) -> Counter[int]:
    """Return how often an optimizer holds each Parameter, by its id."""
    entries: Counter[int] = Counter()
    for group in optimizer.param_groups:
        entries.update(id(parameter) for parameter in group["params"])
    return entries


def _refuse_repeated(name: str, entries: Counter[int], tables: list[Any]) -> None:
    """Refuse an optimizer that holds a table twice, and would step it twice."""
    for table in tables:
        count = entries[id(table)]
        if count > 1:
            raise UnsupportedError(f"{name} holds one table {count} times", _AFTER)


def _refuse_gathered(name: str, entries: Counter[int], records: list[Any]) -> None:
    """Refuse an optimizer that holds Parameters that FSDP2 gathered for a forward."""
    gathered = {id(record._unsharded_param) for record in records if hasattr(record, "_unsharded_param")}
    count = sum(entries[parameter] for parameter in gathered)
    if count:
        remedy = f"{_AFTER}, or call reshard() on its units before that"
        raise UnsupportedError(f"{name} holds {count} gathered Parameters, which the model does not keep", remedy)


def _local(x: Any) -> Tensor:
    """Return this process's part of a Parameter or gradient."""
    if hasattr(x, "to_local"):
        x = x.to_local()
    part: Tensor = x.detach()
    return part


def _digest(x: Tensor) -> Tensor:
    """Return the sum of a tensor's entries, read as integers.

    Different tensors have the same sum with a chance of 2⁻⁶⁴, or if they differ in the order of entries only.
    """
    return x.contiguous().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def _gather_values(value: Any, group: Any) -> list[Any]:
    """Return the values of all processes of a group, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
