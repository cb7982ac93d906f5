"""Rules that compare stored tables with the config's flag: B010–B016, B018, B019, B090."""

from __future__ import annotations

from tiewise.checkpoint.claims import FLAG, Claim, Claims, architecture
from tiewise.checkpoint.config_parts import quantisation
from tiewise.checkpoint.facts import ComparedEnds, Facts
from tiewise.checkpoint.mlx_loading import MlxLoading
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.rules.rule import (
    Observation,
    Observations,
    Repair,
    Severity,
    describe,
    difference,
    differing_copies,
    names,
    repair_of_ties,
    rule,
    tensor_names,
)
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SOME_ROWS
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import SpecError
from tiewise.core.files import format_bytes
from tiewise.core.spec import EXPORTED, BoundarySpec


@rule("B010", "fatal", "the input table is stored under a name that a loader knows")
def no_input(facts: Facts) -> Observations:
    """Without an input table, every token is a random vector, or loading stops. It happens if a tool saved only part of
    a model, or saved it under other names. Wrappers of DDP, FSDP and torch.compile put prefixes before every name, and
    code that matches `lm_head.weight` exactly then finds nothing (OpenRLHF#1316, tinker-cookbook#593). The rule looks
    for the table by the names of transformers' classes, then by usual names, then by shape.
    What to do: store the table under the name that the model's class gives it.
    Sources: OpenRLHF#1316; tinker-cookbook#593; sglang#16215
    """
    if facts.roles.loaded_input is not None:
        yield from _misnamed_further_inputs(facts)
    for observation in _without_table(facts):
        if facts.class_finds_all_parameters:  # a class that the architecture data lacks, such as one without lookup
            return
        yield observation


def _without_table(facts: Facts) -> Observations:
    """Report input tables that no file stores under a name in the architecture data."""
    roles = facts.roles
    if roles.loaded_input is None and roles.input is not None:
        yield _misnamed_input(facts, roles.input)
    yield from _fresh_tables(facts)
    yield from _missing_further_inputs(facts)
    if roles.input is None:
        yield from _missing_input(facts)


def _misnamed_further_inputs(facts: Facts) -> Observations:
    """Report input tables that the class does not load, if it loads another one."""
    for table in facts.unloaded_input_tables:
        name = facts.roles.unloaded_names[table.name]
        yield Observation(name, _misnamed(table, name), f"store it as {name}", severity="error")


def _fresh_tables(facts: Facts) -> Observations:
    """Report tables that an untied model draws at random because only one of two is stored."""
    for target, source in facts.unfilled_ties:
        if not target.endswith("bias"):
            problem = f"{target} is not stored, and an untied model of this class draws it at random"
            fixes = (f"if it was trained tied: write {FLAG} = true", f"else: store {source} as {target} too")
            yield Observation(target, problem, fixes, severity="error")


def _missing_further_inputs(facts: Facts) -> Observations:
    """Report further input tables that are neither stored nor tied to a stored one."""
    for table_name in facts.missing_tables:
        name = facts.saved_name(table_name)
        stored = facts.roles.input_tables[0]
        problem = f"the second input table {name} is not stored, and is drawn at random"
        problem += f". Nothing ties it to {short(stored.name)}"
        yield name, problem, f"take {name} from the source of the checkpoint"


def _misnamed(table: Stored, name: str) -> str:
    """Return the evidence that a table has a name that its class does not load."""
    return f"the input table is stored as {short(table.name)}, and its class looks for {name}"


def _misnamed_input(facts: Facts, table: Stored) -> Observation:
    """Return the finding about a single input table that the class does not load."""
    roles = facts.roles
    name = roles.unloaded_names[table.name]
    effect = "the head is used instead"
    severity: Severity = "error"
    if facts.tied is not True or roles.loaded_output is None:
        effect = "transformers draws the table at random"
        severity = "fatal"
    problem = f"{_misnamed(table, name)}: {effect}"
    if table.name in facts.unwrapped_names:
        problem += ". A training wrapper put a prefix before the names"
        return Observation(name, problem, facts.command("repair"), safe=True, severity=severity)
    remedy = f"rename it to {name}, and change the prefix of the other tensors in the same way"
    twins = _tables_of_others(facts, table.name, name)
    if twins:
        problem += f". {names(twins)} is such a table too: the file stores several models"
        remedy = f"write each model to a separate folder, then {remedy}"
    return Observation(name, problem, remedy, severity=severity)


def _tables_of_others(facts: Facts, table: str, name: str) -> list[str]:
    """Return the input tables of other models in the file.

    Their names are `name` with another prefix, such as `value_model.`.
    """
    ending = f".{name}"
    if not table.endswith(ending):
        return []
    return [other for other in facts.folder.tensor_names if other.endswith(ending) and other != table]


def _missing_input(facts: Facts) -> Observations:
    """Report that no tensor is the input table, if the class must have one."""
    text, roles = facts.text, facts.roles
    if text.vocab_size is None or _may_lack_input(facts):
        return
    # B016 reports a stored head without an input table
    is_reported = roles.saves_shared_table_as_head or not facts.matrices_without_role
    if roles.output is not None and is_reported:
        return
    problem = f"no input table with {text.vocab_size:,} rows is stored among {len(facts.folder.tensor_names):,} tensors"
    if facts.matrices_without_role:
        problem += f". It may be one of these: {tensor_names(facts.matrices_without_role)}"
    where, remedy = "input table", "store it under the name in its class"
    if roles.input_name:
        where, remedy = roles.input_name, f"store it as {roles.input_name}"
    yield where, problem, remedy


def _may_lack_input(facts: Facts) -> bool:
    """Return whether the input table may be missing without a fault."""
    if not facts.is_complete or _is_packed_in_unknown_way(facts):
        return True
    return facts.roles.headless and facts.roles.class_ends is None


def _is_packed_in_unknown_way(facts: Facts) -> bool:
    """Return whether a quantised checkpoint stores no known table at its ends."""
    return facts.quantised and bool(facts.roles.opaque)


@rule("B011", "fatal", "an untied model stores its output head")
def no_output(facts: Facts) -> Observations:
    """The config says that the two ends have separate tables, and the head is missing. transformers 4 and 5 draw it at
    random; 5 reports it as missing, 4 reports nothing. vLLM left it uninitialised before August 2026 (#51665) and has
    tied it since; llama.cpp ties it; mlx-lm refuses. The usual cause is a VLM whose nested config says tied while its
    root says untied (Qwen3-VL-Embedding#89). The dangerous one is a save that dropped the head of a diverged pair.
    What to do: if the model was trained tied, write the flag as true at every level. If not, the head is lost: take the
    checkpoint from its source again. A table whose values are much larger than those of the layers was trained
    with special scales, as MiniCPM's was. If the model is converted to Llama's class and tied, it gives wrong logits in
    every loader (llama.cpp#5276).
    Sources: llama.cpp#5276; Qwen3-VL-Embedding#89; vllm#51063; transformers#43429
    """
    if not _must_have_head(facts):
        return
    claims, roles = facts.claims, facts.roles
    why = _why_untied(facts)
    if roles.output is not None:
        name = roles.unloaded_names[roles.output.name]
        problem = f"{why}, and the head is stored as {short(roles.output.name)}, where transformers looks for {name}"
        is_safe = roles.output.name in facts.unwrapped_names
        yield name, problem, facts.command("repair") if is_safe else f"rename it to {name}", is_safe
        return
    problem = _lost_head(facts, why)
    fixes: list[str] = []
    if facts.scaled_up is not None:
        fixes.append("first: look up how it was trained, and load it with its own class")
    fixes.append(f"if it was trained tied: {facts.command('tie', '--keep input')}")
    fixes.append("else: take the head from its source")
    where, true_level = roles.output_name or "output head", _level_that_ties(claims)
    if true_level is None:
        yield where, problem, tuple(fixes)
        return
    written = "true"
    if true_level.malformed is not None:
        written = 'the text "true"'
    problem += f". {facts.flag_path(true_level)} is {written}"
    yield where, problem, *repair_of_ties(facts)


def _lost_head(facts: Facts, why: str) -> str:
    """Return the evidence that an untied model stores no head; `why` says why it is untied."""
    claims = facts.claims
    problem = f"{why}, and no head is stored; transformers draws it at random"
    if claims.deciding.written is False and claims.fixed is None:
        problem += f". {facts.flag_path(claims.deciding)} is false"
    if facts.matrices_without_role:
        problem += f". The head may be one of these: {tensor_names(facts.matrices_without_role)}"
    if facts.scaled_up is not None:
        problem += f". The table's values are {facts.scaled_up:.0f} times as large as those of the layers. The model"
        problem += " may need scales that this class lacks, as MiniCPM does; tying it then gives wrong logits"
    return problem


def _level_that_ties(claims: Claims) -> Claim | None:
    """Return the first level whose flag is true, or the text "true".

    Return None without such a level, and if the class ignores flags.
    """
    if claims.fixed is not None:
        return None
    for claim in claims.levels:
        is_true_text = (claim.malformed or "").lower() == "true"
        if claim.written is True or is_true_text:
            return claim
    return None


def _must_have_head(facts: Facts) -> bool:
    """Return whether the model is untied and transformers finds no head where there should be one."""
    claims, roles = facts.claims, facts.roles
    is_untied = facts.tied is False and not claims.t5_like
    if not is_untied or not facts.is_complete:
        return False
    if roles.input is None or roles.loaded_output is not None:
        return False
    if roles.headless:
        return False
    if claims.has_family_data:
        return not _is_packed_in_unknown_way(facts) and not facts.class_finds_all_parameters
    # an unknown class may use a quantised tensor, or one without a role, as its head
    return not facts.matrices_without_role and not facts.quantised


def _why_untied(facts: Facts) -> str:
    """Return a clause that says why the model is untied."""
    claims = facts.claims
    if claims.fixed is False:
        return "this class never ties"
    key = facts.flag_path(claims.deciding)
    if claims.deciding.written is False:
        return "the config says untied"
    if claims.deciding.malformed is not None:
        return f"{key} is not a boolean, and this class does not tie by default"
    return f"{key} is absent, which this class reads as untied"


@rule("B012", "error", "a tied model stores no head that differs from its table", scans=True)
def tied_but_different(facts: Facts) -> Observations:
    """The config says tied, and two different tables are stored. transformers 4 overwrote the head with the input
    table, and so did vLLM before August 2026 (vllm#51063); mlx-lm still drops it; transformers 5 keeps both, warns, and
    leaves the config wrong (transformers#42507). One folder is then two models. It comes from merging an adapter
    trained at both ends (peft#2777, transformers#45127), from FSDP or ZeRO gathering two copies of a tied table
    (verl#6334), and from training that silently ran untied.
    What to do: if the head was trained on purpose, write the flag as false at every level. If one side is an accident,
    keep the other with `tiewise tie --keep input|output`. A head that is unrelated to the table and over ten times
    shorter was probably never trained (Megatron-LM#7577), and repair leaves it to you.
    Sources: vllm#51063; transformers#42507; peft#2777; transformers#45127; verl#6334; llama.cpp#9065; Megatron-LM#7577
    """
    pair = facts.compared_ends
    if facts.tied is not True or pair is None:
        return
    if not pair.likeness.differing or _is_t5_with_head(facts.claims):
        return
    where = short(pair.head.name)
    if facts.roles.headless:
        yield _not_read(facts, where)
        return
    problem = "the config says tied, and two different tables are stored"
    problem += f". {where} and {short(pair.table.name)}: {difference(pair.likeness)}"
    if facts.has_untrained_head:
        times = 1 / max(pair.likeness.length_ratio, 1e-9)
        problem += f". The head's rows are {times:,.0f} times shorter, so the head was probably never trained"
    yield where, problem, *_choice_of_table(facts)


def _is_t5_with_head(claims: Claims) -> bool:
    """Return whether the flag gives a T5-like model a separate head, as in T5 1.1.

    The class ignores the flag in this respect.
    """
    return claims.t5_like and claims.deciding.written is False


def _choice_of_table(facts: Facts) -> Repair:
    """Return the repair of two different tables under a flag that ties them."""
    tie = facts.command("tie", "--keep input")
    if facts.has_untrained_head:
        return Repair((f"if it was never trained: {tie}", f"to use it all the same: {facts.command('untie')}"))
    if facts.layer_ties:
        modules = ", ".join(facts.layer_ties)
        return Repair((f"to keep one: {tie}", f"leave the flag true: it also ties {modules}"))
    if facts.claims.fixed is not None or facts.claims.t5_like:
        return Repair(f"to keep one: {tie}")
    return Repair((f"to keep both tables: {facts.command('repair')}", f"to keep one: {tie}"), is_safe=True)


@rule("B013", "warning", "a tied model stores its table once", scans=True)
def tied_and_stored_twice(facts: Facts) -> Observations:
    """The head is a byte-for-byte copy of the input table. It costs disk space and download time. In loaders that load
    every stored tensor, it also costs memory: a merge of Gemma 2 gained a billion parameters (mergekit#385), and
    llama.cpp keeps both (llama.cpp#13328). transformers 5.0 left such a pair untied, so that later training drifted
    apart; 5.23 ties it. It comes from any save that lost the alias: FSDP, ZeRO consolidation, merges, "clone before
    saving" recipes.
    A packed head repeats the table's numbers, scales and biases. mlx-lm skips the numbers alone and stops at the rest
    (mlxcel#291), which is an error.
    What to do: `tiewise repair` drops the head with all its parts. Nothing else changes.
    Sources: mergekit#385; llama.cpp#13328; transformers#42507; DeepSpeed#3824; mlxcel#291
    """
    if facts.tied is not True:
        return
    pair = _equal_pair(facts)
    if pair is not None:
        yield _stored_twice(facts, pair)
        if facts.roles.headless:
            return
    if facts.packed_twice:
        yield _packed_alike(facts)


def _equal_pair(facts: Facts) -> ComparedEnds | None:
    """Return the two tables if they were compared and are equal; else None."""
    if facts.compared_ends is None or not facts.compared_ends.likeness.equal:
        return None
    return facts.compared_ends


def _stored_twice(facts: Facts, pair: ComparedEnds) -> Observation:
    """Return the finding about a head that equals the table."""
    where = short(pair.head.name)
    if facts.roles.headless:
        return _not_read(facts, where)
    problem = f"the one table is stored twice, which costs {format_bytes(pair.head.nbytes)}. {_equal_tables(pair)}"
    if pair.likeness.nan:
        problem += ". Some values are NaN, and transformers 5 then keeps both"
    if _is_t5_with_head(facts.claims):
        remedy = f"none needed: transformers 4 reads this head, and {FLAG} = true would scale what it multiplies"
        return Observation(where, problem, remedy, severity="info")
    return Observation(where, problem, *repair_of_ties(facts))


def _packed_alike(facts: Facts) -> Observation:
    """Return the finding about a packed head that repeats the packed table."""
    table, head = facts.roles.input_end, facts.roles.output_end
    parts = list(head.parts.values())
    spare = format_bytes(sum(part.nbytes for part in parts))
    problem = f"the one packed table is stored twice, which costs {spare}"
    problem += f". {short(head.module)} and {short(table.module)} are equal byte for byte ({names(head.parts)})"
    where = short(parts[0].name)
    if quantisation(facts.config).get("lm_head") is True:
        remedy = f"set quantization_config.lm_head to false by hand, then: {facts.command('repair')}"
        return Observation(where, problem, remedy)
    severity: Severity = "warning"
    if MlxLoading(facts, facts.claims.levels[0].model_type or "").refuses_scales_of_head:
        severity, problem = (
            "error",
            f"{problem}. mlx-lm does not load it, as its model has no {short(head.module)}.scales",
        )
    return Observation(where, problem, facts.command("repair"), safe=True, severity=severity)


def _not_read(facts: Facts, name: str) -> Observation:
    """Return the finding about a head of a class without one.

    LlamaForSequenceClassification that was saved with an old `lm_head` is an example.
    """
    owner = short(architecture(facts.config) or "its class")
    problem = f"transformers does not read {name}, because {owner} has no token head"
    return Observation(name, problem, "none needed; the tensor may be removed", severity="info")


def _equal_tables(pair: ComparedEnds) -> str:
    """Return a clause on two equal tables: equal bytes, or equal except for signs of zeros."""
    pair_text = f"{describe(pair.head)} is {short(pair.table.name)}"
    if pair.likeness.kind == IDENTICAL:
        return f"{pair_text} byte for byte"
    return f"{pair_text} except for the signs of zeros"


@rule("B014", "info", "an untied model's two tables are not the same", scans=True)
def equal_but_not_tied(facts: Facts) -> Observations:
    """The config says untied, and the two stored tables are equal. Someone untied the model and did not train it
    afterwards, or a save wrote false for a tied model. Every loader makes the right model of it. Toolkits that shard a
    model clone a tied head on purpose, and write such pairs. Training will separate the two ends; until then, one of
    them is redundant.
    What to do: nothing if that is meant; else `tiewise tie --keep input` stores one table and says so.
    Sources: torchtitan: the Hugging Face backend clones the head for FSDP
    """
    pair = _equal_pair(facts)
    if pair is None or facts.tied is True:
        return
    if facts.roles.headless:
        return  # the class does not read the head
    how = "no config says if they are tied"
    if facts.claims.levels:
        how = "the config says untied"
    problem = f"two equal tables are stored, and {how}. {_equal_tables(pair)}, {format_bytes(pair.head.nbytes)}"
    fixes = ("none needed if you will train them apart", f"to tie them: {facts.command('tie', '--keep input')}")
    yield short(pair.head.name), problem, fixes


@rule("B015", "warning", "two stored tables are equal, or separately trained", scans=True)
def drifted(facts: Facts) -> Observations:
    """Two tables that were trained separately have nothing in common. Every row differs by about its length. Tables
    that are equal after a cast, equal except for some rows, or within a tenth of each other were one table recently.
    Usual causes: one end saved in another precision; new tokens written at one end only (transformers#35141); an alias
    lost on the meta device or in FSDP, so each end was trained separately from then on (pytorch#188346,
    Automodel#2571). A config that says `exported_boundary: tied+free=K` explains K rows.
    What to do: decide whether the difference is intended. If not, `tiewise tie --keep input|output|mean` makes them one
    again, and says by how much any logit changes.
    Sources: transformers#35141; pytorch#188346; Automodel#2571; lmms-engine#157
    """
    if facts.compared_ends is None or facts.roles.headless:
        return
    table, head, alike = facts.compared_ends
    if alike.kind not in (SAME_VALUES, SOME_ROWS, CLOSE):
        return
    if facts.tied is True and alike.differing:
        return  # B012 reports tied models whose rows differ, and is more severe
    if 0 < alike.differing <= _exported_free_rows(facts):
        return
    types = ""
    if table.dtype != head.dtype:
        types = f" ({table.dtype} and {head.dtype})"
    problem = "the two tables are nearly equal, so they were one table once"
    problem += f". {short(table.name)} and {short(head.name)}{types}: {difference(alike)}"
    tie = facts.command("tie", "--keep input")
    fixes = [f"if the difference is not intended: {tie}", "none needed if it is"]
    if alike.kind != SAME_VALUES:
        fixes.insert(1, "instead of input, --keep takes output or mean")
    yield short(head.name), problem, tuple(fixes)


def _exported_free_rows(facts: Facts) -> int:
    """Return the number of free rows that the tables were exported with, as the config says."""
    try:
        return BoundarySpec.parse(facts.config.get(EXPORTED, "tied")).free or 0
    except SpecError:
        return 0


@rule("B016", "error", "a single shared table is stored under the input table's name")
def only_head_stored(facts: Facts) -> Observations:
    """The only stored table has the head's name. transformers 5 ties in both directions; other loaders look for the
    input table and stop, or leave it random. CodeShell was published in this form, and llama.cpp had to add support
    (llama.cpp#12456). It comes from saves that drop shared names in alphabetical order or by pointer, without asking
    which one is canonical (safetensors#98).
    What to do: `tiewise tie` stores the tensor under the input table's name, with the flag true; `tiewise repair` does
    it if the config says tied.
    Sources: llama.cpp#12456; safetensors#98
    """
    head, input_name = facts.roles.output, facts.roles.input_name
    if head is None or not _lacks_input(facts):
        return
    looked_for = short(input_name or "the input table's own name")
    problem = f"the only table is stored as {short(head.name)}, and loaders look for {looked_for}"
    problem += f". It is {describe(head)}"
    if _can_be_renamed(facts, head):
        yield short(head.name), problem, *repair_of_ties(facts)
    else:
        fixes = (f"if it was trained tied: {facts.command('tie')}", "else: take the input table from its source")
        yield short(head.name), problem, fixes


def _can_be_renamed(facts: Facts, head: Stored) -> bool:
    """Return whether a head without input table can be renamed to the input table.

    A head that the class does not load has a prefix that the new name would keep.
    """
    if head.name in facts.roles.unloaded_names or facts.claims.tied is not True or facts.claims.t5_like:
        return False
    return facts.roles.input_name is not None and not facts.roles.output_end.quantised


def _lacks_input(facts: Facts) -> bool:
    """Return whether the class has an input table and no tensor can be it."""
    roles = facts.roles
    if roles.input is not None or not facts.is_complete:
        return False
    if facts.matrices_without_role:
        return False
    if roles.headless and roles.input_name is None:
        return False  # a class without input embedding, such as one with a CTC head
    return not roles.saves_shared_table_as_head  # such a class saves the shared table under the head's name


@rule("B019", "error", "the layers between the body and the head are stored")
def head_layers(facts: Facts) -> Observations:
    """BERT and similar models have a dense layer and a norm between body and output table. A file may have the table
    and lack these layers: DeBERTa's publisher calls them `lm_predictions.lm_head` (transformers#15216), and a body that
    was saved without a head has none. transformers then draws their matrices at random, and the loss of a masked
    language model is near chance though both tables are right. The data of transformers' classes says which layers a
    head has.
    What to do: store them under the names that the class gives them, or load the body with a class without a head.
    Sources: transformers#15216; transformers#15673
    """
    lost = [facts.saved_name(name) for name in facts.missing_head]
    if lost:
        problem = f"layers of the head are not stored, and are newly initialised: {names(lost)}"
        remedy = "store them under these names, or load the folder with a class that has no head"
        yield short(lost[0]), problem, remedy


@rule("B090", "info", "no scale, cap or row normalisation acts at the ends")
def boundary_numbers(facts: Facts) -> Observations:
    """Some families scale, cap or project at the input embedding or the output head. Granite has embedding_multiplier
    and logits_scaling, Cohere logit_scale, Gemma the square root of the width and a soft cap, OPT and ALBERT a
    projection, T5 the scale before the head. A tied table then serves two scales at once, and a tool that unties,
    merges or factors without them changes every logit. Baichuan 2 and Bailing (Ling) divide the rows of the head by
    their lengths before every product, and converters that took the stored rows got other logits (vllm#1022,
    llama.cpp#3270). The rule recognises such a class by its code in the folder, which it parses and never runs, or by
    norm_head in the config.
    What to do: nothing here; tiewise's verbs keep these numbers, and refuse to change the function. For a normalised
    head, write rows of length 1 before another class or tool reads them.
    Sources: transformers: configs of Granite, Cohere, Gemma, OPT, ALBERT, T5; vllm#1022; vllm#1876; llama.cpp#3270
    """
    scalars = facts.roles.scalars
    if scalars:
        first = next(iter(scalars))
        listed = names([f"{short(key)} = {value:g}" for key, value in scalars.items()])
        problem = f"the model scales or caps at the boundary: {listed}"
        remedy = "none needed: tie, untie and factor keep them, as every other tool should"
        yield short(first), problem, remedy
    for where, how in normalised_heads(facts):
        problem = f"{how}. The length of a stored row has no effect on its logit"
        remedy = "none for this class; another tool that uses the rows as stored changes every logit"
        yield where, problem, remedy


@rule("B018", "warning", "a table of layers for further tokens equals the main one, or is separate", scans=True)
def further_tokens(facts: Facts) -> Observations:
    """DeepSeek-V3 stores a second table and head for the layer that predicts the token after next. Its documentation
    says that they are shared. Loaders draft with different ones: transformers 5 ignores the copies and takes the main
    ones (MtpModel in its modeling_layers.py), vLLM loads the copies (deepseek_mtp.py). A fine-tuning or a merge that
    changed only the main tables leaves copies that are nearly equal. The text stays right, because every draft is
    verified, but loaders that read the copies accept fewer drafts. Separately trained tables are only noted.
    What to do: store the main tables under the copies' names too, or leave the copies out if the loader shares.
    Sources: DeepSeek-V3 README_WEIGHTS.md; transformers modeling_layers.py (5.23.0); vLLM deepseek_mtp.py (03356f8)
    """
    yield from differing_copies(facts, facts.roles)
