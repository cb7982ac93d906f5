"""What the lenses of a model read: results by layer, how their training went, and all of it as JSON takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tiewise.analysis.estimates import Estimate
from tiewise.training.results import strict

CONVERGED = 0.01  # of the KL: what the last tenth of the steps may still change
BITS = 1 / math.log(2)


@dataclass(frozen=True)
class Read:
    """One lens at one layer, on held-out windows.

    Args:
        kl: KL(final ‖ lens), nats per position.
        nll: cross-entropy of the lens against the text's next token, nats.
        agreement: share of positions where lens and model name the same token first.
    """

    kl: Estimate
    nll: Estimate
    agreement: Estimate

    @property
    def bits(self) -> float:
        """KL in bits per position."""
        return self.kl.value * BITS


@dataclass(frozen=True)
class Layer:
    """Both lenses on the residual stream at one place.

    Args:
        depth: layers applied before it; 0 is what the first layer reads.
        name: of the layer that wrote it, `input` at depth 0.
        logit: the logit lens.
        tuned: the tuned lens; None after the last layer, where both are the model itself.
        curve: held-out KL of the tuned lens at `Lenses.marks`, nats.
        fitted: mean KL on the training batches of the last tenth of the steps, each before its step; None likewise.
        improvement: 1 − KL at the end / KL before the last tenth of the steps; None likewise.
    """

    depth: int
    name: str
    logit: Read
    tuned: Read | None
    curve: tuple[float, ...]
    fitted: float | None
    improvement: float | None

    @property
    def converged(self) -> bool | None:
        """Whether the last tenth of the steps changed the held-out KL by less than 1 %."""
        return None if self.improvement is None else abs(self.improvement) < CONVERGED


@dataclass(frozen=True)
class Lenses:
    """Every layer's lenses, how they were trained, and what fixed distributions reach.

    Args:
        layers: by depth, 0 to L.
        nll: of the model itself on the held-out windows, nats.
        uniform: KL from the final distribution to the uniform one, nats.
        unigram: to the training windows' token counts, one added to each.
        constant: to the model's mean distribution on the training windows: no distribution that is the same everywhere
            is nearer to the model on those windows.
        tied: whether input and output table are one.
        steps: that each translator was trained for.
        marks: steps at which the curves were read.
        batch: windows per step.
        rate: Adam's.
        windows: training windows.
        held_out: held-out windows, each with `length` − 1 positions read.
        length: T.
        seed: of the order of training windows.
    """

    layers: tuple[Layer, ...]
    nll: Estimate
    uniform: Estimate
    unigram: Estimate
    constant: Estimate
    tied: bool
    steps: int
    marks: tuple[int, ...]
    batch: int
    rate: float
    windows: int
    held_out: int
    length: int
    seed: int

    @property
    def passes(self) -> float:
        """Times that training went over its windows."""
        return self.steps * self.batch / self.windows

    @property
    def converged(self) -> bool:
        """Whether every layer's translator did."""
        return all(layer.converged is not False for layer in self.layers)

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it, KL in nats and bits."""
        fixed = {name: _kl(getattr(self, name)) for name in ("uniform", "unigram", "constant")}
        training = {name: getattr(self, name) for name in ("steps", "batch", "rate", "passes", "windows", "seed")}
        found: dict[str, Any] = {
            "tied": self.tied,
            "held_out_windows": self.held_out,
            "length": self.length,
            "model_nll": _estimate(self.nll),
            "chance": fixed,
            "training": {**training, "marks": list(self.marks), "converged": self.converged},
            "layers": [_layer(layer) for layer in self.layers],
        }
        made: dict[str, Any] = strict(found)
        return made


def _estimate(found: Estimate, times: float = 1.0) -> dict[str, float]:
    return {"value": found.value * times, "low": found.low * times, "high": found.high * times}


def _kl(found: Estimate) -> dict[str, Any]:
    return {"nats": _estimate(found), "bits": _estimate(found, BITS)}


def _read(found: Read | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"kl": _kl(found.kl), "nll": _estimate(found.nll), "agreement": _estimate(found.agreement)}


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "depth": layer.depth,
        "name": layer.name,
        "logit": _read(layer.logit),
        "tuned": _read(layer.tuned),
        "held_out_curve": list(layer.curve),
        "fitted": layer.fitted,
        "improvement": layer.improvement,
        "converged": layer.converged,
    }
