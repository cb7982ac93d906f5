"""Run one rule on one checkpoint."""

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rule import rules


def run(rule, path, **settings):
    """Findings of one rule; every one must name the rule, a place, evidence and a way out."""
    found = list(rules()[rule].check(Facts(open_folder(path), **settings)))
    for finding in found:
        assert finding.rule == rule
        assert finding.where
        assert finding.evidence
        assert finding.repair
    return found


def one(rule, path, **settings):
    """The only finding of one rule."""
    (finding,) = run(rule, path, **settings)
    return finding
