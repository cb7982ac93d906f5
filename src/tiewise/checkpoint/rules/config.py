"""B020 to B022 and B090: what the config says, at every level, and what else it does at the boundary."""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.checkpoint.claims import FLAG, Claim
from tiewise.checkpoint.facts import TEXT_PARTS, Facts
from tiewise.checkpoint.rule import CONFIG_FIX, ERROR, INFO, WARNING, Finding, Rule, difference, flag_at, names, said
from tiewise.checkpoint.untrusted import short


def _speaking(facts: Facts) -> list[Claim]:
    """Levels that some loader asks for the flag: the deciding one and the parts that hold a text model."""
    return [claim for claim in facts.claims.levels if claim.decides or claim.level.rpartition(".")[2] in TEXT_PARTS]


def _mend(facts: Facts) -> tuple[str, bool]:
    """The repair of a flag, and whether it is safe: only where the tensors decide and the flag means nothing else."""
    if facts.truth is None or facts.claims.t5_like:
        return f"{CONFIG_FIX}: write the flag that training used at every level", False
    return facts.command("repair"), True


def _absent(facts: Facts) -> Iterator[Finding]:
    roles = facts.roles
    for claim in facts.claims.levels:
        if claim.malformed is not None:
            what = f"{flag_at(claim.level)} is {claim.malformed}, which is neither true nor false"
            yield Finding("B020", WARNING, flag_at(claim.level), what, *_mend(facts))
    speaking = _speaking(facts)
    if not speaking or roles.headless or (roles.input is None and roles.output is None):
        return
    if any(claim.written is not None or claim.malformed is not None for claim in speaking):
        return
    stored = "no head of its own is stored" if roles.output is None else "a head is stored"
    default = facts.claims.tied
    meant = "whose default is not known here" if default is None else f"whose class takes {said(default)}"
    harmless = (default is True and roles.output is None) or facts.claims.fixed is not None
    what = f"{FLAG} is absent in a config of {_family(facts)}, {meant}, and {stored}; loaders' defaults differ"
    yield Finding("B020", INFO if harmless else WARNING, FLAG, what, *_mend(facts))


def _family(facts: Facts) -> str:
    kind = facts.config.get("model_type")
    return short(kind) if isinstance(kind, str) else "an unknown family"


def _levels_disagree(facts: Facts) -> Iterator[Finding]:
    written = [claim for claim in _speaking(facts) if claim.written is not None]
    if len({claim.written for claim in written}) < 2:
        return
    listed = ", ".join(f"{flag_at(claim.level)} = {said(claim.written)}" for claim in written)
    tensors = {
        True: "the tensors say tied",
        False: "the tensors say untied",
        None: "the tensors were not compared or do not tell",
    }[facts.truth]
    wrong = next((claim for claim in written if claim.written is not facts.truth), written[-1])
    yield Finding("B021", ERROR, flag_at(wrong.level), f"{listed}; {tensors}", *_mend(facts))


def _t5(facts: Facts) -> Iterator[Finding]:
    if not facts.claims.t5_like or not facts.complete:
        return
    roles, claim = facts.roles, facts.claims.deciding
    if claim is not None and claim.written is False and roles.output is None and roles.input is not None:
        what = f"{FLAG} is false and no head is stored; this family reads false also as 'do not scale before the head'"
        fix = f"if it was trained tied, {CONFIG_FIX}: true, with scale_decoder_outputs as it was trained"
        yield Finding("B022", ERROR, FLAG, what, fix)
    for other in roles.inputs[1:] if facts.claims.tied is not False else ():
        if roles.input is not None and (alike := facts.compare(roles.input, other)) is not None and alike.differing:
            what = (
                f"{short(roles.input.name)} and {short(other.name)} are one table in this family: {difference(alike)}"
            )
            fix = "find out which one was trained, and store that one alone"
            yield Finding("B022", ERROR, short(other.name), what, fix)


def _scalars(facts: Facts) -> Iterator[Finding]:
    scalars = facts.roles.scalars
    if scalars:
        listed = names([f"{short(key)} = {value:g}" for key, value in scalars.items()])
        what = f"the model scales or caps at the boundary: {listed}"
        fix = "none needed; tie, untie and factor keep them, and other tools should"
        yield Finding("B090", INFO, short(next(iter(scalars))), what, fix)


RULES = (
    Rule(
        "B020",
        WARNING,
        "the flag is written, as true or false",
        """Where tie_word_embeddings is absent, each loader takes a default of its own: transformers 4 true for every
model, transformers 5 that of the class (false for Llama, true for Gemma), mlx-lm true for Llama. A head that is
stored may so be dropped, and one that is not stored may be drawn at random (transformers#6692). Only noted where the
class does not ask for it, or where the class's default is true and no head is stored, since all agree then.
What to do: `tiewise repair` writes what the tensors say at every level that a loader reads.""",
        ("transformers#6692", "transformers#42815", "mlx-lm models/llama.py"),
        _absent,
    ),
    Rule(
        "B021",
        ERROR,
        "all levels of a nested config say the same",
        """A multimodal config says it twice: at its root and in text_config (or decoder, generator). transformers
reads the level of the class that owns the head, vLLM and mlx-lm read the text level, and each was wrong for some
model: VLMs spoke gibberish where the nested true was not lifted to the root (transformers#43429, #43455, #45857), and
vLLM dropped a real head where the root said true and the text level false (vllm#51063).
What to do: `tiewise repair` writes what the tensors say at every level.""",
        ("transformers#43429", "transformers#43455", "transformers#45857", "vllm#51063", "vllm#33359"),
        _levels_disagree,
    ),
    Rule(
        "B022",
        ERROR,
        "a T5-like model has one input table, and its flag is not taken for a switch",
        """T5 and its descendants always share one input table between encoder and decoder, and read
tie_word_embeddings = false also as "do not scale before the head". With the flag false and only `shared` stored,
transformers 4 draws the head at random and early versions of 5 the input tables too (transformers#47620, #43880,
#42815). Files that store several input tables of different content load differently by version: MADLAD's encoder was
read from its head (transformers#48154).
What to do: never flip the flag blindly, as it also changes the scale. Find out how the model was trained and store
the table that was.""",
        ("transformers#47620", "transformers#43880", "transformers#42815", "transformers#48154"),
        _t5,
    ),
    Rule(
        "B090",
        INFO,
        "numbers that act at the boundary are known",
        """Some families multiply or cap at the vocabulary's ends: Granite embedding_multiplier and logits_scaling,
Cohere logit_scale, Gemma the square root of the width and a soft cap, OPT and ALBERT a projection, T5 the scale
before the head. A tied table then serves two scales at once, and a tool that unties, merges or factors without them
changes every logit.
What to do: nothing here; tiewise's verbs keep these numbers, and refuse what would change the function.""",
        ("transformers: configs of Granite, Cohere, Gemma, OPT, ALBERT, T5",),
        _scalars,
    ),
)
