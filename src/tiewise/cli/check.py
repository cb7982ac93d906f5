"""`tiewise check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import CheckpointError, choices

FAIL_ON = ("fatal", "error", "warning", "info", "never")


def check(
    paths: list[Path] = typer.Argument(None, metavar="PATH", help="Folder (adapters too), .safetensors, .gguf, .onnx."),
    base: Path = typer.Option(None, metavar="DIR", help="Of an adapter: the checkpoint that it changes."),
    beside: Path = typer.Option(None, metavar="DIR", help="Of a GGUF or ONNX file: the checkpoint it was made from."),
    target: Path = typer.Option(None, metavar="DIR", help="Of a draft: the checkpoint that it proposes tokens to."),
    world: int = typer.Option(None, metavar="N", help="Ranks to spread it over: what each gets of the tables."),
    as_class: str = typer.Option(None, "--as", metavar="CLASS", help="The class of transformers that shall load it."),
    quantise: Path = typer.Option(None, metavar="FILE", help="JSON config of a quantisation to come: does it fit?"),
    deep: bool = typer.Option(False, "--deep", help="Read every row: NaN, empty and duplicate rows, equal tensors."),
    headers: bool = typer.Option(False, "--headers", help="Read headers only; equal tables are not told apart."),
    follow_links: bool = o.FOLLOW_LINKS,
    select: str = typer.Option(None, metavar="IDS", help="Only these rules: B012,B02."),
    ignore: str = typer.Option(None, metavar="IDS", help="Not these rules."),
    fail_on: str = typer.Option("error", metavar="|".join(FAIL_ON), help="Exit 1 from this severity on."),
    explain: str = typer.Option(None, metavar="ID", help="Say what a rule is about, and stop. `all` lists them."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say what a checkpoint really holds at its two ends, what each loader will make of it, and how to repair it.

    Nothing is executed, no pickle is opened, nothing is written.
    """
    if explain is not None:
        _explain(explain, json_)
        return
    if not paths:
        raise typer.BadParameter("give a checkpoint: a folder, a .safetensors, a .gguf or a .onnx file")
    if fail_on not in FAIL_ON:
        raise typer.BadParameter(f"--fail-on {fail_on}: {choices(fail_on, FAIL_ON)}")
    options: dict[str, Any] = {"base": base, "beside": beside, "target": target, "world": world, "as_class": as_class}
    options |= {"quantise": quantise, "deep": deep, "scan": not headers, "follow_links": follow_links}
    options |= {"select": o.listed(select), "ignore": o.listed(ignore)}
    from tiewise.checkpoint.audit import SCHEMA
    from tiewise.checkpoint.audit import check as audit
    from tiewise.checkpoint.audit_view import audit_view

    audits, unread = [], False
    for path in paths:  # one that cannot be read does not keep the others back
        try:
            with o.interruptible(f" while reading {path}"), o.progress_bar(quiet, reads=True):
                found = audit(path, **options)
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            o.tell(f"tiewise: {error}")
            unread = True
            continue
        audits.append(found)
        if not json_:
            o.print_view(audit_view(found))
    if json_:
        records = [found.record() for found in audits]
        o.print_json(records[0] if len(paths) == 1 else {"schema": SCHEMA, "audits": records})
    if unread:
        raise typer.Exit(2)
    if fail_on != "never" and any(found.at_least(fail_on) for found in audits):
        raise typer.Exit(1)


def _explain(wanted: str, json_: bool) -> None:
    from tiewise.checkpoint.audit_view import rule_view
    from tiewise.checkpoint.rules.rule import rules

    known = rules()
    if wanted != "all" and wanted.upper() not in known:
        raise CheckpointError(
            f"no rule {wanted!r}", f"{choices(wanted, known, 'rules are')}; `--explain all` lists them"
        )
    chosen = tuple(known.values()) if wanted == "all" else (known[wanted.upper()],)
    if json_:
        keys = ("id", "severity", "title", "explain", "sources", "deep")
        o.print_json({"rules": [{key: getattr(rule, key) for key in keys} for rule in chosen]})
    elif wanted == "all":
        for rule in chosen:
            typer.echo(f"{rule.id}  {rule.severity:<8} {rule.title}")
    else:
        o.print_view(rule_view(chosen[0]))
