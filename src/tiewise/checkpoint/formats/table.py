"""Table of the formats of `tiewise check`. A new format is one file of this folder and one row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiewise.checkpoint.formats.agent import agent_text
from tiewise.checkpoint.formats.answer import CheckedPath
from tiewise.checkpoint.formats.github import github_text
from tiewise.checkpoint.formats.json_object import json_text
from tiewise.checkpoint.formats.sarif import sarif_text

TEXT, JSON = "text", "json"


@dataclass(frozen=True)
class OutputFormat:
    """Format in which `tiewise check` prints its answers."""

    name: str
    # returns the answers as one text, "" to print nothing; None for `text`, which prints each audit when it is done
    render: Callable[[Sequence[CheckedPath]], str] | None


FORMATS = {
    one.name: one
    for one in (
        OutputFormat(TEXT, None),
        OutputFormat(JSON, json_text),
        OutputFormat("sarif", sarif_text),
        OutputFormat("github", github_text),
        OutputFormat("agent", agent_text),
    )
}
