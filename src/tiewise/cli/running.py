"""How a command that trains ends, also where several processes train: one line, one exit code, nobody left waiting."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer

from tiewise.cli.options import tell
from tiewise.core import ctrl_c
from tiewise.core.errors import Interrupted, RunError, TiewiseError


@dataclass
class Running:
    """Whether a command's run is on disk, so that `--resume` goes on with it, and since when the command works."""

    begun: bool
    since: float = field(default_factory=time.monotonic)

    def gone(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.since


@contextmanager
def running(command: str, out: Path, *, begun: bool) -> Iterator[Running]:
    """Within this context `command` works on the run in `out`, alone or as one of several processes.

    Ctrl-C exits 130 and a disk that takes no more is a `RunError`; both say how to go on. Of several processes one
    speaks, the others exit with the same code.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on speed; read when torch is imported
    state = Running(begun)
    from tiewise.training import ranks
    from tiewise.training.disk import disk_error, quiet_threads

    resume = shlex.join(["tiewise", command, "--out", str(out), "--resume"])
    try:
        with quiet_threads():
            ranks.join()
            yield state
    except ranks.Elsewhere as error:
        ranks.leave(together=ranks.known(error))
        raise typer.Exit(2) from None
    except (Exception, KeyboardInterrupt) as error:
        if ctrl_c.behind(error):
            if ranks.first() and state.begun:
                kept = "a checkpoint is written" if isinstance(error, Interrupted) else "what was finished is kept"
                tell(f"tiewise: interrupted, {kept}; {resume} goes on")
            ranks.leave(together=ranks.known(error))
            raise typer.Exit(130) from None
        way = f"make room there, then {resume}" if state.begun else "make room there, or choose another --out"
        said = error if isinstance(error, TiewiseError) else disk_error(error, out, way) or _lost(error, resume)
        if said is None:
            raise
        if ranks.size() == 1:
            raise said from None
        tell(f"tiewise: {said}")
        ranks.leave(together=ranks.known(error))
        raise typer.Exit(2) from None
    ranks.leave(together=False)


def _lost(error: BaseException, resume: str) -> RunError | None:
    """Say that another process is gone, where `error` is how this one saw it; the cause is that one's to say."""
    from tiewise.training import ranks

    gone = ("closed by peer", "reset by peer", "Broken pipe")
    if ranks.size() > 1 and isinstance(error, RuntimeError) and any(sign in str(error) for sign in gone):
        return RunError("another process of this run has ended", f"{resume} goes on from the last checkpoint")
    return None
