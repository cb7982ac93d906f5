"""`tiewise inspect`, `explore` and `diff`: measurements of models, and of changes between them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError
from tiewise.core.writing_faults import writing_fault
from tiewise.inspection.sections import section_names

if TYPE_CHECKING:
    from rich.table import Table

    from tiewise.core.measurement import Measurement
    from tiewise.inspection.inspection import Inspection
    from tiewise.inspection.workspace import Request

FEW_LISTED = 5  # rows that `diff` lists without --full
PAGE, RESULT = "report.html", "inspection.json"
EFFORT = "Effort"  # panel of the help


def inspect(
    model: Path = typer.Argument(..., metavar="A", help="Hugging Face folder, or a folder of `tiewise compare`."),
    other: Path = typer.Argument(None, metavar="[B]", help="Second model, to compare with the first."),
    text: list[str] = typer.Option(
        None, "--text", "-t", metavar="TEXT", help="Text to run on, as in compare.", callback=o.require_texts
    ),
    tokens: str = typer.Option(None, metavar="PAIRS", help='Token pairs to follow both ways: "New, York; San, Diego".'),
    word_pairs: Path = typer.Option(
        None, "--word-pairs", metavar="FILE", help="Rated word pairs to compare rows with: word1 word2 rating."
    ),
    only: str = typer.Option(None, metavar="NAMES", help=f"Only some sections: {', '.join(section_names())}."),
    out: Path = typer.Option(None, "--out", "-o", metavar="DIR", help=f"Write {PAGE} and {RESULT} there."),
    windows: int = typer.Option(64, help="Pieces of text that models run on.", rich_help_panel=EFFORT),
    length: int = typer.Option(128, help="Tokens of each piece.", rich_help_panel=EFFORT),
    samples: int = typer.Option(4000, help="Rows of a table that are compared pair by pair.", rich_help_panel=EFFORT),
    lens_steps: int = typer.Option(250, help="Training steps of each tuned lens.", rich_help_panel=EFFORT),
    heldout: float = typer.Option(
        0.2,
        "--held-out",
        help="Share of rows that maps are scored on, not fitted to; 0: all for both.",
        rich_help_panel=EFFORT,
    ),
    seed: int = typer.Option(0, help="Seed of every draw.", rich_help_panel=EFFORT),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace the inspection in --out.", rich_help_panel=o.RESULTS
    ),
    full: bool = typer.Option(False, "--full", help="Print every table, as --only does."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Measure the effects of tying inside a model.

    Every measure has its interval and its chance level. The answer is whether to tie, as far as the models show it.
    With --only, it is that of the named sections. Without --text, sections that need a text are left out.
    """
    from tiewise.inspection.inspection import check_request, measure_sections, open_models, parse_pairs
    from tiewise.inspection.workspace import Effort, Request

    effort = Effort(windows, length, samples=samples, lens_steps=lens_steps, held_out=heldout)
    names = o.split_list(only)
    pairs = parse_pairs(tokens) if tokens else ()
    rated = None if word_pairs is None else str(word_pairs)
    request = check_request(Request(tuple(text or ()), pairs, names, seed, effort, rated))
    with o.interruptible("; nothing was written"):
        if out is not None:
            _check_writable(out, overwrite)
        subjects = open_models([model] if other is None else [model, other])
        _check_packages(request)
        with o.progress_bar(quiet, reads=False):
            inspection = measure_sections(subjects, request)
    record = inspection.record()
    if out is not None:
        page = _write(inspection, record, out)
        if not quiet:
            o.print_to_stderr(f"page: {page}")
    if json_:
        return o.print_json(record)
    from tiewise.report.views import inspection_view

    o.print_view(inspection_view(inspection, full or bool(names), written=out is not None))


def _check_packages(request: Request) -> None:
    """Refuse a request whose packages are not installed; the tables alone need none."""
    if find_spec("torch") and find_spec("transformers"):
        o.hush_libraries()
        return
    if request.texts:
        o.need_torch()
    if request.pairs or request.word_pairs:
        o.need("tokenizers")


def _write(inspection: Inspection, record: dict[str, Any], out: Path) -> Path:
    """Write the page and the result to `out`, and return the page.

    After an error, all new files and folders are removed.
    """
    from tiewise.core.files import write_result
    from tiewise.report.inspection_page import write_inspection

    new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    is_new = not (out / PAGE).exists()
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = writing_fault(error).remedy("choose another --out")
            raise RunError(f"cannot make {out}: {error.strerror}", remedy) from None
        page = write_inspection(inspection, out, o.command_line())
        write_result(json.dumps(record, indent=1, allow_nan=False) + "\n", out / RESULT, "out")
    except BaseException:
        with suppress(OSError):
            if is_new:
                (out / PAGE).unlink(missing_ok=True)
            for folder in new_folders:
                folder.rmdir()
        raise
    return page


def _check_writable(out: Path, overwrite: bool) -> None:
    """Refuse an `out` that cannot be written, before anything is measured.

    The check leaves no file behind.
    """
    if (out / RESULT).is_file() and not overwrite:
        raise RunError(f"{out} holds an inspection already", "add --overwrite to replace it, or choose another --out")
    if (out / PAGE).is_file() and not (out / RESULT).is_file():
        raise RunError(f"{out / PAGE} is no inspection of tiewise", "choose another --out")
    below = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not below.is_dir():
        raise RunError(f"{below} is a file", "choose another --out")
    try:
        tempfile.TemporaryFile(dir=below).close()
    except OSError as error:
        remedy = writing_fault(error).remedy("choose another --out")
        raise RunError(f"cannot write in {below}: {error.strerror}", remedy) from None
    o.need("plotly", "jinja2", extra="plots")


def explore(
    paths: list[Path] = typer.Argument(None, metavar="[CKPT|RUN]...", help="Model folders, or those of `compare`."),
    tokens: str = typer.Option(None, metavar="WORDS", help="Tokens of the checkpoint to show: New, York, #1234."),
    text: list[str] = typer.Option(
        None, "--text", "-t", metavar="TEXT", help="Show the text's most frequent tokens.", callback=o.require_texts
    ),
    out: Path = typer.Option(
        None, "--out", "-o", metavar="PAGE.html", help="Page to write.", show_default="a temporary file"
    ),
    no_open: bool = typer.Option(False, "--no-open", help="Write the page, and open no browser."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the page at --out.", rich_help_panel=o.RESULTS),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Explore tying on one interactive page, which works offline.

    On it you edit matrices, drag sizes, and drop a checkpoint to see its tables.
    """
    from tiewise.report.explorer.page import explore as explorer_page

    if text:
        o.need_torch()
    with o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=True):
        page = explorer_page(*(paths or ()), words=o.split_list(tokens), texts=text or ())
        target = out or Path(tempfile.mkdtemp(prefix="tiewise-")) / "explore.html"
        page.write(target, overwrite)
    is_open = False
    if not no_open and _has_display():
        import webbrowser

        is_open = webbrowser.open(target.resolve().as_uri())
    if json_:
        o.print_json({"page": str(target), "bytes": target.stat().st_size, "opened": is_open})
    else:
        print(target)


def _has_display() -> bool:
    """Return whether a browser opens in a window, and not in the terminal."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def diff(
    old: Path = typer.Argument(metavar="OLD", help="Hugging Face folder, or one .safetensors."),
    new: Path = typer.Argument(metavar="NEW", help="The later one: fine-tuned, merged or resized."),
    top: int = typer.Option(
        None, min=0, help="Number of rows to list, the most changed first. 5; 20 with --full or --json."
    ),
    full: bool = typer.Option(False, "--full", help="Print all figures, and 20 rows of each table."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Report which rows of the tables changed between two checkpoints, and by how much.

    It also reports the rank of the change. Only the tables are read. The new checkpoint may be fine-tuned, merged with
    an adapter, or resized.
    """
    from tiewise.core.records import to_strict_json
    from tiewise.inspection.tables.row_changes import MOST_LISTED
    from tiewise.inspection.tables.row_changes import diff as compared

    with o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=True):
        if top is None:
            top = MOST_LISTED if full or json_ else FEW_LISTED
        changes = compared(old, new, top=top)
    if json_:
        return o.print_json(to_strict_json(changes.record()))
    _print_changes(changes, full)


def _print_changes(changes: Measurement, full: bool) -> None:
    """Print the answer, the rows that changed most, and the notes; with `full` also all quantities."""
    from rich.console import Console

    from tiewise.report.views import rich_table

    console = Console()
    console.print(f"{changes.answer[0].upper()}{changes.answer[1:]}.", style="bold", highlight=False)
    if full:
        console.print(_table_of_quantities(changes))
    for listing in changes.listings:
        console.print(listing.name, highlight=False)
        console.print(rich_table([tuple(listing.header), *listing.rows], justified=True))
    for note in changes.notes:
        console.print(note, style="dim", highlight=False, markup=False)
    if not full and changes.listings:
        console.print("More: --full lists 20 rows of each table, and all figures.", style="dim", highlight=False)


def _table_of_quantities(changes: Measurement) -> Table:
    """Return a row for each quantity and a column for each table."""
    from tiewise.report.views import rich_table

    tables = tuple(dict.fromkeys(quantity.of for quantity in changes.quantities))
    values = {(quantity.name, quantity.of): str(quantity) for quantity in changes.quantities}
    reasons = {quantity.name: quantity.why for quantity in changes.quantities}
    rows = [("", *tables, "")]
    for name, why in reasons.items():
        cells = [values.get((name, table), "–") for table in tables]
        rows.append((name, *cells, why))
    return rich_table(rows)
