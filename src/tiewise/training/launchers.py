"""Where the runs of a comparison are trained: on this machine (`local`), or spread over a cluster by Ray.

    OnRay(jobs, out, say)         → Workers of `ray`: Ray starts the processes, one task for a run

They share the run folder, which is the unit of resume: a run is finished where its `result.json` is, goes on
from its newest checkpoint elsewhere, and is held by whoever trains it (`run.train`), so that nothing is trained twice.
Any other scheduler trains one run by `compare.finish_element`; `compare --resume` then makes the report.

A Ray task has its run trained by a process of its own, as the local launcher does: with the same threads, the same
figures. Ray's own retries are off: a task that streams may not be repeated behind its reader's back, and who waits
shall read that a worker was lost.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tiewise.core.errors import Interrupted, RunError, one_line
from tiewise.core.files import write_whole
from tiewise.training.folder import newest_checkpoint
from tiewise.training.trainer import Job
from tiewise.training.workers import AUTO, TOKEN, Workers, fault, installed, streamed

LOCAL, RAY = "local", "ray"
LAUNCHERS = (LOCAL, RAY)
_PASSED = ("TIEWISE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")  # variables that a run obeys, wherever it is
_LISTEN = 0.25  # seconds for which words of several tasks are gathered
_STORE = 80 << 20  # bytes that a cluster of our own keeps for objects, least that Ray takes: ours are words


class OnRay(Workers):
    """Trains every run as a Ray task, on the cluster of RAY_ADDRESS or on the cores of this machine."""

    retries = 3

    def __init__(self, asked: int | str, out: Path, say: Callable[[str], None]) -> None:
        """Raises RunError where there is no Ray, and as `Workers`."""
        super().__init__(asked, say)
        self.out, self.address = out, os.environ.get("RAY_ADDRESS", "")
        if find_spec("ray") is None:
            raise RunError("--launcher ray needs ray", "pip install 'tiewise[ray]'")
        if self.address.startswith("ray://"):
            what = f"RAY_ADDRESS={self.address}: a client outside the cluster shares no folder with it"
            raise RunError(what, "start the command on a machine of the cluster, with RAY_ADDRESS=auto")
        self.held = ExitStack()  # what ends with us
        self.token = secrets.token_hex(16)
        self.ray: Any = None  # once there is a cluster
        self.nodes: list[dict[str, Any]] = []
        self.options: dict[str, int] = {}  # what a task takes of its machine, beside its threads

    def alone(self) -> bool:
        """Never: also a single run at a time is trained where there is room."""
        return False

    def shares(self, jobs: int) -> list[int]:
        """Threads of each run: all have as many, since they are spread over machines."""
        return [self.threads] * jobs

    def fit(self, runs: int) -> str | None:
        """As many at a time as asked for, or as there are cores or GPUs, with the most threads that fit."""
        if self.ray is None:
            self._begin()
        cpus, gpus = ([int(node["Resources"].get(kind, 0)) for node in self.nodes] for kind in ("CPU", "GPU"))
        self.options = {"num_gpus": 1} if sum(gpus) else {}

        def room(threads: int) -> int:
            """How many runs of so many threads there is room for, each on one machine, with a GPU if there are any."""
            return sum(min(c // threads, g if sum(gpus) else c) for c, g in zip(cpus, gpus, strict=True))

        most = room(1)
        has = f"{sum(gpus)} GPUs and {sum(cpus)} cores" if sum(gpus) else f"{sum(cpus)} cores"
        if not most:
            raise RunError(f"no machine of the cluster has room for a run: it has {has}", "add one that has")
        count = min(runs, most if self.asked == AUTO else int(self.asked))
        if count > most:
            raise RunError(f"jobs = {self.asked} where the cluster has {has}", f"give {most} or fewer, or auto")
        self.threads = max(threads for threads in range(1, max(cpus) + 1) if threads == 1 or room(threads) >= count)
        first, self.chosen, self.count = not self.chosen, True, max(1, count)
        machines = sum(cpu > 0 for cpu in cpus)
        self.place = {"launcher": RAY, "machines": machines}
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"Ray: {self.count} at a time on {machines} machine{'s' * (machines > 1)}, {threads} each" * first

    def hire(self) -> _Task:
        """Return what starts one task after another."""
        return _Task(self)

    def hear(self, busy: Sequence[_Task]) -> Sequence[_Task]:
        """Return the tasks that have something to say; not the first alone, or it would drown the others."""
        streams = [task.stream for task in busy]
        while True:
            ready = self.ray.wait(streams, num_returns=len(streams), timeout=_LISTEN)[0]
            if found := [task for task in busy if task.stream in ready]:
                return found

    def end(self) -> None:
        """Leave the cluster, or end it where it is our own; what still runs there ends."""
        super().end()
        self.held.close()
        self.ray = None

    def _begin(self) -> None:
        """Find or start the cluster; see that all its machines see the run's folder, with the same packages."""
        # it prints what it thinks of lost workers to stdout, where results belong; we say it
        self.held.enter_context(redirect_stdout(StringIO()))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        own: dict[str, Any] = {"address": self.address}
        if not self.address:
            # a password that dies with this process, where Ray would leave one in the home folder
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            folder = tempfile.mkdtemp(prefix="ray-")
            self.held.callback(shutil.rmtree, folder, ignore_errors=True)
            cores = max(torch.get_num_threads(), 1 if self.asked == AUTO else int(self.asked))
            own = {"address": "local", "num_cpus": cores, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
            own |= {"object_store_memory": _STORE, "include_dashboard": False}
        self.ray = import_module("ray")
        self.held.callback(self.ray.shutdown)
        try:
            self.ray.init(**own, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            where = self.address or "of this machine"
            fix = "see that it runs, or unset RAY_ADDRESS"
            raise RunError(f"no Ray cluster {where}: {one_line(error)}", fix) from None
        self.nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        write_whole(self.out / TOKEN, self.token)
        self.held.callback((self.out / TOKEN).unlink, missing_ok=True)
        on_node = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        for node in self.nodes:
            there = on_node(node_id=node["NodeID"], soft=False)
            asked = self.ray.remote(fault).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            name = node.get("NodeManagerHostname") or node["NodeID"]
            try:
                said = self.ray.get(asked.remote(str(self.out), self.token, installed()))
            except self.ray.exceptions.RayError as error:
                what = f"{name} cannot run tiewise: {_last_line(error)}"
                raise RunError(what, "install the same tiewise on every machine of the cluster") from None
            if said:
                raise RunError(f"{name} {said[0]}", said[1])


class _Task:
    """One Ray task after another, as a `Worker` is one process; `job` is what it has in hand."""

    def __init__(self, over: OnRay) -> None:
        self.over = over
        self.job: Any = None  # or None
        self.stream: Any = None

    def take(self, job: Job, call: bytes) -> None:
        """Start the task of a run."""
        over = self.over
        env = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        task = over.ray.remote(streamed).options(num_cpus=over.threads, max_retries=0, **over.options)
        self.stream = task.remote(call, env, str(over.out), over.token, installed())
        self.job = job  # now there is something to stop

    def says(self) -> tuple[Any, ...]:
        """Return its next message, or how it ended."""
        errors, job = self.over.ray.exceptions, self.job
        try:
            said: tuple[Any, ...] = self.over.ray.get(next(self.stream))
            return said
        except errors.TaskCancelledError:
            written = newest_checkpoint(job.folder)[1] > 0
            ended: BaseException = Interrupted(str(job.folder)) if written else KeyboardInterrupt()
        except errors.RayTaskError as error:
            ended = RunError(f"{job.title}: {_last_line(error)}", "--resume goes on from its last checkpoint")
        except (errors.RayError, StopIteration) as error:
            return "lost", f"was lost ({_last_line(error)})"
        return "error", pickle.dumps(ended)

    def stop(self) -> None:
        """Have its worker write a checkpoint and stop."""
        self.over.ray.cancel(self.stream)

    def end(self) -> None:
        """Forget it: it ends with the cluster, or with our part in it."""
        self.stream = None


def _last_line(error: BaseException) -> str:
    """What a Ray error says, without the traceback and the colours that it brings."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:200]}" if lines else type(error).__name__
