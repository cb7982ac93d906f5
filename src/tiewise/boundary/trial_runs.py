"""Forward passes of a user's model on random tokens, which leave no trace in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.undisturbed import undisturbed

SEED = 20240229  # of every batch that a model is run on


def ordinary_ids(model: Any, rows: int, shape: tuple[int, int], source: torch.Generator) -> Tensor:
    """Draw token ids [*shape] below `rows`, without the special ones, on the device of `source`."""
    config = model.config.get_text_config().to_dict()
    special = [value for key, value in config.items() if key.endswith("token_id")]
    ordinary = [token for token in range(min(rows, 4096)) if token not in special]
    ids = torch.tensor(ordinary or [0], device=source.device)
    drawn = torch.randint(len(ids), shape, generator=source, device=source.device)
    return ids[drawn]


def run_without_trace(model: Any, batch: dict[str, Any], *, training: bool = False) -> Any:
    """Return the output of one forward with fixed randomness, and leave no trace in the model."""
    # fixed, since some families sample in their forward
    with undisturbed(model, training=training, seed=SEED), torch.set_grad_enabled(training):
        return model(**batch)
