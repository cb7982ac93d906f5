"""`tiewise sweep --claims` and `--claim ID`: published claims, their rules and verdicts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiewise.cli import options as o

if TYPE_CHECKING:
    from rich.console import Group

    from tiewise.lab.claims.registry import PublishedClaim

COLUMNS = ("claim", "verdict", "measured, or price", "paper", "published")
NARROW = 3  # first columns, which any terminal shows
WIDE = 120  # columns of a terminal from which paper and published figure are shown


def list_claims(*, as_json: bool) -> None:
    """Print how many claims have each verdict, then a table of all."""
    from tiewise.lab.claims.listing import claim_records, summary

    if as_json:
        return o.print_json({"summary": summary(), "claims": claim_records()})
    o.print_view(_claims_view)


def _claims_view(width: int) -> Group:
    """Return the summary and the table of claims for a terminal of this width."""
    from rich.console import Group
    from rich.text import Text

    from tiewise.lab.claims.listing import claim_rows, summary
    from tiewise.report.views import rich_table

    count = len(COLUMNS) if width >= WIDE else NARROW
    table = rich_table([row[:count] for row in (COLUMNS, *claim_rows())])
    for column in table.columns[:NARROW]:
        column.no_wrap = True
    hint = Text("tiewise sweep --claim ID prints the rule of one, and runs it.", "dim")
    return Group(Text(summary(), "bold"), table, hint)


def carry_out_claim(claim: PublishedClaim, out: Path, options: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    """Print a claim and its rule, run it, and print the verdict.

    `options` are those of `run_claim`.
    """
    text = f"{claim.name}, {claim.paper} ({claim.year}), {claim.where}: {claim.says}\nRule {claim.rule_hash}: "
    o.print_to_stderr(f"{text}{claim.rule_text}.")
    command = shlex.join(["tiewise", "sweep", "--claim", claim.name, "--out", str(out)])
    with o.interruptible(f"; resume with: {command}"):
        o.hush_libraries()
        from tiewise.lab.claims.run import run_claim
        from tiewise.training.compare import Display
        from tiewise.training.worker_process import settle

        settle()
        result = run_claim(claim, out, Display.on_stderr(quiet=quiet), **options)
    if as_json:
        return o.print_json(result.record())
    o.print_text(result.answer_text())
