"""Options that commands share, and their output: results on stdout, all else on stderr."""

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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import typer

from tiewise.core import ranks
from tiewise.core.errors import RunError
from tiewise.core.interrupts import is_caused_by_ctrl_c
from tiewise.core.progress import ProgressListener, listen_to_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

Option = tuple[type, Any]  # type of a command's parameter, and typer's description of it
Options = dict[str, Option]  # by the parameter's name


def require_texts(context: typer.Context, text: Any) -> Any:
    """Return the value of `--text`; raises DataError if it names a file that does not exist.

    The parser calls this, so a misspelt path fails before a command imports torch. Under torchrun the command checks
    it, and one process prints the error.
    """
    if text and not context.resilient_parsing and not ranks.is_launched():
        from tiewise.training.data.text_names import require_exists

        for name in [text] if isinstance(text, str) else text:
            require_exists(name)
    return text


TEXT = typer.Option(
    None,
    "--text",
    "-t",
    metavar="TEXT",
    help="Text to train on: a file, folder, glob, FILE.jsonl:FIELD, FILE.parquet:COLUMN, hf:ID\\[/CONFIG]\\[:SPLIT], "
    "- for standard input, builtin (Python's own documentation), or synthetic:NAME=VALUE,… May be repeated.",
    show_default="builtin",
    callback=require_texts,
)
# panels of the help below the main options, in this order
TRAINING = "Training"
FAMILIES = "Other families"
MACHINES = "Many machines"
RESULTS = "Output"
JSON = typer.Option(
    False, "--json", help="Print one JSON object on stdout; all else goes to stderr.", rich_help_panel=RESULTS
)
RESUME = typer.Option(False, "--resume", help="Finish what is in --out.")
OVERWRITE = typer.Option(False, "--overwrite", help="Replace the run in --out.", rich_help_panel=RESULTS)
MARGIN = typer.Option(
    None,
    metavar="NATS",
    help="Loss differences below this many nats per token count as equivalent.",
    show_default="0.02",
    rich_help_panel=TRAINING,
)
JOBS = typer.Option(
    "auto",
    metavar="N|auto",
    help="Runs to train at a time. auto: a trial of a few steps chooses one, or as many as threads and memory allow; "
    "one on a GPU.",
    rich_help_panel=TRAINING,
)
LAUNCHER = typer.Option(
    "local",
    metavar="local|ray",
    help="Where to train runs. ray: as tasks on the cluster of RAY_ADDRESS, or on this machine's cores.",
    rich_help_panel=MACHINES,
)
REPORT_TO = typer.Option(
    None,
    "--report-to",
    metavar="NAME,…",
    help="Experiment trackers that show each run while it trains: tensorboard, trackio, wandb, mlflow and others of "
    "transformers.",
    show_default="none",
    rich_help_panel=RESULTS,
)
PUSH_TO_HUB = typer.Option(
    None,
    "--push-to-hub",
    metavar="USER/NAME",
    help="At the end, upload the model with a model card to this repository of the Hugging Face Hub; of a comparison "
    "the best model, with the report.",
    show_default=False,
    rich_help_panel=RESULTS,
)
FOLLOW_LINKS = typer.Option(
    False,
    "--follow-links",
    help="Read links that lead outside the folder, too.",
    rich_help_panel="Reading",
)
QUIET = typer.Option(False, "--quiet", "-q", help="Print no progress.", rich_help_panel=RESULTS)
SOON = 1.0  # seconds before a progress bar appears; shorter work needs none
LINES_AFTER = 3.0  # the same for the lines that replace the bar if stderr is no terminal


def taking(**options: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command these parameters, as keywords."""

    def add_parameters(command: Callable[..., None]) -> Callable[..., None]:
        """Set the command's signature, which typer reads."""
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = []
        for name, (option_type, description) in options.items():
            parameters.append(inspect.Parameter(name, keyword, default=description, annotation=option_type))
        command.__annotations__ = {name: option_type for name, (option_type, _) in options.items()}
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        return command

    return add_parameters


def split_list(text: str | None) -> tuple[str, ...]:
    """Return the items that commas separate, without empty ones."""
    return tuple(item.strip() for item in (text or "").split(",") if item.strip())


def command_line() -> str:
    """Return the typed command line."""
    return shlex.join(["tiewise", *sys.argv[1:]])


def print_to_stderr(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def interruptible(remains: str | Callable[[], str]) -> Iterator[None]:
    """End a command with one line after Ctrl-C or a signal.

    Ctrl-C counts even if a library replaced its exception. `remains` is the end of the line: what is on disk.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not isinstance(error, SystemExit) and not is_caused_by_ctrl_c(error):
            raise
        print_to_stderr(f"tiewise: interrupted{remains if isinstance(remains, str) else remains()}")
        raise typer.Exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130) from None


def print_json(record: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(record, allow_nan=False))


def print_text(text: str) -> None:
    """Print a text on stdout as it is; nothing if it is empty."""
    if text:
        print(text)


def print_view(view: RenderableType | Callable[[int], RenderableType]) -> None:
    """Print a view on stdout, without highlighting numbers and paths.

    A function as `view` gets the width of the terminal in columns.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.print(view(console.width) if callable(view) else view, crop=False)


def hush_libraries() -> None:
    """Suppress the output of libraries, except their errors."""
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
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns when one exchange takes two calls


def need_torch() -> None:
    """Refuse a command if the packages for training are missing.

    The message says how to install them. Output at their import is suppressed.
    """
    need("torch", "transformers", "datasets", "accelerate", "plotly", "jinja2")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice on speed
    warnings.filterwarnings("ignore")


def need(*names: str, extra: str = "torch") -> None:
    """Refuse a command if a package is missing, and say how to install its extra."""
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise RunError(f"this command needs {', '.join(missing)}", f"pip install 'tiewise[{extra}]'")


@contextmanager
def progress_bar(quiet: bool, reads: bool, soon: float = SOON) -> Iterator[None]:
    """Show the progress of a block on stderr.

    It is a bar, or a line per stage if stderr is no terminal. With `reads`, the progress is in bytes of one file after
    another; otherwise it is in parts of one task. Parts take from seconds to minutes, so the bar shows the elapsed time
    and no estimate of the rest. It appears after `soon` seconds. Reading files prints no lines.
    """
    if quiet or (reads and not sys.stderr.isatty()):
        yield
        return
    if not sys.stderr.isatty():
        with listen_to_progress(_stage_printer()):
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
    task, start = bar.add_task("", total=None), time.monotonic()
    current: tuple[str, float] | None = None

    @lru_cache
    def print_once(stage: str) -> None:
        """Print a stage without a total, unless it was printed before."""
        bar.console.print(stage, markup=False, highlight=False, style="dim")

    def show(name: str, done: float, total: float) -> None:
        """Update the bar by one report of progress. A stage without a total is one line."""
        nonlocal current
        if time.monotonic() - start < soon:
            return
        if total == 0:
            print_once(name)
            return
        if reads and current != (name, total):  # the bar starts again for each file
            bar.reset(task)
        current = (name, total)
        bar.start()
        bar.update(task, description=name, completed=done, total=total)

    try:
        with listen_to_progress(show):
            yield
    finally:
        bar.stop()


def _stage_printer() -> ProgressListener:
    """Return a function that prints each stage once, with the progress, after `LINES_AFTER` seconds."""
    start = time.monotonic()
    printed: set[str] = set()

    def show(name: str, done: float, total: float) -> None:
        """Print a stage that was not printed before."""
        if name in printed or time.monotonic() - start < LINES_AFTER:
            return
        printed.add(name)
        print_to_stderr(name if total == 0 else f"{name} ({100 * done / max(total, 1):.0f} %)")

    return show
