"""Tiny transformers models, whose saved tensors are identified by their values."""

import logging
import warnings
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import torch
import transformers as tr
from safetensors import safe_open
from shrink import parameters_on_meta, shrink
from transformers.models.auto import modeling_auto as auto

FLAG = "tie_word_embeddings"
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
MAPPINGS = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in (*TASKS, "PRETRAINING")]
TOO_BIG = 20_000_000


def classes():
    """Return the names of all classes in transformers' mappings of models over tokens."""
    values = [value for mapping in MAPPINGS for value in mapping.values()]
    return sorted({name for value in values for name in ([value] if isinstance(value, str) else value)})


def classes_for(task, families):
    """Return LlamaForCausalLM and GPTJForCausalLM for "CausalLM" and "Llama GPTJ"."""
    return [f"{family}For{task}" for family in families.split()]


def tiny(name, flag=None, **changes):
    """Return a tiny model with random ends; `flag` replaces the flag at every config level that has one."""
    model_class = getattr(tr, name)
    config = shrink(model_class)
    if flag is not None or changes:
        config = model_class.config_class.from_dict(flagged(config.to_dict(), flag) | changes)
    if parameters_on_meta(model_class, config) > TOO_BIG:
        raise ValueError("too big")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config)
    with torch.no_grad():
        for part in [*ends(model)[0], ends(model)[1]]:
            for values in (getattr(part, "weight", None), getattr(part, "bias", None)):
                if values is not None:
                    values.normal_()
    return model


def flagged(record, flag):
    """Return a config with the flag replaced wherever it occurs."""
    if not isinstance(record, dict) or flag is None:
        return record
    return {key: flag if key == FLAG else flagged(value, flag) for key, value in record.items()}


def ends(model):
    """Return ([modules of input tables, the main one first], module of the head or None)."""
    owners = [model, ask(model, "get_encoder"), ask(model, "get_decoder")]
    tables = [ask(owner, "get_input_embeddings") for owner in owners]
    head = ask(model, "get_output_embeddings")
    # a Linear here projects image patches (Pix2Struct) and reads no ids
    tables = [t for t in tables if getattr(t, "weight", None) is not None and not isinstance(t, torch.nn.Linear)]
    return tables, head if hasattr(head, "weight") else None


def ask(owner, method):
    try:
        return getattr(owner, method)()
    except (AttributeError, NotImplementedError):
        return None


def stored_as(path, values):
    """Return the names under which a folder's files store exactly these values."""
    wanted = values.detach().numpy()
    names = []
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                shape = tuple(opened.get_slice(name).get_shape())
                if shape == wanted.shape and np.array_equal(opened.get_tensor(name), wanted):
                    names.append(name)
    return names


def without(record, key):
    """Return a config without a key at any level."""
    return {k: without(v, key) for k, v in record.items() if k != key} if isinstance(record, dict) else record


@contextmanager
def heard():
    """Yield a buffer with everything that transformers logs in the block."""
    logger, text = tr.logging.get_logger("transformers"), StringIO()
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # an earlier test may have silenced the library
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
