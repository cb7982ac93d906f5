"""What an ALBERT run has beyond `Settings`: widths, what layers share, the pairs, the masks, and the optimizer.

In YAML and after `--set` these stand beside the other settings, by the same names. An arm is a boundary, and what its
layers share where that is not the run's `share`: `factored:64+share=ffn`, `tied+share=all:groups=2`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from tiewise.core.errors import RunError, SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.data.masking import Masking
from tiewise.data.sentence_pairs import OBJECTIVES, Packing

MODEL = "albert"
ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")  # of those that transformers knows
_CHOICES = {"objective": OBJECTIVES, "optimizer": ("lamb", "adamw"), "norm": ("before", "after")}
_SHARE = "+share="


@dataclass(frozen=True)
class Albert:
    """Settings of ALBERTs and their pretraining.

    Attributes:
        share: what layers share, in the written form of `SharingSpec`, in arms that do not say.
        embedding: E of arms whose boundary does not say (`factored:64` does); None: the hidden width, `width`.
        inner: width of the ffn; None: four times `width`.
        norm: of the embeddings, before their projection or after it.
        act: activation, by transformers' name.
        dropout: of embeddings, attention and what each sublayer adds.
        objective: of the pairs: sop, nsp, or none.
        in_order: share of pairs as in the text.
        short: share of rows packed to a random shorter length.
        masking: share of tokens that are predicted.
        longest: words of the longest masked run.
        whole_words: mask words, not tokens.
        optimizer: lamb or adamw; matrices decay by `weight_decay`, biases and norms do not.
        warmup: share of the steps in which the rate rises, before it falls to 0, both linearly.
        clip: largest norm of the gradient; 0 leaves it.
    """

    share: str = "all"
    embedding: int | None = None
    inner: int | None = None
    norm: str = "before"
    act: str = "gelu_new"
    dropout: float = 0.0
    objective: str = "sop"
    in_order: float = 0.5
    short: float = 0.1
    masking: float = 0.15
    longest: int = 3
    whole_words: bool = True
    optimizer: str = "lamb"
    warmup: float = 0.1
    clip: float = 1.0

    def checked(self) -> Albert:
        """Return these options, `share` in its canonical form.

        Raises:
            RunError: a value out of range.
            DataError, SpecError: as `Masking`, `Packing` and `SharingSpec`.
        """
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RunError(f"{name} = {getattr(self, name)!r}", f"choose one of {', '.join(choices)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise RunError(f"{item.name} = {value}", "use zero or a positive number")
        for name in ("embedding", "inner"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise RunError(f"{name} = {getattr(self, name)}", "use 1 or more")
        if self.act not in ACTS:
            raise RunError(f"act = {self.act!r}", f"choose one of {', '.join(ACTS)}")
        if self.dropout >= 1 or self.warmup > 1:
            raise RunError(f"dropout = {self.dropout}, warmup = {self.warmup}", "use shares below 1")
        self.masks()
        return replace(self, share=str(SharingSpec.parse(self.share)))

    def masks(self) -> Masking:
        """How tokens are masked."""
        return Masking(share=self.masking, longest=self.longest, whole_words=self.whole_words)

    def packing(self, length: int, objective: str | None = None) -> Packing:
        """How pairs are made, for this objective or another."""
        return Packing(length, objective or self.objective, self.in_order, self.short)


def read_arm(text: str) -> tuple[BoundarySpec, SharingSpec | None]:
    """(boundary, what layers share; None where it does not say) of an arm.

    Raises:
        SpecError: one of both cannot be read.
    """
    boundary, marked, share = text.partition(_SHARE)
    return BoundarySpec.parse(boundary), SharingSpec.parse(share) if marked else None


def shared_arms(arms: Sequence[str], shares: Sequence[str]) -> tuple[str, ...]:
    """Every arm with every sharing, boundary by boundary.

    Raises:
        SpecError: an arm that has a sharing of its own, or a text that cannot be read.
    """
    own = next((arm for arm in arms if _SHARE in arm), None)
    if own is not None:
        raise SpecError(f"{own} says itself what its layers share", "leave +share= out, or --share")
    sharings = [SharingSpec.parse(share) for share in shares]
    return tuple(arm_name(BoundarySpec.parse(arm), share) for arm in arms for share in sharings)


def arm_name(boundary: BoundarySpec, share: SharingSpec | None) -> str:
    """Canonical form of an arm."""
    return str(boundary) + (f"{_SHARE}{share}" if share is not None else "")
