"""Export of a sharded save as an ordinary folder, as `save_pretrained` writes it.

Tied tables stay tied.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from tiewise.boundary.hf import model_class
from tiewise.boundary.sharded.shard_files import TYPES, ShardedSave, wrap_write_errors
from tiewise.checkpoint.audit import check, errors_of_result
from tiewise.checkpoint.hf_folder import CONFIG, Folder
from tiewise.checkpoint.rewrite.new_folder import copy_file, destination, rename_to_destination, temporary_folder
from tiewise.checkpoint.stored import BITS
from tiewise.checkpoint.tokenizer_ids import TOKENIZER_FILES
from tiewise.checkpoint.untrusted import require_memory
from tiewise.core.disk_errors import system_error
from tiewise.core.errors import CheckpointError
from tiewise.core.files import sync_to_disk

_LOAD_IT = "load it into your own model on one process: load_sharded(folder, model)"


def export_sharded(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the model of a sharded save as `save_pretrained` would, and return the new folder.

    It runs in one process, which needs memory for the weights once. Config and generation config are those of the saved
    model. Tokenizer files in `folder` are copied.

    >>> import tempfile, tiewise
    >>> from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save = tiewise.boundary.save_sharded(f"{folder}/save", model)
    ...     exported = tiewise.boundary.export_sharded(save, f"{folder}/exported")
    ...     type(AutoModelForCausalLM.from_pretrained(exported)).__name__
    'GPT2LMHeadModel'

    Args:
        folder: the folder of a save of `save_sharded`.
        out: the new folder.

    Returns:
        The new folder.

    Raises:
        CheckpointError: as `load_sharded`; the saved model was not one of transformers; `out` exists or cannot be
            written; or `check` finds an error in the result.
        InstallError: the config does not say which class to build.
    """
    saved = ShardedSave(Path(os.fspath(folder)))
    index = saved.index
    if index.config is None or index.architecture is None:
        raise CheckpointError(f"{saved.folder}: it was saved from a model without a config", _LOAD_IT)
    real = destination(Folder(saved.folder, (), None, {}, {}), Path(os.fspath(out)))
    saved.verify()
    with temporary_folder(real) as partial:
        with wrap_write_errors(real):
            _write_model(saved, index.architecture, index.config, partial)
            for name in TOKENIZER_FILES:
                if (saved.folder / name).is_file():
                    copy_file(saved.folder / name, partial / name)
            for path in (*partial.iterdir(), partial):
                sync_to_disk(path)
        for finding in errors_of_result(check(partial), index.config):
            what = f"{saved.folder}: the result was not kept: {finding.rule} at {finding.where}: {finding.evidence}"
            raise CheckpointError(what, "the save itself is as it was")
        rename_to_destination(partial, real)
    return real


def _write_model(saved: ShardedSave, architecture: str, config: dict[str, Any], partial: Path) -> None:
    """Build the model of a save and write it to `partial`. A disk that cannot be written raises an OSError."""
    (partial / CONFIG).write_text(json.dumps({**config, "architectures": [architecture]}, indent=2))
    try:
        model_config = AutoConfig.from_pretrained(partial, trust_remote_code=False)
    except ValueError:
        raise CheckpointError(f"{saved.folder}: its config is of no class that transformers has", _LOAD_IT) from None
    with torch.device("meta"):
        model = model_class(model_config, partial)(model_config)
    model.load_state_dict(_load_state(saved, model), assign=True)
    if saved.index.generation_config is not None:
        model.generation_config = GenerationConfig.from_dict(saved.index.generation_config)
    try:
        model.save_pretrained(partial)
    except SafetensorError as error:  # the system's error in another class
        raise (system_error(error) or error) from None


def _load_state(saved: ShardedSave, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's full tensors, under all of their names."""
    entries = {name: entry for name, entry in saved.index.tensors.items() if name.startswith("model/")}
    sizes = (math.prod(entry.shape) * BITS[entry.dtype] // 8 for entry in entries.values())
    require_memory(sum(sizes), "the whole model")
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, entry in entries.items():
        tensor = torch.empty(entry.shape, dtype=TYPES[entry.dtype])
        saved.fill(name, tensor)
        plain_name = name.removeprefix("model/")
        if plain_name in parameters:  # one Parameter, so that its aliases are the same object after loading
            tensor = nn.Parameter(tensor)
        state[plain_name] = tensor
    return state | {alias: state[name] for alias, name in saved.index.aliases.items()}
