"""What `tiewise.internals.refinement` finds: every application of a layer, every block that is applied repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiewise.analysis.estimates import Estimate
from tiewise.training.results import to_record


@dataclass(frozen=True)
class Application:
    """One application of a layer; every estimate is a mean over tokens, its interval one over windows.

    Args:
        layer: name of the module in the model.
        change: ‖h_{l+1} − h_l‖ / ‖h_l‖.
        distance: ‖h_{l+1} − h_l‖, as ALBERT's figure 1 has it.
        cosine: of h_{l+1} and h_l.
        turn: cosine between this application's change and the one before it; None for the first.
        norm: ‖h_{l+1}‖.
        again: relative change if the same layer is applied once more to its own output.
        again_cosine: cosine of that output and the layer's own.
        shared: fraction of the layer's parameters that an earlier application has used, by Parameter identity.
        same_as: the earliest application (from 0) with exactly the same parameters, or None.
    """

    layer: str
    change: Estimate | None
    distance: Estimate | None
    cosine: Estimate | None
    turn: Estimate | None
    norm: Estimate | None
    again: Estimate | None
    again_cosine: Estimate | None
    shared: float
    same_as: int | None


@dataclass(frozen=True)
class Rest:
    """A block that the model repeats, applied further from where the model left it.

    Args:
        first, period, times: the block's first application (from 0), its length, how often the model applies it.
        residual: ‖f(h) − h‖ / ‖h‖ at each application of the block, the model's own `times` first; None once a window
            is no longer finite.
        two_steps: ‖f(f(h)) − h‖ / ‖h‖ at each further application but the first.
        ratio: geometric mean over the further applications of ‖f(f(h)) − f(h)‖ / ‖f(h) − h‖, as far as the changes are
            more than rounding error; None where none is.
        growth: geometric mean over the second half of the further applications of how a small random difference grows:
            below 1 near-by states come together, whatever the states themselves do.
        windows: windows that were followed.
        converged: those whose residual at the end is below 1e-5.
        alternating: those that have not, but return after two applications (two_steps below 1e-5).
        from_end: ‖h_model − h_end‖ / ‖h_end‖ over the converged windows; None where there are none.
    """

    first: int
    period: int
    times: int
    residual: tuple[Estimate | None, ...]
    two_steps: tuple[Estimate | None, ...]
    ratio: Estimate | None
    growth: Estimate | None
    windows: int
    converged: int
    alternating: int
    from_end: Estimate | None


@dataclass(frozen=True)
class Course:
    """All applications of one model's stack, and every block that it repeats.

    Args:
        applications: in order, L of them.
        repeats: runs in which a block is applied again and again.
        alike: [L + 1][L + 1], cosine of h_i and h_j, mean over tokens and windows; h_0 is what the first layer reads.
    """

    applications: tuple[Application, ...]
    repeats: tuple[Rest, ...]
    alike: tuple[tuple[float, ...], ...]

    @property
    def shared(self) -> bool:
        """Whether any application uses parameters of an earlier one."""
        return any(one.shared > 0 for one in self.applications)


@dataclass(frozen=True)
class Refinement:
    """What a model does from layer to layer, beside the same architecture untrained.

    Args:
        tokens: tokens that were run.
        windows: windows they came in.
        further: applications of a repeated block beyond the model's own.
        trained: the model as it is.
        untrained: with fresh weights, shared where the model's are; None where its class does not build it again.
    """

    tokens: int
    windows: int
    further: int
    trained: Course
    untrained: Course | None

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return to_record(self)
