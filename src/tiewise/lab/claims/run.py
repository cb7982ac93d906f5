"""One published claim, from its grid to its verdict.

    OUT/texts/NAME.jsonl   a text that the claim writes
    OUT/runs/              the study of the grid, as `tiewise sweep` has it
    OUT/CLAIM.json         the result

Claims of one grid share its runs: in the same folder, a further claim trains nothing.
"""

from __future__ import annotations

import platform
from pathlib import Path
from statistics import fmean

import torch

from tiewise.core import __version__
from tiewise.core.errors import RunError
from tiewise.lab.claims.expected import OTHER_TEXT
from tiewise.lab.claims.outcome import MEASURES, ClaimRuns
from tiewise.lab.claims.recorded import ClaimResult
from tiewise.lab.claims.registry import GPU_MINUTES, PublishedClaim
from tiewise.lab.claims.texts import write_text
from tiewise.lab.studies import carry_out_study
from tiewise.report.papers import TEXTS
from tiewise.training.compare import Display
from tiewise.training.folder import write_json
from tiewise.training.launchers import LOCAL
from tiewise.training.study.grid import GRID, StudyGrid

RUNS = "runs"  # subfolder of the study


def run_claim(
    claim: PublishedClaim,
    out: Path,
    display: Display,
    *,
    overwrite: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
) -> ClaimResult:
    """Run or resume the grid of a claim in `out`, and apply its rule.

    Raises:
        TiewiseError: the folder or a text cannot be used, or the claim needs a GPU and there is none.
        Interrupted: as in `compare`. The same call resumes.
    """
    if claim.price == GPU_MINUTES and not torch.cuda.is_available():
        raise RunError(f"claim {claim.name} needs a GPU ({claim.price})", "run it where torch.cuda.is_available()")
    grid, folder = _claim_grid(claim, out), out / RUNS
    has_started = any(folder.glob(f"**/{GRID}"))
    command = f"tiewise sweep --claim {claim.name} --out {out}"
    resume = has_started and not overwrite
    carry_out_study(grid, folder, command, display, overwrite=overwrite, resume=resume, jobs=jobs, launcher=launcher)
    result = judge(claim, ClaimRuns.read(grid, folder), command)
    write_json(out / f"{claim.name}.json", result.record())
    return result


def _claim_grid(claim: PublishedClaim, out: Path) -> StudyGrid:
    """Return the grid of a claim, after writing the text that it needs."""
    text = None
    if claim.grid.make:
        text = write_text(claim.grid.make, out / "texts")
    return claim.grid.study(claim.says, text)


def judge(claim: PublishedClaim, runs: ClaimRuns, command: str) -> ClaimResult:
    """Apply the rule of a claim to finished runs."""
    outcome = MEASURES[claim.measure["kind"]](claim.measure, runs)
    verdict = claim.expects.verdict(outcome) if has_text(claim, runs) else OTHER_TEXT
    seconds = [run.seconds for comparison in runs.comparisons.values() for run in comparison.runs]
    versions = {"tiewise": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return ClaimResult(
        claim=claim.name,
        verdict=verdict,
        outcome=outcome.value,
        low=outcome.low,
        high=outcome.high,
        seeds=_seeds(runs),
        rule=claim.rule_hash,
        versions=versions,
        command=command,
        seconds=round(sum(seconds), 1),
    )


def _seeds(runs: ClaimRuns) -> int:
    """Return the number of seeds of each arm."""
    return round(fmean(len(comparison.seeds) for comparison in runs.comparisons.values()))


def has_text(claim: PublishedClaim, runs: ClaimRuns) -> bool:
    """Return whether the runs read the text of the claim's figure.

    Equal counts of tokens and vocabulary identify it.
    """
    if not claim.text:
        return True
    for comparison in runs.comparisons.values():
        tokens = comparison.data["splits"]["train"]["tokens"]
        if (tokens, comparison.data["tokenizer"]["vocab"]) != TEXTS[claim.text]:
            return False
    return True
