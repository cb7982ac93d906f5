"""Format `json`: the complete audits, as docs/reference-schemas.md describes them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tiewise.checkpoint.audit import SCHEMA
from tiewise.checkpoint.formats.answer import CheckedPath, audits_of


def json_text(answers: Sequence[CheckedPath]) -> str:
    """Return one object: the audit of a single path, or a list of audits.

    Return "" if the only path is unreadable.
    """
    records = [audit.record() for audit in audits_of(answers)]
    if len(answers) > 1:
        return json.dumps({"schema": SCHEMA, "audits": records}, allow_nan=False)
    if not records:
        return ""
    return json.dumps(records[0], allow_nan=False)
