"""Methods of PEFT, by their tensors for a module and their merge into a tied base.

Saving, loading and merging every method of PEFT 0.21 on a tiny Llama showed the entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tiewise.checkpoint.untrusted import short

LORA, COPY, TOKENS, UPDATE = "low-rank update", "full copy", "trained rows", "update"  # forms of a change
USE_PEFT = "load it with its base, or merge it with PEFT"
# settings under which a LoRA adapter computes more than the sums of `adapter merge`
UNSUPPORTED_SETTINGS = (
    "target_parameters layer_replication use_qalora use_bdlora alora_invocation_tokens arrow_config kasa_config"
)
# `init_lora_weights` that leave the base unchanged
NEUTRAL_INITS = ("True", "False", "None", "gaussian", "eva", "orthogonal")


class Method(NamedTuple):
    """One `peft_type`."""

    prefix: str  # start of the part names that it stores for a module; empty: it stores shared tensors only
    form: str = UPDATE  # form of the change of a target module
    merges: bool = True  # False: PEFT refuses a merge, or merges no weight
    on_blocks: bool = False  # a target may be a module without tensors, such as a layer
    shares: bool = True  # tensors outside the model's modules are shared: prompts, projections and vector banks


UNKNOWN = Method("", merges=False, shares=False)
METHODS = {
    "LORA": Method("lora_", LORA, shares=False),
    "ADALORA": Method("lora_", LORA),
    "ADAMSS": Method("adamss_"),
    "ADAPTION_PROMPT": Method("adaption_", merges=False, on_blocks=True),
    "BEFT": Method("beft_", merges=False),  # a bias
    "BOFT": Method("boft_"),
    "C3A": Method("c3a_"),
    "CARTRIDGE": Method("", merges=False),
    "CPT": Method("", merges=False),
    "DEFT": Method("deft_"),
    "DELORA": Method("delora_"),
    "FOURIERFT": Method("fourierft_"),
    "FROD": Method("frod_"),
    "GLORA": Method("glora_"),
    "GRALORA": Method("gralora_"),
    "HIRA": Method("hira_"),
    "HRA": Method("hra_"),
    "IA3": Method("ia3_"),
    "LILY": Method("lily_", merges=False),
    "LN_TUNING": Method("ln_tuning_", COPY),
    "LOHA": Method("hada_"),
    "LOKR": Method("lokr_"),
    "MISS": Method("miss_"),
    "MULTITASK_PROMPT_TUNING": Method("", merges=False),
    "OFT": Method("oft_"),
    "OSF": Method("osf_"),
    "PEANUT": Method("peanut_"),
    "POLY": Method("poly_", merges=False),
    "PREFIX_TUNING": Method("", merges=False),
    "PROMPT_TUNING": Method("", merges=False),
    "PSOFT": Method("psoft_"),
    "PVERA": Method("pvera_"),
    "P_TUNING": Method("", merges=False),
    "RANDLORA": Method("randlora_"),
    "ROAD": Method("road_"),
    "SHADOW": Method("shadow_", merges=False, on_blocks=True),
    "SHIRA": Method("shira_"),
    "SUPERTUNING": Method("supertuning_"),
    "TINYLORA": Method("tinylora_"),
    "TRAINABLE_TOKENS": Method("trainable_tokens_", TOKENS),
    "UNILORA": Method("unilora_"),
    "VBLORA": Method("vblora_"),
    "VERA": Method("vera_"),
    "WAVEFT": Method("waveft_"),
    "XLORA": Method("", merges=False),
}


def method_of(config: Mapping[str, Any]) -> Method:
    """Return the method that an adapter's config names, else `UNKNOWN`."""
    method = METHODS.get(str(config.get("peft_type")), UNKNOWN)
    if config.get("alora_invocation_tokens"):  # PEFT does not merge these
        return method._replace(merges=False)
    return method


def is_lora(config: Mapping[str, Any]) -> bool:
    """Return whether an adapter's config names the method LORA."""
    return bool(config.get("peft_type") == "LORA")


def reasons_against_merge(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) for each setting with which `adapter merge` refuses an adapter."""
    if not is_lora(config):
        yield f"its peft_type is {short(config.get('peft_type'))}, and not LORA", USE_PEFT
    for key in UNSUPPORTED_SETTINGS.split():
        if config.get(key):
            yield f"it was trained with {key}, no sum that is known here", USE_PEFT
    initial = str(config.get("init_lora_weights", True))
    if initial not in NEUTRAL_INITS:
        remedy = "convert it with PEFT first: path_initial_model_for_weight_conversion"
        yield f"its training began with {short(initial)}, which changes the base", remedy
