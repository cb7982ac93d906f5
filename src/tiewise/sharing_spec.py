"""`SharingSpec`: one written form for which parts of a stack's layers are one and the same.

    none            every layer has its own parameters
    attention       one attention for all layers, with the norms that belong to it; the ffn is each layer's own
    ffn             one ffn for all layers, with its norms; the attention is each layer's own
    all             one whole layer, applied L times (ALBERT)
    all:groups=2    the layers split into consecutive runs as even as they can be, each with one layer of its own

A norm goes with the sublayer that it normalises. A norm that both sublayers read (parallel blocks) is shared by `all`
alone. `SharingSpec.parse` and `str` are inverse to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.errors import SpecError
from tiewise.spec_values import count

KINDS = ("none", "attention", "ffn", "all")


@dataclass(frozen=True)
class SharingSpec:
    """What layers share (`kind`), and among how many runs of layers it is shared (`groups`).

    Raises:
        SpecError: on an unknown kind, fewer than one group, or groups where nothing is shared.
    """

    kind: str = "none"
    groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"unknown sharing {self.kind!r}", f"choose one of {', '.join(KINDS)}")
        if self.groups < 1:
            raise SpecError(f"groups={self.groups}: must be 1 or more", "groups count the distinct layers that remain")
        if self.kind == "none" and self.groups != 1:
            raise SpecError(f"groups={self.groups} on none: nothing is shared", "use all:groups=2, say, or none alone")

    @classmethod
    def parse(cls, text: str | SharingSpec) -> SharingSpec:
        """Read the written form. A spec is returned as it is.

        >>> SharingSpec.parse("all:groups=2").groups
        2
        """
        if isinstance(text, SharingSpec):
            return text
        kind, colon, argument = text.strip().partition(":")
        if kind not in KINDS:
            raise SpecError(f"unknown sharing {kind!r} in {text!r}", f"choose one of {', '.join(KINDS)}")
        if not colon:
            return cls(kind)
        key, _, value = argument.partition("=")
        if key != "groups":
            raise SpecError(f"unknown argument {key!r} in {text!r}", "known: groups")
        try:
            groups = count(value)
        except ValueError:
            what = f"groups={value or '(nothing)'} in {text!r}: must be a whole number, 1 or more"
            raise SpecError(what, f"write {kind}:groups=2, say") from None
        return cls(kind, groups)

    def __str__(self) -> str:
        return self.kind if self.groups == 1 else f"{self.kind}:groups={self.groups}"

    def group_of(self, layer: int, layers: int) -> int:
        """Return the run that `layer` of `layers` belongs to (ALBERT's rule, exact where it does not divide evenly).

        Raises:
            SpecError: there are more groups than layers.
        """
        if self.groups > layers:
            raise SpecError(f"{self}: {self.groups} groups of {layers} layers", f"choose groups ≤ {layers}")
        return layer * self.groups // layers
