"""Views of an audit and of a rule, as `tiewise check` prints them.

Text from the checkpoint is always a rich `Text`, never markup.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tiewise.checkpoint.audit import Audit, Part
from tiewise.checkpoint.audit_verdict import as_sentence, verdict
from tiewise.checkpoint.claims import FLAG, Claim
from tiewise.checkpoint.families import family
from tiewise.checkpoint.loader_columns import PHRASES, LoaderOutcome, named_loaders
from tiewise.checkpoint.rules.rule import SEVERITIES, Finding, Rule, counted, difference, flag_text, names
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core import Late
from tiewise.core.files import format_bytes

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.padding import Padding
    from rich.table import Table

rich_box, rich_console, rich_padding = Late("rich.box"), Late("rich.console"), Late("rich.padding")
rich_table, rich_text = Late("rich.table"), Late("rich.text")
Row: TypeAlias = tuple[str, str]  # label, value

STYLE = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "cyan"}
# {whether the loaded model uses the stored tensors: (word, style)}
RIGHT = {True: ("right", "green"), False: ("WRONG", "red"), None: ("unknown", "yellow")}
_PLURALS = {"error": "errors", "warning": "warnings"}  # of severities
ROLES = {  # {role with one line per tensor: its label}; all tensors of another role share one line
    "input": "input table",
    "output": "output head",
    "bias": "bias",
    "position": "positions",
    "map": "map",
    "draft map": "draft map",
    "both": "both ends",
}


def html(audit: Audit) -> str:
    """Return an audit as HTML, for a notebook."""
    console = rich_console.Console(file=io.StringIO(), record=True, width=120, highlight=False)
    console.print(audit_view(audit))
    return str(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))


def audit_view(audit: Audit, full: bool = False, named: bool = False) -> Group:
    """Return an audit for the terminal: verdict, findings, loaders, and the tables that were read.

    Args:
        audit: the audit.
        full: list each loader with its versions, its outcome and the source, instead of groups of loaders.
        named: start with the path, to distinguish several audits.
    """
    blocks: list[RenderableType] = [_verdict(audit, named)]
    blocks += [_finding(finding) for finding in audit.findings]
    if audit.outcomes:
        loaders = _loaders if full else _groups
        blocks.append(loaders(audit.outcomes))
    blocks += [_title(audit), _summary(audit), _closing(audit, full)]
    group: Group = rich_console.Group(*blocks)
    return group


def _verdict(audit: Audit, named: bool) -> RenderableType:
    """Return the first line: the verdict, after the path if there are several."""
    word, colon, rest = verdict(audit).partition(":")
    path = f"{audit.path}: " * named
    style = f"bold {STYLE.get(audit.worst or '', 'green')}"
    line: RenderableType = rich_text.Text.assemble((path, "bold"), (word, style), colon, rest, overflow="fold")
    return line


def _closing(audit: Audit, full: bool) -> RenderableType:
    """Return the last line: the number of findings, and the commands that say more."""
    more = []
    if audit.findings:
        more.append(f"--explain {audit.findings[0].rule}")
    if audit.outcomes and not full:
        more.append("--full lists each loader with its source")
    text = f"  {counted_findings(audit)}."
    if more:
        text += f" More: {'; '.join(more)}."
    line: RenderableType = rich_text.Text(text, "dim")
    return line


def _title(audit: Audit) -> RenderableType:
    """Return the path, the type of checkpoint, and the number and bytes of the tensors."""
    checkpoint_type = audit.kind
    if audit.as_class is not None:
        checkpoint_type += f" as {audit.as_class}"
    about = f": {checkpoint_type}, {counted(audit.tensors, 'tensor')}, {format_bytes(audit.nbytes)}"
    title: RenderableType = rich_text.Text.assemble("  ", (str(audit.path), "bold"), about, overflow="fold")
    return title


def _summary(audit: Audit) -> Table:
    """Return the rows of the summary as a table."""
    table: Table = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 4))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in summary_rows(audit):
        table.add_row(label, rich_text.Text(value))
    return table


def _groups(outcomes: Sequence[LoaderOutcome]) -> Table:
    """Return one line for each outcome, with the loaders that have it; wrong outcomes first."""
    table: Table = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for right in (False, None, True):
        word, style = RIGHT[right]
        for outcome, loaders in _by_outcome(outcomes, right).items():
            table.add_row(
                rich_text.Text(word, style), PHRASES[outcome], rich_text.Text(named_loaders(loaders, outcomes))
            )
    return table


def _by_outcome(outcomes: Iterable[LoaderOutcome], right: bool | None) -> dict[str, list[LoaderOutcome]]:
    """Return {outcome: loaders that have it} of the loaders that are right, wrong or undecided."""
    groups: dict[str, list[LoaderOutcome]] = {}
    for outcome in outcomes:
        if outcome.right is right:
            groups.setdefault(outcome.outcome, []).append(outcome)
    return groups


def _loaders(outcomes: Sequence[LoaderOutcome]) -> Padding:
    """Return the outcome of each loader, with its source, as a table."""
    table: Table = rich_table.Table(box=rich_box.SIMPLE_HEAD, pad_edge=False)
    for name in ("loader", "outcome", "which means"):
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        basis = outcome.source
        if outcome.predicted:
            basis = f"from reading {basis}"
        loader = rich_text.Text.assemble(f"{outcome.loader} {outcome.versions}\n", (basis, "dim"))
        style = STYLE["error"] if outcome.right is False else ""
        table.add_row(loader, rich_text.Text(outcome.outcome, style), rich_text.Text(outcome.sentence))
    return _indented(table)


def _finding(finding: Finding) -> Group:
    """Return a finding: its evidence, and one line for each fix.

    A line with a command is never cut into two, so that it can be copied.
    """
    severity = (finding.severity, STYLE[finding.severity])
    evidence = as_sentence(finding.evidence)
    lines = [_indented(rich_text.Text.assemble((finding.rule, "bold"), " ", severity, "  ", evidence))]
    for fix in finding.fixes:
        if "tiewise " in fix or fix.startswith("mv -- "):
            lines.append(rich_text.Text.assemble(("    → ", "green"), fix, no_wrap=True, overflow="ignore"))
        else:
            lines.append(_indented(rich_text.Text.assemble(("  → ", "green"), fix)))
    group: Group = rich_console.Group(*lines)
    return group


def _indented(block: RenderableType) -> Padding:
    """Return a block indented by two columns."""
    padding: Padding = rich_padding.Padding(block, (0, 0, 0, 2))
    return padding


def counted_findings(audit: Audit) -> str:
    """Return the findings by severity in words, e.g. "1 error, 2 warnings"."""
    if not audit.findings and not audit.in_baseline:
        return f"{len(audit.ran)} rules found no fault"
    counts = Counter[str]()
    for finding in audit.findings:
        counts[finding.severity] += finding.count
    words = []
    for severity in reversed(SEVERITIES):
        count = counts[severity]
        if count > 1:
            words.append(f"{count:,} {_PLURALS.get(severity, severity)}")
        elif count == 1:
            words.append(f"1 {severity}")
    if audit.in_baseline:
        words.append(f"{sum(finding.count for finding in audit.in_baseline):,} known")
    return ", ".join(words)


def rule_view(rule: Rule) -> Group:
    """Return a rule as `--explain` prints it."""
    blank = rich_text.Text()
    head = rich_text.Text.assemble((rule.id, "bold"), "  ", (rule.severity, STYLE[rule.severity]), "  ", rule.title)
    about, *advice = [part.replace("\n", " ").strip() for part in rule.explain.split("What to do: ")]
    blocks = [head, blank, rich_text.Text(about)]
    if len(advice) == 1:
        blocks.append(rich_text.Text.assemble(("What to do: ", "bold"), advice[0]))
    else:
        blocks += [rich_text.Text(part) for part in advice]
    blocks.append(blank)
    if rule.deep:
        blocks.append(rich_text.Text("Runs only with --deep.", "dim"))
    blocks.append(rich_text.Text(f"Sources: {', '.join(rule.sources)}", "dim"))
    group: Group = rich_console.Group(*blocks)
    return group


def summary_rows(audit: Audit) -> list[Row]:
    """Return (label, value) rows on the config's claims and the stored tensors of both ends."""
    return [*_claims(audit), *_stored(audit), *_of_hub(audit)]


def _of_hub(audit: Audit) -> Iterator[Row]:
    """Yield rows on a repository's commit, and on the shards that were not read."""
    if audit.hub is None:
        return
    yield "commit", audit.hub.commit
    if audit.hub.unread:
        shards = counted(len(audit.hub.unread), "shard")
        yield "not read", f"{shards} without a table or a tied tensor ({names(audit.hub.unread)}); see --all-headers"


def _claims(audit: Audit) -> Iterator[Row]:
    """Yield a row for each level of the config, and one for an unknown family."""
    levels = audit.claims.levels
    for claim in levels:
        value = _claim(claim)
        if claim is audit.claims.deciding and len(levels) > 1:
            value += ", decides"
        yield f"config {short(claim.level) or 'root'}", value
    if audit.roles is None:
        return
    if not levels:
        yield "config", "none: tying is known from the tensors alone"
        return
    root = family(levels[0].model_type)
    if not root.has_facts:
        yield "family", f"{root.unknown_message}: its ends were identified by {audit.roles.source}"


def _claim(claim: Claim) -> str:
    """Return the flag of one level of the config, and its model type."""
    type_text = short(f" ({claim.model_type})" if claim.model_type else "")
    if claim.written is not None:
        return f"{FLAG}: {flag_text(claim.written)}{type_text}"
    if claim.default is None:
        return f"{FLAG} absent, and its class is not known{type_text}"
    return f"{FLAG} absent; its class takes {flag_text(claim.default)}{type_text}"


def _stored(audit: Audit) -> Iterator[Row]:
    """Yield a row for each stored part, and one on the likeness of both tables."""
    inputs = [part for part in audit.parts if part.role == "input"]
    others = [part for part in audit.parts if part.role != "input"]
    yield from _single_rows(inputs)
    yield from _absent_head(audit)
    yield from _single_rows(others)
    yield from _rows_by_role(audit)
    yield from _likeness(audit)


def _single_rows(parts: Iterable[Part]) -> Iterator[Row]:
    """Yield a row for each part whose role is in `ROLES`."""
    for part in parts:
        if part.role in ROLES:
            yield ROLES[part.role], _described(part.tensor)


def _described(tensor: Stored) -> str:
    """Return name, type, shape and bytes of a tensor."""
    return f"{short(tensor.name)}  {tensor.dtype} {list(tensor.shape)}  {format_bytes(tensor.nbytes)}"


def _absent_head(audit: Audit) -> Iterator[Row]:
    """Yield a row on the output head if only the input table is stored."""
    roles = audit.roles
    if roles is None or roles.input is None:
        return
    if roles.output is not None:
        return
    if roles.headless:
        value = "none: this class has no token head"
    elif audit.claims.tied:
        value = "not stored: the input table is used"
    else:
        value = "not stored"
    yield ROLES["output"], value


def _rows_by_role(audit: Audit) -> Iterator[Row]:
    """Yield one row for each role that is not in `ROLES`."""
    by_role = dict[str, list[Stored]]()
    for part in audit.parts:
        if part.role not in ROLES:
            by_role.setdefault(part.role, []).append(part.tensor)
    for role, tensors in by_role.items():
        value = _described(tensors[0])
        if len(tensors) > 1:
            value += f" and {len(tensors) - 1:,} more, {format_bytes(sum(tensor.nbytes for tensor in tensors))} in all"
        yield role, value


def _likeness(audit: Audit) -> Iterator[Row]:
    """Yield a row on the likeness of both tables, if both are stored."""
    roles = audit.roles
    if audit.ends is not None:
        value = difference(audit.ends)
        if audit.spare:
            value += f"; {format_bytes(audit.spare)} stored twice"
        yield "both tables", value
        return
    if roles is None or audit.kind == "draft":
        return
    if len(roles.one_table_per_end) == 2:
        yield "both tables", "not compared" if audit.scan else "not compared (headers only)"
