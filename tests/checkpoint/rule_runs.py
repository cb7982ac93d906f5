"""Tables of cases of rules: what is written, which findings it has, and that `repair` does what they promise."""

import pytest
from tiny_checkpoints import written

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import repair
from tiewise.checkpoint.rules.rule import rules

# 24 rows are no multiple of 64; what loaders make of whatever else is found; some of these families scale
ALWAYS = {"B042", "B080", "B090"}


def table_of(cases):
    """The rows of a table for `parametrize`, each named after its first column and its number."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{c[0]} {n}".lower()) for n, c in enumerate(cases)])


def fires(folder, case, **settings):
    """Check one row: (rules, severity, place, whether it is safe to repair, how the folder is written, *words).

    Of the rules, which are all that find anything (ALWAYS apart), the first is described; the words stand in its
    evidence or, behind a line break, its way out. Where it is safe, nothing is left after `repair` but two tables that
    were one, which are the user's to decide.
    """
    names, severity, where, safe, how, *words = case
    path = written(folder / "a", how)
    audit = check(path, deep=settings.get("scan", True), **settings)
    assert all(finding.where and finding.evidence and finding.repair for finding in audit.findings)
    rule, *_ = names.split()
    assert {rule} | {finding.rule for finding in audit.findings} - ALWAYS == set(names.split())
    (found,) = [finding for finding in audit.findings if finding.rule == rule]
    assert (found.severity, found.where, found.safe) == (severity, where, safe), found
    said = f"{found.evidence}\n{found.repair}\n"
    for text in words:
        assert text.replace("PATH", str(path)) in said
    if safe:
        mended = {finding.rule for finding in audit.findings if finding.safe}
        left = check(repair(path, folder / "mended").to)
        assert mended.isdisjoint(finding.rule for finding in left.findings)
        assert {finding.rule for finding in left.at_least("warning")} <= {"B015"}


def told(findings):
    return [f"{one.rule} {one.severity} {one.where}" for one in findings]


def run(rule, path, **settings):
    """Findings of one rule."""
    return list(rules()[rule].check(Facts(open_folder(path), **settings)))


def silent(folder, case):
    """Check one row: (rules, how the folder is written). None of them finds anything."""
    names, how = case
    path = written(folder / "a", how)
    for rule in names.split():
        assert run(rule, path) == [], rule
