"""Ties that `from_pretrained` of transformers makes between the loaded tensors of a class.

The rules are those of `PreTrainedModel.tie_weights`: two tensors that are both stored are tied only if their numbers
are equal, and a stored target fills a missing source. Tensor names are those of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class ClassTie(NamedTuple):
    """One tie of a class: the target becomes the source's parameter."""

    target: str
    source: str


@dataclass
class TiedTensors:
    """Parameters of a class after its ties."""

    parameters: dict[str, str] = field(default_factory=dict)  # {tied tensor: tensor whose parameter it is}
    refused: list[ClassTie] = field(default_factory=list)  # ties left out with a warning, as the numbers differ

    def parameter(self, name: str) -> str:
        """Return the tensor whose parameter this tensor is; its own name if no tie changed it."""
        return self.parameters.get(name, name)

    def are_tied(self, one: str, other: str) -> bool:
        """Return whether two tensors are one parameter."""
        return self.parameter(one) == self.parameter(other)

    def warns_about(self, name: str) -> bool:
        """Return whether a tie of this tensor's parameter was left out with a warning."""
        return any(self.has_parameter_of(tie, name) for tie in self.refused)

    def has_parameter_of(self, tie: ClassTie, name: str) -> bool:
        """Return whether one of a tie's tensors is the same parameter as this tensor."""
        return self.are_tied(name, tie.target) or self.are_tied(name, tie.source)


def tie_loaded(ties: Mapping[str, str], absent: Iterable[str], are_equal: Callable[[str, str], bool]) -> TiedTensors:
    """Return the parameters after all ties of a class, in the class's order.

    Args:
        ties: {target: source}, in the class's order.
        absent: tensors in ties that no stored tensor fills.
        are_equal: whether the loaded numbers of two tensors are equal.
    """
    tied, missing = TiedTensors(), set(absent)
    pairs = [ClassTie(target, source) for target, source in ties.items()]
    for number, pair in enumerate(pairs):
        if missing.isdisjoint(pair):
            if not are_equal(tied.parameter(pair.target), tied.parameter(pair.source)):
                tied.refused.append(pair)
                continue
            _share(tied, pair)
            continue
        filling = _filling_tie(pair, pairs[number + 1 :], missing)
        if filling is not None:
            missing.discard(filling.target)
        _share(tied, filling or pair)
    return tied


def _share(tied: TiedTensors, pair: ClassTie) -> None:
    """Make the target the source's parameter."""
    tied.parameters[pair.target] = tied.parameter(pair.source)


def _filling_tie(pair: ClassTie, later: Sequence[ClassTie], missing: set[str]) -> ClassTie | None:
    """Return the tie that fills a missing tensor of a pair; None without a stored tensor."""
    if pair.source not in missing:
        return pair
    if pair.target not in missing:
        return ClassTie(target=pair.source, source=pair.target)
    for other in later:
        if other.source == pair.source and other.target not in missing:
            return ClassTie(pair.target, other.target)
    return None
