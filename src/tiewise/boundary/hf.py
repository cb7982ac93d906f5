"""Checkpoints with a boundary, for transformers' auto classes.

    import tiewise.hf
    model = AutoModelForCausalLM.from_pretrained(path)      # a model saved with factored:64, say
    model = tiewise.hf.load(path)                           # any token model, with its boundary installed and verified
    plain = tiewise.hf.plain_copy(model)                    # the same function in the family's plain classes

Importing this module registers the config type of such checkpoints with transformers; importing `tiewise` does not.
No code of a checkpoint is executed.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

import tiewise.boundary.sharing.share  # noqa: F401  (its entry of a config)
from tiewise.boundary.installation import build_into
from tiewise.boundary.plain_classes import plain_copy as plain_copy
from tiewise.boundary.saved import AUTO, ENTRY, PREFIX, family_model, is_family_config, plain_class_of, register
from tiewise.boundary.saved import TiewiseConfig as TiewiseConfig
from tiewise.core.errors import InstallError, TiewiseWarning, one_line_message

register()


def load(path: str | os.PathLike[str], *, batch: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """Load a model that was saved with or without a boundary, and install the boundary.

    A model without one gets the boundary of the tables that it has.

    Args:
        path: folder, or name on the Hugging Face hub.
        batch: keyword arguments of one forward, with labels, for a model that needs more than token ids (Whisper).
        **options: options of `from_pretrained`, such as `dtype`.

    Returns:
        The model, whose handle `tiewise.installed(model)` returns.

    Raises:
        InstallError: no folder has this name, config.json does not say which model class to build, or the model
            cannot have a boundary.

    >>> from tempfile import mkdtemp
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> folder = mkdtemp()
    >>> GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(folder)
    >>> type(load(folder)).__name__
    'GPT2LMHeadModel'
    """
    config = _read_config(path)
    with warnings.catch_warnings():
        # the warning of a first failure is not needed: `build_into` runs the model again, with the user's batch
        warnings.filterwarnings("ignore", ".*how its loss counts labels could not be asked", TiewiseWarning)
        model = model_class(config, path).from_pretrained(path, config=config, **options)
    build_into(model, getattr(config, ENTRY, None), batch, loaded=True)
    return model


def _read_config(path: str | os.PathLike[str]) -> Any:
    """Return the config of a folder or of a name on the hub.

    InstallError: there is none that transformers reads.
    """
    if not isinstance(path, str | os.PathLike):
        remedy = 'write tiewise.load("path/to/model"), or tiewise.install(model) for a live one'
        raise InstallError(f"tiewise.load reads a folder, not a value of type {type(path).__name__}", remedy)
    try:
        return AutoConfig.from_pretrained(os.fspath(path))
    except (OSError, ValueError) as error:
        if not os.path.exists(path):
            remedy = "check the path; a name of the Hugging Face hub needs a connection or its copy in the cache"
            raise InstallError(f"{path}: no such folder", remedy) from error
        reason = one_line_message(error)
        raise InstallError(f"{path} is no model of transformers: {reason}", "name its folder") from error


def model_class(config: Any, path: str | os.PathLike[str]) -> Any:
    """Return the model class of a config that was read from `path`.

    It is a class of transformers. If the config names a boundary, it is the class that tiewise derives from that.

    Raises:
        InstallError: the config names no class of transformers and no registered class.
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
    """Return the class of this name that a package, such as `tiewise.models`, registered; else None."""
    for auto in AUTO:
        model = auto._model_mapping.get(plain_class_of(config), None)
        if getattr(model, "__name__", None) == name:
            return model
    return None


__all__ = ["TiewiseConfig", "load", "plain_copy"]
