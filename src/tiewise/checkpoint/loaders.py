"""Outcome of loading a checkpoint with each loader. One folder may give different models.

docs/dev/incidents.md shows the columns of `loader_columns.py` and the source of each entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tiewise.checkpoint.claims import TEXT_PARTS, Claim, Claims
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.loader_columns import (
    DROPPED,
    ERROR,
    INCOMPLETE,
    LLAMA_CPP_NAMED,
    MLX,
    NEW_TENSORS,
    NO_SCALE,
    RANDOM_TENSORS,
    SGLANG,
    TRANSFORMERS_4,
    TRANSFORMERS_5,
    UNTIED,
    VLLM_BEFORE,
    VLLM_NAMED,
    VLLM_SEPARATE_HEAD,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import from_column
from tiewise.checkpoint.mlx_loading import MlxLoading
from tiewise.checkpoint.server_loading import server_outcome
from tiewise.checkpoint.transformers_loading import WITH_TIEWISE, TransformersLoading


def predict(facts: Facts) -> tuple[LoaderOutcome, ...]:
    """Return the outcome of each loader. Empty without a config or tensors."""
    if facts.folder.config is None or not facts.folder.tensors:
        return ()
    outcomes = _by_the_ends(facts)
    if not facts.missing_elsewhere:
        return outcomes
    return tuple(_with_missing_tensors(facts, outcome) for outcome in outcomes)


def _with_missing_tensors(facts: Facts, outcome: LoaderOutcome) -> LoaderOutcome:
    """Return the outcome of a loader that finds both ends, but lacks other tensors."""
    if outcome.right is not True or _is_of_whole_mlx_model(facts, outcome):
        return outcome
    count = len(facts.missing_elsewhere)
    sentence = f"{count:,} tensor{'s' if count > 1 else ''} outside the embedding and head are not stored."
    return replace(outcome, outcome=_word_of_missing_tensors(facts, outcome.loader), sentence=sentence, right=False)


def _word_of_missing_tensors(facts: Facts, loader: str) -> str:
    """Return what a loader does with tensors outside the embedding and head that no file stores."""
    if loader == MLX.name:
        return ERROR
    if loader != TRANSFORMERS_5.name:
        return INCOMPLETE  # it leaves them as they are
    if facts.draws_elsewhere:
        return RANDOM_TENSORS
    return NEW_TENSORS


def _is_of_whole_mlx_model(facts: Facts, outcome: LoaderOutcome) -> bool:
    """Return whether a row of mlx-lm covers all tensors.

    It does for a family with a recorded run, which passes by some.
    """
    return outcome.loader == MLX.name and family(facts.claims.levels[0].model_type).mlx_run is not None


def _by_the_ends(facts: Facts) -> tuple[LoaderOutcome, ...]:
    """Return the outcome of each loader by the two ends, except the installed transformers."""
    claims = facts.claims
    with_transformers = tuple(_transformers(facts))
    if facts.as_class is not None:  # only transformers has this class
        return with_transformers
    model_type = claims.levels[0].model_type or ""
    return (
        *with_transformers,
        *_vllm(facts, model_type),
        server_outcome(facts, LLAMA_CPP_NAMED[family(model_type).llama_cpp], claims.tied),
        MlxLoading(facts, model_type).outcome(),
        *_sglang(facts, model_type),
    )


def _transformers(facts: Facts) -> Iterator[LoaderOutcome]:
    """Yield the outcomes of transformers 4 and 5. For tiewise's type, add 5 with tiewise."""
    claims = facts.claims
    flag_of_4 = claims.fixed is not False and _level_of_transformers_4(claims).effective is not False
    yield TransformersLoading(facts, TRANSFORMERS_4, flag_of_4).outcome()
    yield TransformersLoading(facts, TRANSFORMERS_5, claims.tied).outcome()
    if facts.is_tiewise_type:  # stock transformers raises; the classes of tiewise load it
        with_tiewise = replace(TRANSFORMERS_5, name=WITH_TIEWISE)
        yield TransformersLoading(facts, with_tiewise, claims.tied).outcome()


def _level_of_transformers_4(claims: Claims) -> Claim:
    """Return the level whose flag transformers 4 reads.

    It is a text part with the flag, else the deciding level.
    """
    for claim in claims.levels:
        if claim.level in TEXT_PARTS and claim.written is not None:
            return claim
    return claims.deciding


def _vllm(facts: Facts, model_type: str) -> Iterator[LoaderOutcome]:
    """Yield the outcomes of vLLM before and since August 2026. One of its classes did not change."""
    exception = family(model_type).vllm
    if exception == "own head":
        yield from_column(facts, VLLM_SEPARATE_HEAD, True)
        return
    claims = facts.claims
    flag = claims.tied
    written = {claim.written for claim in claims.levels}
    if claims.fixed is not False and True in written:  # vLLM takes a flag that is true at any level
        flag = True
    yield server_outcome(facts, VLLM_BEFORE, flag)
    yield server_outcome(facts, VLLM_NAMED[exception], flag)


def _sglang(facts: Facts, model_type: str) -> Iterator[LoaderOutcome]:
    """Yield the outcome of SGLang, after that of earlier versions if it differs."""
    outcome = server_outcome(facts, SGLANG, facts.claims.tied)
    if outcome.outcome != UNTIED:
        yield outcome
        return
    if family(model_type).sglang == "dropped head":
        before = replace(SGLANG, versions="before February 2026", source="sglang#15398, sglang#18024")
        yield outcome_of(before, DROPPED, "The input table is copied over the stored head.")
    if _has_packed_head(facts):
        yield from _sglang_with_packed_head(facts)
    else:
        yield outcome


def _has_packed_head(facts: Facts) -> bool:
    """Return whether the head is quantised with compressed-tensors."""
    section = facts.config.get("quantization_config")
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        return False
    return facts.roles.output_end.quantised


def _sglang_with_packed_head(facts: Facts) -> Iterator[LoaderOutcome]:
    """Yield the outcomes for a quantised head: SGLang before and since it supports one."""
    before = replace(SGLANG, versions="before 19 August 2026", source="sglang#35228, sglang#28130")
    yield outcome_of(before, NO_SCALE)
    word = NO_SCALE
    targets = str(facts.config["quantization_config"].get("config_groups"))
    if "lm_head" in targets:
        word = UNTIED
    sentence = "It loads a packed head that a target of the quantisation names, and drops the scales of any other."
    yield outcome_of(replace(before, versions="since 19 August 2026"), word, sentence)
