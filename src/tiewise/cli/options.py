"""Options that commands share, and how a command speaks: results on stdout, everything else on stderr."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tiewise.core.errors import RunError
from tiewise.core.interrupts import is_caused_by_ctrl_c
from tiewise.core.progress import listen_to_progress
from tiewise.core.spec import split_specs as split_specs

if TYPE_CHECKING:
    from rich.console import RenderableType

Option = tuple[type, Any]  # of a command's parameter, and typer's description of it
Options = dict[str, Option]  # by the parameter's name
TEXT = typer.Option(
    None,
    "--text",
    "-t",
    metavar="TEXT",
    help="File, folder, glob, FILE.jsonl:FIELD, FILE.parquet:COLUMN, hf:ID\\[/CONFIG]\\[:SPLIT], - for standard input, "
    "builtin (prose that every Python carries), or synthetic:NAME=VALUE,… (a made language). May be repeated.",
    show_default="builtin",
)
JSON = typer.Option(False, "--json", help="Print one JSON object on stdout; everything else goes to stderr.")
RESUME = typer.Option(False, "--resume", help="Finish the run in --out.")
OVERWRITE = typer.Option(False, "--overwrite", help="Replace the run in --out.")
JOBS = typer.Option(
    "auto",
    metavar="N|auto",
    help="Runs trained at a time, in processes of their own with a share of the threads each. auto: one, or as "
    "many as there are threads and memory for, whichever a trial of a few steps finds faster; one on a GPU.",
)
LAUNCHER = typer.Option(
    "local",
    metavar="local|ray",
    help="Where runs are trained. ray: as tasks on the cluster of RAY_ADDRESS, or on this machine's cores.",
)
FOLLOW_LINKS = typer.Option(False, "--follow-links", help="Read through links that lead outside the folder too.")
QUIET = typer.Option(False, "--quiet", "-q", help="No progress.")
SOON = 1.0  # seconds without a progress bar: what is over by then needs none


def taking(**options: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command parameters, by name; it gets all of them as keywords."""

    def made(command: Callable[..., None]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        told = [inspect.Parameter(n, keyword, default=said, annotation=kind) for n, (kind, said) in options.items()]
        command.__annotations__ = {name: kind for name, (kind, _) in options.items()}
        command.__dict__["__signature__"] = inspect.Signature(told)
        return command

    return made


def listed(text: str | None) -> tuple[str, ...]:
    """Return what commas separate, without empty ones."""
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())


def command_line() -> str:
    """Return the command as typed."""
    return shlex.join(["tiewise", *sys.argv[1:]])


def tell(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def interruptible(left: str | Callable[[], str]) -> Iterator[None]:
    """End a command at Ctrl-C, also where a library made another error of it, or at a signal; `left` says how."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not isinstance(error, SystemExit) and not is_caused_by_ctrl_c(error):
            raise
        tell(f"tiewise: interrupted{left if isinstance(left, str) else left()}")
        raise typer.Exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130) from None


def print_json(record: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(record, allow_nan=False))


def print_view(view: RenderableType | Callable[[int], RenderableType]) -> None:
    """Print, without colouring what only looks like a number or a path; a view may ask how wide the terminal is."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(view(console.width) if callable(view) else view)


def hush_libraries() -> None:
    """Keep what libraries print out of the command's output; their errors still show."""
    import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.filterwarnings("ignore")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("tiewise").setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # else it warns of two exchanges for one


def need_torch() -> None:
    """Refuse, and say how to get the training parts, where they are missing; what they print at import is kept back."""
    need("torch", "transformers", "datasets", "accelerate", "plotly", "jinja2")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on speed
    warnings.filterwarnings("ignore")


def need(*names: str, extra: str = "torch") -> None:
    """Refuse, and say how to get packages of an extra, where one is missing."""
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise RunError(f"this command needs {', '.join(missing)}", f"pip install 'tiewise[{extra}]'")


@contextmanager
def progress_bar(quiet: bool, reads: bool, soon: float = SOON) -> Iterator[None]:
    """Show the progress inside on stderr where someone looks: bytes read of each thing, or parts of one work.

    Parts take from seconds to minutes each, so the time that has passed is shown, and none that remains.
    The bar appears after `soon` seconds.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.SpinnerColumn("line"),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn() if reads else progress.TaskProgressColumn(),
        progress.TransferSpeedColumn() if reads else progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task, begun = bar.add_task("", total=None), time.monotonic()
    of: tuple[str, float] | None = None

    def show(what: str, done: float, total: float) -> None:
        nonlocal of
        if time.monotonic() - begun < soon:
            return
        if reads and of != (what, total):  # each has the bar to itself
            bar.reset(task)
        of = (what, total)
        bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        with listen_to_progress(show):
            yield
    finally:
        bar.stop()
