"""What a recurrent run has beyond `Settings`: the cell's sizes and dropouts, streams, epochs, and how the rate falls.

In YAML and after `--set` these stand beside the other settings, by the same names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tiewise.core.errors import RunError

CELLS = ("lstm", "gru", "tanh", "relu")
_CHOICES = {
    "bias": ("one", "two"),
    "optimizer": ("sgd", "adamw"),
    "objective": ("mean", "time"),
    "anneal": ("epochs", "plateau"),
    "keep": ("last", "best"),
}


@dataclass(frozen=True)
class Recurrent:
    """Settings of recurrent models, their training and their objective.

    Attributes:
        embedding: width E of the lookup's vectors; None: the hidden width, `width`.
        inner: width of all layers but the last, which gives what the head reads; None: `width`.
        bias: biases of each gate, one as papers count or two as fused kernels have them.
        dropout_embedding: share of words whose whole vector is dropped for a step.
        dropout_input: dropout of the looked-up vectors.
        dropout_between: dropout between layers.
        dropout_output: dropout of what the head reads.
        dropout_recurrent: dropout of h before its matrix, one mask per sequence.
        weight_drop: dropout of the hidden-to-hidden matrices.
        variational: one dropout mask for all positions of a sequence, not one for each.
        activation: coefficient of the activation regularisation (AR) of AWD-LSTM, on the mean squared output.
        slowness: coefficient of its temporal one (TAR), on the mean squared change from step to step.
        start: a of the uniform ±a that all weights start from.
        start_body: the same of the recurrent layers alone; 0: as `start`.
        output_bias: whether the softmax has a bias of its own.
        files: training, validation and test file of the corpus; empty: train.txt, valid.txt, test.txt.
        epochs: passes over the training file.
        vary_length: draw each step's length around `length` (half of it once in twenty), the rate in proportion.
        optimizer: sgd (no momentum) or adamw.
        objective: what is differentiated and clipped: the mean over all words (mean), or the mean over streams of the
            sum over positions (time), which is `length` times as large.
        clip: largest norm of the gradient; 0 leaves it.
        anneal: whether `decay` falls due after every epoch, or after each that did not lower the validation nll.
        decay: factor on the learning rate.
        decay_after: epochs at the full rate, for `anneal: epochs`.
        average_patience: n of NT-ASGD: average the weights from when the validation nll is above all but the last n
            before it; 0 never averages.
        keep: which weights the run ends with: of the last epoch, or of the one with the lowest validation nll.
        augment: α of the augmented loss; 0 is plain cross-entropy.
        temperature: τ of the augmented loss.
        parallel: streams that a split is measured in, side by side; each word counts once.
    """

    embedding: int | None = None
    inner: int | None = None
    bias: str = "two"
    dropout_embedding: float = 0.0
    dropout_input: float = 0.0
    dropout_between: float = 0.0
    dropout_output: float = 0.0
    dropout_recurrent: float = 0.0
    weight_drop: float = 0.0
    variational: bool = False
    activation: float = 0.0
    slowness: float = 0.0
    start: float = 0.1
    start_body: float = 0.0
    output_bias: bool = True
    files: tuple[str, ...] = ()
    epochs: int = 6
    vary_length: bool = False
    optimizer: str = "sgd"
    objective: str = "mean"
    clip: float = 0.25
    anneal: str = "epochs"
    decay: float = 1.0
    decay_after: int = 0
    average_patience: int = 0
    keep: str = "last"
    augment: float = 0.0
    temperature: float = 10.0
    parallel: int = 10

    @property
    def validates(self) -> bool:
        """Whether training looks at the validation split after every epoch."""
        return self.anneal == "plateau" or self.average_patience > 0 or self.keep == "best"

    def checked(self) -> Recurrent:
        """Return these options.

        Raises:
            RunError: a value out of range.
        """
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RunError(f"{name} = {getattr(self, name)!r}", f"choose {' or '.join(choices)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RunError(f"{item.name} = {value}", "use a number")
            dropped = item.name.startswith("dropout") or item.name == "weight_drop"
            if dropped and not 0 <= value < 1:
                raise RunError(f"{item.name} = {value}", "use zero or more, below 1")
        for name in ("epochs", "parallel", "embedding", "inner"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise RunError(f"{name} = {getattr(self, name)}", "use 1 or more")
        for name in ("start", "decay", "temperature"):
            if not getattr(self, name) > 0:
                raise RunError(f"{name} = {getattr(self, name)}", "use a positive number")
        for name in ("clip", "decay_after", "average_patience", "augment", "activation", "slowness", "start_body"):
            if getattr(self, name) < 0:
                raise RunError(f"{name} = {getattr(self, name)}", "use zero or a positive number")
        return self
