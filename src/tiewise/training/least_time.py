"""The least time that a comparison takes on any machine of this size, known before torch and the text are loaded.

`--minutes` is divided among runs by short trials (`short_trials`), which take a minute themselves. A request that no
processor of today could serve is refused here first, from the settings alone. What is not known counts as nothing, so a
request that passes may still be refused by the trials.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tiewise.core.errors import RunError
from tiewise.training.settings import DECODER, Settings

START = 2.0  # seconds to import torch and transformers
BUILTIN = 3.0  # seconds to parse the modules of the standard library and to train a tokenizer on their docstrings
RUN = 0.05  # seconds to build, save and report one run
OPERATIONS = 1.5e11  # of one core in a second, in matrix products in fp32; small models reach a third of that
LEAST_STEPS, TRIAL_STEPS = 20, 5  # of a run, and of a tuning run
TRIALS = 9  # tuning runs of an arm
POINTS, POINT_BLOCKS = 20, 32  # of a curve: how many, and blocks of the held-out text behind each
# The built-in text in tokens of at most 4,096 kinds, of any Python: what is held out, and what chooses among trials.
BUILTIN_HELDOUT, BUILTIN_TUNE = 45_000, 20_000


@dataclass(frozen=True)
class Machine:
    """What limits the speed of runs on a machine."""

    cores: int
    may_have_gpu: bool  # True if torch might find an accelerator, whose speed is unknown

    @classmethod
    def here(cls) -> Machine:
        """Return this machine, as far as this process may use it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(cores, _may_have_gpu())


def refuse_impossible_minutes(settings: Settings, machine: Machine | None = None) -> None:
    """Raise RunError if `settings` give fewer minutes than their runs take in the best case.

    `machine` is this one by default. A machine that may have a GPU is not judged.
    """
    if settings.minutes is None:
        return
    machine = machine or Machine.here()
    if machine.may_have_gpu:
        return
    arms = len(settings.arms)
    runs, trials = settings.seeds * arms, TRIALS * arms if settings.tune else 0
    work = runs * _operations(settings, trial=False) + trials * _operations(settings, trial=True)
    start = START + BUILTIN * _is_builtin(settings)
    seconds = start + (runs + trials) * RUN + work / (machine.cores * OPERATIONS)
    if 60 * settings.minutes < seconds:
        raise _impossible(settings.minutes, seconds, runs, trials, machine.cores)


def _impossible(minutes: float, seconds: float, runs: int, trials: int, cores: int) -> RunError:
    """Return the error that names the least minutes."""
    tuning = f"{trials} tuning runs and " if trials else ""
    problem = f"--minutes {minutes:g} does not hold {tuning}{runs} runs of {LEAST_STEPS} steps"
    least = math.ceil(seconds / 6) / 10
    needed = f"{cores} core{' needs' if cores == 1 else 's need'} {least:g} minutes at the very least"
    remedy = f"give --minutes {10 * least:g} or more, or fewer arms and seeds"
    return RunError(f"{problem}: {needed}, and usually several times that", remedy)


def _operations(settings: Settings, trial: bool) -> float:
    """Return the operations of one run, or of a tuning run: 2 per weight and token that is read, 6 that is trained."""
    if settings.run_kind != DECODER:
        return 0.0
    body = settings.layers * 12 * settings.width**2 if settings.model in ("llama", "gpt2") else 0
    vocab = _least_vocabulary(settings.tokenizer)
    heldout, tune = 0, 0  # of any other text or tokenizer nothing is known
    if _is_builtin(settings) and 0 < vocab <= 4096:
        heldout, tune = BUILTIN_HELDOUT, BUILTIN_TUNE
    point = min(heldout, POINT_BLOCKS * settings.length)
    if trial:
        read, steps = point + min(tune, settings.measured), TRIAL_STEPS
    else:
        curve = (1 + POINTS) * point
        read, steps = curve + 2 * min(heldout, settings.measured), LEAST_STEPS
    trained = steps * settings.batch * settings.accumulate * settings.length
    return (2.0 * read + 6.0 * trained) * (settings.width * vocab + body)


def _is_builtin(settings: Settings) -> bool:
    """Return whether the runs read the built-in text alone."""
    return tuple(settings.text) == ("builtin",)


def _least_vocabulary(tokenizer: str) -> int:
    """Return the rows of the head that the tokenizer's name promises; 0 if it promises none."""
    if tokenizer == "bytes":
        return 256
    kind, _, size = tokenizer.partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 0


def _may_have_gpu() -> bool:
    """Return whether torch might find an accelerator here."""
    if sys.platform != "linux":
        return True
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia*", "dri", "kfd", "accel*"))
