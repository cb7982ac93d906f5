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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# an empty first entry of sys.path would import from the current folder, which may be untrusted
_CODE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from importlib import import_module; import_module(sys.argv[2]).main()"
)
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


def ask_child(module: str, request: Mapping[str, Any], limits: ChildLimits) -> dict[str, Any] | NoReply:
    """Run a module's `main` in a new process and return its reply.

    Args:
        module: module of tiewise.
        request: content of its stdin.
        limits: time and size of the reply.
    """
    command = [sys.executable, "-c", _CODE, str(Path(__file__).parents[2]), module]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            env=os.environ | _ENVIRONMENT,
            capture_output=True,
            timeout=limits.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return NoReply(f"took longer than {limits.seconds:g} s")
    except OSError as error:
        return NoReply(f"started no process ({error.strerror})")
    return _reply_of(child, limits.reply)


def _reply_of(child: subprocess.CompletedProcess[bytes], most: int) -> dict[str, Any] | NoReply:
    """Return the JSON object on the last line of stdout, or the reason for none."""
    try:
        if len(child.stdout) > most:
            raise ValueError("a long reply")
        reply = json.loads(child.stdout.decode().strip().rpartition("\n")[2])
    except ValueError:
        reason = f"stopped with exit code {child.returncode}"
        last_line = child.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
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
        resource.setrlimit(resource.RLIMIT_CPU, (rounded_seconds, rounded_seconds))


def write_reply(reply: Mapping[str, Any]) -> None:
    """Write the reply, in the child."""
    print(f"\n{json.dumps(reply, allow_nan=False)}", flush=True)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message in one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
