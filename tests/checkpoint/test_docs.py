"""The documentation names the rules that there are."""

from pathlib import Path

from tiewise.checkpoint.rules import RULES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_rules_is_the_catalogue():
    lines = (DOCS / "check.md").read_text(encoding="utf-8").splitlines()
    table = [line.split("|")[1:4] for line in lines if line.startswith("| B0")]
    assert [tuple(cell.strip() for cell in row) for row in table] == [(r.id, r.severity, r.title) for r in RULES]
