"""Types of the settings that `compare`, `train` and `heal` take as keywords, for type checkers.

`tools/make_stubs.py` writes this file from `settings.Settings` and from the options of each kind of run. These define
what the settings mean, and check their values when a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class SharedSettings(TypedDict, total=False):
    """Settings of every kind of run (PEP 692); functions name `text` and `seed` themselves."""

    # of every kind
    seeds: int
    split: str
    tokenizer: str
    train_tokens: int | None
    kind: str
    width: int
    layers: int
    heads: int
    length: int
    batch: int
    accumulate: int
    steps: int
    minutes: float | None
    learning_rate: float | None
    table_rate: float | None
    measured: int
    weight_decay: float
    init: float | None
    match: str
    select: str | None
    margin: float
    tune: bool
    bf16: bool
    activation_checkpointing: bool
    backend: str
    recipe: str
    report_to: str | Sequence[str]
    # of kind=albert
    share: str | Sequence[str]
    embedding: int | None
    inner: int | None
    norm: str
    act: str
    dropout: float
    objective: str
    in_order: float
    short: float
    masking: float
    longest: int
    whole_words: bool
    optimizer: str
    warmup: float
    clip: float
    # of kind=heal
    what: str
    # of kind=recurrent
    bias: str
    dropout_embedding: float
    dropout_input: float
    dropout_between: float
    dropout_output: float
    dropout_recurrent: float
    weight_drop: float
    variational: bool
    activation: float
    slowness: float
    start: float
    start_body: float
    output_bias: bool
    files: Sequence[str]
    epochs: int
    vary_length: bool
    anneal: str
    decay: float
    decay_after: int
    average_patience: int
    keep: str
    augment: float
    temperature: float
    parallel: int
    # of kind=seq2seq
    noise: float
    span: float


class TrainingSettings(SharedSettings, total=False):
    """Settings of `train`."""

    model: str


class ComparisonSettings(TrainingSettings, total=False):
    """Settings of `compare`: `boundary` is another name of `arms`."""

    arms: str | Sequence[str]
    boundary: str | Sequence[str]
