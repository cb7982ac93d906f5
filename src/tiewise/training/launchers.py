"""Launchers: runs are trained on this machine (`local`) or on a cluster by Ray.

    OnRay(jobs, out, say)         → Workers of `ray`: Ray starts the processes, one task for a run

All machines share the run folder. A run is finished if its `result.json` exists, and resumes elsewhere from its newest
checkpoint. The process that trains it locks it (`run.train`), so no run is trained twice. Any other scheduler trains
one run by `compare.finish_element`, and `compare --resume` then writes the report.

A Ray task starts a separate process for its run, as the local launcher does, so threads and figures are the same. Ray's
retries are off: a task that streams messages must not be repeated unnoticed, and the user reads that a worker was lost.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tiewise.core.errors import Interrupted, RunError, one_line_message
from tiewise.core.files import write_atomically
from tiewise.training.folder import newest_checkpoint
from tiewise.training.remote_worker import TOKEN, find_mismatch, installed_versions, stream_messages
from tiewise.training.worker_process import Message, Work
from tiewise.training.workers import AUTO, WorkerHandle, Workers

LOCAL, RAY = "local", "ray"
LAUNCHERS = (LOCAL, RAY)
_PASSED = (
    "TIEWISE_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
)  # prefixes of environment variables that a run needs on every machine
_LISTEN = 0.25  # seconds for which messages of several tasks are gathered
_STORE = 80 << 20  # bytes of a local cluster's object store: the least Ray accepts, since messages are short


class OnRay(Workers):
    """Workers that train every run as a Ray task.

    The cluster is that of RAY_ADDRESS, or the cores of this machine.
    """

    retries = 3

    def __init__(self, requested: int | str, out: Path, say: Callable[[str], None]) -> None:
        """Check that Ray can be used.

        RunError: Ray is not installed, RAY_ADDRESS cannot be used, or as `Workers`.
        """
        super().__init__(requested, say)
        self.out, self.address = out, os.environ.get("RAY_ADDRESS", "")
        if find_spec("ray") is None:
            raise RunError("--launcher ray needs ray", "pip install 'tiewise[ray]'")
        if self.address.startswith("ray://"):
            problem = f"RAY_ADDRESS={self.address}: a client outside the cluster shares no folder with it"
            raise RunError(problem, "start the command on a machine of the cluster, with RAY_ADDRESS=auto")
        self.cleanup = ExitStack()  # undoes `_begin`
        self.token = secrets.token_hex(16)
        self.ray: Any = None  # module ray, which has no types, once a cluster is there
        self.nodes: list[dict[str, Any]] = []
        self.options: dict[str, int] = {}  # resources of a task besides its threads

    def trains_here(self) -> bool:
        """Return False: a single run at a time is also trained on the cluster."""
        return False

    def thread_counts(self, jobs: int) -> list[int]:
        """Return the threads of each run: all have equally many, on any machine."""
        return [self.threads] * jobs

    def settle_count(self, runs: int) -> str | None:
        """Set the number of runs at a time, and the most threads that fit.

        The number is the requested one, or that of cores or GPUs.
        """
        if self.ray is None:
            self._begin()
        room = _Room.of(self.nodes)
        self.options = {"num_gpus": 1} if room.has_gpus else {}
        most = room.runs(1)
        if not most:
            raise RunError(f"no machine of the cluster has room for a run: it has {room}", "add one that has")
        count = min(runs, most if self.requested == AUTO else int(self.requested))
        if count > most:
            raise RunError(f"jobs = {self.requested} where the cluster has {room}", f"give {most} or fewer, or auto")
        self.threads = room.most_threads(count)
        is_first = not self.is_settled
        self.is_settled, self.count = True, max(1, count)
        self.location = {"launcher": RAY, "machines": room.machines}
        if not is_first:
            return ""
        machines = f"{room.machines} machine{'s' * (room.machines > 1)}"
        return f"Ray: {self.count} at a time on {machines}, {self.threads} thread{'s' * (self.threads > 1)} each"

    def start_worker(self) -> _Task:
        """Return a handle that starts one task after another."""
        return _Task(self)

    def wait_for_messages(self, busy: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Return all tasks that have a message: the first alone would silence the others."""
        tasks = [task for task in busy if isinstance(task, _Task)]
        streams = [task.stream for task in tasks]
        awaited = [*streams, *(stream.completed() for stream in streams)]
        ready: list[Any] = []
        while not ready:
            ready, _ = self.ray.wait(awaited, num_returns=len(awaited), timeout=_LISTEN)
        return [task for task in tasks if task.stream in ready or task.stream.completed() in ready]

    def end(self) -> None:
        """Leave the cluster, or end it if it is local; running tasks end."""
        super().end()
        self.cleanup.close()
        self.ray = None

    def _begin(self) -> None:
        """Find or start the cluster, and check each of its machines.

        Every machine must see the run's folder and have the same packages.
        """
        # Ray prints lost workers to stdout, where results belong; `_Round` prints them instead
        self.cleanup.enter_context(redirect_stdout(StringIO()))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options: dict[str, Any] = {"address": self.address}
        if not self.address:
            options = self._local_cluster()
        self.ray = import_module("ray")
        self.cleanup.callback(self.ray.shutdown)
        try:
            self.ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            where = self.address or "of this machine"
            remedy = "see that it runs, or unset RAY_ADDRESS"
            raise RunError(f"no Ray cluster {where}: {one_line_message(error)}", remedy) from None
        self.nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        write_atomically(self.out / TOKEN, self.token)
        self.cleanup.callback((self.out / TOKEN).unlink, missing_ok=True)
        for node in self.nodes:
            self._check_node(node)

    def _local_cluster(self) -> dict[str, Any]:
        """Return the options of a cluster of this machine, which ends with this process."""
        # a password of this process alone: Ray would otherwise write one into the home folder
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        folder = tempfile.mkdtemp(prefix="ray-")
        self.cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        least = 1 if self.requested == AUTO else int(self.requested)
        return {
            "address": "local",
            "num_cpus": max(torch.get_num_threads(), least),
            "_temp_dir": folder,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": _STORE,
            "include_dashboard": False,
        }

    def _check_node(self, node: dict[str, Any]) -> None:
        """Raise RunError if a machine of the cluster cannot train these runs."""
        on_node = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        strategy = on_node(node_id=node["NodeID"], soft=False)
        remote = self.ray.remote(find_mismatch).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        name = node.get("NodeManagerHostname") or node["NodeID"]
        try:
            problem = self.ray.get(remote.remote(str(self.out), self.token, installed_versions()))
        except self.ray.exceptions.RayError as error:
            problem = f"{name} cannot run tiewise: {_last_line(error)}"
            raise RunError(problem, "install the same tiewise on every machine of the cluster") from None
        if problem:
            problem, remedy = problem
            raise RunError(f"{name} {problem}", remedy)


@dataclass(frozen=True)
class _Room:
    """Cores and GPUs of each machine of a cluster."""

    cpus: list[int]
    gpus: list[int]

    @classmethod
    def of(cls, nodes: Sequence[dict[str, Any]]) -> _Room:
        """Read the resources that Ray lists for its nodes."""
        resources = [node["Resources"] for node in nodes]
        return cls([int(one.get("CPU", 0)) for one in resources], [int(one.get("GPU", 0)) for one in resources])

    def __str__(self) -> str:
        if self.has_gpus:
            return f"{sum(self.gpus)} GPUs and {sum(self.cpus)} cores"
        return f"{sum(self.cpus)} cores"

    @property
    def has_gpus(self) -> bool:
        """True if a machine has a GPU; every run then takes one."""
        return sum(self.gpus) > 0

    @property
    def machines(self) -> int:
        """Number of machines with a core for training."""
        return sum(cpu > 0 for cpu in self.cpus)

    def runs(self, threads: int) -> int:
        """Return how many runs with this number of threads fit, each on one machine."""
        by_cores = [cpu // threads for cpu in self.cpus]
        if not self.has_gpus:
            return sum(by_cores)
        return sum(min(pair) for pair in zip(by_cores, self.gpus, strict=True))

    def most_threads(self, runs: int) -> int:
        """Return the most threads that each of `runs` simultaneous runs can have, at least 1."""
        most = 1
        for threads in range(2, max(self.cpus) + 1):
            if self.runs(threads) >= runs:
                most = threads
        return most


class _Task:
    """Handle of one Ray task after another; `job` is the job of the current one."""

    def __init__(self, over: OnRay) -> None:
        self.over = over
        self.job: Work | None = None
        self.stream: Any = None
        self.is_cancelled = False

    def start_job(self, job: Work, call: bytes) -> None:
        """Start the task of a run."""
        over = self.over
        env = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        task = over.ray.remote(stream_messages).options(num_cpus=over.threads, max_retries=0, **over.options)
        self.stream = task.remote(call, env, str(over.out), over.token, installed_versions())
        self.is_cancelled = False
        self.job = job  # from here on `stop` has a task to cancel

    def clear_job(self) -> None:
        """Note that the task has finished its job."""
        self.job = None

    def next_message(self) -> Message:
        """Return the task's next message, or how it ended."""
        errors, job = self.over.ray.exceptions, self.job
        assert job is not None, "only a task with a job says something"
        try:
            if self.is_cancelled:
                self._raise_if_ended()
            message: Message = self.over.ray.get(next(self.stream))
            return message
        except errors.TaskCancelledError:
            has_checkpoint = newest_checkpoint(job.folder)[1] > 0
            end: BaseException = Interrupted(str(job.folder)) if has_checkpoint else KeyboardInterrupt()
        except errors.RayTaskError as error:
            end = RunError(f"{job.title}: {_last_line(error)}", "resume from its last checkpoint with --resume")
        except (errors.RayError, StopIteration) as error:
            return "lost", f"was lost ({_last_line(error)})"
        return "error", pickle.dumps(end)

    def _raise_if_ended(self) -> None:
        """Raise TaskCancelledError if the cancelled task has ended.

        Ray may lose the last messages of such a task, and reading them would take forever.
        """
        completed = self.stream.completed()
        has_ended, _ = self.over.ray.wait([completed], timeout=0)
        if has_ended:
            self.over.ray.get(completed)

    def stop(self) -> None:
        """Make the task's worker write a checkpoint and stop."""
        self.is_cancelled = True
        self.over.ray.cancel(self.stream)

    def end(self) -> None:
        """Drop the stream; the task ends when `OnRay` leaves the cluster."""
        self.stream = None


def _last_line(error: BaseException) -> str:
    """Return the last line of a Ray error, without its traceback and colours."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[-1].strip()[:200]}"
