"""The model of a recurrent run: `RNNLM` with the settings' sizes and dropouts, every weight started uniform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiewise.boundary.install import Installed
from tiewise.models import RNNConfig

if TYPE_CHECKING:
    from tiewise.training.settings import Settings


def recurrent_config(settings: Settings, vocab: int) -> RNNConfig:
    """Return the configuration of a recurrent run's model.

    Raises:
        SpecError: sizes or options that no model can have.
    """
    o = settings.recurrent
    assert o is not None
    return RNNConfig(
        vocab_size=vocab,
        hidden_size=o.inner or settings.width,
        embedding_size=o.embedding or settings.width,
        last_hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        cell=settings.model,
        lstm_bias=o.bias,
        output_bias=o.output_bias,
        embedding_dropout=o.dropout_embedding,
        input_dropout=o.dropout_input,
        layer_dropout=o.dropout_between,
        recurrent_dropout=o.dropout_recurrent,
        output_dropout=o.dropout_output,
        weight_dropout=o.weight_drop,
        variational=o.variational,
        ar=o.activation,
        tar=o.slowness,
        table_range=o.start,
        body_range=o.start_body or o.start,
    )


def start_uniform(installed: Installed, reach: float, pad: int | None = None) -> None:
    """Draw tables and maps uniform in ± `reach`, the output table last; a padding row becomes zero."""
    table_in, table_out = installed.tables()
    model = installed.model
    maps = [p for name, p in model.named_parameters() if "_map." in name and p.dim() > 1]
    with torch.no_grad():
        for table in dict.fromkeys((table_in, *maps, table_out)):
            table.uniform_(-reach, reach)
        for table in (table_in, table_out) if pad is not None else ():
            table[pad].zero_()
