"""What a call says beside its value: what is wrong, how far it has come, and that Ctrl-C or a signal ended it.

Every error that a user can cause is a `TiewiseError`: one line that names what is wrong and where, then the way
out. The command line prints exactly that line and exits 2; nothing below it needs to format anything.

    with heard(bar):                             a command or a notebook: bar("reading wte", 4096, 50257)
        progress("reading wte", 4096, 50257)     anywhere below, at every step

    with doing("direct path", rows):             names what follows
        advance(4096)                            deep inside, which need not know what it is part of

Nobody passes a callback down: the listener is a context variable, and without one nothing happens.

Ctrl-C is not forgotten, whatever becomes of its `KeyboardInterrupt`. Python raises that in whatever runs at the moment,
and not everything lets it through: within a `__set_name__` it comes out as a `RuntimeError` (before Python 3.12), from
a C extension's imports as an `ImportError` or `TypeError` without a cause, from a finalizer not at all. So the command
line listens from its first moment: an error behind a press is the press, and training that begins after one stops at
its first step. What must clean up behind itself works within `ending`, where SIGTERM and SIGHUP raise too.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any


class TiewiseError(Exception):
    """What is wrong and where (`problem`), and the way out (`remedy`)."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


def similar(name: object, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that are most like `name`, in whatever case, nearest first.

    >>> similar("Teid", ["untied", "tied", "factored"])
    ['tied', 'untied']
    """
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in known}
    return [by_lower[close] for close in get_close_matches(str(name).lower(), by_lower, n=count)]


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`; None if none is like it."""
    return next(iter(similar(name, known, count=1)), None)


def choices(name: object, known: Iterable[str], lead: str = "") -> str:
    """Return what to do about a name that is not known: the nearest known one, then all of them after `lead`.

    >>> choices("teid", ["untied", "tied", "factored"])
    'did you mean tied? choose one of untied, tied, factored'
    """
    names = list(known)
    near = nearest(name, names)
    hint = "" if near is None else f"did you mean {near}? "
    if not lead and len(names) == 2:
        return f"{hint}choose {names[0]} or {names[1]}"
    return f"{hint}{lead or 'choose one of'} {', '.join(names)}"


class SpecError(TiewiseError, ValueError):
    """A boundary specification that cannot be parsed, or that this model cannot have."""


class DataError(TiewiseError, ValueError):
    """Text, a tokenizer or a split that cannot be used."""


class RunError(TiewiseError, RuntimeError):
    """A run directory, a setting or an output place that cannot be used."""


class InstallError(TiewiseError, RuntimeError):
    """A model into which a boundary cannot be installed; `problem` names the reason."""


class UnsupportedError(TiewiseError, RuntimeError):
    """An operation that is refused because its result would be wrong or undefined."""


def printable(text: str) -> str:
    """Return text with a question mark for whatever no terminal should be sent: names in files come from strangers."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


class CheckpointError(TiewiseError, ValueError):
    """A checkpoint, or a file of one, that cannot be read or must not be rewritten as asked; printable throughout."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(printable(problem), printable(remedy))


def refuse_live_model(name: str, source: object) -> None:
    """Raise CheckpointError if the call `name`, which reads a folder, is given a model in memory."""
    if hasattr(source, "named_parameters"):
        what = f"tiewise.{name} reads a folder, and this is a live {type(source).__name__}"
        raise CheckpointError(what, f"save it first: model.save_pretrained(FOLDER), then tiewise.{name}(FOLDER)")


class PlanError(TiewiseError, ValueError):
    """A model, size or choice that cannot be planned."""


class TiewiseWarning(UserWarning):
    """Something that works but that the user should know; raised as an error in this package's own tests."""


def one_line(error: BaseException, most: int = 160) -> str:
    """Return what another library's error says on one line of at most `most` letters."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def no_numbers(where: str) -> DataError:
    """What to raise where values are NaN or infinite."""
    return DataError(f"{where} holds values that are no numbers", "`tiewise check --deep` names the rows")


class Interrupted(Exception):
    """Ctrl-C came; a checkpoint is on disk. `out` is the run that `--resume` continues."""

    def __init__(self, out: str) -> None:
        super().__init__(f"interrupted; everything so far is in {out}")
        self.out = out


# how far work has come

Listener = Callable[[str, float, float], None]  # (what is done, how much of it, of how much)

_LISTENER: ContextVar[Listener] = ContextVar("listener", default=lambda what, done, total: None)
_DOING: ContextVar[tuple[str, float, float] | None] = ContextVar("doing", default=None)


def progress(what: str, done: float, total: float) -> None:
    """Say that `done` of `total` of something is done."""
    _LISTENER.get()(what, done, total)


def advance(done: float) -> None:
    """Say how much is done of what the innermost `doing` around this line names; outside of any, say nothing."""
    named = _DOING.get()
    if named is not None:
        what, total, begun = named
        progress(what, begun + done, total)


@contextmanager
def doing(what: str, total: float, begun: float = 0) -> Iterator[None]:
    """Name what is done inside, for `advance`; `begun` of it were done before."""
    before = _DOING.set((what, total, begun))
    try:
        yield
    finally:
        _DOING.reset(before)


@contextmanager
def heard(listener: Listener) -> Iterator[Listener]:
    """Have `listener` called for all progress inside; yield who was called before, for a listener that passes it on."""
    outer = _LISTENER.get()
    before = _LISTENER.set(listener)
    try:
        yield outer
    finally:
        _LISTENER.reset(before)


# Ctrl-C, and the signals that end a process

ENDS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Heard:
    pressed = False
    ending: Ending | None = None


def listen_for_ctrl_c() -> None:
    """Remember Ctrl-C from now on, unless this process was started to ignore it, as shells do in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_at_ctrl_c)
        sys.unraisablehook = _unraisable  # a press that a finalizer swallows is not printed


def raise_at_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handle the signal: note it, and raise as Python does by itself."""
    _Heard.pressed = True
    raise KeyboardInterrupt


def ctrl_c_came() -> bool:
    """Whether Ctrl-C was pressed while `raise_at_ctrl_c` handled it, seen since or not."""
    return _Heard.pressed


class NotedPress:
    """A handler that notes Ctrl-C until somebody can act on it; a second press acts at once."""

    def __init__(self, pressed: bool = False) -> None:
        self.pressed = pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def set_ctrl_c(handler: Any) -> Any:
    """Set what Ctrl-C does and return what it did; only the main thread can, and only it gets Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGINT, handler)
    return signal.getsignal(signal.SIGINT)


def ctrl_c_behind(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: pressed before it, itself, or what it came from."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (Interrupted, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen is not None or ctrl_c_came()


class Ending:
    """What signals do within `ending`: the first raises, further ones wait; all of them once it is `held`."""

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}  # the handler that each signal had
        self.held = False  # signals wait: what follows is finished whatever comes
        self.waiting: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.held:
            self.waiting = number
            return
        self.held = True
        handler = self.before[number]
        if callable(handler):
            handler(number, None)
        raise SystemExit(128 + number)


@contextmanager
def ending() -> Iterator[Ending]:
    """Let Ctrl-C, SIGTERM and SIGHUP end a block by raising, KeyboardInterrupt or SystemExit, and only once.

    Cleaning up behind that is not interrupted. A signal that is ignored, as SIGHUP under nohup, or that somebody else
    handles keeps its handler; so do all in other threads than the main one. A block within a block adds nothing.
    """
    if _Heard.ending is not None or threading.current_thread() is not threading.main_thread():
        yield _Heard.ending or Ending()
        return
    made = Ending()
    try:
        _Heard.ending = made
        for number in ENDS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler, raise_at_ctrl_c):
                made.before[number] = handler
                signal.signal(number, made)
        try:
            yield made
        finally:
            made.held = True
    finally:
        _Heard.ending, made.held = None, True
        for number, handler in reversed(made.before.items()):  # Ctrl-C last: it may raise as soon as it can
            signal.signal(number, handler)
    if made.waiting is not None:
        made.held = False
        made(made.waiting, None)


def _unraisable(what: Any) -> None:
    if not isinstance(what.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(what)
