"""The page's verdict on a dropped checkpoint is `tiewise check`'s, word for word, on all that their tests write."""

from dataclasses import asdict

import pytest
from tests.explore.dropping import drop

from tiewise.checkpoint.audit import check

from test_rules_tying import FIRES, SILENT  # isort: skip - dropping.py says where they are
from tiny_checkpoints import written  # isort: skip

RULES = ("B010", "B011", "B012", "B013", "B014", "B015", "B016")  # that the page decides
FIELDS = ("rule", "severity", "where", "evidence", "repair", "safe")
CASES = [case[4] for case in FIRES] + [case[1] for case in SILENT]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_verdict_is_that_of_check(dropper, tmp_path, monkeypatch, number):
    path = written(tmp_path / "a", CASES[number])
    monkeypatch.chdir(tmp_path)  # the page knows the folder's name alone
    audit = [asdict(finding) for finding in check("a").findings if finding.rule in RULES]
    page = drop(dropper, path, answered=False)
    assert page.locator("#refused").all_inner_texts() == []
    found = page.evaluate("dropped.opened.verdict.findings")
    assert sorted(found, key=repr) == sorted(({key: one[key] for key in FIELDS} for one in audit), key=repr)
