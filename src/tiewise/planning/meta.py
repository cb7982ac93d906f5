"""Counting a family that no reader knows: the model's own class, built on the meta device, holds no memory.

Imports torch and transformers; import this module only where a user asks for the model to be built.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture, Ends
from tiewise.planning.parts import Part

CLASSES = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)


def architecture_on_meta(config: Mapping[str, Any]) -> Architecture:
    """Build `config`'s model without memory and count it: tables, the head's bias, and all else as `other`.

    Exact in total and in the tables. Layers are not told apart, so sharing cannot be planned; every matrix counts as
    used by every token.

    Raises:
        PlanError: transformers does not know the family, or refuses the config.
    """
    values = dict(config)
    family = str(values.pop("model_type", ""))
    model = _built(family, values)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is None or head is None:
        raise PlanError(f"{family} has no token table and head", "plan works on language models")
    counted = {id(parameter): parameter for parameter in model.parameters()}
    ours = {id(p): p for p in (table.weight, head.weight, getattr(head, "bias", None)) if p is not None}
    others = [parameter for key, parameter in counted.items() if key not in ours]
    whole = sum(p.numel() for p in others)
    other = Part(whole, sum(p.numel() for p in others if p.dim() > 1), whole)
    (vocab, width), tied = table.weight.shape, head.weight is table.weight
    if head.weight.shape != table.weight.shape:
        raise PlanError(f"{family}: its two tables differ in shape", "such a model cannot be planned")
    ends = Ends(vocab, width, tied, head_biases=int(getattr(head, "bias", None) is not None))
    note = f"{family} was built on the meta device; its layers are not told apart"
    return Architecture(family, width, ends, (), {"other": other}, notes=(note,))


def _built(family: str, values: Mapping[str, Any]) -> Any:
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(family, **values)
            for kind in CLASSES:
                if type(config) in kind._model_mapping:
                    return kind.from_config(config)
    except Exception as error:  # whatever a stranger's class raises, the config is what it was raised for
        what = f"transformers cannot build {family or 'a config without model_type'}: {str(error)[:120]}"
        raise PlanError(what.replace("\n", " "), "leave build out to estimate instead") from None
    raise PlanError(f"transformers has no language model of type {family}", "leave build out to estimate instead")
