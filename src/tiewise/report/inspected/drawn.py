"""The figures of every section that has some, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiewise.report.inspected import (
    alignment_figures,
    closer_figures,
    direct_path_figures,
    run_alignment_figures,
    tokens_figures,
)

DRAWN: Mapping[str, Any] = {
    "direct_path": direct_path_figures,
    "alignment": alignment_figures,
    "closer": closer_figures,
    "run_alignment": run_alignment_figures,
    "tokens": tokens_figures,
}
