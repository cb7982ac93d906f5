"""Coordination of the processes of one run, as `torchrun` or `accelerate launch` start them.

Rank 0 prepares, measures, writes and prints; all ranks train. A fact that only one process can see (a file, an error,
Ctrl-C) is exchanged before any process acts on it. So all processes take the same branch, and none waits for one that
ended. In a run of one process these functions do the same work without communication.

    text = on_rank_zero(prepare)   rank 0 works; the others wait and get its value, or end as it ended
    with agreed(): write()         an error in one process ends all of them here
    if any_of(pressed): ...        true in every process if it is true in one
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
ErrorT = TypeVar("ErrorT", bound=BaseException)
AUTO, KEEP, GATHER = TABLES = ("auto", "keep", "gather")  # whether FSDP keeps a model's tables sharded or gathers them
_PATIENCE = timedelta(days=30)  # the other ranks wait so long for rank 0; if a process dies, they stop at once
_REMEDY = "check MASTER_ADDR and MASTER_PORT, or start the run with torchrun"


class RemoteError(TiewiseError):
    """An error that ended another process of this run; that process prints it."""


@dataclass(frozen=True)
class _Failure:
    """Description of one process's failure, which can be pickled for any error."""

    how: str  # "interrupted", "stopped" by Ctrl-C, or "failed"
    text: str  # the run's folder if `how` is "interrupted", else the error message

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        """Describe an error."""
        if isinstance(error, Interrupted):
            return cls("interrupted", error.out)
        return cls("stopped" if is_caused_by_ctrl_c(error) else "failed", f"{type(error).__name__}: {error}")

    def error(self, rank: int) -> BaseException:
        """Return the error that other processes raise for this failure of process `rank`."""
        if self.how == "interrupted":
            return Interrupted(self.text)
        if self.how == "stopped":
            return KeyboardInterrupt()
        return RemoteError(f"process {rank} ended ({self.text})")


class _Group:
    """The processes that joined.

    `dist` is `torch.distributed`, or None if there is one process.
    """

    def __init__(self, dist: Any = None) -> None:
        self.dist = dist
        self.rank, self.size = 0, 1
        self.agreeing: Any = None  # a second group of the same processes: on the CPU, with a long timeout
        if dist is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.agreeing = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.fsdp = self.tp = 1  # fsdp · tp processes hold one model between them
        self.tables = AUTO  # one of TABLES
        self.press = NotedCtrlC()  # outside of training, records Ctrl-C until all processes can act on it

    def gather(self, mine: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        self.dist.all_gather_object(values, mine, group=self.agreeing)
        return values


_group = _Group()


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1


def join(fsdp: int = 1, tp: int = 1, tables: str = AUTO) -> None:
    """Join the other processes of this run, if there are any.

    Each `fsdp` · `tp` processes hold one model. The ranks of one tensor-parallel group are consecutive and read the
    same tokens. `tables` is one of `TABLES`.

    Raises:
        RunError: the processes cannot connect, or their number is no multiple of `fsdp` · `tp`.
    """
    global _group
    if not is_launched():
        _check(fsdp, tp, tables)
    if not is_launched() or _group.dist is not None:
        return
    import torch  # slow: a run of one process checks its settings before it imports torch
    import torch.distributed as dist

    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    on_cuda = torch.cuda.is_available() and not uses_cpu
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0))
    try:
        dist.init_process_group("nccl" if on_cuda else "gloo")
        _group = _Group(dist)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the processes of this run cannot meet: {one_line_message(error)}", _REMEDY) from None
    set_ctrl_c_handler(_group.press)
    on_rank_zero(lambda: _check(fsdp, tp, tables))
    _group.fsdp, _group.tp, _group.tables = fsdp, tp, tables


def _check(fsdp: int, tp: int, tables: str) -> None:
    """Raise RunError if this run's processes cannot be divided into groups of `fsdp` · `tp`."""
    if tables not in TABLES:
        raise RunError(f"--tables {tables}", suggest_choices(tables, TABLES))
    if tables != AUTO and (fsdp == 1 or tp > 1):
        where = "with --tp, which spreads them" if tp > 1 else "without --fsdp"
        raise RunError(f"--tables {tables} {where}", "leave it out")
    options = " ".join(f"--{name} {value}" for name, value in (("tp", tp), ("fsdp", fsdp)) if value != 1)
    if min(fsdp, tp) < 1:
        raise RunError(options, "give numbers of processes, from 1")
    if size() % (fsdp * tp):
        remedy = f"start {fsdp * tp}, or a multiple: torchrun --nproc_per_node {fsdp * tp} -m tiewise …"
        processes = "1 process" if size() == 1 else f"{size()} processes"
        raise RunError(f"{options} and {processes}", remedy)


def leave(*, together: bool) -> None:
    """End the group; if `together`, first wait until every process calls this."""
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
    """Return (replicas, fsdp, tp), whose product is `size`; None if each process holds a full model."""
    processes_per_model = _group.fsdp * _group.tp
    if processes_per_model == 1:
        return None
    return size() // processes_per_model, _group.fsdp, _group.tp


def tables() -> str:
    """Return how FSDP treats a model's tables: one of `TABLES`."""
    return _group.tables


def is_first() -> bool:
    """Return whether this process is rank 0, which writes and prints."""
    return _group.rank == 0


def rows_per_rank(batch: int) -> int:
    """Return the number of a batch's rows that each process trains on.

    All processes of a tensor-parallel group train on the same rows.

    Raises:
        RunError: the processes cannot divide `batch` evenly.
    """
    parts, unit = size() // _group.tp, f"groups of {_group.tp}" if _group.tp > 1 else "processes"
    if batch % parts:
        remedy = f"use --set batch={batch + -batch % parts}, or a number of processes that divides it"
        raise RunError(f"a batch of {batch} cannot be divided between {parts} {unit}", remedy)
    return batch // parts


def all_of(value: T) -> list[T]:
    """Return the values of all processes, by rank.

    Every process must call this. The value must be picklable.
    """
    if _group.dist is None:
        return [value]
    return _group.gather(value)


def any_of(flag: bool) -> bool:
    """Return whether `flag` is true in any process; every process must call this."""
    return any(all_of(flag))


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` in rank 0 and return its value, which must be picklable, in every process.

    `work` must not communicate with the other processes: they wait for its end. If it raises, they raise `RemoteError`.
    Ctrl-C in rank 0 raises KeyboardInterrupt in all of them.
    """
    if _group.dist is None:
        return work()
    value, error = None, None
    if is_first():
        before = set_ctrl_c_handler(raise_at_ctrl_c)  # no training step must be finished here
        try:
            if _group.press.pressed:  # all processes end now, not after the work
                raise KeyboardInterrupt
            value = work()
        except BaseException as raised:
            error = raised
        finally:
            set_ctrl_c_handler(before)
    agreed_value: T = _agree(error, value)
    return agreed_value


@contextmanager
def hold_on_rank_zero(context: AbstractContextManager[T]) -> Iterator[T]:
    """Enter a context in rank 0 for a block; yield its value in every process."""
    with ExitStack() as stack:
        yield on_rank_zero(lambda: stack.enter_context(context))
        on_rank_zero(stack.close)


@contextmanager
def agreed() -> Iterator[None]:
    """Wait at the block's end for all processes. If one of them raised, all raise.

    Those that did not raise get a `RemoteError`. Within the block, processes communicate through this module only.
    """
    try:
        yield
    except BaseException as error:
        if not is_raised_everywhere(error):
            _agree(error)
        raise
    _agree(None)


def is_raised_everywhere(error: BaseException) -> bool:
    """Return whether all processes raise `error`."""
    return _group.dist is None or getattr(error, "_everywhere", False)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process ended."""
    messages = ("closed by peer", "reset by peer", "Broken pipe")
    return size() > 1 and isinstance(error, RuntimeError) and any(words in str(error) for words in messages)


@contextmanager
def existing_group(task: str, remedy: str) -> Iterator[None]:
    """Join a process group that other code started, for the duration of a block.

    Without such a group, the block runs in one process.

    Raises:
        RunError: another process ended; the message names the `task` and the `remedy`.
    """
    global _group
    import torch.distributed as dist

    joined = _group.dist is None and dist.is_available() and dist.is_initialized()
    if joined:
        _group = _Group(dist)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise RunError(f"another process ended while {task}", remedy) from None
    finally:
        if joined:
            dist.destroy_process_group(_group.agreeing)
            _group = _Group()


def raised_everywhere(error: ErrorT) -> ErrorT:
    """Mark an error that all processes raise at the same point, and return it."""
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
            raise raised_everywhere(error)
        raise raised_everywhere(failure.error(rank))
    return outcomes[0][1]
