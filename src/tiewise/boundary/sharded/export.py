"""An ordinary folder, as `save_pretrained` writes it, of a sharded save: what is tied there is tied here."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from tiewise.boundary.hf import model_class
from tiewise.boundary.sharded.shard_files import TYPES, Saved, writing
from tiewise.checkpoint.audit import check, errors_of_result
from tiewise.checkpoint.hf_folder import CONFIG, Folder
from tiewise.checkpoint.rewrite.new_folder import become, beside, copy, destination
from tiewise.checkpoint.stored import BITS
from tiewise.checkpoint.tokenizer_ids import TOKENIZER_FILES
from tiewise.checkpoint.untrusted import require_memory
from tiewise.core.errors import CheckpointError
from tiewise.core.files import disk_error, sync

_OWN = "load it into your own model on one process: load_sharded(folder, model)"


def export_sharded(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the model of a save as `save_pretrained` would; on one process, which holds the weights once.

    Config and generation config are those that the model had; tokenizer files that lie in `folder` come along.

    Returns:
        The new folder.

    Raises:
        RunError: the disk is full.
        CheckpointError: as `load_sharded`; or the model was none of transformers'; or `out` is taken or cannot be
            written; or our own `check` finds an error in the result.
        InstallError: the config does not say which class to build.
    """
    saved = Saved(Path(os.fspath(folder)))
    index = saved.index
    if index.config is None or index.architecture is None:
        raise CheckpointError(f"{saved.place}: it was saved from a model without a config", _OWN)
    real = destination(Folder(saved.place, (), None, {}, {}), Path(os.fspath(out)))
    saved.verify()
    with beside(real) as made:
        with writing(real):
            (made / CONFIG).write_text(json.dumps({**index.config, "architectures": [index.architecture]}, indent=2))
            try:
                config = AutoConfig.from_pretrained(made, trust_remote_code=False)
            except ValueError:
                raise CheckpointError(f"{saved.place}: its config is of no class that transformers has", _OWN) from None
            with torch.device("meta"):
                model = model_class(config, made)(config)
            model.load_state_dict(_filled(saved, model), assign=True)
            if index.generation_config is not None:
                model.generation_config = GenerationConfig.from_dict(index.generation_config)
            try:
                model.save_pretrained(made)
            except SafetensorError as error:  # the system's, under another name
                raise (disk_error(error, real, "free some space, or give another place") or error) from None
            for name in TOKENIZER_FILES:
                if (saved.place / name).is_file():
                    copy(saved.place / name, made / name)
            for path in (*made.iterdir(), made):
                sync(path)
        for finding in errors_of_result(check(made), index.config):
            what = f"{saved.place}: the result was not kept: {finding.rule} at {finding.where}: {finding.evidence}"
            raise CheckpointError(what, "the save itself is as it was")
        become(made, real)
    return real


def _filled(saved: Saved, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors whole, under all of their names."""
    kept = {name: entry for name, entry in saved.index.tensors.items() if name.startswith("model/")}
    sizes = (math.prod(entry.shape) * BITS[entry.dtype] // 8 for entry in kept.values())
    require_memory(sum(sizes), "the whole model")
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, entry in kept.items():
        whole = torch.empty(entry.shape, dtype=TYPES[entry.dtype])
        saved.fill(name, whole)
        own = name.removeprefix("model/")  # one Parameter, so that its aliases are the same object once it is loaded
        state[own] = nn.Parameter(whole) if own in parameters else whole
    return state | {alias: state[name] for alias, name in saved.index.aliases.items()}
