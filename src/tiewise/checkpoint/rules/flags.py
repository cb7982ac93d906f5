"""Rules on the flag at all levels of the config, and on loaders: B020–B022, B080."""

from __future__ import annotations

from collections.abc import Collection

from tiewise.checkpoint.claims import FLAG, TEXT_PARTS, Claim, dotted_path
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.loader_columns import BROKEN, ERROR, TRANSFORMERS_4, LoaderOutcome, named_loaders
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    SEVERITIES,
    JsonEdit,
    Observation,
    Observations,
    Repair,
    Severity,
    compare_if_unequal,
    difference,
    flag_text,
    repair_of_ties,
    rule,
)
from tiewise.checkpoint.untrusted import short


def _has_reader(claim: Claim) -> bool:
    """Return whether some loader reads a level's flag: it decides, or configures a text model."""
    return claim.decides or claim.level.rpartition(".")[2] in TEXT_PARTS


def _levels_with_reader(facts: Facts) -> list[Claim]:
    """Return the levels whose flag some loader reads."""
    return [claim for claim in facts.claims.levels if _has_reader(claim)]


def untying_edits(facts: Facts) -> tuple[JsonEdit, ...]:
    """Return the edits that set the flag to false at every level that some loader reads."""
    edits = []
    for claim in _levels_with_reader(facts):
        if claim.level in facts.levels:
            edits += [JsonEdit(CONFIG, dotted_path(claim.level, key), False) for key in facts.flag_keys(claim)]
    return tuple(edits)


def only_ties_ends(facts: Facts) -> bool:
    """Return whether the flag ties the two ends, and has no other effect."""
    claims = facts.claims
    return claims.fixed is None and not claims.t5_like and not facts.layer_ties


def _flag_repair(facts: Facts) -> Repair:
    """Return the repair of a flag.

    It is safe only if the tensors decide, and if the flag has no other effect.
    """
    if facts.has_untrained_head:
        return Repair(f"settle the two tables first: {facts.command('tie', '--keep input')}")
    if facts.tables_are_tied is None or _means_more(facts):
        return Repair(f"{CONFIG_FIX}: write the flag that training used at every level")
    return repair_of_ties(facts)


def _means_more(facts: Facts) -> bool:
    """Return whether a change of the flag affects more than the tie, or may be wrong."""
    claims = facts.claims
    if claims.t5_like:
        return True
    if facts.layer_ties and facts.tables_are_tied is not facts.tied:
        return True
    if facts.roles.output is not None or claims.tied is not False:
        return False
    # a table without a head that was scaled up: it may have been trained untied, with scales that the class lacks
    return facts.scaled_up is not None


@rule("B020", "warning", "the flag is written, as true or false")
def flag_absent(facts: Facts) -> Observations:
    """If tie_word_embeddings is absent, each loader takes another default. transformers 4 takes true for every model,
    transformers 5 the default of the class (false for Llama, true for Gemma), mlx-lm true for Llama. A loader may then
    drop a stored head, or draw a missing one at random (transformers#6692). The finding is a note if the class ignores
    the flag, or if the class's default is true and no head is stored, since all loaders agree then. It is one too for
    a part that is saved alone, without model_type: only its class opens it.
    What to do: `tiewise repair` writes the flag that the tensors show, at every level that a loader reads.
    Sources: transformers#6692; transformers#42815; mlx-lm models/llama.py
    """
    yield from _malformed_flags(facts)
    if facts.roles.headless or not facts.roles.one_table_per_end:
        return
    levels = _levels_with_reader(facts)
    stated = [claim for claim in levels if (claim.written, claim.malformed) != (None, None)]
    if levels and not stated:
        yield _absent_flag(facts)


def _malformed_flags(facts: Facts) -> Observations:
    """Report flags that are neither true nor false."""
    for claim in facts.claims.levels:
        if claim.malformed is not None:
            where = facts.flag_path(claim)
            problem = f"{where} is {claim.malformed}; it must be true or false"
            repair = _flag_repair(facts)
            yield where, problem, repair.remedy, repair.is_safe


_ABSENT_MEANS = {  # default of the class → clause of the evidence
    True: "its class then ties",
    False: "its class then does not tie",
    None: "the default of its class is not known",
}


def _absent_flag(facts: Facts) -> Observation:
    """Return the finding about a config without the flag; a note if all loaders agree."""
    default, model_type = facts.claims.tied, facts.config.get("model_type")
    family = "an unknown family"
    if isinstance(model_type, str):
        family = short(model_type)
    stored = "two tables are stored"
    if facts.roles.output is None:
        stored = "one table is stored"
    elif facts.roles.input is None:
        stored = "only a head is stored"
    problem = f"{FLAG} is absent, and each loader assumes its own default"
    problem += f". The family is {family}: {_ABSENT_MEANS[default]}; {stored}"
    severity: Severity = "warning"
    if _all_loaders_agree(facts):
        severity = "info"
    repair = _flag_repair(facts)
    return Observation(FLAG, problem, repair.remedy, repair.is_safe, severity)


def _all_loaders_agree(facts: Facts) -> bool:
    """Return whether all loaders make the same model without `tie_word_embeddings`."""
    if facts.claims.fixed is not None or _is_read_by_its_class_alone(facts):
        return True
    return facts.claims.tied is True and facts.roles.output is None


def _is_read_by_its_class_alone(facts: Facts) -> bool:
    """Return whether only the class that saved the folder opens it.

    The config names this class, which the architecture data lacks, and no family.
    """
    named = facts.config.keys() & {"architectures", "model_type"}
    return (named, facts.roles.class_ends) == ({"architectures"}, None)


@rule("B021", "error", "all levels of a nested config say the same")
def levels_disagree(facts: Facts) -> Observations:
    """A multimodal config has the flag twice: at its root and in text_config (or decoder, generator). transformers
    reads the level of the class that owns the head, vLLM and mlx-lm read the text level, and each was wrong for some
    model: VLMs spoke gibberish where the nested true was not lifted to the root (transformers#43429, #43455, #45857),
    and vLLM dropped a real head where the root said true and the text level false (vllm#51063).
    It is an error if the class itself reads another value than the tensors show. It is a warning if only other loaders
    go wrong, or if the tensors were not compared. It is a note if every loader has a version that is right. T5Gemma's
    config class writes such a pair for an untied model.
    What to do: `tiewise repair` writes the flag that the tensors show, at every level.
    Sources: transformers#43429; transformers#43455; transformers#45857; vllm#51063; vllm#33359
    """
    flags = _written_flags(facts)
    if facts.roles.headless or len(set(flags.values())) < 2:
        return
    listed = ", ".join(f"{path} = {flag_text(flag)}" for path, flag in flags.items())
    wrong = [path for path, flag in flags.items() if flag is not facts.tables_are_tied]
    problem = f"the levels of the config disagree: {listed}. The tensors {_TRUTH[facts.tables_are_tied]}"
    repair = _flag_repair(facts)
    severity = _severity_of_levels(facts)
    yield Observation(wrong[0], problem, repair.remedy, repair.is_safe, severity)


def _written_flags(facts: Facts) -> dict[str, bool]:
    """Return the written flags that some loader reads, by their dotted paths."""
    flags = dict[str, bool]()
    for claim in _levels_with_reader(facts):
        if claim.written is not None:
            flags[facts.flag_path(claim)] = claim.written
    return flags


_TRUTH = {True: "are tied", False: "are untied", None: "were not compared, or do not decide it"}


def _severity_of_levels(facts: Facts) -> Severity:
    """Return the severity of levels that disagree, by the class and then by other loaders."""
    if _is_class_right(facts):
        severity_for_loaders = _severity_of(predict(facts), facts)
        if severity_for_loaders in (None, "info"):
            return "info"
        return "warning"
    if facts.tables_are_tied is None:  # the tensors were not compared, so the class may be right
        return "warning"
    return "error"


def _is_class_right(facts: Facts) -> bool:
    """Return whether the class itself makes the right model of the tensors."""
    reads = facts.claims.tied
    if reads is None:
        return False
    # where the class reads false, two stored tables are loaded as they are, whether or not they are equal
    loads_both = facts.is_complete and facts.roles.output is not None
    return reads is facts.tables_are_tied or (loads_both and not reads)


@rule("B022", "error", "a T5-like model has one input table, and a flag that fits its head")
def t5_ends(facts: Facts) -> Observations:
    """T5 and its descendants always share one input table between encoder and decoder. They read tie_word_embeddings =
    false also as "do not scale before the head". With the flag false and only `shared` stored, transformers 4 draws the
    head at random and early versions of 5 the input tables too (transformers#47620, #43880, #42815). Files that store
    several input tables of different content load differently by version: MADLAD's encoder was read from its head
    (transformers#48154).
    What to do: never flip the flag blindly, as it also changes the scale. Find out how the model was trained, and store
    the table that was trained.
    Sources: transformers#47620; transformers#43880; transformers#42815; transformers#48154
    """
    if not facts.claims.t5_like or not facts.is_complete:
        return
    if facts.claims.deciding.written is False:
        yield from _t5_without_head(facts)
    if facts.claims.tied is not False:
        yield from _t5_input_tables(facts)


def _t5_without_head(facts: Facts) -> Observations:
    """Report a T5-like model whose flag is false, and which stores no head."""
    roles = facts.roles
    if roles.input is None or roles.output is not None:
        return
    if roles.headless:
        return
    problem = f"the config says untied ({FLAG} = false), and no head is stored"
    problem += ". For this family, false also means that nothing is scaled before the head"
    remedy = f"if it was trained tied: {CONFIG_FIX}: {FLAG} = true, and scale_decoder_outputs as in training"
    yield FLAG, problem, remedy


def _t5_input_tables(facts: Facts) -> Observations:
    """Report stored input tables of a T5-like model that differ from the first one."""
    for other in facts.roles.input_tables[1:]:
        first = facts.roles.input_tables[0]
        alike = compare_if_unequal(facts, first, other)
        if alike is not None:
            where = short(other.name)
            problem = "two different input tables are stored, and this family has one"
            problem += f". {short(first.name)} and {where}: {difference(alike)}"
            yield where, problem, "find out which copy was trained, and store only that one"


@rule("B080", "warning", "every loader makes the same model of it")
def loaders_disagree(facts: Facts) -> Observations:
    """Loaders use different evidence for the tie. transformers reads the flag of one level of the config, vLLM that of
    any level. llama.cpp mostly looks at the stored tensors. mlx-lm reads the flag, with other defaults. Each has models
    that are exceptions. So one folder may load as two different models, or partly at random. The table of loaders in
    the report says what each loader does, for which versions, and whether that was run or read in its source and
    threads. The finding is a note if a server refuses to load the checkpoint, or if another version of the loader is
    right. It is a note too if only transformers 4 goes wrong with a config that transformers 5 wrote. It is a warning
    if a loader makes another model, or if an older version draws something at random. It is an
    error if no version of transformers loads it, or if a loader draws something at random in every version. If another
    rule names the cause, its repair settles this finding too. Some cases are faults of the loader: llama.cpp skips a
    separate head of Gemma 2 (llama.cpp#9065), and no stock loader knows tiewise's factored tables.
    What to do: repair the causes; if only the loader is wrong, use another, or make one table (`tiewise tie`).
    Sources: vllm#51063; vllm#51665; transformers#42507; llama.cpp#9065; llama.cpp#13328
    """
    outcomes = predict(facts)
    severity = _severity_of(outcomes, facts)
    if severity is None:
        return
    wrong = [outcome for outcome in outcomes if outcome.right is False]
    share = f"{len(wrong)} of {len(outcomes)} loaders"
    problem = f"{share} would fail or load something else: {named_loaders(wrong, outcomes)}"
    alone: tuple[str, ...] = ()
    fixes: tuple[str, ...]
    if facts.is_tiewise_type:
        problem = "only transformers loads the type `tiewise`, and only after `import tiewise.hf`"
        fixes = (f"to make a plain model: {facts.command('factor', '--undo')}",)
    elif len(wrong) == len(outcomes):
        first = wrong[0]
        fixes = ("fix the other findings; until then no loader loads it right",)
        alone = ("load it with the program that saved it",)
        problem += f". {first.loader} {first.versions}: {first.sentence}"
    else:
        right = named_loaders([outcome for outcome in outcomes if outcome.right], outcomes)
        fixes = (f"load it only with {right}, until the other findings are fixed",)
        alone = (f"load it only with {right}",)
        if not right:
            fixes = ("fix the other findings; until then no loader is known to load it right",)
            alone = ("load it with the program that saved it",)
    yield Observation(facts.path.name, problem, fixes, severity=severity, alone=alone)


def _severity_of(outcomes: Collection[LoaderOutcome], facts: Facts) -> Severity | None:
    """Return the highest severity of wrong outcomes, None if no loader goes wrong."""
    loaders_right = {outcome.loader for outcome in outcomes if outcome.right}
    severities = list[Severity]()
    for outcome in outcomes:
        if outcome.right is not False:
            continue
        is_old = outcome.loader in loaders_right and _is_older_than_config(outcome, facts)
        is_for_another_loader = outcome.outcome == ERROR and facts.is_packed_for_mlx
        if is_old or is_for_another_loader:
            severities.append("info")
        else:
            severities.append(_severity_of_wrong(outcome, loaders_right))
    return max(severities, key=SEVERITIES.index, default=None)


def _is_older_than_config(outcome: LoaderOutcome, facts: Facts) -> bool:
    """Return whether the outcome is of transformers 4, and a later version wrote the config."""
    if (outcome.loader, outcome.versions) != (TRANSFORMERS_4.name, TRANSFORMERS_4.versions):
        return False
    written_by = facts.config.get("transformers_version")
    major = str(written_by).partition(".")[0]
    return isinstance(written_by, str) and major.isdecimal() and int(major) > int(TRANSFORMERS_4.versions)


# (the loader is right in another version, the outcome is lost) → severity
_SEVERITY_OF_WRONG: dict[tuple[bool, bool], Severity] = {
    (True, False): "info",
    (True, True): "warning",
    (False, False): "warning",
    (False, True): "error",
}


def _severity_of_wrong(outcome: LoaderOutcome, loaders_right: set[str]) -> Severity:
    """Return the severity of a wrong outcome.

    Args:
        loaders_right: loaders that are right in another version.
    """
    # a server that refuses reports it and does no harm: many do not support a state that a sound checkpoint may have
    if outcome.outcome == ERROR and outcome.loader != "transformers":
        return "info"
    is_right_elsewhere, is_lost = outcome.loader in loaders_right, outcome.outcome in BROKEN
    return _SEVERITY_OF_WRONG[is_right_elsewhere, is_lost]
