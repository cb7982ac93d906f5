"""Child processes that answer one request in JSON, within limits of memory and time.

They run another library's code on files that may be untrusted. A child reads its request from stdin and writes its
reply as the last line of stdout. Both sides are here: `ask_child` starts a module's `main`, which calls `read_request`,
`limit_process` and `write_reply`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# an empty first entry of sys.path would import from the current folder, which may be untrusted
_CODE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from importlib import import_module; import_module(sys.argv[2]).main()"
)
REPORT_SECONDS = 1.0  # between two calls of `on_wait`
_END_OF_CPU_TIME = 24  # number of the signal SIGXCPU
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a child process."""

    seconds: float  # of wall time
    reply: int = 2**20  # bytes of its reply


@dataclass(frozen=True)
class NoReply:
    """Reason why a child process answered nothing."""

    reason: str  # a predicate, such as "stopped with exit code -9"


def _ignore_waiting() -> None:
    """Report nothing."""


def ask_child(
    module: str, request: Mapping[str, Any], limits: ChildLimits, on_wait: Callable[[], None] = _ignore_waiting
) -> dict[str, Any] | NoReply:
    """Run a module's `main` in a new process and return its reply.

    Args:
        module: module of tiewise.
        request: content of its stdin.
        limits: time and size of the reply.
        on_wait: called every `REPORT_SECONDS` while the process runs.
    """
    command = [sys.executable, "-c", _CODE, str(Path(__file__).parents[2]), module]
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | _ENVIRONMENT)
    except OSError as error:
        return NoReply(f"started no process ({error.strerror})")
    with child:
        try:
            ended = _wait_for(child, json.dumps(request).encode(), limits.seconds, on_wait)
        except BaseException:  # Ctrl-C ends the child too
            child.kill()
            raise
    if ended is None:
        return NoReply(f"took longer than {limits.seconds:g} s")
    return _reply_of(ended, limits.reply)


def _wait_for(
    child: subprocess.Popen[bytes], request: bytes, seconds: float, on_wait: Callable[[], None]
) -> subprocess.CompletedProcess[bytes] | None:
    """Return a process that ended, with its output; None if it was stopped after `seconds`."""
    stop = time.monotonic() + seconds
    unsent: bytes | None = request
    while True:
        left = stop - time.monotonic()
        if left <= 0:
            child.kill()
            child.communicate()
            return None
        try:
            out, err = child.communicate(unsent, timeout=min(left, REPORT_SECONDS))
        except subprocess.TimeoutExpired:
            unsent = None  # the next call continues with the rest of the request
            on_wait()
            continue
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def _reply_of(child: subprocess.CompletedProcess[bytes], most: int) -> dict[str, Any] | NoReply:
    """Return the JSON object on the last line of stdout, or the reason for none."""
    try:
        if len(child.stdout) > most:
            raise ValueError("a long reply")
        reply = json.loads(child.stdout.decode().strip().rpartition("\n")[2])
    except ValueError:
        if child.returncode == -_END_OF_CPU_TIME:
            return NoReply("took more processor time than its limit")
        reason = f"stopped with exit code {child.returncode}"
        last_line = child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        if "bad_alloc" in last_line or "MemoryError" in last_line:
            return NoReply("needs more memory than its limit")
        return NoReply(f"{reason} ({_one_short_line(last_line)})" if last_line else reason)
    if not isinstance(reply, dict):
        return NoReply("reported nothing")
    return reply


def _one_short_line(text: str) -> str:
    """Return a text without control characters, cut to 120 characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable[:120]


def read_request() -> dict[str, Any]:
    """Return the request, in the child."""
    request: dict[str, Any] = json.loads(sys.stdin.read())
    return request


def limit_process(memory: int, seconds: float) -> None:
    """Limit this process's private memory in bytes and its processor time, where the system can."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        rounded_seconds = max(1, int(seconds))
        # at the second limit the system kills; at the first it sends a signal that names the reason
        resource.setrlimit(resource.RLIMIT_CPU, (rounded_seconds, rounded_seconds + 1))


def write_reply(reply: Mapping[str, Any]) -> None:
    """Write the reply, in the child."""
    print(f"\n{json.dumps(reply, allow_nan=False)}", flush=True)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message in one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
