"""Checkpoints with a boundary, read and written: importing this module teaches transformers' auto classes to load them.

    import tiewise.hf
    model = AutoModelForCausalLM.from_pretrained(path)      # a model saved with factored:64, say
    model = tiewise.hf.load(path)                           # any token model, with its boundary installed and verified
    plain = tiewise.hf.plain_copy(model)                    # the same function in the family's own classes

Nothing is registered by importing `tiewise` itself, and no checkpoint brings code along.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

import tiewise.sharing.share  # noqa: F401  (its entry of a config)
from tiewise.boundary.install import build_into, installed
from tiewise.boundary.locate import Journal, declare_tying
from tiewise.boundary.saved import AUTO, ENTRY, PREFIX, family_model, forget, is_family, link_of, register
from tiewise.boundary.saved import TiewiseConfig as TiewiseConfig
from tiewise.boundary.verify import unswap
from tiewise.core.errors import InstallError, TiewiseWarning, UnsupportedError

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
        # what a model could not be asked yet `build_into` asks, with the batch that it needs
        warnings.filterwarnings("ignore", ".*how its loss counts labels could not be asked", TiewiseWarning)
        model = model_class(config, path).from_pretrained(path, config=config, **options)
    build_into(model, getattr(config, ENTRY, None), batch, loaded=True)
    return model


def model_class(config: Any, path: str | os.PathLike[str]) -> Any:
    """Return transformers' class of a config read from `path`, or ours where the config names a boundary.

    Raises:
        InstallError: it does not say which class that is.
    """
    names = config.architectures or ["(none)"]
    name = names[0].removeprefix(PREFIX)
    plain = getattr(transformers, name, None)
    if plain is None:  # a class that a package has registered for this kind of config, `tiewise.models` say
        kind = config.plain_class if is_family(config) else type(config)
        models = (auto._model_mapping.get(kind, None) for auto in AUTO)
        plain = next((model for model in models if getattr(model, "__name__", None) == name), None)
    if not (isinstance(plain, type) and issubclass(plain, PreTrainedModel)):
        fix = "load it with the class that you know it has, then call tiewise.install(model)"
        what = f"{path}: its config.json names the architecture {names[0]}"
        raise InstallError(f"{what}, neither of transformers nor registered", fix)
    return family_model(plain) if is_family(config) else plain


def plain_copy(model: Any) -> PreTrainedModel:
    """Return a copy in the family's own class, its tables dense and untied where maps or scales made them differ.

    Raises:
        InstallError: no boundary is installed.
        UnsupportedError: the family's class has no place for what the boundary adds to the logits.
    """
    link = installed(model)._link
    fix = "keep the boundary, and load the model with tiewise.hf.load"
    if link.structure.softcap is not None:
        raise UnsupportedError(f"{link.spec}: a soft-cap is no matrix, so no dense table does the same", fix)
    if link.spec.out_bias:
        raise UnsupportedError(f"{link.spec}: the projection's bias is no table", fix)
    if link.structure.new_bias:
        raise UnsupportedError(f"{link.spec}: the family's own head has no bias to keep this one in", fix)
    plain = copy.deepcopy(model)
    made = link_of(plain)
    assert made is not None
    unswap(made, Journal())
    made.undo.undo()
    for module, name in ((made.ends.owner, "in_map"), (made.head, "out_map")):
        if hasattr(module, name):
            delattr(module, name)
    for lookup in made.lookups:
        lookup.embedding_dim = lookup.weight.shape[1]
    made.head.in_features = made.hidden_width
    forget(plain, ENTRY)
    declare_tying(plain, made.ends, Journal())
    return plain


__all__ = ["TiewiseConfig", "load", "plain_copy"]
