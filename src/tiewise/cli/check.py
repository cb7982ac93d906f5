"""`tiewise check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import CheckpointError, suggest_choices

if TYPE_CHECKING:
    from tiewise.checkpoint.baseline import Baseline
    from tiewise.checkpoint.formats.answer import CheckedPath
    from tiewise.checkpoint.formats.table import OutputFormat
    from tiewise.checkpoint.rules.rule import Rule

COMPARED, READING = "Adapters, drafts, exports, and planned uses", "Reading"  # panels of the help
FAIL_ON = ("fatal", "error", "warning", "info", "never")


def check(
    paths: list[Path] = typer.Argument(
        None,
        metavar="[PATH]...",
        help="Checkpoint or adapter folder, .safetensors, .gguf or .onnx file, or hf://ORG/MODEL\\[@REVISION]\\[/PATH].",
    ),
    full: bool = typer.Option(
        False,
        "--full",
        help="List each loader with its versions, its outcome and the source. Of hf://, compare tables whole.",
    ),
    deep: bool = typer.Option(False, "--deep", help="Read every row: NaN, empty and duplicate rows, equal tensors."),
    fail_on: str = typer.Option(
        "error", metavar="SEVERITY", help="Exit with 1 from this severity on: fatal, error, warning, info; or never."
    ),
    select: str = typer.Option(None, metavar="IDS", help="Apply only these rules: B012,B02."),
    ignore: str = typer.Option(None, metavar="IDS", help="Leave these rules out."),
    explain: str = typer.Option(None, metavar="ID", help="Explain a rule, and stop. `all` lists the rules."),
    base: Path = typer.Option(
        None, metavar="DIR", help="For an adapter: the checkpoint that it changes.", rich_help_panel=COMPARED
    ),
    original: Path = typer.Option(
        None,
        metavar="DIR",
        help="For a GGUF or ONNX file: the checkpoint that it was made from.",
        rich_help_panel=COMPARED,
    ),
    target: Path = typer.Option(
        None, metavar="DIR", help="For a draft: the checkpoint that it proposes tokens to.", rich_help_panel=COMPARED
    ),
    as_class: str = typer.Option(
        None, "--as", metavar="CLASS", help="Class of transformers that will load it.", rich_help_panel=COMPARED
    ),
    quantise: Path = typer.Option(
        None,
        metavar="FILE",
        help="JSON config of a planned quantisation: does it fit the two ends?",
        rich_help_panel=COMPARED,
    ),
    world: int = typer.Option(
        None, metavar="N", help="Number of ranks: can they share the tables' rows?", rich_help_panel=COMPARED
    ),
    headers: bool = typer.Option(
        False, "--headers", help="Read headers only, so that equal tables are not recognised.", rich_help_panel=READING
    ),
    no_build: bool = typer.Option(
        False,
        "--no-build",
        envvar="TIEWISE_NO_BUILD",
        help="Do not build the class with transformers, which shows if every tensor is loaded.",
        rich_help_panel=READING,
    ),
    all_headers: bool = typer.Option(
        False,
        "--all-headers",
        help="Of hf://, read the headers of all shards, not only those with a table.",
        rich_help_panel=READING,
    ),
    follow_links: bool = o.FOLLOW_LINKS,
    baseline: Path = typer.Option(
        None,
        metavar="FILE",
        help="Report only findings that this JSON of an earlier check lacks.",
        rich_help_panel=o.RESULTS,
    ),
    format_: str = typer.Option(
        None,
        "--format",
        metavar="FORMAT",
        help="Output: text, json, sarif, github (annotations) or agent (lines of key=value).",
        show_default="text",
        rich_help_panel=o.RESULTS,
    ),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Check a checkpoint's input embedding and output head, and say how to repair faults.

    It reports the tables that the files store and how each loader reads them. It runs no code of the checkpoint, opens
    no pickle and writes nothing.
    """
    if explain is not None:
        _explain(explain, json_)
        return
    if not paths:
        raise typer.BadParameter("give a checkpoint: a folder, a .safetensors, a .gguf or a .onnx file")
    form = _format(format_, json_)
    if fail_on not in FAIL_ON:
        problem = f"--fail-on {fail_on}; {suggest_choices(fail_on, FAIL_ON)}"
        _print_refusal(form, paths, problem)
        raise typer.BadParameter(problem)
    options: dict[str, Any] = {"base": base, "original": original, "target": target, "world": world}
    options |= {"as_class": as_class, "quantise": quantise, "deep": deep, "scan": not headers}
    options |= {"follow_links": follow_links, "build": not no_build}
    options |= {"all_headers": all_headers, "full": full}
    options |= {"select": o.split_list(select), "ignore": o.split_list(ignore)}
    from tiewise.checkpoint.hub_names import checkpoint_path

    try:
        earlier = _baseline(baseline)
    except CheckpointError as error:
        _print_refusal(form, paths, str(error))
        raise
    answers = []
    for path in map(checkpoint_path, paths):
        answer = _answer(path, options, earlier, quiet=quiet)
        answers.append(answer)
        if form.render is None:
            _print_text(answer, full=full, named=len(paths) > 1)
    if form.render is not None:
        o.print_text(form.render(answers))
    _exit(answers, fail_on)


def _format(name: str | None, json_: bool) -> OutputFormat:
    """Return the format that `--format` names; `--json` is the same as `--format json`."""
    from tiewise.checkpoint.formats.table import FORMATS, JSON, TEXT

    if json_ and name not in (None, JSON):
        raise typer.BadParameter(f"--json with --format {name}: leave one of them out")
    if json_:
        return FORMATS[JSON]
    if name is None:
        return FORMATS[TEXT]
    if name not in FORMATS:
        raise typer.BadParameter(f"--format {name}; {suggest_choices(name, FORMATS)}")
    return FORMATS[name]


def _print_refusal(form: OutputFormat, paths: list[Path], problem: str) -> None:
    """Print, in a format for programs, that an option keeps every path from being checked."""
    from tiewise.checkpoint.formats.answer import CheckedPath

    if form.render is not None:
        o.print_text(form.render([CheckedPath(path, error=problem) for path in paths]))


def _baseline(path: Path | None) -> Baseline | None:
    """Read the file of `--baseline`; None without one."""
    from tiewise.checkpoint.baseline import read_baseline

    if path is None:
        return None
    return read_baseline(path)


def _answer(path: Path, options: dict[str, Any], earlier: Baseline | None, *, quiet: bool) -> CheckedPath:
    """Check one path; a path that cannot be read gives an answer with the error.

    Args:
        path: the checkpoint.
        options: arguments of `check`.
        earlier: findings that are not reported again; None reports all.
        quiet: show no progress.
    """
    from tiewise.checkpoint.audit import check as audit_of
    from tiewise.checkpoint.formats.answer import CheckedPath

    try:
        with o.interruptible(f" while reading {path}"), o.progress_bar(quiet, reads=True):
            audit = audit_of(path, **options)
    except CheckpointError as error:
        o.print_to_stderr(f"tiewise: {error}")
        return CheckedPath(path, error=str(error))
    if earlier is not None:
        audit = earlier.new_of(audit)
    return CheckedPath(path, audit)


def _print_text(answer: CheckedPath, *, full: bool, named: bool) -> None:
    """Print an audit for a person; an error was printed on stderr."""
    from tiewise.checkpoint.audit_view import audit_view

    if answer.audit is not None:
        o.print_view(audit_view(answer.audit, full, named))


def _exit(answers: list[CheckedPath], fail_on: str) -> None:
    """End with the exit code of the answers.

    It is 2 if a path could not be read, and 1 if a finding is as severe as `--fail-on`.
    """
    audits = [answer.audit for answer in answers if answer.audit is not None]
    if len(audits) < len(answers):
        raise typer.Exit(2)
    if fail_on != "never" and any(audit.at_least(fail_on) for audit in audits):
        raise typer.Exit(1)


def _explain(name: str, json_: bool) -> None:
    """Print what one rule is about, or a list of all rules."""
    from tiewise.checkpoint.audit_view import rule_view
    from tiewise.checkpoint.rules.rule import rules

    by_id = rules()
    selected = list(by_id.values())
    if name != "all":
        if name.upper() not in by_id:
            remedy = f"{suggest_choices(name, by_id, 'rules are')}; `--explain all` lists them"
            raise CheckpointError(f"no rule {name!r}", remedy)
        selected = [by_id[name.upper()]]
    if json_:
        o.print_json({"rules": [_rule_record(rule) for rule in selected]})
    elif name == "all":
        for rule in selected:
            typer.echo(f"{rule.id}  {rule.severity:<8} {rule.title}")
    else:
        o.print_view(rule_view(selected[0]))


def _rule_record(rule: Rule) -> dict[str, Any]:
    """Return a rule's description as JSON."""
    keys = ("id", "severity", "title", "explain", "sources", "deep")
    return {key: getattr(rule, key) for key in keys}
