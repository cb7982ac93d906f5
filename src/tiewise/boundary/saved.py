"""Classes made on demand, and models that no other tool loads: one config type `tiewise`, and a model class per family.

    config.json of Llama with factored:64     "model_type": "tiewise", "base_model_type": "llama",
                                              "tiewise_boundary": "factored:64"
    → TiewiseConfig.from_dict                 class TiewiseLlamaConfig(LlamaConfig)
    → AutoModelForCausalLM                    class TiewiseLlamaForCausalLM(FamilyModel, LlamaForCausalLM)

Nothing in a checkpoint is executed: family classes come from transformers, by the names it registered. Plain tied and
untied models keep their own type and only carry the spec as one more entry, which other loaders pass over. What else
a model may be saved with (`tiewise.boundary.sharing`) is an `Entry` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import _CAN_RECORD_REGISTRY
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiewise.boundary.declare_tying import copy_config, declare_tying
from tiewise.boundary.journal import Journal
from tiewise.boundary.tied_keys import depth_keys
from tiewise.core.errors import InstallError
from tiewise.core.spec import MODEL_TYPE

PREFIX = "Tiewise"
ENTRY = "tiewise_boundary"
BASE = "base_model_type"
_TASKS = "CausalLM MaskedLM Seq2SeqLM PreTraining ImageTextToText SequenceClassification TokenClassification"
_TASKS += " QuestionAnswering MultipleChoice"
# auto classes that load models of tokens
AUTO: tuple[Any, ...] = (AutoModel, *(getattr(transformers, f"AutoModelFor{task}") for task in _TASKS.split()))


# classes that are made at run time, and what a model keeps of its boundary

NAME = "_tiewise"


def link_of(module: Any) -> Any:
    """Return the `Link` of an installed model or module, or None."""
    return vars(module).get(NAME)


def is_on_meta(model: Any) -> bool:
    """Return whether the model has shapes but no values yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def plain_class_of(x: Any) -> type:
    """Return the class that an object's was made from at run time, or else its own."""
    plain: type = getattr(type(x), "plain_class", type(x))
    return plain


class Swapped:
    """A class made from a plain one at run time. It copies and pickles by naming what made it."""

    plain_class: type
    factory_call: tuple[Any, ...]  # (function, *arguments) that makes the class, also in another process

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, self.factory_call, vars(self)


def _blank(function: Any, *arguments: Any) -> Any:
    cls = function(*arguments)
    return cls.__new__(cls)


def _make(plain: Any, bases: tuple[type, ...], factory_call: tuple[Any, ...], **body: Any) -> Any:
    """Make the class `Tiewise…` of `plain`."""
    body |= {"plain_class": plain, "factory_call": factory_call, "__module__": __name__, "__doc__": plain.__doc__}
    return type(f"{PREFIX}{plain.__name__}", bases, body)


@cache
def swapped(plain: Any, mixin: Any) -> Any:
    """Return the class of `plain`'s objects once `mixin` stands beneath it."""
    bases: tuple[type, ...] = (Swapped, plain, mixin)
    if issubclass(mixin, plain):
        bases = (Swapped, mixin)
    return _make(plain, bases, (swapped, plain, mixin))


# the type that no other tool loads


def _do_nothing(model: Any) -> None:
    """Do nothing once a model has its values."""


class Entry(NamedTuple):
    """Functions by which an entry of a config acts on a model made from it."""

    build: Callable[[Any, Any], None]  # (model, the entry's value), before there are weights
    loaded: Callable[[Any], None] = _do_nothing  # (model), once it has its values


ENTRIES: dict[str, Entry] = {}  # by the entry's name


class TiewiseConfig(PreTrainedConfig):
    """Config that `AutoConfig` reads under `tiewise`; it hands over to the family's own config class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the family's config."""
        base = config_dict.get(BASE)
        if base not in CONFIG_MAPPING:
            remedy = f"its config.json should say {BASE}: llama, say; is transformers recent enough?"
            raise InstallError(f"a tiewise checkpoint of the unknown family {base!r}", remedy)
        return register_family(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


class DepthTying:
    """Mixin above a model class whose layers may share parameters."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return {target: source} of all tied Parameters. Keys that layers share do not depend on the config's flag."""
        of_family: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        return {**of_family, **depth_keys(self)}

    def _adjust_bias(self, module: Any, table: Any) -> None:
        """Fit a head's bias to a tied table, as transformers does for whatever is tied. Layers have nothing to fit."""
        if isinstance(module, nn.Linear):
            super()._adjust_bias(module, table)  # type: ignore[misc]


class FamilyModel(DepthTying, Swapped):
    """Mixin above a family's model class: builds what its config names, a boundary and whatever else."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        entries = _config_entries(config)
        unknown = entries.keys() - ENTRIES.keys()
        if unknown:
            remedy = "import tiewise.hf first; if that is not enough, this version of tiewise is too old"
            raise InstallError(f"config.json names {', '.join(sorted(unknown))}, which is not known", remedy)
        for entry, value in entries.items():
            ENTRIES[entry].build(self, value)
        if not is_on_meta(self):
            _run_after_load(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as the family does, and tell every entry; refused (InstallError) by transformers' tensor parallelism."""
        if _asks_for_tensor_parallelism(kwargs):
            remedy = "load it whole and give parallelize_module the plan of tiewise.parallel_plan(model, mesh)"
            raise InstallError(f"{cls.__name__} has maps or options that no plan of transformers knows", remedy)
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        model = loaded
        if isinstance(loaded, tuple):  # with output_loading_info
            model = loaded[0]
        _run_after_load(model)
        return loaded

    def _get_name(self) -> str:
        """Return the family's own name: the Trainer's label smoother shifts by it."""
        return self.plain_class.__name__

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize the tables as the family does, each still in its own module.

        transformers makes a new head, which has no map, scale or cap, and puts one lookup in the place of all of
        them, so that a map has several names. It also freezes or frees a map as it finds the map's table.
        """
        link = link_of(self)
        if link is None:
            return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        ends: list[tuple[str, Any]] = link.ends.named
        trained: list[tuple[nn.Parameter, bool]] = []
        for _, module in ends:
            trained += [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        resized = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        for parameter, trains in trained:
            parameter.requires_grad_(trains)
        for name, module in ends:
            replacement = self.get_submodule(name)  # type: ignore[attr-defined]
            if replacement is not module:
                _take_sizes(module, replacement)
                self.set_submodule(name, module)  # type: ignore[attr-defined]
        # BART's tables are one from here on, BERT's biases too, whatever the flag said
        declare_tying(self, link.ends, Journal())
        return resized

    @classmethod
    def is_custom_code(cls) -> bool:
        """Say what the family says: custom classes skip part of the initialisation after loading."""
        is_custom: bool = cls.plain_class.is_custom_code()  # type: ignore[attr-defined]
        return is_custom


def _asks_for_tensor_parallelism(options: dict[str, Any]) -> bool:
    """Return whether options of `from_pretrained` ask transformers to split the model over ranks."""
    if options.get("tp_plan") or options.get("tp_size"):
        return True
    ranks = getattr(options.get("distributed_config"), "tp_size", None)
    return ranks is not None and ranks > 1


def _take_sizes(module: nn.Module, resized: nn.Module) -> None:
    """Give an end the table, the bias and the sizes of its replacement by transformers."""
    for attribute in ("weight", "bias", "num_embeddings", "padding_idx", "out_features"):
        if hasattr(module, attribute):
            setattr(module, attribute, getattr(resized, attribute))


class FamilyConfig(Swapped):
    """Mixin above a family's config class."""


@cache
def family_config(plain: Any) -> Any:
    """Return the config class of a family with a boundary."""
    return _make(plain, (FamilyConfig, plain), (family_config, plain), model_type=MODEL_TYPE)


@cache
def family_model(plain: Any) -> Any:
    """Return the class of `plain` models with a boundary. Its files have the names that the family's have."""
    config = family_config(plain.config_class)
    model_class = _make(plain, (FamilyModel, plain), (family_model, plain), config_class=config)
    renamings = get_checkpoint_conversion_mapping(plain.__name__)
    if renamings is None:
        renamings = get_checkpoint_conversion_mapping(plain.config_class.model_type)
    if renamings is not None:
        register_checkpoint_conversion_mapping(model_class.__name__, renamings, overwrite=True)
    # by its name a live model that becomes one gives hidden states and attentions; its __init__ does not run again
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(model_class), plain._can_record_outputs)
    return model_class


def register_family(plain: Any) -> Any:
    """Register a family's config and models with the auto classes. Return the config class."""
    config_class = family_config(plain)
    for auto in AUTO:
        models = auto._model_mapping.get(plain, ())
        if not isinstance(models, tuple):
            models = (models,)
        for model in models:
            if model.config_class is plain:
                auto.register(config_class, family_model(model), exist_ok=True)
                break
    return config_class


def declare_family(model: Any, config: Any, journal: Journal) -> None:
    """Give a model and its own config the type that no other tool loads."""
    if is_family_config(config):
        return
    journal.set(config, BASE, type(config).model_type)
    journal.set(config, "__class__", register_family(config.__class__))
    journal.set(model, "__class__", family_model(model.__class__))


def remove_entry(model: Any, entry: str) -> None:
    """Take an entry out of a model's config, and with the last one the type that no other tool loads."""
    config = copy_config(model, Journal())
    vars(config).pop(entry, None)
    if _config_entries(config):
        return
    vars(config).pop(BASE, None)
    for swapped_object in (config, model):
        if isinstance(swapped_object, FamilyModel | FamilyConfig):
            swapped_object.__class__ = swapped_object.plain_class


def is_family_config(config: Any) -> bool:
    """Return whether a config is of the type that no other tool loads."""
    return isinstance(config, FamilyConfig)


def _config_entries(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name.startswith("tiewise_") and value is not None}


def _run_after_load(model: Any) -> None:
    for entry in _config_entries(model.config):
        ENTRIES[entry].loaded(model)


def register() -> None:
    """Make `AutoConfig` know the type; families register when a checkpoint or a model names them."""
    AutoConfig.register(MODEL_TYPE, TiewiseConfig, exist_ok=True)
