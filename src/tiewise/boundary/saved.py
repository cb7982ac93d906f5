"""Config and model classes of saved models with a boundary.

Other tools cannot load a model whose boundary has more than plain tables. Such a model is saved with the config type
`tiewise`, and its classes are made at run time, one per family:

    config.json of Llama with factored:64     "model_type": "tiewise", "base_model_type": "llama",
                                              "tiewise_boundary": "factored:64"
    → TiewiseConfig.from_dict                 class TiewiseLlamaConfig(LlamaConfig)
    → AutoModelForCausalLM                    class TiewiseLlamaForCausalLM(FamilyModel, LlamaForCausalLM)

No code of a checkpoint is executed: family classes come from transformers, by their registered names. Plain tied and
untied models keep the family's config type. Their config has the spec as one more entry, which other loaders ignore.
Shared layers (`tiewise.boundary.sharing`) are stored as another `Entry`.
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
from tiewise.boundary.free_rows import free_rows_of
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


# classes that are made at run time

NAME = "_tiewise"


def link_of(module: Any) -> Any:
    """Return the `Link` of an installed model or module, or None."""
    return vars(module).get(NAME)


def is_on_meta(model: Any) -> bool:
    """Return whether the model has shapes but no values yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def plain_class_of(x: Any) -> type:
    """Return the class that an object's class was made from, or else its class."""
    plain: type = getattr(type(x), "plain_class", type(x))
    return plain


class SwappedClass:
    """Base of the classes that are made from a plain class at run time.

    Copying and pickling stores the call that makes the class.
    """

    plain_class: type
    factory_call: tuple[Any, ...]  # (function, *arguments) that makes the class, also in another process

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, self.factory_call, vars(self)


def _blank(function: Any, *arguments: Any) -> Any:
    """Return an object without attributes, of the class that the call makes (for pickle)."""
    cls = function(*arguments)
    return cls.__new__(cls)


def _make(plain: Any, bases: tuple[type, ...], factory_call: tuple[Any, ...], **body: Any) -> Any:
    """Make the class `Tiewise…` of a plain class."""
    body |= {"plain_class": plain, "factory_call": factory_call, "__module__": __name__, "__doc__": plain.__doc__}
    return type(f"{PREFIX}{plain.__name__}", bases, body)


@cache
def swapped(plain: Any, mixin: Any) -> Any:
    """Return a class with the bases `plain` and then `mixin`, for objects of class `plain`."""
    bases: tuple[type, ...] = (SwappedClass, plain, mixin)
    if issubclass(mixin, plain):
        bases = (SwappedClass, mixin)
    return _make(plain, bases, (swapped, plain, mixin))


# the config type `tiewise`


def _do_nothing(model: Any) -> None:
    """Do nothing after a model is loaded."""


class Entry(NamedTuple):
    """Functions by which an entry of a config changes a model made from the config."""

    build: Callable[[Any, Any], None]  # called as build(model, value of the entry) before weights are loaded
    after_load: Callable[[Any], None] = _do_nothing  # called as after_load(model) when weights are loaded


ENTRIES: dict[str, Entry] = {}  # by the entry's name


class TiewiseConfig(PreTrainedConfig):
    """Config class that `AutoConfig` finds for the type `tiewise`.

    It returns an object of the config class that is made for the model's family.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of the family that the entry `base_model_type` names."""
        base = config_dict.get(BASE)
        if base not in CONFIG_MAPPING:
            remedy = f"its config.json should say {BASE}: llama, say; is transformers recent enough?"
            raise InstallError(f"a tiewise checkpoint of the unknown family {base!r}", remedy)
        return register_family(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


class DepthTying:
    """Mixin before a model class whose layers may share parameters."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return {target: source} of all tied Parameters.

        Keys that layers share do not depend on the config's tying flag.
        """
        of_family: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        return {**of_family, **depth_keys(self)}

    def _adjust_bias(self, module: Any, table: Any) -> None:
        """Resize a head's bias to a tied table.

        transformers calls this for all tied modules; layers that share Parameters are left as they are.
        """
        if isinstance(module, nn.Linear):
            super()._adjust_bias(module, table)  # type: ignore[misc]


class FamilyModel(DepthTying, SwappedClass):
    """Mixin before a family's model class, which builds the entries of its config."""

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
        """Load as the family does, and call `after_load` of every entry.

        Raises:
            InstallError: the options ask transformers for tensor parallelism, whose plans lack the boundary.
        """
        if _asks_for_tensor_parallelism(kwargs):
            remedy = "load it whole and give parallelize_module the plan of tiewise.boundary.parallel_plan(model, mesh)"
            raise InstallError(f"{cls.__name__} has maps or options that no plan of transformers knows", remedy)
        result = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        model = result
        if isinstance(result, tuple):  # (model, info), with output_loading_info
            model = result[0]
        _run_after_load(model)
        return result

    def _get_name(self) -> str:
        """Return the plain class's name, by which the Trainer's label smoother decides to shift."""
        return self.plain_class.__name__

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize the tables as the family does, but keep the modules.

        transformers makes a new head without map, scale or soft-cap. It also replaces all lookups by one, so that a map
        gets several names, and sets `requires_grad` of a map to that of the table.
        """
        link = link_of(self)
        if link is None:
            return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        _require_free_tokens(link, args, kwargs)
        ends: list[tuple[str, Any]] = link.ends.named_modules
        trained: list[tuple[nn.Parameter, bool]] = []
        for _, module in ends:
            trained += [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        resized = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        for parameter, trains in trained:
            parameter.requires_grad_(trains)
        for name, module in ends:
            replacement = self.get_submodule(name)  # type: ignore[attr-defined]
            if replacement is not module:
                _copy_sizes(module, replacement)
                self.set_submodule(name, module)  # type: ignore[attr-defined]
        # transformers has tied BART's tables and BERT's biases, even if the flag was off
        declare_tying(self, link.ends, Journal())
        return resized

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return the plain class's answer, since custom code skips part of the initialisation."""
        is_custom: bool = cls.plain_class.is_custom_code()  # type: ignore[attr-defined]
        return is_custom


def _asks_for_tensor_parallelism(options: dict[str, Any]) -> bool:
    """Return whether options of `from_pretrained` ask transformers to split the model over ranks."""
    if options.get("tp_plan") or options.get("tp_size"):
        return True
    ranks = getattr(options.get("distributed_config"), "tp_size", None)
    return ranks is not None and ranks > 1


def _require_free_tokens(link: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to cut a free row off.

    The arguments are those of `resize_token_embeddings`.
    """
    free = free_rows_of(link.head)
    rows = kwargs.get("new_num_tokens", args[0] if args else None)
    if free is not None and rows is not None:
        free.check_ids(rows)


def _copy_sizes(module: nn.Module, resized: nn.Module) -> None:
    """Copy table, bias and sizes from transformers' replacement of an end to the end."""
    for attribute in ("weight", "bias", "num_embeddings", "padding_idx", "out_features"):
        if hasattr(module, attribute):
            setattr(module, attribute, getattr(resized, attribute))


class FamilyConfig(SwappedClass):
    """Mixin before a family's config class."""


@cache
def family_config(plain: Any) -> Any:
    """Return the config class with a boundary for a family's config class `plain`."""
    return _make(plain, (FamilyConfig, plain), (family_config, plain), model_type=MODEL_TYPE)


@cache
def family_model(plain: Any) -> Any:
    """Return the model class with a boundary for a family's model class `plain`.

    Tensor names in its files are those of the family.
    """
    config = family_config(plain.config_class)
    model_class = _make(plain, (FamilyModel, plain), (family_model, plain), config_class=config)
    renamings = get_checkpoint_conversion_mapping(plain.__name__)
    if renamings is None:
        renamings = get_checkpoint_conversion_mapping(plain.config_class.model_type)
    if renamings is not None:
        register_checkpoint_conversion_mapping(model_class.__name__, renamings, overwrite=True)
    # transformers finds recordable outputs by class name; a live model that changes its class does not rerun __init__
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(model_class), plain._can_record_outputs)
    return model_class


def register_family(plain: Any) -> Any:
    """Register a family's config and models with the auto classes, and return the config class."""
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
    """Give a model and its config the classes with a boundary, saved as type `tiewise`."""
    if is_family_config(config):
        return
    journal.set(config, BASE, type(config).model_type)
    journal.set(config, "__class__", register_family(config.__class__))
    journal.set(model, "__class__", family_model(model.__class__))


def remove_entry(model: Any, entry: str) -> None:
    """Remove an entry from a model's config.

    If it was the last one, model and config also return to their plain classes.
    """
    config = copy_config(model, Journal())
    vars(config).pop(entry, None)
    if _config_entries(config):
        return
    vars(config).pop(BASE, None)
    for swapped_object in (config, model):
        if isinstance(swapped_object, FamilyModel | FamilyConfig):
            swapped_object.__class__ = swapped_object.plain_class


def is_family_config(config: Any) -> bool:
    """Return whether a config has the type `tiewise`."""
    return isinstance(config, FamilyConfig)


def _config_entries(config: Any) -> dict[str, Any]:
    """Return the config's entries of tiewise that have a value."""
    return {name: value for name, value in vars(config).items() if name.startswith("tiewise_") and value is not None}


def _run_after_load(model: Any) -> None:
    """Call `after_load` of every entry of a model's config."""
    for entry in _config_entries(model.config):
        ENTRIES[entry].after_load(model)


def register() -> None:
    """Register the type `tiewise` with `AutoConfig`.

    Families are registered later, when a checkpoint or a model needs them.
    """
    AutoConfig.register(MODEL_TYPE, TiewiseConfig, exist_ok=True)
