"""`tiewise explore`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import typer

from tiewise.cli import options as o


def explore(
    paths: list[Path] = typer.Argument(None, metavar="[CKPT|RUN]...", help="Model folders, or those of `compare`."),
    tokens: str = typer.Option(None, metavar="WORDS", help="Tokens of the checkpoint to hold: New, York, #1234."),
    text: list[str] = typer.Option(None, "--text", "-t", metavar="TEXT", help="Its most frequent tokens are shown."),
    out: Path = typer.Option(None, "--out", "-o", metavar="PAGE.html", help="The page to write; a temporary file."),
    no_open: bool = typer.Option(False, "--no-open", help="Write the page and print its path, no more."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace what is at --out."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """See tying with your own eyes: one page, offline, to edit matrices, drag sizes and drop a checkpoint on."""
    from tiewise.explorer.page import explore as made

    if text:
        o.need_torch()
    with o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=True):
        words = [word.strip() for word in (tokens or "").split(",") if word.strip()]
        page = made(*(paths or ()), words=words, texts=text or ())
        target = out or Path(tempfile.mkdtemp(prefix="tiewise-")) / "explore.html"
        page.write(target, overwrite)
    # a browser of the terminal would take it over
    seen = sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    opened = False
    if seen and not no_open:
        import webbrowser

        opened = webbrowser.open(target.resolve().as_uri())
    if json_:
        o.print_json({"page": str(target), "bytes": target.stat().st_size, "opened": opened})
    else:
        print(target)
