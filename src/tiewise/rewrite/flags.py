"""The flag, written at every level of a config that a loader reads."""

from __future__ import annotations

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.facts import TEXT_PARTS, Facts


def flags(facts: Facts, tied: bool) -> dict[str, bool]:
    """Return the flag by dotted path, for the levels that do not say `tied` yet: the root and every text part.

    Empty where there is no config.json.
    """
    return {
        f"{claim.level}.{FLAG}" if claim.level else FLAG: tied
        for claim in facts.claims.levels
        if claim.level in facts.levels and claim.written is not tied
        if claim.decides or not claim.level or claim.level.rpartition(".")[2] in TEXT_PARTS
    }


def flag_note(facts: Facts, tied: bool) -> tuple[str, ...]:
    """Return the note that a file without a config needs."""
    if facts.folder.config is not None:
        return ()
    return (f"there is no config.json: see that {FLAG} is {str(tied).lower()} in the one that goes with this file",)
