"""Write the model types that the generic formula counts, and those that it cannot count.

    python tools/make_estimated_families.py     writes src/tiewise/checkpoint/data/estimated_families.json; two minutes

The tool looks at every type of the installed transformers that has token tables and no reader in tiewise. It builds
the type's class on the meta device from an empty config, and once more with one layer more. The formula counts a type
if its total differs from that of the class by at most `MOST`, and if the same holds for the added layer. All other
types are "not_counted".
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import tiewise
from tiewise.checkpoint.families import family as record_of
from tiewise.core.errors import PlanError
from tiewise.planning.config import Config
from tiewise.planning.read_config import estimate_by_formula

PATH = Path(tiewise.__file__).parent / "checkpoint" / "data" / "estimated_families.json"
MOST = 0.02  # share of the count of the class
HEADS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "MultimodalLM", "SpeechSeq2Seq", "PreTraining")
BUILT = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel")


def parameters_of_class(config: Any) -> tuple[int, bool]:
    """Build the config's class; return its parameters, and whether it has a token head."""
    name = next(name for name in BUILT if type(config) in getattr(transformers, name)._model_mapping)
    with torch.device("meta"):
        model = getattr(transformers, name).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()), name != "AutoModel"


def counted(config: Any, has_head: bool) -> int:
    """Return the formula's count of a config's parameters.

    An untied head is subtracted if the class lacks it.
    """
    architecture = estimate_by_formula(Config(config.to_dict(), str(config.model_type)))
    ends = architecture.ends
    return architecture.total - (0 if has_head or ends.tied else ends.vocab * ends.width)


def is_estimated(family: str) -> bool:
    """Return whether the formula counts a model type within `MOST` of its class.

    The class's default config is compared, and the same with one layer more.
    """
    config = AutoConfig.for_model(family)
    try:
        longer = AutoConfig.for_model(family, num_hidden_layers=config.num_hidden_layers + 1)
        (theirs, has_head), (theirs_longer, _) = parameters_of_class(config), parameters_of_class(longer)
    except Exception:  # a class that fails is not counted, for any error
        return False
    ours, layer = counted(config, has_head), theirs_longer - theirs
    our_layer = counted(longer, has_head) - ours
    return abs(ours - theirs) <= MOST * theirs and abs(our_layer - layer) <= MOST * layer


def has_tables(family: str) -> bool:
    """Return whether the formula finds the sizes that it needs in the type's default config."""
    try:
        counted(AutoConfig.for_model(family), has_head=True)
    except (PlanError, AttributeError, TypeError, ValueError, StrictDataclassError):
        return False
    return True


def is_headless(family: str) -> bool:
    """Return whether no class of the type computes logits over tokens."""
    kind = CONFIG_MAPPING[family]
    return not any(kind in getattr(transformers, f"AutoModelFor{head}")._model_mapping for head in HEADS)


def families() -> dict[str, list[str]]:
    """Return the model types under "estimated", "not_counted" and "headless"."""
    types: dict[str, list[str]] = {"estimated": [], "not_counted": [], "headless": []}
    for family in sorted(CONFIG_MAPPING_NAMES):
        if record_of(family).reader is None and has_tables(family):
            types["estimated" if is_estimated(family) else "not_counted"].append(family)
        if is_headless(family):
            types["headless"].append(family)
    return types


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = [f'"{name}": {json.dumps(types)}' for name, types in families().items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
