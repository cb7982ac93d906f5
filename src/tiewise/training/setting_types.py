"""Types of the settings that `compare`, `train` and `heal` take as keywords, for type checkers and editors.

`settings.Settings` and the options of each kind of run define what the settings mean, and check their values when a run
starts. This file repeats names and types only; `tests/training/test_setting_types.py` compares it with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class SharedSettings(TypedDict, total=False):
    """Settings of every kind of run (PEP 692); `heal` names its `model` and `seed` itself."""

    # text and tokenizer
    text: str | Sequence[str]
    split: str
    tokenizer: str
    train_tokens: int | None
    # model
    kind: str
    width: int
    layers: int
    heads: int
    length: int
    init: float | None
    # training
    recipe: str
    seeds: int
    batch: int
    accumulate: int
    steps: int
    minutes: float | None
    learning_rate: float
    measured: int
    weight_decay: float
    match: str
    tune: bool
    bf16: bool
    activation_checkpointing: bool
    backend: str
    # of ALBERT and recurrent models
    embedding: int | None
    inner: int | None
    objective: str
    optimizer: str
    clip: float
    # of ALBERT
    share: str
    norm: str
    act: str
    dropout: float
    in_order: float
    short: float
    masking: float
    longest: int
    whole_words: bool
    warmup: float
    # of recurrent models
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
    # of encoder-decoders
    noise: float
    span: float
    # of healing
    what: str


class TrainingSettings(SharedSettings, total=False):
    """Settings of `train`."""

    model: str


class ComparisonSettings(TrainingSettings, total=False):
    """Settings of `compare`: `boundary` is another name of `arms`."""

    arms: str | Sequence[str]
    boundary: str | Sequence[str]
