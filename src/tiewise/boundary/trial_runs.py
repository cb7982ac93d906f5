"""Forward passes on random tokens that leave a user's model unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.undisturbed import undisturbed

SEED = 20240229  # seed of all random batches


def ordinary_ids(model: Any, rows: int, shape: tuple[int, int], source: torch.Generator) -> Tensor:
    """Draw token ids [*shape] below `rows` and 4,096, without special tokens, from `source`."""
    config = model.config.get_text_config().to_dict()
    special = [value for key, value in config.items() if key.endswith("token_id")]
    ordinary = [token for token in range(min(rows, 4096)) if token not in special]
    ids = torch.tensor(ordinary or [0], device=source.device)
    indices = torch.randint(len(ids), shape, generator=source, device=source.device)
    return ids[indices]


def run_without_trace(model: Any, batch: dict[str, Any], *, training: bool = False) -> Any:
    """Return the output of one forward with a fixed seed, and leave the model unchanged."""
    # the seed is fixed because some families sample in their forward
    with undisturbed(model, training=training, seed=SEED), torch.set_grad_enabled(training):
        return model(**batch)
