"""Options that commands share, and how a command speaks: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.core.errors import RunError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tiewise.training.settings import Settings
    from tiewise.training.shown import Shown

TEXT = typer.Option(
    None,
    "--text",
    "-t",
    metavar="TEXT",
    help="File, folder, glob, FILE.jsonl:FIELD, FILE.parquet:COLUMN, hf:ID\\[/CONFIG]\\[:SPLIT], - for standard input, "
    "or builtin (prose that every Python carries). May be repeated.",
    show_default="builtin",
)
SPLIT = typer.Option(
    None,
    metavar="random|contiguous",
    help="What is held out: documents, and parts of long files, drawn at random; or the last parts of the text.",
    show_default="random",
)
TOKENIZER = typer.Option(
    None,
    help="bpe:SIZE (trained on the training split), bytes, a tokenizer.json, or a Hugging Face id.",
    show_default="bpe:4096",
)
MODEL = typer.Option(None, help="llama, gpt2, or the path of a config.json.", show_default="llama")
STEPS = typer.Option(None, help="Optimizer steps of each run.", show_default="600")
OUT = typer.Option(None, "--out", "-o", help="Folder for all that the run writes.", show_default="runs/<command>")
CONFIG = typer.Option(None, "--config", help="YAML file of settings (any of run.yaml); options win over it.")
SET = typer.Option(None, "--set", metavar="NAME=VALUE", help="Any setting of run.yaml, e.g. width=256. Repeatable.")
RECIPE = typer.Option(
    None,
    metavar="NAME",
    help="A published recurrent model, trained on CORPUS: press-wolf-small, press-wolf-large, inan-200, inan-650, "
    "pytorch-200, pytorch-650 or awd. Or an ALBERT, trained on --text: albert-small or albert-base.",
)
CORPUS = typer.Argument(
    None,
    help="With --recipe: a folder with train.txt, valid.txt and test.txt, words parted by spaces.",
    show_default=False,
)
SHARE = typer.Option(
    None,
    metavar="SHARING",
    help="What an ALBERT's layers share: none, attention, ffn, all, all:groups=2, … Of several, separated by commas, "
    "compare trains each with every boundary.",
    show_default="as the recipe",
)
RESUME = typer.Option(False, "--resume", help="Finish the run in --out.")
OVERWRITE = typer.Option(False, "--overwrite", help="Replace the run in --out.")
JSON = typer.Option(False, "--json", help="Print one JSON object on stdout; everything else goes to stderr.")
QUIET = typer.Option(False, "--quiet", "-q", help="No progress.")


def asked(
    out: Path,
    given: dict[str, Any],
    config: Path | None,
    assigned: list[str] | None,
    *,
    resume: bool,
    overwrite: bool,
    single: bool = False,
) -> Settings | None:
    """Return the checked settings: defaults, the recipe, the YAML file, `--set`, options; None given is not given.

    They are those of one run where `single`, else of a comparison; a recipe of several arms is trained tied. `share` of
    `given` is for every arm. With `resume`, None: the run has its settings.

    Raises:
        RunError, SpecError: a file, name or value that cannot be used, or `resume` with anything else.
    """
    import yaml

    from tiewise.training.settings import Settings

    if resume:
        if overwrite or config or assigned or any(value is not None for value in given.values()):
            raise RunError("--resume takes its settings from the run", f"give only --out {out} --resume")
        return None
    record: dict[str, Any] = {}
    if given.get("recipe") is not None:
        from tiewise.training.recurrent.recipes import recipe

        record |= recipe(given["recipe"])
    if single:
        record |= {"arms": record["arms"] if len(record.get("arms", ())) == 1 else ("tied",), "seed": 1}
    if config is not None:
        record |= {name: value for name, value in Settings.read(config).items() if value is not None}
    typed: dict[str, Any] = {}
    for item in assigned or []:
        name, equals, value = item.partition("=")
        if not equals:
            raise RunError(f"--set {item!r}", "write --set NAME=VALUE")
        try:
            typed |= Settings.typed({name: yaml.safe_load(value)}, "--set")
        except yaml.YAMLError:
            raise RunError(f"--set {item!r}: the value cannot be read", "write NAME=VALUE with a plain value") from None
    typed |= {name: value for name, value in given.items() if value is not None and name != "share"}
    length = next((layer for layer in (typed, record) if layer.keys() & {"steps", "minutes"}), {})  # typed ones win
    record = {name: value for name, value in record.items() if name != "minutes"} | typed
    record |= {"minutes": length["minutes"]} if "minutes" in length else {}
    if not single and record.get("seed") is not None:
        raise RunError("seed is a setting of train", "use --seeds N, whose runs are seeds 1 to N")
    settings = Settings.of(record)
    settings = (settings if given.get("share") is None else _shared(settings, given["share"])).checked()
    if {"steps", "minutes"} <= length.keys():
        raise RunError("both steps and minutes are given", "leave one of them out: minutes become steps")
    return settings


def _shared(settings: Settings, shares: Sequence[str]) -> Settings:
    """Return the settings with every arm once for each of `shares`.

    Raises:
        RunError: the model is no ALBERT.
        SpecError: an arm that says itself what its layers share, or a sharing that cannot be read.
    """
    from tiewise.training.albert.options import shared_arms

    if settings.albert is None:
        what = f"--share with model = {settings.model!r}: what layers share is a choice of ALBERT runs"
        raise RunError(what, "add --recipe albert-small, say, or leave --share out")
    return replace(settings, arms=shared_arms(settings.arms, shares))


def split_specs(text: str) -> list[str]:
    """Split boundaries or sharings at commas, but for those within one: `name=…` continues what stands before it.

    `untied` is always a boundary: two projected tables of width 300 are `projected:untied,k=300` here.

    >>> split_specs("all:groups=2,ends=1,none")
    ['all:groups=2,ends=1', 'none']
    """
    return re.split(r",(?!\w+=)", re.sub(r"\s*,\s*", ",", text.strip()))


def texts(text: list[str] | None, recipe: str | None, corpus: str | None) -> tuple[str, ...] | None:
    """Return what a command is to read: `--text`, or the corpus of a recipe.

    Raises:
        RunError: a corpus without a recipe, a recipe without a corpus, or both of them with `--text`.
    """
    if recipe is None and corpus is None:
        return tuple(text) if text else None
    if recipe is not None and recipe.startswith("albert"):  # of any text, in sentences
        if text and corpus is not None:
            raise RunError(f"{corpus!r} and --text", "name the text once")
        return (corpus,) if corpus is not None else tuple(text) if text else None
    if recipe is None:
        raise RunError(f"{corpus!r} without --recipe", "add --recipe NAME for a word-level corpus, or use --text")
    if text or corpus is None:
        raise RunError(f"--recipe {recipe} needs one corpus", "name its folder, and leave --text out")
    return (corpus,)


def command_line() -> str:
    """Return the command as typed."""
    return shlex.join(["tiewise", *sys.argv[1:]])


def shown(quiet: bool) -> Shown:
    """Return how progress is shown: lines on stderr, bars too where someone is looking; nothing when quiet."""
    from tiewise.training import ranks
    from tiewise.training.shown import Shown

    if quiet or not ranks.first():
        return Shown(lambda line: None)
    if not sys.stderr.isatty():
        return Shown(tell)
    from tqdm import tqdm

    return Shown(lambda line: tqdm.write(line, file=sys.stderr), bars=True)  # above the bar that is there


def tell(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(record: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(record, allow_nan=False))


def print_view(view: RenderableType) -> None:
    """Print, without colouring what only looks like a number or a path."""
    from rich.console import Console

    Console(highlight=False).print(view)


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
    need("torch", "transformers", "datasets", "accelerate", "plotly", "jinja2")


def need(*names: str, extra: str = "torch") -> None:
    """Say how to get packages of an extra where they are missing.

    Raises:
        RunError: one is not there.
    """
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise RunError(f"this command needs {', '.join(missing)}", f"pip install 'tiewise[{extra}]'")
