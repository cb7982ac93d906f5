"""The documentation names the rules that there are."""

from pathlib import Path

from tiewise.checkpoint.rule import rules

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_rules_is_the_catalogue():
    lines = (DOCS / "check.md").read_text(encoding="utf-8").splitlines()
    table = [line.split("|")[1:4] for line in lines if line.startswith("| B0")]
    said = [(rule.id, rule.severity, rule.title) for rule in rules().values()]
    assert [tuple(cell.strip() for cell in row) for row in table] == said
