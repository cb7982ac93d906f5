"""What must hold while several processes train one table: looked at in the first steps, and then no more.

    first training forward    ends that are tied hold one Parameter
    first optimizer step      the optimizer holds each table once, and the part that is kept, not the gathered whole
    fourth                    processes tell each other: under DDP their tables are bit for bit the same; under FSDP2
                              no process has rows that all stand still while others' move

Each of these goes wrong without a word: a table that was made after DDP had wrapped the model is averaged with nobody;
an optimizer that was built between a forward and its backward moves a copy that is thrown away; a tie that sharding
broke leaves one end as it was. Every row of an output table has a gradient, of a token that no text has too: what
stands still is not rare, it is cut off. A learning rate of 0 moves nobody's, and the question is asked later again.

It hangs on hooks that torch calls around every optimizer's step; they are taken away with the answer. The cost is
two passes over the local rows and one exchange of a few bytes. The host reads from the device at those steps alone.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tiewise.boundary.sharded_tables import parameter_records
from tiewise.core.errors import UnsupportedError

_FIRST, _LAST = 4, 64  # steps after which the answer is asked for: at powers of two, until something has moved
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_AFTER = "shard or wrap the model first, build the optimizer from model.parameters() afterwards"
_watched: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # never in the model: copies and files have it not


def watch(model: nn.Module, link: Any) -> None:
    """Begin to watch the tables of `link`, once, where DDP or FSDP2 trains the model over several processes."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if model in _watched or (wrapper is None and not hasattr(model, "_get_fsdp_state")):
        return
    if link.spec.tables == 1 and all(lookup.weight is not link.head.weight for lookup in link.lookups):
        fix = "load and tie the model first, then shard it by torch's fully_shard or wrap it, then build the optimizer"
        raise UnsupportedError(f"a {link.spec} boundary whose ends hold two Parameters", fix)
    _watched[model] = _Watch(model, link, None if wrapper is None else wrapper.process_group)


def unwatch(model: nn.Module) -> None:
    """Watch the model no more."""
    if (found := _watched.get(model)) is not None:
        found.stop()
    _watched[model] = None


class _Watch:
    def __init__(self, model: nn.Module, link: Any, replicas: Any) -> None:
        self.model, self.link = ref(model), ref(link)  # neither lives longer for being watched
        self.replicas = replicas  # the group of DDP; None under FSDP2
        self.owner: Any = None  # the optimizer that holds the tables; one that wraps it comes first
        self.steps = 0
        # both stay on their device until they are asked for: a step would wait for it
        self.reached: Tensor | None = None  # whether any gradient has come that is not 0
        self.digest: Tensor | None = None  # of the table before the first step
        self.hooks = register_optimizer_step_pre_hook(self.before), register_optimizer_step_post_hook(self.after)
        finalize(model, self.stop)

    def stop(self) -> None:
        """Take the hooks away."""
        for hook in self.hooks:
            hook.remove()

    def tables(self, records: list[Any]) -> list[Any]:
        """Tables as an optimizer must hold them, the head's first; modules may have them gathered."""
        link: Any = self.link()
        sharded = {}
        for record in records:
            place = record._module_info
            for module in (place.module, *place.shared_modules):
                sharded[id(module), place.param_name] = record.sharded_param
        found = [sharded.get((id(module), "weight"), module.weight) for module in (link.head, *link.lookups)]
        return list({id(table): table for table in found}.values())

    def before(self, optimizer: Any, *_: Any) -> None:
        """Hold the optimizer's entries against the tables, and see whether a gradient has come."""
        model = self.model()
        if model is None:
            return
        records, name = parameter_records(model), type(optimizer).__name__
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        made = {id(record._unsharded_param) for record in records if hasattr(record, "_unsharded_param")}
        gathered = sum(id(parameter) in made for parameter in held)
        if gathered:
            fix = f"{_AFTER}, or call reshard() on its units before that"
            raise UnsupportedError(f"{name} holds {gathered} gathered Parameters, which the model does not keep", fix)
        tables = self.tables(records)
        for table in tables:
            count = sum(parameter is table for parameter in held)
            if count > 1:
                raise UnsupportedError(f"{name} holds one table {count} times", _AFTER)
        table = tables[0]
        if self.owner is None and any(parameter is table for parameter in held):
            self.owner, self.digest = ref(optimizer), _digest(_local(table))
        if self.owned_by(optimizer) and table.grad is not None:
            came = _local(table.grad).any()
            self.reached = came if self.reached is None else self.reached | came

    def owned_by(self, optimizer: Any) -> bool:
        """Whether it is the one that holds the head's table."""
        return self.owner is not None and self.owner() is optimizer

    def after(self, optimizer: Any, *_: Any) -> None:
        """Count, and compare processes when it is time."""
        model = self.model()
        if model is None or not self.owned_by(optimizer):
            return
        self.steps += 1
        if self.steps < _FIRST or self.steps & (self.steps - 1):
            return
        tables = self.tables(parameter_records(model))
        wrong = self.unlike(tables) if self.replicas is not None else self.still(tables[0])
        if wrong is not None or self.steps >= _LAST:
            unwatch(model)
        if wrong:
            raise UnsupportedError(f"after {self.steps} steps {wrong[0]}", wrong[1])

    def unlike(self, tables: list[Tensor]) -> tuple[str, ...]:
        """What is wrong with DDP's copies of the tables, and the way out."""
        digests = _told([int(_digest(table.detach())) for table in tables], self.replicas)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return ()
        fix = "install, tie and untie before DistributedDataParallel wraps the model, and step all processes alike"
        return f"the table of process {other} is not that of process 0", fix

    def still(self, table: Any) -> tuple[str, ...] | None:
        """What is wrong with the rows of FSDP2's processes, and the way out; None where none has moved yet."""
        if not hasattr(table, "device_mesh"):
            return ()  # FSDP2 was told to leave it alone
        rows, mesh = _local(table), table.device_mesh
        reached = self.reached is not None and bool(self.reached)
        moved = reached and (rows.element_size() < 4 or bool(_digest(rows) != self.digest))  # narrow types round
        said = [moved if len(rows) > 1 else None]  # one row may be the padding's
        for dimension in reversed(range(mesh.ndim)):
            said = [each for group in _told(said, mesh.get_group(dimension)) for each in group]
        if True not in said:
            return None
        if False not in said:
            return ()
        why = "and others' move: they have no gradient, or the optimizer moves something else"
        fix = f"tie, then shard with torch's fully_shard; {_AFTER}"
        process = int(mesh.mesh.flatten()[said.index(False)])
        return f"all rows of process {process} stand still, {why}", fix


def _local(x: Any) -> Tensor:
    """What this process has of a Parameter or gradient."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach()


def _digest(x: Tensor) -> Tensor:
    """A sum of the bits: other values have another one, but for a chance of 2⁻⁶⁴ or an exchange of entries."""
    return x.contiguous().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def _told(mine: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found
