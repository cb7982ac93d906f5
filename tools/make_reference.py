"""Write the reference pages: of the command line from its options, of the API from docstrings.

python tools/make_reference.py           writes docs/reference-cli.md, docs/reference-api.md, docs/reference-rules.md,
                                         the table in docs/check.md, and the list in checkpoint/rules/__init__.py
python tools/make_reference.py --hold    writes nothing, and exits with 1 where a page is not what it would write
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

import tiewise
from tiewise.checkpoint.rules.rule import rules, rules_by_subject
from tiewise.cli.main import command_line, commands

DOCS = Path(__file__).parents[1] / "docs"
MADE = "<!-- made by `python tools/make_reference.py`: change what it describes, not this page -->\n"
INDEX_NOTE = "# `tools/make_reference.py` writes this list. Look here before you write a rule: it may be one of these."
TABLE = "<!-- table made by `python tools/make_reference.py`: `@rule` has what it says -->"  # mark in docs/check.md
ROOMS = {  # modules that `import tiewise` offers names of, in the order in which a reader meets them
    "Comparing and training": ("lab", "training", "planning", "inspection.inspection", "report"),
    "The boundary in a model": (
        "boundary.boundary",
        "boundary.hf",
        "boundary.install",
        "boundary.param_groups",
        "boundary.parallel_plan",
        "boundary.probe",
        "boundary.schedule",
        "boundary.sharing",
        "core.sharing_spec",
        "core.spec",
    ),
    "Losses, lookups, products": ("boundary.ops", "core.backends"),
    "Checkpoints": ("checkpoint", "inspection.tables"),
    "Many processes": ("boundary.sharded",),
    "Errors": ("core.errors",),
}


def cli() -> Iterator[str]:
    """Lines of the command line's page."""
    yield from ("# Command line", "", MADE)
    yield "Every command also has `--help`. What they print as JSON is described by [schemas](schemas.md)."
    for heading, panel in commands().items():
        yield from ("", f"## {heading}")
        for name in panel:
            group = typer.main.get_command(command_line([name]))
            command = group.commands[name]  # type: ignore[attr-defined]
            context = command.make_context(name, [], resilient_parsing=True)
            usage = " ".join(["tiewise", name, *command.collect_usage_pieces(context)])
            yield from ("", f"### `tiewise {name}`", "", f"`{usage}`", "", *prose(command.help or ""), "")
            for parameter in command.params:
                record = parameter.get_help_record(context)
                if record is None or parameter.name == "help":
                    continue
                written, said = record
                said, _, default = said.partition("[default: ")
                written, default = written.replace("\\[", "["), default.rstrip("]").strip("()")
                said = escaped(" ".join(said.replace("\\[", "[").split()))
                yield f"- `{written}`: {said}" + (f" Default: `{default}`." if default else "")


def api() -> Iterator[str]:
    """Lines of the page on what `import tiewise` offers."""
    yield from ("# API", "", MADE)
    yield "What `import tiewise` offers. A name is loaded when it is first used: importing the package costs nothing."
    homes: dict[str, list[str]] = {}
    for name, home in tiewise._MODULES.items():
        if name != "__version__":
            homes.setdefault(home.removeprefix("tiewise."), []).append(name)
    for heading, rooms in ROOMS.items():
        yield from ("", f"## {heading}")
        for home in [home for home in homes if any(f"{home}.".startswith(f"{room}.") for room in rooms)]:
            for name in homes.pop(home):
                yield from described(name, getattr(tiewise, name))
    assert not homes, f"no heading has {', '.join(homes)}"


def described(name: str, thing: object) -> Iterator[str]:
    """A name, how it is called, what it says of itself; of a class its own public methods and properties too."""
    yield from ("", f"### `{name}`", "")
    is_class = inspect.isclass(thing)
    if not (is_class and issubclass(thing, Exception)):
        yield from (f"`{name}{signature(thing)}`", "")
    yield from prose(inspect.getdoc(thing) or "")
    own = [(key, value) for key, value in vars(thing).items() if not key.startswith("_")] if is_class else []
    for key, value in own:
        value = getattr(value, "__func__", value)
        said = inspect.getdoc(value) if callable(value) or isinstance(value, property) else None
        if said and getattr(value, "__module__", "tiewise").startswith("tiewise"):
            called = "" if isinstance(value, property) else signature(value)
            yield from ("", f"**`.{key}{called}`**", "", *prose(said))


def signature(thing: object) -> str:
    """How a thing is called, without the types, which its docstring names where they matter."""
    try:
        given = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=p.empty) for p in given.parameters.values() if p.name not in ("self", "cls")]
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
                name, colon, said = " ".join(item.split()).partition(": ")
                yield (
                    f"- `{name}`: {escaped(said)}" if colon and " " not in name else f"- {escaped(name + colon + said)}"
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
    """Text in which nothing outside code is taken for Markdown or HTML."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>|\[\]])", r"\\\1", part) for part in parts)


def rule_page() -> Iterator[str]:
    """Lines of the page on the rules of `tiewise check`."""
    yield from ("# Rules of `tiewise check`", "", MADE)
    yield "`tiewise check --explain B012` prints one of them. [check.md](check.md) says how they are chosen and read."
    for rule in rules().values():
        yield from ("", f"## {rule.id}: {rule.title}", "", f"Severity: {rule.severity}.", "", *prose(rule.explain))
        if rule.sources:
            yield f"Seen or read in: {', '.join(escaped(source) for source in rule.sources)}."


def check_page() -> Iterator[str]:
    """Lines of the page on `tiewise check`, with the table of rules as they are."""
    before, mark, rest = (DOCS / "check.md").read_text(encoding="utf-8").partition(f"{TABLE}\n")
    assert mark, "docs/check.md lacks the mark above its table of rules"
    _, _, after = rest.lstrip("\n").partition("\n\n")  # behind the old table
    yield from (before + TABLE, "")
    yield "| id | severity | what holds in a sound checkpoint | read |"
    yield "|---|---|---|---|"
    for rule in rules().values():
        yield f"| {rule.id} | {rule.severity} | {rule.title} | {rule.reads} |"
    yield from ("", after)


def rule_index() -> Iterator[str]:
    """Lines of the package of rules: its docstring, and comments that list them by subject."""
    yield '"""Check rules, one file per subject; `rule.rules` imports every file of this folder and lists them."""'
    yield from ("", INDEX_NOTE)
    for subject, found in rules_by_subject().items():
        yield from ("#", f"# {subject}.py")
        for rule in found:
            yield f"#     {rule.id}  {rule.severity:7}  {rule.title}"


RULES = Path(tiewise.__file__).parent / "checkpoint" / "rules"
PAGES = {
    DOCS / "reference-cli.md": cli,
    DOCS / "reference-api.md": api,
    DOCS / "reference-rules.md": rule_page,
    DOCS / "check.md": check_page,
    RULES / "__init__.py": rule_index,
}


def main() -> None:
    """Write the pages, or say which of them is behind."""
    behind = []
    for path, lines in PAGES.items():
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines())).rstrip() + "\n"
        if "--hold" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            behind.append(path.name)
    if behind:
        sys.exit(f"{', '.join(behind)}: behind the code; run python tools/make_reference.py")


if __name__ == "__main__":
    main()
