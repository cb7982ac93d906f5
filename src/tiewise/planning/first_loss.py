"""The loss of a freshly drawn model's first step, from its config, without building it (`tiewise.core.random_logits`).

The models of the catalogue, tied and untied as they are drawn by default, have been computed before: their losses are
kept in `catalogue/first_losses.json` under all that they depend on, so that anything else is computed.
`tools/make_first_losses.py` writes the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tiewise.core.packaged import packaged_json
from tiewise.core.random_logits import POSITIONS, Computed, Start, start
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import Architecture


@cache
def kept() -> dict[str, Computed]:
    """Losses that were computed before, by the written form of their start."""
    rows = packaged_json("catalogue/first_losses.json")
    return {made: (nll, own) for made, nll, own in rows}


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
    made = start_of(architecture, spec, std, length)
    assumed = ""
    if signal is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
    elif made.own and sharing and sharing.kind != "none":
        assumed = "shared layers followed as if they were independent"
    return FirstLoss(*(kept().get(repr(made)) or made.computed()), assumed)


def start_of(
    architecture: Architecture, spec: BoundarySpec, std: float | None = None, length: int = POSITIONS
) -> Start:
    """Return what the first loss depends on; arguments as of `first_loss`."""
    ends, signal = architecture.ends, architecture.signal
    body_std = std if std is not None else signal.std if signal else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    scale = architecture.output_scale
    return start(spec, ends.vocab, ends.width, table_std, signal, body_std=body_std, scale=scale, positions=length)
