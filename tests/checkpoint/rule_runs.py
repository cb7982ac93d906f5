"""Helpers that check tables of rule cases: the expected findings, and that `repair` resolves safe ones."""

import pytest
from tiny_checkpoints import written

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rewrite import repair
from tiewise.checkpoint.rules.rule import rules

# rules that other findings imply: 24 rows are no multiple of 64, loaders differ, and some families scale logits
ALWAYS = {"B042", "B080", "B090"}

# {rule whose finding `repair` resolves: rules of the warnings that it may leave, as their repair is the user's choice}
REMAINING = {
    "B012": ("B015",),  # two tables that were once one
    # a packed end, which some engines read without its scale, and SGLang with some quantisations
    "B050": ("B052", "B080"),
    "B054": ("B052", "B080"),
}
FOLLOWING = ("B015",)  # warnings about the repaired tables


def table_of(cases):
    """Parametrize a test over a table; each id is the first column and the number of the row."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{c[0]} {n}".lower()) for n, c in enumerate(cases)])


def assert_fires(folder, case, **settings):
    """Check one row: (rules, severity, place, whether the repair is safe, how to write the folder, *words).

    Only the named rules (and those in ALWAYS) may report findings. Severity, place and words describe the first rule;
    words with a line break are part of its repair. If the repair is safe, `repair` leaves no warning except those in
    `REMAINING`, and of these only `FOLLOWING` may be new.
    """
    names, severity, where, safe, how, *words = case
    path = written(folder / "a", how)
    audit = check(path, deep=settings.get("scan", True), **settings)
    assert all(finding.where and finding.evidence and finding.repair for finding in audit.findings)
    rule, *_ = names.split()
    assert {rule} | {finding.rule for finding in audit.findings} - ALWAYS == set(names.split())
    (found,) = [finding for finding in audit.findings if finding.rule == rule]
    assert (found.severity, found.where, found.safe) == (severity, where, safe), found
    report = f"{found.evidence}\n{found.repair}\n"
    for text in words:
        assert text.replace("PATH", str(path)) in report
    if safe:
        mended = {finding.rule for finding in audit.findings if finding.safe}
        left = check(repair(path, folder / "mended").to)
        assert mended.isdisjoint(finding.rule for finding in left.findings)
        before = summaries(audit.findings)
        for finding in left.at_least("warning"):
            assert finding.rule in REMAINING.get(rule, ()), finding
            is_of_the_result = finding.rule in FOLLOWING or finding.rule in ALWAYS
            assert is_of_the_result or summaries([finding])[0] in before, finding


def summaries(findings):
    return [f"{one.rule} {one.severity} {one.where}" for one in findings]


def run_rule(rule, path, **settings):
    """Return the findings of one rule."""
    return list(rules()[rule].check(Facts(open_folder(path), **settings)))


def assert_silent(folder, case):
    """Check that no rule of one row, (rules, how to write the folder), reports a finding."""
    names, how = case
    path = written(folder / "a", how)
    for rule in names.split():
        assert run_rule(rule, path) == [], rule
