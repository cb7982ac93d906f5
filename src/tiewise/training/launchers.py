"""Where the runs of a comparison are trained if not on this machine (`local`): spread over a cluster, or written down.

    OnRay(jobs, out, say)         → Workers of `ray`: Ray starts the processes, one task for a run
    written(launcher, out, runs)  → `slurm` and `sky`: a script, one element for each run that is not finished

All of them share the run folder, which is the unit of resume: a run is finished where its `result.json` is, goes on
from its newest checkpoint elsewhere, and is held by whoever trains it (`run.train`), so that nothing is trained twice.
An element of a script does `compare.finish_element`; `compare --resume` then makes the report.

A Ray task has its run trained by a process of its own, as the local launcher does: with the same threads, the same
figures. Ray's own retries are off: a task that streams may not be repeated behind its reader's back, and who waits
shall read that a worker was lost.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from tiewise.core import __version__
from tiewise.core.errors import Interrupted, RunError, one_line
from tiewise.core.files import write_whole
from tiewise.training.folder import newest_checkpoint
from tiewise.training.run import finished
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job
from tiewise.training.workers import AUTO, TOKEN, Workers, fault, installed, streamed

LOCAL, RAY = "local", "ray"
LAUNCHERS = (LOCAL, RAY, "slurm", "sky")
_PASSED = ("TIEWISE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")  # variables that a run obeys, wherever it is
_LISTEN = 0.25  # seconds for which words of several tasks are gathered
_STORE = 80 << 20  # bytes that a cluster of our own keeps for objects, least that Ray takes: ours are words


def refuse_trials(launcher: str, settings: Settings) -> None:
    """Refuse what needs trials before the first run: they are trained by whoever trains the runs, or say nothing."""
    for name in ("tune", "minutes"):
        if getattr(settings, name):
            what = f"{name} with --launcher {launcher}, whose runs begin when nobody waits for trials"
            raise RunError(what, f"leave {name} out, or use --launcher {RAY}")


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


@dataclass(frozen=True)
class Script:
    """What spreads the runs of a folder that are left: a file, the command that starts it, and those that follow."""

    launcher: str
    path: Path
    text: str
    runs: int  # that it trains
    submit: str
    collect: str

    def record(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return asdict(self) | {"path": str(self.path)}


def written(launcher: str, out: Path, runs: Sequence[Job], workers: Workers) -> Script:
    """Write the script of `slurm` or `sky` into `out`, one element for each of `runs` that is not finished."""
    refuse_trials(launcher, runs[0].settings)
    left = [number for number, job in enumerate(runs, 1) if finished(job.folder) is None]
    if not left:
        raise RunError(f"all {len(runs)} runs in {out} are finished", f"tiewise compare --out {out} --resume reports")
    many = len(left) if workers.asked == AUTO else min(int(workers.asked), len(left))
    end = shlex.join(["tiewise", "compare", "--out", str(out), "--resume"])
    if launcher == "slurm":
        path, made = out / "slurm.sh", _slurm(out, left, many)
        submit, collect = shlex.join(["sbatch", str(path)]), end
    else:
        path, made = out / "sky.yaml", _sky(out, left, many)
        submit = shlex.join(["sky", "launch", "-c", "tiewise", str(path)])
        nodes = " ".join(["tiewise", *(f"tiewise-worker{n}" for n in range(1, many))])
        folder = shlex.quote(f"{out}/")
        collect = f"for n in {nodes}; do rsync -a $n:tiewise-run/ {folder} || break; done && sky down tiewise && {end}"
    write_whole(path, made)
    return Script(launcher, path, made, len(left), submit, collect)


def _slurm(out: Path, left: Sequence[int], many: int) -> str:
    """Return the array script, whose lines of its own sbatch reads; what a cluster wants beside them is the user's."""
    together = left[-1] - left[0] == len(left) - 1
    array = f"{left[0]}-{left[-1]}" if together else ",".join(map(str, left))
    log = f'{shlex.quote(str(out))}/slurm-"$SLURM_ARRAY_JOB_ID"-"$SLURM_ARRAY_TASK_ID".log'
    command = shlex.join([sys.executable, "-m", "tiewise", "compare", "--out", str(out), "--resume", "--quiet"])
    return f"""#!/bin/bash
#SBATCH --job-name=tiewise
#SBATCH --array={array}%{many}
#SBATCH --cpus-per-task=1
#SBATCH --requeue
#SBATCH --signal=INT@120
#SBATCH --output=/dev/null
# One element for each run. Time, memory, partition, cores and GPUs are your cluster's: give them here, or to sbatch,
# whose options win over these lines. {out} must be the same folder on every machine.
# Two minutes before its time is over a run writes a checkpoint and ends; the same script, submitted again, goes on.
exec >>{log} 2>&1
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
exec srun {command} --element "$SLURM_ARRAY_TASK_ID"
"""


def _sky(out: Path, left: Sequence[int], many: int) -> str:
    """Return the task: so many nodes, each with a copy of the folder, each training every so many-th run."""
    return f"""# {len(left)} runs on {many} nodes: each has a copy of the run folder and trains its share of them there.
name: tiewise
num_nodes: {many}
resources:
  cpus: 2+
file_mounts:
  ~/tiewise-run: {json.dumps(str(out))}
setup: |
  pip install 'tiewise[torch]=={__version__}'
run: |
  runs=({" ".join(map(str, left))})
  for ((i = SKYPILOT_NODE_RANK; i < ${{#runs[@]}}; i += SKYPILOT_NUM_NODES)); do
    tiewise compare --out ~/tiewise-run --resume --quiet --element "${{runs[i]}}" || code=$?
  done
  exit "${{code:-0}}"
"""
