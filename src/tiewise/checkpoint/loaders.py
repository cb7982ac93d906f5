"""Outcome of loading a checkpoint with each loader: one folder, different models.

docs/loaders.md shows the columns of `loader_columns.py` and says where each entry comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tiewise.checkpoint.claims import FLAG, TEXT_PARTS, architecture, unwrapped
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import mlx_data
from tiewise.checkpoint.loader_columns import (
    ALONE,
    DEPENDS,
    DROPPED,
    ERROR,
    LLAMA_CPP_NAMED,
    LLAMA_CPP_T5,
    MLX,
    MLX_LETTERS,
    NO_HEAD,
    NO_SCALE,
    NOT_SERVED,
    PLAIN,
    SGLANG,
    TRANSFORMERS_4,
    TRANSFORMERS_5,
    UNTIED,
    VLLM_AFTER,
    VLLM_BEFORE,
    VLLM_HEADLESS,
    VLLM_OWN_HEAD,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.loader_states import from_column, shape_misfit, stored_state
from tiewise.checkpoint.transformers_loading import CANONICAL, WITH_OWN, TransformersLoading
from tiewise.checkpoint.untrusted import short

_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForCondGeneration")  # ends of class names


def predict(facts: Facts) -> tuple[LoaderOutcome, ...]:
    """Return the outcome of each loader; nothing if there is no config, or no tensors, to load."""
    claims = facts.claims
    if facts.folder.config is None or not facts.folder.tensors:
        return ()
    with_transformers = tuple(_transformers(facts))
    if facts.as_class is not None:  # a class of transformers, which no other loader has
        return with_transformers
    kind = claims.levels[0].model_type or ""
    return (
        *with_transformers,
        *_vllm(facts, kind),
        _server(facts, LLAMA_CPP_NAMED[family(kind).llama_cpp], claims.tied),
        mlx(facts, kind),
        *sglang(facts, kind),
    )


def _transformers(facts: Facts) -> Iterator[LoaderOutcome]:
    """Yield the outcomes of transformers 4 and 5, and of 5 with this package if it wrote the checkpoint."""
    claims = facts.claims
    # transformers 4 reads the flag of the text part, whose base default is true
    text_parts = [claim for claim in claims.levels if claim.level in TEXT_PARTS and claim.written is not None]
    of_text = text_parts[0] if text_parts else claims.deciding
    flag_of_4 = of_text.effective is not False and claims.fixed is not False
    yield TransformersLoading(facts, TRANSFORMERS_4, flag_of_4).outcome()
    yield TransformersLoading(facts, TRANSFORMERS_5, claims.tied).outcome()
    if facts.is_own:  # stock transformers raises, and this package's classes load it
        with_own = replace(TRANSFORMERS_5, name=WITH_OWN)
        yield TransformersLoading(facts, with_own, claims.tied).outcome()


def _vllm(facts: Facts, kind: str) -> Iterator[LoaderOutcome]:
    """Yield the outcomes of vLLM before and after its change, or of its one class that never changed."""
    exception = family(kind).vllm
    if exception == "own head":
        yield from_column(facts, VLLM_OWN_HEAD, True)
        return
    claims = facts.claims
    # vLLM takes a flag that is true at any level
    any_level_ties = claims.fixed is not False and any(claim.written for claim in claims.levels)
    flag = True if any_level_ties else claims.tied
    yield _server(facts, VLLM_BEFORE, flag)
    yield _server(facts, VLLM_HEADLESS if exception == "no head" else VLLM_AFTER, flag)


def sglang(facts: Facts, kind: str) -> Iterator[LoaderOutcome]:
    """Yield the outcome of SGLang; before it the outcome of earlier versions, if that was another."""
    outcome = _server(facts, SGLANG, facts.claims.tied)
    if outcome.outcome == UNTIED and family(kind).sglang == "dropped head":
        before = replace(SGLANG, versions="before February 2026", source="sglang#15398, sglang#18024")
        yield outcome_of(before, DROPPED, "The input table is copied over the stored head.")
    section = facts.config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    is_packed_head = facts.roles.output_end.quantised and section.get("quant_method") == "compressed-tensors"
    if outcome.outcome == UNTIED and is_packed_head:
        before = replace(SGLANG, versions="before 19 August 2026", source="sglang#35228, sglang#28130")
        yield outcome_of(before, NO_SCALE)
        what = "It loads a packed head that a target of the quantisation names, and drops the scales of any other."
        word = UNTIED if "lm_head" in str(section.get("config_groups")) else NO_SCALE
        outcome = outcome_of(replace(before, versions="since 19 August 2026"), word, what)
    yield outcome


def mlx(facts: Facts, kind: str) -> LoaderOutcome:
    """Return the outcome of mlx-lm: as its family was run with a tiny model, else as most of its classes read."""
    levels = [claim for claim in facts.claims.levels if not claim.level or claim.level in TEXT_PARTS]
    if len(levels) == 1:
        flags = {_flag_as_mlx_reads(facts.levels[""])}
    else:  # of a composite it reads the text part's flag, and the root may say anything
        flags = {claim.written for claim in levels}
    letters = family(kind).mlx_letters
    if letters is None or len(flags) > 1:  # runs set the flag at every level, or at none
        return _mlx_by_usual_class(facts, kind, flags)
    by_flag = dict(zip((True, False, None), letters.split(), strict=True))
    words = tuple(MLX_LETTERS[letter] for letter in by_flag[flags.pop()])
    data = mlx_data()
    run = replace(MLX, versions=data["version"], source=f"run on {data['date']}", tied=words, untied=words)
    outcome = _server(facts, run, True)
    if outcome.outcome not in (ERROR, NOT_SERVED, NO_HEAD):
        why = _not_in_mlx(facts)
        if why is not None:
            outcome = outcome_of(replace(run, source="load_model of its utils.py: strict"), ERROR, why)
    is_as_run = outcome.outcome in words and outcome.sentence == PLAIN[outcome.outcome] and not facts.quantised
    return replace(outcome, predicted=not is_as_run)


def _flag_as_mlx_reads(level: Mapping[str, Any]) -> bool | None:
    """Return a flag as `if args.tie_word_embeddings` takes it, null as false; None if the config lacks it."""
    return bool(level[FLAG]) if FLAG in level else None


def _mlx_by_usual_class(facts: Facts, kind: str, flags: set[bool | None]) -> LoaderOutcome:
    """Return the outcome of mlx-lm for a family that was not run, by `flags` of the levels that it may read."""
    flag = facts.claims.fixed
    if flag is None:
        flag = flags <= {None} or True in flags
    outcome = _server(facts, MLX, flag)
    if family(kind).is_served_by_mlx or outcome.outcome == NO_HEAD:
        return outcome
    return outcome_of(MLX, NOT_SERVED)


def _not_in_mlx(facts: Facts) -> str | None:
    """Return the sentence on an end of another name or shape than mlx-lm's model has; None if all fit.

    It loads strictly: such an end stops it.
    """
    misfit = shape_misfit(facts)
    if misfit is not None:
        return misfit
    known = facts.roles.known
    if known is None:
        return None
    ends = [name for name in (*known.inputs, known.output) if name is not None]
    saved = {f"{known.disk.get(name, name)}.weight" for name in ends}
    prefix = f"{known.prefix}."
    with_other_prefix = {name.removeprefix(prefix) for name in saved} | {prefix + name for name in saved}
    for table in facts.roles.tables:
        if table.name in with_other_prefix - saved:
            names = " or ".join(sorted(saved))
            return f"It loads strictly, and its model has no {short(table.name)} ({names} is its name)."
    return None


def _server(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    """Return the outcome of a loader that has classes of its own for models that write text."""
    stopped = _is_not_served(facts, loader) or _does_not_find_ends(facts, loader)
    return from_column(facts, loader, flag) if stopped is None else stopped


def _is_not_served(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Check that a loader has a class for the model."""
    if facts.is_own:
        return outcome_of(loader, ERROR, "It does not know the type `tiewise`: export the model dense first.")
    if facts.roles.headless:
        return outcome_of(loader, NO_HEAD)
    if loader is not LLAMA_CPP_T5 and not _writes_text(facts):
        return outcome_of(loader, NOT_SERVED)
    return None


def _does_not_find_ends(facts: Facts, loader: Loader) -> LoaderOutcome | None:
    """Check that the ends are stored in a file and under names that a loader reads."""
    roles = facts.roles
    has_model_file = any(name.startswith("model") for name in facts.folder.headers)
    if loader.name in ("llama.cpp", "mlx-lm") and not has_model_file:
        return outcome_of(loader, ERROR, "It opens model*.safetensors alone.")
    if any(unwrapped(name) != name for name in roles.unread):
        return outcome_of(loader, ERROR, "The names in the file are those of a wrapped model: nothing in it is found.")
    if roles.unread:
        return outcome_of(loader, DEPENDS, "The names in the file are not those of its class: its own code decides.")
    if roles.named_like_head and stored_state(facts) == ALONE:
        return outcome_of(loader, DEPENDS, CANONICAL)
    lacks_an_end = roles.input is None or roles.output is None
    if not facts.claims.known and lacks_an_end and facts.unplaced:
        return outcome_of(loader, DEPENDS, "An end may be stored under a name of its own: its own code decides.")
    return None


def _writes_text(facts: Facts) -> bool:
    """Return whether the class writes text token by token without an encoder, by its name."""
    if facts.config.get("is_encoder_decoder") is True or facts.claims.t5_like:
        return False
    name = architecture(facts.config)
    return name is None or name.endswith(_DECODERS)
