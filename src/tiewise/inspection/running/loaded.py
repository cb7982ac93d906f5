"""Checkpoints opened to run: weights in fp32, evaluation mode, ends located.

Nothing is unpickled, and no code of a checkpoint is executed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import tiewise.training.models  # noqa: F401  # teaches the auto classes our own models
from tiewise.boundary.hf import model_class
from tiewise.boundary.locate import ModelEnds, locate
from tiewise.boundary.undisturbed import preserve_generators, undisturbed
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.untrusted import require_memory
from tiewise.core.errors import CheckpointError, DataError, TiewiseError, one_line_message
from tiewise.training.data.tokenizer import Ids

P = ParamSpec("P")
R = TypeVar("R")

TOKENS_AT_ONCE = 2048
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Opened:
    """A checkpoint loaded as a model that can run."""

    folder: Folder  # the checkpoint on disk
    model: PreTrainedModel  # in evaluation mode (no dropout), on the CPU, in fp32
    ends: ModelEnds  # its input embeddings and its output head

    @property
    def vocab(self) -> int:
        """Return V, the number of rows of the input table."""
        return int(self.ends.main_lookup.weight.shape[0])

    @property
    def longest(self) -> int | None:
        """Return the number of positions of the model; None if its config has no limit."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            return positions
        return None

    def at_once(self, length: int) -> int:
        """Return how many windows of this length one forward takes.

        It limits the states and logits that are in memory to those of a few thousand tokens.
        """
        tokens = min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // self.vocab)
        return max(1, tokens // length)

    def checked(self, windows: Ids) -> Tensor:
        """Return windows of ids [n, T] as a tensor, after checks that the model accepts them.

        Raises:
            DataError: there are no windows; a window has fewer than two tokens, or more than the model has positions;
                an id has no row.
        """
        if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
            raise DataError(f"windows of shape {windows.shape}", "give at least one window of two tokens or more")
        rows = min(self.vocab, len(self.ends.head.weight))
        largest, length = int(windows.max()), windows.shape[1]
        if largest >= rows or int(windows.min()) < 0:
            raise DataError(f"token {largest} in tables of {rows:,} rows", "use the tokenizer of this model")
        if self.longest is not None and length > self.longest:
            problem = f"windows of {length} tokens, and the model has {self.longest} positions"
            raise DataError(problem, f"give windows of at most {self.longest}")
        return torch.from_numpy(np.ascontiguousarray(windows, dtype=np.int64))


def open_model(path: str | os.PathLike[str], dtype: Any = torch.float32) -> Opened:
    """Load a Hugging Face folder with transformers' class, without executing its code.

    A folder that was saved with a boundary is loaded with the boundary's class.

    Raises:
        CheckpointError: not a folder with config.json and safetensors, too large for the free memory, or transformers
            cannot load it.
        InstallError: its config names no class of transformers, or `install` does not support its ends.
    """
    folder = open_folder(path)
    if folder.config is None:
        raise CheckpointError(f"{folder.path}: no config.json that can be read", "give a Hugging Face folder")
    if not folder.tensors:
        fix = "convert the weights to safetensors first; pickled files are never opened"
        raise CheckpointError(f"{folder.path}: no safetensors in it", fix)
    values = sum(math.prod(tensor.shape) for tensor in folder.tensors.values())
    require_memory(values * dtype.itemsize, f"running {folder.path}")
    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
        options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
        with preserve_generators():  # loading draws the tensors that the folder lacks at random
            model = model_class(config, folder.path).from_pretrained(folder.path, config=config, **options)
    except TiewiseError:
        raise
    except Exception as error:  # the config classes of transformers raise errors of any type
        problem = f"{folder.path}: transformers cannot load it ({_load_failure(error)})"
        raise CheckpointError(problem, "`tiewise check` says what is wrong with it") from None
    model.eval()
    return Opened(folder, model, locate(model))


def _load_failure(error: Exception) -> str:
    """Return the reason why transformers cannot load a model."""
    # the message for a mismatched shape names an option of transformers instead of the reason
    if "ignore_mismatched_sizes" in str(error):
        return "a stored tensor has another shape than its config says"
    return one_line_message(error)


def leaves_model(measure: Callable[Concatenate[Opened, P], R]) -> Callable[Concatenate[Opened, P], R]:
    """Decorate a measure of an opened model: it restores the model and the random generators."""

    def measured(opened: Opened, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the measure, then restore the model and the generators."""
        with undisturbed(opened.model):
            return measure(opened, *args, **kwargs)

    return update_wrapper(measured, measure)
