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


class PeftMethod(NamedTuple):
    """One `peft_type`."""

    prefix: str  # start of the part names that it stores for a module; empty: it stores shared tensors only
    form: str = UPDATE  # form of the change of a target module
    merges: bool = True  # False: PEFT refuses a merge, or merges no weight
    on_blocks: bool = False  # a target may be a module without tensors, such as a layer
    shares: bool = True  # tensors outside the model's modules are shared: prompts, projections and vector banks


UNKNOWN = PeftMethod("", merges=False, shares=False)
METHODS = {
    "LORA": PeftMethod("lora_", LORA, shares=False),
    "ADALORA": PeftMethod("lora_", LORA),
    "ADAMSS": PeftMethod("adamss_"),
    "ADAPTION_PROMPT": PeftMethod("adaption_", merges=False, on_blocks=True),
    "BEFT": PeftMethod("beft_", merges=False),  # a bias
    "BOFT": PeftMethod("boft_"),
    "C3A": PeftMethod("c3a_"),
    "CARTRIDGE": PeftMethod("", merges=False),
    "CPT": PeftMethod("", merges=False),
    "DEFT": PeftMethod("deft_"),
    "DELORA": PeftMethod("delora_"),
    "FOURIERFT": PeftMethod("fourierft_"),
    "FROD": PeftMethod("frod_"),
    "GLORA": PeftMethod("glora_"),
    "GRALORA": PeftMethod("gralora_"),
    "HIRA": PeftMethod("hira_"),
    "HRA": PeftMethod("hra_"),
    "IA3": PeftMethod("ia3_"),
    "LILY": PeftMethod("lily_", merges=False),
    "LN_TUNING": PeftMethod("ln_tuning_", COPY),
    "LOHA": PeftMethod("hada_"),
    "LOKR": PeftMethod("lokr_"),
    "MISS": PeftMethod("miss_"),
    "MULTITASK_PROMPT_TUNING": PeftMethod("", merges=False),
    "OFT": PeftMethod("oft_"),
    "OSF": PeftMethod("osf_"),
    "PEANUT": PeftMethod("peanut_"),
    "POLY": PeftMethod("poly_", merges=False),
    "PREFIX_TUNING": PeftMethod("", merges=False),
    "PROMPT_TUNING": PeftMethod("", merges=False),
    "PSOFT": PeftMethod("psoft_"),
    "PVERA": PeftMethod("pvera_"),
    "P_TUNING": PeftMethod("", merges=False),
    "RANDLORA": PeftMethod("randlora_"),
    "ROAD": PeftMethod("road_"),
    "SHADOW": PeftMethod("shadow_", merges=False, on_blocks=True),
    "SHIRA": PeftMethod("shira_"),
    "SUPERTUNING": PeftMethod("supertuning_"),
    "TINYLORA": PeftMethod("tinylora_"),
    "TRAINABLE_TOKENS": PeftMethod("trainable_tokens_", TOKENS),
    "UNILORA": PeftMethod("unilora_"),
    "VBLORA": PeftMethod("vblora_"),
    "VERA": PeftMethod("vera_"),
    "WAVEFT": PeftMethod("waveft_"),
    "XLORA": PeftMethod("", merges=False),
}


def method_of(config: Mapping[str, Any]) -> PeftMethod:
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
