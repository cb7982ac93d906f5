"""Questions to a class of transformers that is built without weights for a given config.

The architecture data describes each class with its default config. This module asks the class itself: a child process
(`built_class_child.py`) builds it on the meta device, where tensors have a shape and no memory, and answers one
question about the model. Only classes of transformers itself are built, never code of a checkpoint. A child has limits
of memory and time, and no access to the network. Replies are cached in the user's cache. Nothing here imports torch or
transformers.

A question is a module of tiewise with a function `answer(model, argument)`, which returns a JSON object:

    reply = ask(ClassQuestion(config, "LlamaForCausalLM", "tiewise.planning.counted_class"))
    if isinstance(reply, NotBuilt):
        ...  # reply.reason says why
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import short
from tiewise.core.files import cache_folder, write_atomically
from tiewise.core.json_child import ChildLimits, NoReply, ask_child
from tiewise.core.progress import report_progress

MOST_SECONDS = 20  # of processor time
MOST_WALL_SECONDS = 180  # on a busy machine, twenty seconds of work take longer
MOST_BYTES = 2 * 10**9  # of private memory
MOST_REPLY = 2**26  # bytes
MOST_CACHED = 500  # replies
SWITCH = "TIEWISE_NO_BUILD"  # environment variable: a value other than "" and "0" builds nothing
LIBRARIES = ("torch", "transformers")
CHILD = "tiewise.checkpoint.built_class_child"
CODE = (CHILD, "tiewise.checkpoint.initial_values")  # modules that a reply depends on, next to the question's


@dataclass(frozen=True)
class ClassQuestion:
    """A question about one class with one config."""

    config: Mapping[str, Any]  # content of config.json
    class_name: str | None  # class of transformers; None: the class that its AutoModel mappings choose
    module: str  # module of tiewise whose function `answer` gets the model and the argument
    argument: Any = None  # JSON


@dataclass(frozen=True)
class NotBuilt:
    """Reason why a class was not asked."""

    reason: str  # a clause, such as "transformers is not installed"
    is_refused: bool = False  # the class of transformers raised an error for this config, so nothing can load it
    is_stopped: bool = False  # the child process ended without an answer: by a limit of time or memory, or by a crash


def is_switched_off() -> bool:
    """Return whether the environment variable says that no class is built."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


def ask(question: ClassQuestion) -> dict[str, Any] | NotBuilt:
    """Return a class's answer, from the cache or from a child process."""
    if is_switched_off():
        return NotBuilt(f"{SWITCH} is set")
    for library in LIBRARIES:
        if find_spec(library) is None:
            return NotBuilt(f"{library} is not installed")
    request = asdict(question)
    cached = _cache_file(request)
    reply = _read_cached(cached) or _ask_child(request, cached)
    if isinstance(reply, NotBuilt):
        return reply
    return refusal_in(reply) or reply


def refusal_in(reply: Mapping[str, Any]) -> NotBuilt | None:
    """Return the reason in a child's reply without an answer; None for an answer."""
    if "refused" in reply:
        return NotBuilt(short(reply["refused"], 160), is_refused=True)
    if "not_built" in reply:
        return NotBuilt(short(reply["not_built"], 160))
    return None


def _ask_child(request: Mapping[str, Any], cached: Path | None) -> dict[str, Any] | NotBuilt:
    """Return the reply of a child process, and cache it. A child that was stopped is not cached."""
    class_name = short(request["class_name"] or "the class of the config")
    limits = {"memory": MOST_BYTES, "seconds": MOST_SECONDS}
    stage = f"building {class_name} without weights"
    reply = ask_child(
        CHILD,
        {**request, **limits},
        ChildLimits(MOST_WALL_SECONDS, MOST_REPLY),
        on_wait=lambda: report_progress(stage, 0, 0),
    )
    if isinstance(reply, NoReply):
        reply = {"stopped": reply.reason}
    if "stopped" in reply:
        return NotBuilt(f"{stage} {short(reply['stopped'], 160)}", is_stopped=True)
    _write_cached(cached, reply)
    return reply


def _cache_file(request: Mapping[str, Any]) -> Path | None:
    """Return the file of a cached reply, named after request, libraries and code. None without a cache."""
    versions = [metadata.version(library) for library in LIBRARIES]
    code = [_digest_of_module(module) for module in (*CODE, request["module"])]
    key = json.dumps([versions, code, request], sort_keys=True, default=str)
    name = hashlib.sha256(key.encode()).hexdigest()
    try:
        return cache_folder() / "built-classes" / f"{name}.json"
    except RuntimeError:  # the user has no home folder
        return None


def _digest_of_module(module: str) -> str:
    """Return a digest of a module's source; "" if it cannot be read."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    try:
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        return ""


def _read_cached(path: Path | None) -> dict[str, Any] | None:
    """Return a cached reply; None if there is none or it cannot be read."""
    if path is None:
        return None
    try:
        reply = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return reply if isinstance(reply, dict) else None


def _write_cached(path: Path | None, reply: Mapping[str, Any]) -> None:
    """Cache a reply, and delete the oldest of too many. A cache that cannot be written is no error."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(reply))
        replies = sorted(path.parent.glob("*.json"), key=_age_key)
        for old in replies[:-MOST_CACHED]:
            old.unlink(missing_ok=True)


def _age_key(path: Path) -> float:
    """Return the time of a file's last change; 0 if another process deleted it."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
