"""Write the reference pages: of the command line from its options, of the API from docstrings.

python tools/make_reference.py           writes docs/reference-cli.md, docs/reference-api.md, docs/reference-rules.md,
                                         the list in checkpoint/rules/__init__.py, and a table in docs/loss.md
python tools/make_reference.py --hold    writes nothing, and exits with 1 if a page differs from what it would write
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import tiewise
from tiewise.boundary.ops.backend_coverage import COLUMNS, list_coverage
from tiewise.checkpoint.rules.rule import rules, rules_by_subject
from tiewise.cli.commands import commands
from tiewise.cli.main import click_command

DOCS = Path(__file__).parents[1] / "docs"
NOTICE = "<!-- made by `python tools/make_reference.py`: change what it describes, not this page -->\n"
TABLE_NOTICE = "<!-- made by `python tools/make_reference.py` -->"
INDEX_NOTE = "# `tools/make_reference.py` writes this list. Look here before you write a rule: it may be one of these."
NAMESPACES = {  # package → title and first sentence of its part of the page
    "tiewise": ("Top level", "The names of daily use."),
    "tiewise.checkpoint": ("`tiewise.checkpoint`", "Audits and rewrites of stored checkpoints, without torch."),
    "tiewise.boundary": ("`tiewise.boundary`", "The training library: both ends of a model, losses, devices."),
    "tiewise.lab": ("`tiewise.lab`", "Experiments: comparisons, single runs, sweeps, inspections."),
}


def cli() -> Iterator[str]:
    """Yield the lines of the command line's page."""
    yield from ("# Command line", "", NOTICE)
    yield "Every command also has `--help`. What they print as JSON is described by [schemas](reference-schemas.md)."
    panel = ""
    for name, described in commands().items():
        if described.panel != panel:
            panel = described.panel
            yield from ("", f"## {panel}")
        command = click_command(name)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["tiewise", name, *command.collect_usage_pieces(context)])
        yield from ("", f"### `tiewise {name}`", "", f"`{usage}`", "", *prose(command.help or ""), "")
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is None or parameter.name == "help":
                continue
            written, text = record
            text, _, default = text.partition("[default: ")
            written, default = written.replace("\\[", "["), default.rstrip("]").strip("()")
            text = escaped(" ".join(text.replace("\\[", "[").split()))
            yield f"- `{written}`: {text}" + (f" Default: `{default}`." if default else "")


def api() -> Iterator[str]:
    """Yield the lines of the page on the public names, one part for each namespace."""
    yield from ("# API", "", NOTICE)
    yield "A name is loaded when it is first used: importing a package costs nothing."
    described_names: set[str] = set()
    for namespace, (title, sentence) in NAMESPACES.items():
        package = import_module(namespace)
        names = [name for name in dir(package) if not name.startswith("_")]
        again = [name for name in names if name in described_names]
        yield from ("", f"## {title}", "", sentence)
        if again:
            yield f"It also has {', '.join(f'`{name}`' for name in again)} of the top level."
        for name in names:
            if name not in described_names:
                yield from described(f"{namespace}.{name}", getattr(package, name))
                described_names.add(name)


def described(name: str, value: object) -> Iterator[str]:
    """Yield the entry of a name: its signature and its docstring.

    A class also gets entries of its public methods and properties.
    """
    yield from ("", f"### `{name}`", "")
    is_class = inspect.isclass(value)
    if not (is_class and issubclass(value, Exception)):
        yield from (f"`{name.rpartition('.')[2]}{signature(value)}`", "")
    yield from prose(inspect.getdoc(value) or "")
    members = [(key, member) for key, member in vars(value).items() if not key.startswith("_")] if is_class else []
    for key, member in members:
        member = getattr(member, "__func__", member)
        docstring = inspect.getdoc(member) if callable(member) or isinstance(member, property) else None
        if docstring and getattr(member, "__module__", "tiewise").startswith("tiewise"):
            called = "" if isinstance(member, property) else signature(member)
            yield from ("", f"**`.{key}{called}`**", "", *prose(docstring))


def signature(value: object) -> str:
    """Return the parameters of a function or class without their types.

    Docstrings name the types that matter.
    """
    try:
        full = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=p.empty) for p in full.parameters.values() if p.name not in ("self", "cls")]
    text = str(inspect.Signature(plain))
    return re.sub(r"<(?:factory|function|object)[^>]*>", "…", text)


def prose(docstring: str) -> Iterator[str]:
    """Return a docstring as Markdown.

    Indented blocks keep their form; `Args:` and similar sections become lists.
    """
    for block in re.split(r"\n{2,}", docstring.strip()):
        head, _, rest = block.partition("\n")
        if re.fullmatch(r"[A-Z]\w+:", head) and rest:
            yield from (f"*{head[:-1]}*", "")
            for item in re.split(r"\n(?= {4}\S)", rest):
                name, colon, text = " ".join(item.split()).partition(": ")
                yield (
                    f"- `{name}`: {escaped(text)}" if colon and " " not in name else f"- {escaped(name + colon + text)}"
                )
        elif (
            block.startswith((">>>", "    ", "│"))
            or re.search(r"^( {2,}|>>>|\|)", block, re.M)
            or "  " in block.strip()
        ):
            yield from ("```text", block, "```")
        else:
            yield escaped(block)
        yield ""


def escaped(text: str) -> str:
    """Return text in which Markdown and HTML characters outside code are escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", part) for part in parts)


def rule_page() -> Iterator[str]:
    """Yield the lines of the page on the rules of `tiewise check`."""
    yield from ("# Rules of `tiewise check`", "", NOTICE)
    yield "`tiewise check --explain B012` prints one of them. [check.md](check.md) says how to choose rules."
    yield from ("", "| id | severity | rule of a sound checkpoint | it reads |", "|---|---|---|---|")
    for rule in rules().values():
        yield f"| {rule.id} | {rule.severity} | {rule.title} | {rule.reads} |"
    for rule in rules().values():
        yield from ("", f"## {rule.id}: {rule.title}", "", f"Severity: {rule.severity}.", "", *prose(rule.explain))
        if rule.sources:
            yield f"Seen or read in: {', '.join(escaped(source) for source in rule.sources)}."


def rule_index() -> Iterator[str]:
    """Yield the lines of the package of rules: its docstring, and comments by subject."""
    yield '"""Check rules, one file per subject; `rule.rules` imports every file of this folder and lists them."""'
    yield from ("", INDEX_NOTE)
    for subject, subject_rules in rules_by_subject().items():
        yield from ("#", f"# {subject}.py")
        for rule in subject_rules:
            yield f"#     {rule.id}  {rule.severity:7}  {rule.title}"


RULES = Path(tiewise.__file__).parent / "checkpoint" / "rules"


def loss_page() -> Iterator[str]:
    """Yield the lines of `docs/loss.md`, with the table of the backends as they are now."""
    lines = (DOCS / "loss.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(TABLE_NOTICE) + 2
    end = lines.index("", start)
    yield from lines[:start]
    yield f"| | {' | '.join(f'`{name}`' for name in COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for row in list_coverage():
        yield f"| {row.name} | {' | '.join('yes' if name in row.backends else 'no' for name in COLUMNS)} |"
    yield from lines[end:]


PAGES = {
    DOCS / "reference-cli.md": cli,
    DOCS / "reference-api.md": api,
    DOCS / "reference-rules.md": rule_page,
    RULES / "__init__.py": rule_index,
    DOCS / "loss.md": loss_page,
}


def main() -> None:
    """Write the pages, or list those that differ from the code."""
    outdated = []
    for path, lines in PAGES.items():
        text = "\n".join(lines()).rstrip() + "\n"
        if lines is not loss_page:  # its examples have blank lines of their own
            text = re.sub(r"\n{3,}", "\n\n", text)
        if "--hold" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(path.name)
    if outdated:
        sys.exit(f"{', '.join(outdated)}: behind the code; run python tools/make_reference.py")


if __name__ == "__main__":
    main()
