"""`SharingSpec`: the written form of which layers of a stack share parameters.

    none            every layer has its own parameters
    attention       one attention for all layers, with its norms; each layer has a separate ffn
    ffn             one ffn for all layers, with its norms; each layer has a separate attention
    all             one full layer, applied L times (ALBERT)
    all:groups=2    the layers split into consecutive runs of nearly equal length, one shared layer per run (AABB)
    all:cycle=2     a block of two layers, repeated (ABAB)
    all:ends=1      the first and the last layer share nothing, those between share; also written `sandwich`
    all+rank=8      each layer adds a separate low-rank difference to every shared matrix, and has separate vectors

Arguments combine (`ffn:cycle=2,ends=1+rank=4`), but groups and cycle exclude each other. A norm goes with the sublayer
that it normalises. A norm that both sublayers read (parallel blocks) is shared by `all` alone. `SharingSpec.parse` and
`str` are inverse to each other.

Runs and cycles are SEQUENCE and CYCLE of Takase & Kiyono 2021 (arXiv:2104.06022), separate first and last layers the
sandwich of Reid et al. 2021 (arXiv:2101.00234), low-rank differences the relaxed sharing of Bae et al.
2024 (arXiv:2410.20672).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiewise.core.errors import SpecError, suggest_choices
from tiewise.core.spec import read_option
from tiewise.core.spec_options import count

KINDS = ("none", "attention", "ffn", "all")
SHORT = {"sandwich": "all:ends=1"}


@dataclass(frozen=True)
class SharingSpec:
    """Choice of the parameters that layers share, and of the layers that share them.

    Attributes:
        kind: `none`, `attention`, `ffn` or `all`.
        groups: distinct layers between the ends, each used for a run of consecutive layers.
        cycle: distinct layers between the ends, used in turn; 0 for runs.
        ends: layers at each end of the stack that share nothing.
        rank: rank of each layer's difference from a shared matrix; 0 for none.

    Raises:
        SpecError: on an unknown kind, a number out of range, or arguments that contradict each other.

    >>> str(SharingSpec.parse("all:groups=2"))
    'all:groups=2'
    """

    kind: str = "none"
    groups: int = 1
    cycle: int = 0
    ends: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        self._check_range()
        if self.cycle == 1:
            object.__setattr__(self, "cycle", 0)  # one written form for one meaning: a block of one is one run
        if self.cycle and self.groups != 1:
            remedy = "groups use each layer for a run, cycle uses them in turn: choose one of the two"
            raise SpecError(f"groups={self.groups} and cycle={self.cycle} at once", remedy)
        changed = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        if self.kind == "none" and changed:
            name = changed[0]
            problem = f"{name}={getattr(self, name)} on none: nothing is shared"
            raise SpecError(problem, "use all:groups=2, say, or none alone")

    def _check_range(self) -> None:
        """Refuse an unknown kind and numbers out of range."""
        if self.kind not in KINDS:
            raise SpecError(f"unknown sharing {self.kind!r}", suggest_choices(self.kind, KINDS))
        if self.groups < 1:
            raise SpecError(f"groups={self.groups}: must be 1 or more", "groups count the distinct layers that remain")
        for name in ("cycle", "ends", "rank"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name}={getattr(self, name)}: must not be negative", "0 leaves it out")

    @classmethod
    def parse(cls, text: str | SharingSpec) -> SharingSpec:
        """Read the written form. A spec is returned as it is.

        >>> SharingSpec.parse("all:groups=2").groups
        2
        """
        if isinstance(text, SharingSpec):
            return text
        if not isinstance(text, str):
            raise SpecError(f"a {type(text).__name__} is no sharing", "write all, ffn or all:groups=2, say")
        written = text.strip()
        head, *options = SHORT.get(written, written).split("+")
        kind, colon, arguments = head.partition(":")
        if kind not in KINDS:
            first = kind.partition(",")[0]
            remedy = suggest_choices(kind, (*KINDS, *SHORT))
            if first in KINDS:  # `all,groups=2`: a comma instead of the colon
                remedy = f"write {first}:groups=2 or {first}+rank=4, say"
            raise SpecError(f"unknown sharing {kind!r} in {text!r}", remedy)
        values: dict[str, Any] = {}  # by field; `read_option` adds to it
        items = arguments.split(",") if colon else []  # `all:` has one empty item, which `read_option` refuses
        for item in items:
            key, _, value = item.partition("=")
            read_option(text, key, value, _ARGUMENTS, "argument", values, _DOCS)
        for item in options:
            key, _, value = item.partition("=")
            read_option(text, key, value, _OPTIONS, "option", values, _DOCS)
        return cls(kind, **values)

    def __str__(self) -> str:
        arguments = [f"{name}={getattr(self, name)}" for name in _ARGUMENTS if getattr(self, name) != _DEFAULTS[name]]
        text = self.kind
        if arguments:
            text += f":{','.join(arguments)}"
        if self.rank:
            text += f"+rank={self.rank}"
        return text

    def group_of(self, layer: int, layers: int) -> int:
        """Return the number of the group with which a layer shares parameters.

        The stack has `layers` layers. Runs are numbered from 0 by ALBERT's rule, also if they do not divide evenly.
        The layers of a cycle are numbered likewise. Layers at the ends of the stack have numbers after those.

        Raises:
            SpecError: the spec needs more distinct layers than there are.
        """
        between, index = layers - 2 * self.ends, layer - self.ends
        distinct = max(self.cycle, self.groups)
        if self.ends and between < 1:
            raise SpecError(f"{self}: two ends of {self.ends} in {layers} layers", "leave a layer between the ends")
        if distinct > between:
            if self.cycle:
                raise SpecError(f"{self}: a cycle of {distinct} of {between} layers", f"choose cycle ≤ {between}")
            raise SpecError(f"{self}: {distinct} groups of {between} layers", f"choose groups ≤ {between}")
        if not 0 <= index < between:
            return distinct + layer
        if self.cycle:
            return index % self.cycle
        return index * self.groups // between


_ARGUMENTS = {name: (name, count) for name in ("groups", "cycle", "ends")}
_OPTIONS = {"rank": ("rank", count)}
_DOCS = "docs/factoring.md: a whole number, 1 or more"
_DEFAULTS = {"groups": 1, "cycle": 0, "ends": 0, "rank": 0}
