"""Lower bound on the time of a comparison, computed before torch and the text are loaded.

`--minutes` is divided among runs by short trials (`short_trials`), which take a minute themselves. This module first
refuses a request that no current processor can meet, from the settings alone. Unknown quantities count as zero, so the
trials may still refuse a request that passes.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tiewise.core.errors import RunError
from tiewise.training.settings import BUILT_IN, DECODER, Settings

START = 2.0  # seconds to import torch and transformers
BUILTIN = 3.0  # seconds to parse the modules of the standard library and to train a tokenizer on their docstrings
RUN = 0.05  # seconds to build, save and report one run
OPERATIONS = 1.5e11  # fp32 operations of one core per second in matrix products; small models reach a third
LEAST_STEPS = 20  # fewest steps of a run
TRIALS = 5  # tuning runs per arm for each rate; the second rate shares one with the first
TRIAL_TOKENS = 32_768  # tokens of the tuning split that a tuning run is measured on, at most
POINTS, POINT_BLOCKS = 20, 32  # points of a curve, and blocks of tuning text per point
# Fewest tokens of the built-in text's held-out and tune splits in any Python, with a vocabulary of at most 4,096.
BUILTIN_HELDOUT, BUILTIN_TUNE = 45_000, 20_000


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that limit the speed of its runs."""

    cores: int
    may_have_gpu: bool  # True if torch might find an accelerator, whose speed is unknown

    @classmethod
    def here(cls) -> Machine:
        """Return this machine, with the cores that this process may use."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, _may_have_gpu())


def refuse_impossible_minutes(settings: Settings, machine: Machine | None = None) -> None:
    """Raise RunError if `settings` give fewer minutes than their runs take at best.

    `machine` is this one by default. A machine that may have a GPU is not judged.
    """
    if settings.minutes is None:
        return
    machine = machine or Machine.here()
    if machine.may_have_gpu:
        return
    arms = len(settings.arms)
    runs, trials = settings.seeds * arms, _trials_per_arm(settings) * arms
    work = runs * _operations(settings, tunes=False) + trials * _operations(settings, tunes=True)
    start = START + BUILTIN * _is_builtin(settings)
    seconds = start + (runs + trials) * RUN + work / (machine.cores * OPERATIONS)
    if 60 * settings.minutes < seconds:
        raise _impossible(settings.minutes, seconds, runs, trials, machine.cores)


def _trials_per_arm(settings: Settings) -> int:
    """Return the number of tuning runs that each arm has at least."""
    if not settings.tune:
        return 0
    rates = 1 + (settings.table_rate is not None)
    return 1 + rates * (TRIALS - 1)


def _impossible(minutes: float, seconds: float, runs: int, trials: int, cores: int) -> RunError:
    """Return the error that names the least minutes."""
    tuning = f"{trials} tuning runs and " if trials else ""
    problem = f"--minutes {minutes:g} does not hold {tuning}{runs} runs of {LEAST_STEPS} steps"
    least = math.ceil(seconds / 6) / 10
    needed = f"{cores} core{' needs' if cores == 1 else 's need'} {least:g} minutes at the very least"
    remedy = f"give --minutes {10 * least:g} or more, or fewer arms and seeds"
    return RunError(f"{problem}: {needed}, and usually several times that", remedy)


def _operations(settings: Settings, tunes: bool) -> float:
    """Return the operations of one run, or of a tuning run.

    A weight takes 2 operations per evaluated token, and 6 per trained token.
    """
    if settings.run_kind != DECODER:
        return 0.0
    body = settings.layers * 12 * settings.width**2 if settings.model in BUILT_IN else 0
    vocab = _least_vocabulary(settings.tokenizer)
    heldout, tune = 0, 0  # unknown for any other text or tokenizer
    if _is_builtin(settings) and 0 < vocab <= 4096:
        heldout, tune = BUILTIN_HELDOUT, BUILTIN_TUNE
    judged, measured = heldout, settings.measured
    if tunes:
        judged, measured = tune, min(TRIAL_TOKENS, measured)
    few = POINT_BLOCKS * settings.length
    read = min(judged, few) + POINTS * min(tune, few) + 2 * min(judged, measured)
    trained = LEAST_STEPS * settings.batch * settings.accumulate * settings.length
    return (2.0 * read + 6.0 * trained) * (settings.body_width * vocab + body)


def _is_builtin(settings: Settings) -> bool:
    """Return whether the runs read the built-in text alone."""
    return tuple(settings.text) == ("builtin",)


def _least_vocabulary(tokenizer: str) -> int:
    """Return the rows of the head that the tokenizer's name guarantees; 0 if none."""
    if tokenizer == "bytes":
        return 256
    tokenizer_type, _, size = tokenizer.partition(":")
    return int(size) if tokenizer_type == "bpe" and size.isdecimal() else 0


def _may_have_gpu() -> bool:
    """Return whether torch might find an accelerator here."""
    if sys.platform != "linux":
        return True
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia*", "dri", "kfd", "accel*"))
