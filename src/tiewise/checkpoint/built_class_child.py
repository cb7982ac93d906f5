"""Child process of `built_class.py`.

It builds one class of transformers on the meta device and answers a question about it.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from tiewise.core.json_child import describe_error, limit_process, read_request, write_reply

OUT_OF_MEMORY = "needs more memory than its limit"
# endings of the AutoModelFor… classes that are tried in this order if a config names no class
AUTO_CLASSES = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "MultimodalLM")


def main() -> None:
    """Answer one request."""
    request = read_request()
    limit_process(request["memory"], request["seconds"])
    write_reply(answer(request))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question.

    Without an answer, the result is {"refused": reason}, {"not_built": reason} or, if the limits leave too little
    memory, {"stopped": predicate}.
    """
    try:
        model = build(request["config"], request["class_name"])
    except ClassNotFoundError as error:
        return {"not_built": str(error)}
    except Exception as error:  # a config may make a class raise anything
        if _lacks_memory(error):
            return {"stopped": OUT_OF_MEMORY}
        key = "not_built" if isinstance(error, ImportError | OSError) else "refused"
        return {key: describe_error(error)}
    question = import_module(request["module"])
    try:
        reply: dict[str, Any] = question.answer(model, request["argument"])
    except Exception as error:
        if _lacks_memory(error):
            return {"stopped": OUT_OF_MEMORY}
        return {"not_built": describe_error(error)}
    return reply


def _lacks_memory(error: Exception) -> bool:
    """Return whether an error says nothing about the config, since the limits leave no memory.

    The first line of its message counts. Torch adds the calls in C++ below, whose types name allocators.
    """
    message = str(error).partition("\n")[0]
    return isinstance(error, MemoryError) or "alloc" in message or "thread" in message


class ClassNotFoundError(Exception):
    """transformers has no such class, or none for a config."""


def build(config: Mapping[str, Any], class_name: str | None) -> Any:
    """Return a model on the meta device, as `from_pretrained` builds it for this config.json.

    No tensors are tied yet: `from_pretrained` ties them after it has loaded the files. A head may have more rows than
    the table to which it will be tied.

    Raises:
        ClassNotFoundError: transformers lacks the class.
        Exception: the class refuses the config.
    """
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    model_class = None if class_name is None else built_in_class(class_name, config.get("model_type"))
    config_class = transformers.AutoConfig if model_class is None else model_class.config_class
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        loaded = config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded._attn_implementation = "eager"  # a config may name a kernel that is fetched
        if model_class is None:
            model_class = auto_class(loaded)
        return _on_meta_device(model_class, loaded)


def _on_meta_device(model_class: Any, config: Any) -> Any:
    """Return a model without numbers, in the contexts in which `from_pretrained` makes one."""
    import torch

    with ExitStack() as contexts:
        for context in model_class.get_init_context(torch.float32, False, False, False):
            contexts.enter_context(context)
        return model_class(config)


def built_in_class(name: str, model_type: Any = None) -> Any:
    """Return the model class of transformers with this name.

    It may be a part, such as WhisperDecoder, that only the module of the family `model_type` has.

    Raises:
        ClassNotFoundError: transformers has no such class.
    """
    import transformers

    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        model_class = getattr(_module_of_family(model_type), name, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model or not model_class.__module__.startswith("transformers."):
        raise ClassNotFoundError(f"transformers {transformers.__version__} has no class {name}")
    return model_class


def _module_of_family(model_type: Any) -> Any:
    """Return the module of transformers with a family's classes; None for an unknown family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    name = str(model_type)
    if name not in CONFIG_MAPPING_NAMES:
        return None
    package = model_type_to_module_name(name)
    return import_module(f"transformers.models.{package}.modeling_{package}")


def auto_class(config: Any) -> Any:
    """Return the first class that the AutoModel mappings have for a config.

    Raises:
        ClassNotFoundError: no mapping has one.
    """
    import transformers

    names = AUTO_CLASSES
    if config.get_text_config() is not config:
        names = AUTO_CLASSES[::-1]  # a composite may also have a class of its language model alone
    for name in names:
        auto: Any = getattr(transformers, f"AutoModelFor{name}", None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        classes = auto._model_mapping[type(config)]
        return classes[0] if isinstance(classes, list | tuple) else classes
    problem = f"transformers {transformers.__version__} has no language model of type {config.model_type}"
    raise ClassNotFoundError(problem)
