"""Checkpoints with a boundary, read and written: importing this module teaches transformers' auto classes to load them.

    import tiewise.hf
    model = AutoModelForCausalLM.from_pretrained(path)      # a model saved with factored:64, say
    model = tiewise.hf.load(path)                           # any token model, with its boundary installed and verified
    plain = tiewise.hf.plain_copy(model)                    # the same function in the family's own classes

Nothing is registered by importing `tiewise` itself, and no checkpoint brings code along.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

import tiewise.boundary.sharing.share  # noqa: F401  (its entry of a config)
from tiewise.boundary.install import build_into
from tiewise.boundary.plain_classes import plain_copy as plain_copy
from tiewise.boundary.saved import AUTO, ENTRY, PREFIX, family_model, is_family_config, plain_class_of, register
from tiewise.boundary.saved import TiewiseConfig as TiewiseConfig
from tiewise.core.errors import InstallError, TiewiseWarning

register()


def load(path: str | os.PathLike[str], *, batch: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with or without a boundary, and install it.

    Args:
        path: folder, or name on the Hugging Face hub.
        batch: as for `install`: of a model that does not run on token ids alone (Whisper), one that it runs on.
        **options: as for `from_pretrained`, e.g. `dtype`.

    Raises:
        InstallError: config.json does not say which model class to build, or the model has no boundary.
    """
    config = AutoConfig.from_pretrained(os.fspath(path))
    with warnings.catch_warnings():
        # `build_into` runs the model again, with the batch that it needs: a first failure is no news
        warnings.filterwarnings("ignore", ".*how its loss counts labels could not be asked", TiewiseWarning)
        model = model_class(config, path).from_pretrained(path, config=config, **options)
    build_into(model, getattr(config, ENTRY, None), batch, loaded=True)
    return model


def model_class(config: Any, path: str | os.PathLike[str]) -> Any:
    """Return transformers' class of a config read from `path`. If the config names a boundary, return ours.

    Raises:
        InstallError: it does not say which class that is.
    """
    names = config.architectures or ["(none)"]
    name = names[0].removeprefix(PREFIX)
    plain = getattr(transformers, name, None)
    if plain is None:
        plain = _registered_model(config, name)
    if not (isinstance(plain, type) and issubclass(plain, PreTrainedModel)):
        remedy = "load it with the class that you know it has, then call tiewise.install(model)"
        problem = f"{path}: its config.json names the architecture {names[0]}"
        raise InstallError(f"{problem}, neither of transformers nor registered", remedy)
    if is_family_config(config):
        return family_model(plain)
    return plain


def _registered_model(config: Any, name: str) -> Any:
    """Return the class of this name that a package registered for a config, or None. `tiewise.models` is one."""
    for auto in AUTO:
        model = auto._model_mapping.get(plain_class_of(config), None)
        if getattr(model, "__name__", None) == name:
            return model
    return None


__all__ = ["TiewiseConfig", "load", "plain_copy"]
