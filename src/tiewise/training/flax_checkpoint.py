"""Checkpoints of a run in JAX: `checkpoint-<step>/` with its arrays and, as PyTorch's, `trainer_state.json`.

A checkpoint is made beside its place, every file of it flushed to the disk, and then renamed: a kill leaves the one
before or the new one. The two newest are kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from tiewise.core.errors import CheckpointError
from tiewise.core.files import sync, write_whole
from tiewise.flax.flax_training import Fitting
from tiewise.flax.parameter_files import read
from tiewise.training.folder import newest_checkpoint, read_json, replace_path, write_json

ARRAYS, STATE = "arrays.safetensors", "trainer_state.json"
KEPT = 2


def keep(fitting: Fitting, folder: Path) -> None:
    """Write a checkpoint of `fitting` into a run's folder, and remove all but the newest."""
    final = folder / f"checkpoint-{fitting.step}"
    made = final.with_name(final.name + ".partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    write_whole(made / ARRAYS, save({name: np.asarray(value) for name, value in fitting.arrays().items()}))
    write_json(made / STATE, {"global_step": fitting.step, "fitting": fitting.record()})
    replace_path(made, final)
    sync(folder)
    old = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    for path in old[:-KEPT]:
        shutil.rmtree(path)


def take_up(fitting: Fitting, folder: Path) -> None:
    """Go on from the newest whole checkpoint of a run's folder, where there is one; torn ones are removed.

    Raises:
        CheckpointError: it cannot be read, or is of another model or optimizer.
    """
    found, _ = newest_checkpoint(folder)
    if found is None:
        return
    record = read_json(found / STATE).get("fitting")
    if record is None:
        raise CheckpointError(f"{found} is no checkpoint of the flax backend", "remove it to start the run again")
    fitting.take_up(read(found / ARRAYS), record, str(found))
