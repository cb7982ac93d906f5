"""`tiewise inspect`."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError

PAGE, RESULT = "report.html", "inspection.json"


def inspect(
    model: Path = typer.Argument(..., metavar="A", help="Hugging Face folder, or a folder of `tiewise compare`."),
    other: Path = typer.Argument(None, metavar="[B]", help="A second model, to be set beside the first."),
    text: list[str] = typer.Option(None, "--text", "-t", metavar="TEXT", help="To run the models on; as compare's."),
    tokens: str = typer.Option(None, metavar="PAIRS", help='Token pairs to follow both ways: "New, York; San, Diego".'),
    only: str = typer.Option(None, metavar="NAMES", help="Only these sections: direct_path,alignment."),
    out: Path = typer.Option(None, "--out", "-o", metavar="DIR", help=f"Write {PAGE} and {RESULT} there."),
    windows: int = typer.Option(64, help="Pieces of text that models are run on."),
    length: int = typer.Option(128, help="Tokens of each piece."),
    samples: int = typer.Option(4000, help="Rows of a table that are compared pair by pair."),
    lens_steps: int = typer.Option(250, help="Steps that each tuned lens is trained for."),
    held_out: float = typer.Option(0.2, help="Share of rows that maps are scored on, not fitted to; 0: all for both."),
    seed: int = typer.Option(0, help="Of every draw."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the inspection in --out."),
    full: bool = typer.Option(False, "--full", help="Print every table; so does --only."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Show what tying does inside a model: direct path, bigrams, alignment, gradients, tokens, lenses, refinement,
    other numbers of applications.

    Every measure with its interval and its chance level. What needs a text is left out without --text.
    """
    from tiewise.inspection.bench import Effort, Request
    from tiewise.inspection.inspection import checked, inspected, pairs_of, subjects_of

    effort = Effort(windows, length, samples=samples, lens_steps=lens_steps, held_out=held_out)
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    request = checked(Request(tuple(text or ()), pairs_of(tokens) if tokens else (), names, seed, effort))
    with o.interruptible("; nothing was written"):
        if out is not None:
            _check_room(out, overwrite)
        subjects = subjects_of([model] if other is None else [model, other])
        if find_spec("torch") and find_spec("transformers"):
            o.hush_libraries()
        else:  # a light install, which measures what tables alone say
            if request.texts:
                o.need_torch()
            if request.pairs:
                o.need("tokenizers")
        with o.progress_bar(quiet, reads=False):
            found = inspected(subjects, request)
    record = found.record()
    if out is not None:
        from tiewise.core.files import write_result
        from tiewise.report.figures import write_inspection

        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {out}: {error.strerror}", "choose another --out") from None
        page = write_inspection(found, out, o.command_line())
        write_result(json.dumps(record, indent=1, allow_nan=False) + "\n", out / RESULT, "--out")
        if not quiet:
            o.tell(f"page: {page}")
    if json_:
        return o.print_json(record)
    from tiewise.report.faces import inspection_view

    o.print_view(inspection_view(found, full or bool(names)))


def _check_room(out: Path, overwrite: bool) -> None:
    """Refuse before anything is measured what could not be written after it. Leaves nothing behind."""
    if (out / RESULT).is_file() and not overwrite:
        raise RunError(f"{out} holds an inspection already", "add --overwrite to replace it, or choose another --out")
    if (out / PAGE).is_file() and not (out / RESULT).is_file():
        raise RunError(f"{out / PAGE} is no inspection of tiewise", "choose another --out")
    below = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not below.is_dir():
        raise RunError(f"{below} is a file", "choose another --out")
    try:
        tempfile.TemporaryFile(dir=below).close()
    except OSError as error:
        raise RunError(f"cannot write in {below}: {error.strerror}", "choose another --out") from None
    o.need("plotly", "jinja2", extra="plots")
