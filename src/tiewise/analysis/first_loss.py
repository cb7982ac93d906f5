"""The loss of a freshly drawn model's first step, from its config, without building it.

A norm before the head makes the hidden state's norm √D, so the logits of other words are N(0, σ²E·scale²), and
`predicted_nll` integrates their expected log-sum-exp. A tied table meets itself besides: the residual stream still
carries the token's own row, and how much of it is left at the head decides (`mean_field`).

The models of the catalogue, tied and untied as they are drawn by default, have been computed before: their losses are
kept in `catalogue/first_losses.json` under all that they depend on, so that anything else is computed.
`tools/make_first_losses.py` writes the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tiewise.analysis.architecture import Architecture
from tiewise.analysis.mean_field import own_cosines
from tiewise.analysis.packaged import packaged_json
from tiewise.analysis.signal import Signal
from tiewise.late import Late
from tiewise.random_logits import logit_std, predicted_nll
from tiewise.sharing_spec import SharingSpec
from tiewise.spec import BoundarySpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
else:
    np = Late("numpy")

POSITIONS = 64  # positions followed; longer texts average more, and differ little
Computed = tuple[float, float | None]  # nll, own: see FirstLoss


@dataclass(frozen=True)
class OwnRow:
    """What decides how much of its own row a token meets at the head: arguments of `own_cosines`, and E."""

    table_width: int
    signal: Signal
    width: int
    std: float
    row_std: float
    positions: int


@dataclass(frozen=True)
class Start:
    """All that a first loss depends on; `own` where a token meets its own row."""

    vocab: int
    logit_std: float
    softcap: float | None
    own: OwnRow | None = None

    def loss(self) -> Computed:
        """Return nll and own share, kept or computed."""
        return kept().get(repr(self)) or self.computed()

    def computed(self) -> Computed:
        """Compute them."""
        row, vocab, tau, cap = self.own, self.vocab, self.logit_std, self.softcap
        if row is None:
            return predicted_nll(vocab, tau, softcap=cap), None
        own = own_cosines(row.signal, row.width, row.std, row.row_std, row.positions)
        return _meeting_itself(vocab, tau, own * tau * math.sqrt(row.table_width), cap), float(own.mean())


@cache
def kept() -> dict[str, Computed]:
    """Losses that were computed before, by the written form of their start."""
    rows = packaged_json("catalogue/first_losses.json")
    return {start: (nll, own) for start, nll, own in rows}


@dataclass(frozen=True)
class FirstLoss:
    """`nll` in nats; `own` is the mean cosine between hidden state and the token's own row (tied tables; else None).

    `assumed` says what the prediction takes for granted; empty where the family has been measured.
    """

    nll: float
    own: float | None = None
    assumed: str = ""


def first_loss(
    architecture: Architecture,
    spec: BoundarySpec,
    sharing: SharingSpec | None = None,
    std: float | None = None,
    length: int = POSITIONS,
) -> FirstLoss | None:
    """Expected nll of a uniformly random target at step 0; None where the model has no head over words.

    Args:
        architecture: the model.
        spec: its boundary; `init` overrides the tables' std.
        sharing: of its layers; shared layers are followed as if they were independent, which `assumed` says.
        std: of tables and body; None takes the config's.
        length: T; early positions average fewer others.
    """
    if not architecture.ends.head:
        return None
    signal = architecture.signal
    start = start_of(architecture, spec, std, length)
    assumed = ""
    if signal is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
    elif start.own and sharing and sharing.kind != "none":
        assumed = "shared layers followed as if they were independent"
    return FirstLoss(*start.loss(), assumed)


def start_of(
    architecture: Architecture, spec: BoundarySpec, std: float | None = None, length: int = POSITIONS
) -> Start:
    """Return what the first loss depends on; arguments as of `first_loss`."""
    ends, signal = architecture.ends, architecture.signal
    body_std = std if std is not None else signal.std if signal else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    tau = architecture.output_scale * logit_std(spec, ends.width, table_std)
    cap = spec.softcap or (signal.softcap if signal else None)
    if signal is None or spec.kind not in ("tied", "residual", "spd"):
        return Start(ends.vocab, tau, cap)  # behind random maps or in another table no row meets itself
    row_std = table_std * spec.scales(ends.width)[0] * signal.input_scale
    own = OwnRow(ends.width, signal, architecture.width, body_std, row_std, min(length, POSITIONS))
    return Start(ends.vocab, tau, cap, own)


def _meeting_itself(vocab: int, tau: float, own: Array, cap: float | None) -> float:
    """Mean nll over positions whose own logits are `own`; positions are averaged in a few groups of equal size."""
    if cap is not None:
        own = cap * np.tanh(own / cap)
    if own.max() < math.log(vocab) - 8:  # a thousandth of the sum
        return predicted_nll(vocab, tau, softcap=cap)
    groups = [float(group.mean()) for group in np.array_split(np.sort(own), min(4, len(own)))]
    nlls = [predicted_nll(vocab, tau, self_logit=logit, softcap=cap) - logit / vocab for logit in groups]
    return sum(nlls) / len(nlls)
