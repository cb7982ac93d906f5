"""An audit as it is shown: what config and tensors say, what loaders make of it, then the findings."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.loaders import LoaderOutcome
from tiewise.checkpoint.rule import SEVERITIES, Rule, difference
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size

STYLE = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "cyan"}
ROLES = {"input": "input table", "output": "output head", "bias": "bias", "position": "positions", "map": "map"}
ROLES |= {"draft map": "draft map", "both": "both ends"}


def audit_view(audit: Audit) -> RenderableType:
    """Return an audit as it is printed. Everything that comes from the checkpoint is `Text`, never markup."""
    what = f"{audit.tensors:,} tensors, {size(audit.nbytes)}"
    loaded_as = f" as {audit.as_class}" if audit.as_class is not None else ""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_claims(audit), *_stored(audit)):
        table.add_row(name, Text(value))
    parts: list[RenderableType] = [
        Text.assemble((str(audit.path), "bold"), f"  {audit.kind}{loaded_as}, {what}", overflow="fold"),
        table,
        *([_loaders(audit.outcomes)] if audit.outcomes else []),
    ]
    for found in audit.findings:
        head = Text.assemble((found.rule, "bold"), " ", (found.severity, STYLE[found.severity]), "  ", found.evidence)
        safe = "  (safe: tiewise repair does it)" if found.safe else ""
        repair = Text.assemble(("  → ", "green"), found.repair, (safe, "dim"))
        parts.append(Padding(Group(head, repair), (0, 0, 0, 2)))
    if audit.findings:
        counts = {name: sum(f.count for f in audit.findings if f.severity == name) for name in reversed(SEVERITIES)}
        said = ", ".join(
            f"{count:,} {name}{'s' * (count > 1 and name in ('error', 'warning'))}"
            for name, count in counts.items()
            if count
        )
        parts.append(Text(f"  {said}; tiewise check --explain {audit.findings[0].rule} says more", "dim"))
    else:
        parts.append(Text(f"  nothing found by {len(audit.ran)} rules", "green"))
    return Group(*parts)


def audit_html(audit: Audit) -> str:
    """Return the same as HTML, for a notebook."""
    console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
    console.print(audit_view(audit))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def rule_view(rule: Rule) -> RenderableType:
    """Return what `--explain` prints of one rule."""
    head = Text.assemble((rule.id, "bold"), "  ", (rule.severity, STYLE[rule.severity]), "  ", rule.title)
    when = "Runs only with --deep." if rule.deep else ""
    sources = f"Sources: {', '.join(rule.sources)}" if rule.sources else ""
    about = [Text(part.replace("\n", " ").strip()) for part in rule.explain.split("What to do: ")]
    if len(about) == 2:
        about[1] = Text.assemble(("What to do: ", "bold"), about[1])
    return Group(head, Text(), *about, Text(), *(Text(line, "dim") for line in (when, sources) if line))


def _claims(audit: Audit) -> Iterator[tuple[str, str]]:
    for claim in audit.claims.levels:
        if claim.written is not None:
            what = f"{FLAG}: {str(claim.written).lower()}"
        elif claim.default is None:
            what = f"{FLAG} absent, and its class is not known"
        else:
            what = f"{FLAG} absent; its class takes {str(claim.default).lower()}"
        family = short(f" ({claim.model_type})" if claim.model_type else "")
        decides = ", decides" if claim is audit.claims.deciding and len(audit.claims.levels) > 1 else ""
        yield f"config {short(claim.level) or 'root'}", what + family + decides
    if not audit.claims.levels and audit.roles is not None:
        yield "config", "none: tying is known from the tensors alone"


def _stored(audit: Audit) -> Iterator[tuple[str, str]]:
    roles = audit.roles
    said = [
        (ROLES[role], f"{short(tensor.name)}  {tensor.dtype} {list(tensor.shape)}  {size(tensor.nbytes)}")
        for role, tensor in audit.parts
        if role in ROLES
    ]
    inputs = sum(role == "input" for role, _ in audit.parts)  # they come first
    yield from said[:inputs]
    if roles is not None and roles.output is None and roles.input is not None:
        used = "not stored: the input table is used" if audit.claims.tied else "not stored"
        yield ROLES["output"], "none: this class has no token head" if roles.headless else used
    yield from said[inputs:]
    for role in dict.fromkeys(role for role, _ in audit.parts if role not in ROLES):  # a line for all of a role
        first, *rest = (tensor for other, tensor in audit.parts if other == role)
        more = f" and {len(rest):,} more, {size(sum(each.nbytes for each in (first, *rest)))} in all" if rest else ""
        yield role, f"{short(first.name)}  {first.dtype} {list(first.shape)}  {size(first.nbytes)}{more}"
    if audit.ends is not None:
        spare = f"; {size(audit.spare)} stored twice" if audit.spare else ""
        yield "the two are", difference(audit.ends) + spare
    elif roles is not None and roles.input is not None and roles.output is not None and audit.kind != "draft":
        yield "the two are", "not compared" + ("" if audit.scan else " (headers only)")


def _loaders(outcomes: tuple[LoaderOutcome, ...]) -> Padding:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("loader", "makes of it", "that is"):
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        basis = f"from reading {outcome.source}" if outcome.predicted else outcome.source
        loader = Text.assemble(f"{outcome.loader} {outcome.versions}\n", (basis, "dim"))
        word = Text(outcome.outcome, STYLE["error"] if outcome.right is False else "")
        table.add_row(loader, word, Text(outcome.sentence))
    return Padding(table, (0, 0, 0, 2))
