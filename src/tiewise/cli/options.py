"""Options that commands share, and how a command speaks: results on stdout, everything else on stderr."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.errors import RunError

if TYPE_CHECKING:
    from tiewise.training.settings import Settings

TEXT = typer.Option(
    None,
    "--text",
    "-t",
    metavar="TEXT",
    help="File, folder, glob, FILE.jsonl:FIELD, FILE.parquet:COLUMN, hf:ID\\[/CONFIG]\\[:SPLIT], - for standard input, "
    "or builtin (prose that every Python carries). May be repeated.",
    show_default="builtin",
)
TOKENIZER = typer.Option(
    None,
    help="bpe:SIZE (trained on the training split), bytes, a tokenizer.json, or a Hugging Face id.",
    show_default="bpe:4096",
)
MODEL = typer.Option(None, help="llama, gpt2, or the path of a config.json.", show_default="llama")
STEPS = typer.Option(None, help="Optimizer steps of each run.", show_default="800")
OUT = typer.Option(None, "--out", "-o", help="Folder for all that the run writes.", show_default="runs/<command>")
CONFIG = typer.Option(None, "--config", help="YAML file of settings (any of run.yaml); options win over it.")
SET = typer.Option(None, "--set", metavar="NAME=VALUE", help="Any setting of run.yaml, e.g. width=256. Repeatable.")
RESUME = typer.Option(False, "--resume", help="Finish the run in --out.")
OVERWRITE = typer.Option(False, "--overwrite", help="Replace the run in --out.")
JSON = typer.Option(False, "--json", help="Print one JSON object on stdout; everything else goes to stderr.")
QUIET = typer.Option(False, "--quiet", "-q", help="No progress.")


def settings_from(config: Path | None, assigned: list[str] | None, given: dict[str, Any]) -> Settings:
    """Defaults, then the YAML file, then `--set`, then options; whatever is None was not given.

    Raises:
        RunError: a file, name or value that cannot be used.
    """
    import yaml

    from tiewise.training.settings import Settings

    settings = Settings() if config is None else Settings.load(config)
    record: dict[str, Any] = {}
    for item in assigned or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise RunError(f"--set {item!r}", "write --set NAME=VALUE")
        try:
            record[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RunError(f"--set {item!r}: the value cannot be read", "write NAME=VALUE with a plain value") from None
    changed = Settings.from_record(record, "--set")
    settings = replace(settings, **{name: getattr(changed, name) for name in record})
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def command_line() -> str:
    """Return the command as typed."""
    return shlex.join(["tiewise", *sys.argv[1:]])


def say(quiet: bool) -> Any:
    """Return the function that prints progress lines on stderr, or nothing when quiet."""
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def bars(quiet: bool) -> bool:
    """Whether progress bars make sense: someone is looking."""
    return not quiet and sys.stderr.isatty()


def hush_libraries() -> None:
    """Keep what libraries print out of the command's output; their errors still show."""
    import logging
    import os
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.filterwarnings("ignore")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("tiewise").setLevel(logging.WARNING)


def need_torch() -> None:
    """Say how to get the training parts where they are missing.

    Raises:
        RunError: without the extra.
    """
    from importlib.util import find_spec

    missing = [
        name for name in ("torch", "transformers", "datasets", "accelerate", "plotly") if find_spec(name) is None
    ]
    if missing:
        raise RunError(f"this command needs {', '.join(missing)}", "pip install 'tiewise[torch]'")
