"""What a config says of tying, at every level that says or should say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FLAG = "tie_word_embeddings"


@dataclass(frozen=True)
class Claim:
    """One level of a config: the root, `text_config`, `decoder`, …

    Args:
        level: dotted path below the root; "" is the root.
        model_type: of this level; None where absent.
        written: the flag as written; None where absent.
        default: what this level's class takes where the flag is absent; None where the class is unknown.
        decides: the class that owns the head reads this level.
        vocab_size: of this level; None where absent.
        hidden_size: width D of this level, under whatever key the family has; None where absent.
    """

    level: str
    model_type: str | None = None
    written: bool | None = None
    default: bool | None = None
    decides: bool = False
    vocab_size: int | None = None
    hidden_size: int | None = None

    @property
    def effective(self) -> bool | None:
        """The flag as the class will take it; None where neither written nor known."""
        return self.default if self.written is None else self.written


@dataclass(frozen=True)
class Claims:
    """All levels, the root first.

    Args:
        levels: every level that is a model's config.
        t5_like: the family ties its input tables whatever the flag says, and reads the flag for something else too.
        known: the family is in the architecture data.
    """

    levels: tuple[Claim, ...]
    t5_like: bool = False
    known: bool = False

    @property
    def deciding(self) -> Claim | None:
        """The level whose flag decides; None without a config."""
        return next((claim for claim in self.levels if claim.decides), self.levels[0] if self.levels else None)

    @property
    def tied(self) -> bool | None:
        """Whether the config, read as its class reads it, ties the two ends; None where that cannot be known."""
        return None if self.deciding is None else self.deciding.effective


def read_claims(config: Mapping[str, Any] | None) -> Claims:
    """Read every level of a config."""
    raise NotImplementedError
