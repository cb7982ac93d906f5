"""Rules that compare stored tables with the config's flag: B010–B016, B018, B019, B090."""

from __future__ import annotations

from tiewise.checkpoint.claims import Claims, architecture
from tiewise.checkpoint.config_parts import quantisation
from tiewise.checkpoint.facts import ComparedEnds, Facts
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.rules.rule import (
    Observation,
    Observations,
    Repair,
    Severity,
    describe,
    difference,
    differing_copies,
    dotted,
    flag_text,
    names,
    rule,
    tensor_names,
)
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SOME_ROWS
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import format_bytes


@rule("B010", "fatal", "the input table is stored under a name that a loader knows")
def no_input(facts: Facts) -> Observations:
    """Without an input table, every token is a random vector, or loading stops. It happens if a tool saved only part of
    a model, or saved it under other names. Wrappers of DDP, FSDP and torch.compile put prefixes before every name, and
    code that matches `lm_head.weight` exactly then finds nothing (OpenRLHF#1316, tinker-cookbook#593). The rule looks
    for the table by the names of transformers' classes, then by usual names, then by shape.
    What to do: store the table under the name that the model's class gives it.
    Sources: OpenRLHF#1316; tinker-cookbook#593; sglang#16215
    """
    roles = facts.roles
    if roles.loaded_input is not None:
        yield from _misnamed_further_inputs(facts)
    elif roles.input is not None:
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
            problem = f"{source} is stored alone, and an untied model of this class draws {target} at random"
            remedy = f"store it as {target} too, or write the flag as true if it was trained so"
            yield Observation(target, problem, remedy, severity="error")


def _missing_further_inputs(facts: Facts) -> Observations:
    """Report further input tables that are neither stored nor tied to a stored one."""
    for table_name in facts.missing_tables:
        name = facts.saved_name(table_name)
        stored = facts.roles.input_tables[0]
        problem = f"{name} is not stored, and nothing ties it to {short(stored.name)}"
        problem += ": this second input table is drawn at random"
        yield name, problem, f"take {name} from the source of the checkpoint"


def _misnamed(table: Stored, name: str) -> str:
    """Return the evidence that a table has a name that its class does not load."""
    return f"{short(table.name)} is not a name that its class is loaded from, which looks for {name}"


def _misnamed_input(facts: Facts, table: Stored) -> Observation:
    """Return the finding about a single input table that the class does not load."""
    roles = facts.roles
    name = roles.unloaded_names[table.name]
    effect = "the head takes its place"
    severity: Severity = "error"
    if facts.tied is not True or roles.loaded_output is None:
        effect = "the table is drawn at random"
        severity = "fatal"
    problem = f"{_misnamed(table, name)}: {effect}"
    remedy = f"store it as {name}, and every tensor that is named like it likewise"
    twins = _tables_of_others(facts, table.name, name)
    if twins:
        problem += f"; {names(twins)} is such a table too, so that the file holds several models"
        remedy = f"write each model to a folder of its own; {remedy}"
    return Observation(name, problem, remedy, severity=severity)


def _tables_of_others(facts: Facts, table: str, name: str) -> list[str]:
    """Return the input tables of other models in the file.

    Their names are `name` with another prefix, such as `value_model.`.
    """
    ending = f".{name}"
    if not table.endswith(ending):
        return []
    return [other for other in facts.folder.tensors if other.endswith(ending) and other != table]


def _missing_input(facts: Facts) -> Observations:
    """Report that no tensor is the input table, if the class must have one."""
    text, roles = facts.text, facts.roles
    if text.vocab_size is None or _may_lack_input(facts):
        return
    # B016 reports a stored head without an input table
    is_reported = roles.saves_shared_table_as_head or not facts.matrices_without_role
    if roles.output is not None and is_reported:
        return
    problem = f"vocab_size is {text.vocab_size:,}, and none of {len(facts.folder.tensors):,} tensors is its input table"
    if facts.matrices_without_role:
        problem += f"; one of these may be: {tensor_names(facts.matrices_without_role)}"
    where, remedy = "input table", "store it under the name that its class gives it"
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
    checkpoint from its source again. A table with much larger values than the layers was trained with special scales,
    as MiniCPM's is: converted to Llama's class, tying it gives wrong logits in every loader (llama.cpp#5276).
    Sources: llama.cpp#5276; Qwen3-VL-Embedding#89; vllm#51063; transformers#43429
    """
    if not _must_have_head(facts):
        return
    claims, roles = facts.claims, facts.roles
    why = _why_untied(facts)
    if roles.output is not None:
        name = roles.unloaded_names[roles.output.name]
        problem = f"{why}, and the head is stored as {short(roles.output.name)}: transformers looks for {name}"
        yield name, problem, f"store it as {name}"
        return
    problem = f"{why}, and no output head is stored: transformers draws it at random"
    if facts.matrices_without_role:
        problem += f"; one of these may be it: {tensor_names(facts.matrices_without_role)}"
    remedy = f"if it was trained tied: {facts.command('tie', '--keep input')}; else take the head from its source"
    if facts.scaled_up is not None:
        problem += f"; the table's values are {facts.scaled_up:.0f} times as large as those of its layers, so that the"
        problem += (
            " model may have been trained with scales that this class lacks (MiniCPM), and a tie gives wrong logits"
        )
        remedy = f"look up how it was trained, and load it with its own class; {remedy}"
    where, true_level = roles.output_name or "output head", _level_that_ties(claims)
    if true_level is None:
        yield where, problem, remedy
    else:
        problem += f"; {dotted(true_level)} is true"
        yield where, problem, facts.command("repair"), True


def _level_that_ties(claims: Claims) -> str | None:
    """Return the first level whose flag is true, if the class follows flags; None without one."""
    if claims.fixed is not None:
        return None
    return next((claim.level for claim in claims.levels if claim.written is True), None)


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
        return not _is_packed_in_unknown_way(facts)
    # an unknown class may use a quantised tensor, or one without a role, as its head
    return not facts.matrices_without_role and not facts.quantised


def _why_untied(facts: Facts) -> str:
    """Return a clause that says why the model is untied."""
    claims = facts.claims
    if claims.fixed is False:
        return "this class never ties"
    key = dotted(claims.deciding.level)
    if claims.deciding.written is False:
        return f"{key} is false"
    return f"{key} is absent, which this class reads as false"


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
    problem = f"the config ties, and {where} is not {short(pair.table.name)}: {difference(pair.likeness)}"
    if facts.has_untrained_head:
        times = 1 / max(pair.likeness.length_ratio, 1e-9)
        problem += f"; the head's rows are {times:,.0f} times shorter, as those of a head that was never trained"
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
        return Repair(f"if it was never trained: {tie}; to use it all the same: {facts.command('untie')}")
    if facts.layer_ties:
        modules = ", ".join(facts.layer_ties)
        return Repair(f"choose one: {tie}; the flag also ties {modules}, so that it must stay true")
    if facts.claims.fixed is not None or facts.claims.t5_like:
        return Repair(f"choose one: {tie}")
    return Repair(f"keep both tables: {facts.command('repair')}; or choose one: {tie}", is_safe=True)


@rule("B013", "warning", "a tied model stores its table once", scans=True)
def tied_and_stored_twice(facts: Facts) -> Observations:
    """The head is a byte-for-byte copy of the input table. It costs disk space and download time. In loaders that load
    every stored tensor, it also costs memory: a merge of Gemma 2 gained a billion parameters (mergekit#385), and
    llama.cpp keeps both (llama.cpp#13328). transformers 5.0 left such a pair untied, so that later training drifted
    apart; 5.23 ties it. It comes from any save that lost the alias: FSDP, ZeRO consolidation, merges, "clone before
    saving" recipes.
    A packed head repeats the table's numbers, scales and biases, and loaders that skip the numbers alone stop at the
    rest (mlxcel#291).
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
    problem = f"{_equal_tables(pair)}, {format_bytes(pair.head.nbytes)} stored twice"
    if pair.likeness.nan:
        problem += "; some values are NaN, so that transformers 5 keeps both"
    return Observation(where, problem, facts.command("repair"), safe=True)


def _packed_alike(facts: Facts) -> Observation:
    """Return the finding about a packed head that repeats the packed table."""
    table, head = facts.roles.input_end, facts.roles.output_end
    parts = list(head.parts.values())
    spare = format_bytes(sum(part.nbytes for part in parts))
    problem = f"{short(head.module)} and {short(table.module)} are packed alike, byte for byte ({names(head.parts)})"
    problem += f", {spare} stored twice"
    where = short(parts[0].name)
    if quantisation(facts.config).get("lm_head") is True:
        return Observation(where, problem, "set quantization_config.lm_head to false by hand, then run tiewise repair")
    return Observation(where, problem, facts.command("repair"), safe=True)


def _not_read(facts: Facts, name: str) -> Observation:
    """Return the finding about a head of a class without one.

    LlamaForSequenceClassification that was saved with an old `lm_head` is an example.
    """
    owner = short(architecture(facts.config) or "its class")
    problem = f"{name} is stored, and {owner} has no token head: transformers does not read it"
    return Observation(name, problem, "none needed: the tensor can be left out", severity="info")


def _equal_tables(pair: ComparedEnds) -> str:
    """Return a clause on two equal tables: equal bytes, or equal except for signs of zeros."""
    pair_text = f"{describe(pair.head)} is {short(pair.table.name)}"
    if pair.likeness.kind == IDENTICAL:
        return f"{pair_text} byte for byte"
    return f"{pair_text} but for the signs of zeros"


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
    how = "no config says whether they tie"
    if facts.claims.levels:
        how = f"the config says {flag_text(facts.tied)}"
    problem = f"{_equal_tables(pair)}, and {how}: {format_bytes(pair.head.nbytes)} twice"
    remedy = f"nothing if training shall part them; else {facts.command('tie', '--keep input')}"
    yield short(pair.head.name), problem, remedy


@rule("B015", "warning", "two stored tables are the same, or two tables of their own", scans=True)
def drifted(facts: Facts) -> Observations:
    """Two tables that were trained separately have nothing in common. Every row differs by about its length. Tables
    that are equal after a cast, equal except for some rows, or within a tenth of each other were one table recently.
    Usual causes: one end saved in another precision; new tokens written at one end only (transformers#35141); an alias
    lost on the meta device or in FSDP, so each end was trained separately from then on (pytorch#188346,
    Automodel#2571).
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
    types = ""
    if table.dtype != head.dtype:
        types = f" ({table.dtype} and {head.dtype})"
    keep = "--keep input (or output, or mean)"
    if alike.kind == SAME_VALUES:
        keep = "--keep input"
    problem = f"{short(table.name)} and {short(head.name)}{types}: {difference(alike)}"
    yield short(head.name), problem, f"nothing if meant; else {facts.command('tie', keep)}"


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
    problem = f"only {describe(head)} is stored, and no input table: loaders look for {looked_for}"
    if _can_be_renamed(facts):
        yield short(head.name), problem, facts.command("repair"), True
    else:
        remedy = f"if it was trained tied: {facts.command('tie')}; else take the input table from its source"
        yield short(head.name), problem, remedy


def _can_be_renamed(facts: Facts) -> bool:
    """Return whether a head without input table can be renamed to the input table."""
    if facts.claims.tied is not True or facts.claims.t5_like:
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
    was saved without a head has none. transformers then draws them at random, and the loss of a masked language model
    is near chance though both tables are right. The data of transformers' classes says which layers a head has.
    What to do: store them under the names that the class gives them, or load the body with a class without a head.
    Sources: transformers#15216; transformers#15673
    """
    lost = [facts.saved_name(name) for name in facts.missing_head]
    if lost:
        problem = f"tensors of the head's layers are not stored, and so drawn at random: {names(lost)}"
        remedy = "store them under the names that the class gives them, or load the folder with a class without a head"
        yield short(lost[0]), problem, remedy


@rule("B090", "info", "numbers that act at the boundary are known")
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
        remedy = "none needed; tie, untie and factor keep them, and other tools should"
        yield short(first), problem, remedy
    for where, how in normalised_heads(facts):
        problem = f"{how}, so that a token's logit does not depend on the length of its stored row"
        remedy = "none for this class; a tool that takes the rows as they are stored changes every logit"
        yield where, problem, remedy


@rule("B018", "warning", "a table of layers for further tokens is the main one, or one of its own", scans=True)
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
