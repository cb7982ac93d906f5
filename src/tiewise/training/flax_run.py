"""One arm with one seed, trained in JAX: `tiewise.training.run.train` with the steps taken by `tiewise.flax`.

    PyTorch's model of the arm → its weights → Flax decoder → Optax steps → the weights back → the same measures

Both backends start an arm of a seed from the same numbers, are measured by the same code and leave the same files. A
run that was interrupted starts again; finished ones are kept. What this backend lacks, `Settings.checked` refuses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from flax import nnx

from tiewise.boundary.install import Installed
from tiewise.data.prepared import PreparedText
from tiewise.errors import Interrupted, RunError
from tiewise.flax.models import Decoder
from tiewise.flax.training import Point, Recipe, Trained, fit, token_losses
from tiewise.training import ranks
from tiewise.training.environment import peak_memory, reset_peak_memory
from tiewise.training.evaluate import bits_per_byte, direct_path, measure
from tiewise.training.job import Job
from tiewise.training.model import build, parameters
from tiewise.training.results import CurvePoint, RunResult
from tiewise.training.run import CURVE_BLOCKS, Outcome, finished, keep, starting_facts


def train(job: Job, text: PreparedText, counts: np.ndarray, probe: list[int]) -> Outcome:
    """Train one job to its end, or return what it left; arguments as `tiewise.training.run.train`.

    Raises:
        RunError: several processes train together.
        Interrupted: after Ctrl-C; whatever finished is kept.
    """
    if ranks.size() > 1:
        raise RunError(f"{ranks.size()} processes with the flax backend", "start one, or use the torch backend")
    done = finished(job.folder)
    if done is not None:
        return done
    job.folder.mkdir(parents=True, exist_ok=True)
    reset_peak_memory()
    installed = build(job.settings, job.spec, text, job.seed, job.feed_forward)
    facts = starting_facts(job, installed, text, counts)
    try:
        trained, curve = _fit(job, installed, text)
    except KeyboardInterrupt:
        raise Interrupted(str(job.folder)) from None
    outcome = Outcome(_result(job, installed, text, counts, facts, trained, curve), direct_path(installed, probe))
    keep(job, installed, text, outcome)
    return outcome


def _fit(job: Job, installed: Installed, text: PreparedText) -> tuple[Trained, list[CurvePoint]]:
    """Train in JAX and put the trained weights back into `installed`."""
    s, torch_model = job.settings, installed.model
    config = torch_model.config
    sizes = (text.vocab, s.width, s.layers, s.heads, config.intermediate_size)
    model = Decoder(job.spec, *sizes, rngs=nnx.Rngs(job.seed))
    model.load_named({name: value.numpy() for name, value in torch_model.state_dict().items()})
    recipe = Recipe(s.steps, s.batch, s.length, s.learning_rate, s.weight_decay, job.seed)
    curve: list[CurvePoint] = []

    def seen(point: Point, steps: int) -> None:
        losses, _ = token_losses(model, text.split(job.split), s.length, CURVE_BLOCKS)
        paths, tokens = point.paths, point.step * s.batch * s.length
        nll, cosine = float(losses.mean()), None if math.isnan(paths.cosine) else paths.cosine
        curve.append(CurvePoint(point.step, tokens, point.train_nll, nll, paths.a, paths.b, cosine))

    trained = fit(model, text.split("train"), recipe, seen)
    state = {name: torch.from_numpy(np.array(value)) for name, value in model.named().items()}
    torch_model.load_state_dict(state, strict=False)  # a tied head is the table; `load_named` has checked the names
    return trained, curve


def _result(
    job: Job,
    installed: Installed,
    text: PreparedText,
    counts: np.ndarray,
    facts: dict[str, Any],
    trained: Trained,
    curve: list[CurvePoint],
) -> RunResult:
    s, size, count = job.settings, text.facts["splits"][job.split], parameters(installed)
    blocks = max(1, min(len(text.split(job.split)), s.measured) // s.length)
    heldout, training = (measure(installed, text.split(n), s.length, counts, blocks) for n in (job.split, "train"))
    return RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=s.steps,
        train_nll=training.nll,
        heldout_nll=heldout.nll,
        perplexity=math.exp(min(heldout.nll, 700)),
        bits_per_byte=bits_per_byte(heldout.nll, size["tokens"], size["bytes"]),
        frequency=heldout.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        bytes=4 * sum(count.values()),
        tokens_per_second=trained.tokens / trained.seconds if trained.seconds else math.nan,
        peak_memory_bytes=peak_memory(),
        seconds=trained.seconds,
        learning_rate=s.learning_rate,
        curve=curve,
        **facts,
    )
