"""Several processes of one run, as `torchrun` or `accelerate launch` start them: what they agree on.

The first process prepares, measures, writes and speaks; all of them train. Whatever only one of them can know (a
file, an error, Ctrl-C) they agree on before any of them acts on it, so that all go the same way and none waits for
one that is gone. Alone, every function here does the plain thing at no cost.

    text = on_rank_zero(prepare)   the first process works, the others wait and get its value, or end as it ended
    with agreed(): write()         an error within one of them ends all of them here
    if any_of(pressed): ...        true for all where it is true for one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from tiewise.core.errors import Interrupted, RunError, TiewiseError, one_line_message, suggest_choices
from tiewise.core.interrupts import NotedCtrlC, is_caused_by_ctrl_c, raise_at_ctrl_c, set_ctrl_c_handler

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
AUTO, KEEP, GATHER = TABLES = ("auto", "keep", "gather")  # what fsdp does with a model's tables
_PATIENCE = timedelta(days=30)  # that others wait while the first prepares; a process that dies ends it at once
_NOBODY = "check MASTER_ADDR and MASTER_PORT, or start the run with torchrun"


class Elsewhere(TiewiseError):
    """Another process of this run ended with an error, which it says itself."""


@dataclass(frozen=True)
class _Failure:
    """How one process failed, in a form that survives pickling whatever its error is."""

    how: str  # "interrupted", "stopped" by Ctrl-C, or "failed"
    text: str  # the run to resume of an interrupted process, otherwise its error

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        """Describe an error."""
        if isinstance(error, Interrupted):
            return cls("interrupted", error.out)
        return cls("stopped" if is_caused_by_ctrl_c(error) else "failed", f"{type(error).__name__}: {error}")

    def error(self, rank: int) -> BaseException:
        """Return the error that another process raises for this one of process `rank`."""
        if self.how == "interrupted":
            return Interrupted(self.text)
        if self.how == "stopped":
            return KeyboardInterrupt()
        return Elsewhere(f"process {rank} ended ({self.text})")


class _Group:
    """The processes that joined; `dist` is `torch.distributed`, or None where there is one process."""

    def __init__(self, dist: Any = None) -> None:
        self.dist = dist
        self.rank, self.size = 0, 1
        self.agreeing: Any = None  # a second group of the same processes: on the CPU whatever trains, and patient
        if dist is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.agreeing = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.fsdp = self.tp = 1  # fsdp · tp processes hold one model between them
        self.tables = AUTO  # what fsdp does with its tables
        self.press = NotedCtrlC()  # where Ctrl-C is not handled as training does: until all can act on it

    def gather(self, mine: Any) -> list[Any]:
        """Return what every process brought, by rank."""
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, mine, group=self.agreeing)
        return found


_group = _Group()


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1


def join(fsdp: int = 1, tp: int = 1, tables: str = AUTO) -> None:
    """Meet the other processes of this run, if there are any; `fsdp` · `tp` of them hold a model between them.

    Those of one `tp` follow one another, and see the same tokens. A RunError where they cannot meet, or be so divided.
    """
    global _group
    if not launched():
        _check(fsdp, tp, tables)
    if not launched() or _group.dist is not None:
        return
    import torch  # slow to import, and alone nobody waits for it before the settings are checked
    import torch.distributed as dist

    is_kept_on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    on_cuda = torch.cuda.is_available() and not is_kept_on_cpu
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    try:
        dist.init_process_group("nccl" if on_cuda else "gloo")
        _group = _Group(dist)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the processes of this run cannot meet: {one_line_message(error)}", _NOBODY) from None
    set_ctrl_c_handler(_group.press)
    on_rank_zero(lambda: _check(fsdp, tp, tables))
    _group.fsdp, _group.tp, _group.tables = fsdp, tp, tables


def _check(fsdp: int, tp: int, tables: str) -> None:
    """Raise RunError if this run's processes cannot be divided into groups of `fsdp` · `tp`."""
    if tables not in TABLES:
        raise RunError(f"--tables {tables}", suggest_choices(tables, TABLES))
    if tables != AUTO and (fsdp == 1 or tp > 1):
        where = "beside --tp, which spreads them" if tp > 1 else "without --fsdp"
        raise RunError(f"--tables {tables} {where}", "leave it out")
    options = " ".join(f"--{name} {value}" for name, value in (("tp", tp), ("fsdp", fsdp)) if value != 1)
    if min(fsdp, tp) < 1:
        raise RunError(options, "give numbers of processes, from 1")
    if size() % (fsdp * tp):
        fix = f"start {fsdp * tp}, or a multiple: torchrun --nproc_per_node {fsdp * tp} -m tiewise …"
        processes = "1 process" if size() == 1 else f"{size()} processes"
        raise RunError(f"{options} and {processes}", fix)


def leave(*, together: bool) -> None:
    """End the group; with `together`, not before all of them are here and have said what they say."""
    global _group
    if _group.dist is None:
        return
    if together:
        _group.gather(None)
    set_ctrl_c_handler(raise_at_ctrl_c)
    _group.dist.destroy_process_group()
    _group = _Group()


def size() -> int:
    """Return how many processes train this run."""
    return _group.size


def rank() -> int:
    """Return the number of this process, from 0."""
    return _group.rank


def sharded() -> tuple[int, int, int] | None:
    """Return (replicas, fsdp, tp) whose product is `size`, where processes hold each model between them; else None."""
    processes_per_model = _group.fsdp * _group.tp
    if processes_per_model == 1:
        return None
    return size() // processes_per_model, _group.fsdp, _group.tp


def tables() -> str:
    """Return what fsdp is to do with a model's tables: one of `TABLES`."""
    return _group.tables


def first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return _group.rank == 0


def share(batch: int) -> int:
    """Return how many rows of a batch each process takes, so that all together take `batch`; those of a tp the same."""
    parts, of = size() // _group.tp, f"groups of {_group.tp}" if _group.tp > 1 else "processes"
    if batch % parts:
        fix = f"use --set batch={batch + -batch % parts}, or a number of processes that divides it"
        raise RunError(f"a batch of {batch} cannot be divided between {parts} {of}", fix)
    return batch // parts


def all_of(value: T) -> list[T]:
    """Return what every process brings, by rank; it must be picklable, and all must ask."""
    if _group.dist is None:
        return [value]
    return _group.gather(value)


def any_of(flag: bool) -> bool:
    """Whether `flag` holds in any process; all must ask."""
    return any(all_of(flag))


def on_rank_zero(work: Callable[[], T]) -> T:
    """Let the first process do `work`; return its value, which must be picklable, in every process.

    `work` may not call for the others: they wait for its end. Where it raises, they raise `Elsewhere`; Ctrl-C is Ctrl-C
    in all of them.
    """
    if _group.dist is None:
        return work()
    value, error = None, None
    if first():
        before = set_ctrl_c_handler(raise_at_ctrl_c)  # nothing here needs a step to be finished
        try:
            if _group.press.pressed:  # before this line: all end by it now, and not after the work
                raise KeyboardInterrupt
            value = work()
        except BaseException as raised:
            error = raised
        finally:
            set_ctrl_c_handler(before)
    agreed_value: T = _agree(error, value)
    return agreed_value


@contextmanager
def first_holds(context: AbstractContextManager[T]) -> Iterator[T]:
    """Within this context the first process is in another one, for all of them; each gets what that yields."""
    with ExitStack() as stack:
        yield on_rank_zero(lambda: stack.enter_context(context))
        on_rank_zero(stack.close)


@contextmanager
def agreed() -> Iterator[None]:
    """Go on when all processes have come through this block; where one raised, all of them end.

    What stands in the block may not need the other processes, unless by these functions. The others raise `Elsewhere`.
    """
    try:
        yield
    except BaseException as error:
        if not known(error):
            _agree(error)
        raise
    _agree(None)


def known(error: BaseException) -> bool:
    """Whether all processes know of `error` and end by it."""
    return _group.dist is None or getattr(error, "_everywhere", False)


def lost(error: BaseException) -> bool:
    """Whether an error is how one process sees that another has ended."""
    said = ("closed by peer", "reset by peer", "Broken pipe")
    return size() > 1 and isinstance(error, RuntimeError) and any(words in str(error) for words in said)


@contextmanager
def met(doing: str, way: str) -> Iterator[None]:
    """Within this block a group that somebody else started is this run's; a RunError if one of its processes ends."""
    global _group
    import torch.distributed as dist

    joined = _group.dist is None and dist.is_available() and dist.is_initialized()
    if joined:
        _group = _Group(dist)
    try:
        yield
    except RuntimeError as error:
        if not lost(error):
            raise
        raise RunError(f"another process ended while {doing}", way) from None
    finally:
        if joined:
            dist.destroy_process_group(_group.agreeing)
            _group = _Group()


def everywhere(error: E) -> E:
    """Mark an error that all processes raise at the same moment."""
    error._everywhere = True  # type: ignore[attr-defined]
    return error


def _agree(error: BaseException | None, value: Any = None) -> Any:
    """Exchange outcomes with the other processes; raise the error of the lowest rank that has one."""
    if _group.dist is None:
        if error is not None:
            raise error
        return value
    if error is None and _group.press.pressed:
        error = KeyboardInterrupt()
    mine = None if error is None else _Failure.of(error)
    outcomes: list[tuple[_Failure | None, Any]] = _group.gather((mine, value))
    for rank, (failure, _) in enumerate(outcomes):
        if failure is None:
            continue
        if rank == _group.rank and error is not None:
            raise everywhere(error)
        raise everywhere(failure.error(rank))
    return outcomes[0][1]
