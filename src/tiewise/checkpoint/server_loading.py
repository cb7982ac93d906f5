"""Outcome of loading with vLLM, SGLang, llama.cpp or mlx-lm, which serve models that generate text."""

from __future__ import annotations

from collections.abc import Mapping

from tiewise.checkpoint.claims import architecture, strip_wrappers
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.index_steps import UNREAD_INDEX
from tiewise.checkpoint.loader_columns import (
    DEPENDS,
    ERROR,
    LLAMA_CPP,
    LLAMA_CPP_T5,
    MLX,
    MODEL_FILES_ALONE,
    NO_HEAD,
    NOT_SERVED,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import CANONICAL, from_column, is_saved_as_head, malformed_vocab_size
from tiewise.checkpoint.untrusted import short

_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForCondGeneration")  # ends of class names


def server_outcome(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    """Return the outcome of the first failing check, else the entry of the loader's column."""
    for check in (_check_class, _check_files, _check_malformed, _check_names_of_converter, _check_names):
        failure = check(facts, loader)
        if failure is not None:
            return failure
    return from_column(facts, loader, flag)


def _check_class(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Return an outcome if a loader has no class for the model, else None."""
    if facts.is_tiewise_type:
        return outcome_of(loader, ERROR, "It does not know the type `tiewise`: export the model dense first.")
    if facts.roles.headless:
        return outcome_of(loader, NO_HEAD)
    if loader is not LLAMA_CPP_T5 and not _writes_text(facts):
        return outcome_of(loader, NOT_SERVED)
    return None


def _writes_text(facts: Facts) -> bool:
    """Return whether the class generates text without an encoder, by its name and config."""
    if facts.config.get("is_encoder_decoder") is True or facts.claims.t5_like:
        return False
    name = architecture(facts.config)
    return name is None or name.endswith(_DECODERS)


def _check_files(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Return an outcome if a loader opens none of the files with tensors, else None."""
    if loader.name not in MODEL_FILES_ALONE:
        return None
    for file in facts.folder.headers:
        if file.startswith("model"):
            return None
    return outcome_of(loader, ERROR, "It opens model*.safetensors alone.")


def _check_malformed(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Return an outcome if the index or a vocabulary size is malformed, else None.

    mlx-lm reads no index, and its recorded runs cover sizes.
    """
    if loader.name == MLX.name:
        return None
    if facts.folder.has_unread_index:
        return outcome_of(loader, DEPENDS, UNREAD_INDEX)
    misfit = malformed_vocab_size(facts)
    if misfit is None:
        return None
    return outcome_of(loader, DEPENDS, misfit)


def _check_names_of_converter(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Return an outcome if llama.cpp's converter has no name for an end, else None."""
    if loader.name != LLAMA_CPP.name:
        return None
    ends = facts.class_ends
    for table in facts.roles.tables:
        module, _ = module_of(table.name)
        if module.startswith(f"{ends.prefix}.{ends.prefix}.") and module not in ends.modules:
            return outcome_of(loader, ERROR, f"The converter has no name for {short(table.name)}.")
    if isinstance(facts.config.get("quantization"), Mapping) and "quantization_config" not in facts.config:
        for name in facts.folder.tensors:
            if name.endswith(".scales"):  # mlx-lm packed the model
                return outcome_of(loader, ERROR, f"The converter has no name for {short(name)}.")
    return None


def _check_names(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Return an outcome if a loader may not read the ends' names, else None."""
    roles = facts.roles
    for name in roles.unloaded_names:
        if strip_wrappers(name) != name:
            why = "The names in the file are those of a wrapped model: nothing in it is found."
            return outcome_of(loader, ERROR, why)
    if roles.unloaded_names:
        return outcome_of(loader, DEPENDS, "The names in the file are not those of its class: its own code decides.")
    if is_saved_as_head(facts):
        return outcome_of(loader, DEPENDS, CANONICAL)
    if facts.claims.has_family_data or len(roles.one_table_per_end) == 2:
        return None
    if facts.matrices_without_role:
        return outcome_of(loader, DEPENDS, "An end may be stored under a name of its own: its own code decides.")
    return None
