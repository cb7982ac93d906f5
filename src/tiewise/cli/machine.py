"""`tiewise kernels`."""

from __future__ import annotations

import typer

from tiewise.cli import options as o


def kernels(
    action: str = typer.Argument(None, metavar="[build]", help="Compile them for this machine, into your cache."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say whether compiled kernels are used here, and why not; `build` compiles them: needs g++ and AVX-512.

    Without them everything computes the same, by the portable path. TIEWISE_KERNELS=off leaves them alone.
    """
    if action not in (None, "build"):
        raise typer.BadParameter(f"{action}: `tiewise kernels` says what is there, `tiewise kernels build` compiles it")
    o.need("torch")
    from tiewise.ops import fast_products as compiled

    if action:
        compiled.build()
    said = compiled.kernels_state()
    if json_:
        o.print_json({"kernels": said, "used": compiled.kernels() is not None})
    else:
        typer.echo(f"kernels: {said}")
