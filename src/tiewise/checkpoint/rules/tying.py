"""What both ends store, what the config says, who believes which: B010 to B016, B018 to B022, B080, B090."""

from __future__ import annotations

from collections.abc import Collection

from tiewise.checkpoint.claims import FLAG, Claim, architecture
from tiewise.checkpoint.facts import TEXT_PARTS, Facts, Pair, quantisation
from tiewise.checkpoint.loader_columns import ERROR, LOST, LoaderOutcome
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    Said,
    Severity,
    Told,
    copies,
    describe,
    difference,
    dotted,
    names,
    rule,
    said,
)
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SOME_ROWS
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size


@rule("B010", "fatal", "the input table is stored under a name that a loader knows")
def no_input(facts: Facts) -> Told:
    """Without an input table every token is a random vector, or loading stops. It happens where a tool saved only part
    of a model, or saved it under names of its own: wrappers of DDP, FSDP and torch.compile put prefixes before every
    name, and rules that match `lm_head.weight` exactly then find nothing (OpenRLHF#1316, tinker-cookbook#593). Names
    are looked for in the data of transformers' classes, then among the usual ones, then by shape.
    What to do: store the table under the name that the model's class gives it.
    Sources: OpenRLHF#1316; tinker-cookbook#593; sglang#16215
    """
    text, roles = facts.text, facts.roles
    for table in facts.half_read if roles.input is None or roles.read_input is not None else [roles.input]:
        wanted = roles.unread[table.name]
        what = f"{short(table.name)} is not a name that its class is loaded from, which looks for {wanted}"
        if roles.read_input is not None:
            yield Said(wanted, what, f"store it as {wanted}", severity="error")
            continue
        lost = facts.tied is not True or roles.read_output is None
        what += ": the table is drawn at random" if lost else ": the head takes its place"
        fix = f"store it as {wanted}, and every tensor that is named like it likewise"
        if twins := _tables_of_others(facts, table.name, wanted):
            what += f"; {names(twins)} is such a table too, so that the file holds several models"
            fix = f"write each model to a folder of its own; {fix}"
        yield Said(wanted, what, fix, severity="fatal" if lost else "error")
    for target, source in facts.fresh:
        if not target.endswith("bias"):
            what = f"{source} is stored alone, and an untied model of this class draws {target} at random"
            fix = f"store it as {target} too, or write the flag as true if it was trained so"
            yield Said(target, what, fix, severity="error")
    for name in map(facts.named, facts.missing_tables):
        what = f"{name} is not stored, and nothing ties it to {short(facts.roles.inputs[0].name)}"
        what += ": this second input table is drawn at random"
        yield name, what, f"take {name} from the source of the checkpoint"
    if text.vocab_size is None or not facts.complete or roles.input is not None:
        return
    if (roles.headless and roles.known is None) or (facts.quantised and roles.opaque):
        return
    like = [tensor.name for tensor in facts.unplaced]
    if roles.output is not None and (not like or roles.named_like_head):
        return  # B016 says it, or there is nothing to say
    what = f"vocab_size is {text.vocab_size:,}, and none of {len(facts.folder.tensors):,} tensors is its input table"
    what += f"; one of these may be: {names(like)}" if like else ""
    fix = f"store it as {roles.input_name}" if roles.input_name else "store it under the name that its class gives it"
    yield roles.input_name or "input table", what, fix


def _tables_of_others(facts: Facts, table: str, wanted: str) -> list[str]:
    """Return the input tables of other models in the file: `wanted` behind another prefix, `value_model.` say."""
    if not table.endswith(f".{wanted}"):
        return []
    return [name for name in facts.folder.tensors if name.endswith(f".{wanted}") and name != table]


@rule("B011", "fatal", "an untied model stores its output head")
def no_output(facts: Facts) -> Told:
    """The config says that the two ends do not share a table, and the head is not there. transformers 4 and 5 draw it
    at random; 5 names it as missing, 4 says nothing. vLLM left it uninitialised before August 2026 (#51665) and has
    tied it since; llama.cpp ties it; mlx-lm refuses. A VLM whose nested config says tied while its root says untied is
    the usual cause (Qwen3-VL-Embedding#89), a save that dropped the head of a diverged pair the dangerous one.
    What to do: if the model was trained tied, write the flag as true at every level. If not, the head is lost: take the
    checkpoint from its source again. A table that is much larger than the layers was trained with scales of its own, as
    MiniCPM's is: converted to Llama's class, tying it gives wrong logits in every loader (llama.cpp#5276).
    Sources: llama.cpp#5276; Qwen3-VL-Embedding#89; vllm#51063; transformers#43429
    """
    claims, roles = facts.claims, facts.roles
    if facts.tied is not False or claims.t5_like or roles.headless or not facts.complete:
        return
    if roles.input is None or roles.read_output is not None or (facts.quantised and roles.opaque):
        return
    like = [tensor.name for tensor in facts.unplaced]
    if not claims.known and (like or facts.quantised):
        return  # its own code may know them
    how = "false" if claims.deciding.written is False else "absent, which this class reads as false"
    why = "this class never ties" if claims.fixed is False else f"{dotted(claims.deciding.level)} is {how}"
    what = f"{why}, and no output head is stored: transformers draws it at random"
    if roles.output is not None:
        wanted = roles.unread[roles.output.name]
        what = f"{why}, and the head is stored as {short(roles.output.name)}: transformers looks for {wanted}"
        yield wanted, what, f"store it as {wanted}"
        return
    what += f"; one of these may be it: {names(like)}" if like else ""
    fix = f"if it was trained tied: {facts.command('tie', '--keep input')}; else take the head from its source"
    if facts.scaled_up is not None:
        what += f"; the table's values are {facts.scaled_up:.0f} times as large as those of its layers, so that the"
        what += " model may have been trained with scales that this class lacks (MiniCPM), and a tie gives wrong logits"
        fix = f"look up how it was trained, and load it with its own class; {fix}"
    if below := [claim for claim in claims.levels if claim.written is True and claims.fixed is None]:
        what, fix = f"{what}; {dotted(below[0].level)} is true", facts.command("repair")
    yield roles.output_name or "output head", what, fix, bool(below)


@rule("B012", "error", "a tied model stores no head that differs from its table", scans=True)
def tied_but_different(facts: Facts) -> Told:
    """The config says tied, and two different tables are stored. transformers 4 overwrote the head with the input
    table, and so did vLLM before August 2026 (vllm#51063); mlx-lm still drops it; transformers 5 keeps both, warns, and
    leaves the config wrong (transformers#42507). So one folder is two models. It comes from merging an adapter trained
    at both ends (peft#2777, transformers#45127), from FSDP or ZeRO gathering two copies of a tied table (verl#6334),
    and from training that silently ran untied.
    What to do: if the head was trained on purpose, write the flag as false at every level. If one side is an accident,
    keep the other with `tiewise tie --keep input|output`. A head that is unrelated to the table and over ten times
    shorter was probably never trained (Megatron-LM#7577), and repair leaves it to you.
    Sources: vllm#51063; transformers#42507; peft#2777; transformers#45127; verl#6334; llama.cpp#9065; Megatron-LM#7577
    """
    claims, pair = facts.claims, facts.pair
    if facts.tied is not True or pair is None or not pair.alike.differing:
        return
    if claims.t5_like and claims.deciding.written is False:
        return  # T5 1.1 and its kin: a head of its own, said by the flag, which their class then does not follow
    where = short(pair.head.name)
    if facts.roles.headless:
        yield _not_read(facts, where)
        return
    safe = claims.fixed is None and not claims.t5_like and not facts.layer_ties and not facts.untrained_head
    one = f"choose one: {facts.command('tie', '--keep input')}"
    fix = f"keep both tables: {facts.command('repair')}; or {one}" if safe else one
    differ = difference(pair.alike)
    if facts.untrained_head:
        differ += f"; the head's rows are {1 / max(pair.alike.length_ratio, 1e-9):,.0f} times shorter, "
        differ += "as those of a head that was never trained"
        fix = f"if it was never trained: {facts.command('tie', '--keep input')}; to use it all the same: "
        fix += facts.command("untie")
    elif facts.layer_ties:
        fix += f"; the flag also ties {', '.join(facts.layer_ties)}, so that it must stay true"
    yield where, f"the config ties, and {where} is not {short(pair.table.name)}: {differ}", fix, safe


@rule("B013", "warning", "a tied model stores its table once", scans=True)
def tied_and_stored_twice(facts: Facts) -> Told:
    """The head is a byte-for-byte copy of the input table. It costs disk, download and, in loaders that take what is
    stored, memory: a merge of Gemma 2 gained a billion parameters so (mergekit#385), and llama.cpp keeps both
    (llama.cpp#13328). transformers 5.0 left such a pair untied, so that later training drifted apart; 5.23 ties it. It
    comes from any save that lost the alias: FSDP, ZeRO consolidation, merges, "clone before saving" recipes.
    A packed head repeats the table's numbers, scales and biases, and loaders that skip the numbers alone stop at the
    rest (mlxcel#291).
    What to do: `tiewise dedupe` drops the head, with all that belongs to it. Nothing else changes.
    Sources: mergekit#385; llama.cpp#13328; transformers#42507; DeepSpeed#3824; mlxcel#291
    """
    pair = facts.pair
    if facts.tied is True and pair is not None and pair.alike.equal:
        if facts.roles.headless:
            yield _not_read(facts, short(pair.head.name))
            return
        what = f"{_twice(pair)}, {size(pair.head.nbytes)} stored twice"
        what += "; some values are NaN, so that transformers 5 keeps both" if pair.alike.nan else ""
        yield short(pair.head.name), what, facts.command("dedupe"), True
    if facts.tied is True and facts.packed_twice:
        parts = facts.roles.output_end.parts
        spare = size(sum(part.nbytes for part in parts.values()))
        both = f"{short(facts.roles.output_end.module)} and {short(facts.roles.input_end.module)}"
        what = f"{both} are packed alike, byte for byte ({names(parts)}), {spare} stored twice"
        safe = quantisation(facts.config).get("lm_head") is not True
        fix = facts.command("dedupe") if safe else "set quantization_config.lm_head to false by hand, then dedupe"
        yield short(next(iter(parts.values())).name), what, fix, safe


def _not_read(facts: Facts, name: str) -> Said:
    """A head that is stored for a class without one: LlamaForSequenceClassification saved with an old `lm_head`."""
    owner = short(architecture(facts.config) or "its class")
    what = f"{name} is stored, and {owner} has no token head: transformers does not read it"
    return Said(name, what, "none needed: the tensor can be left out", severity="info")


def _twice(pair: Pair) -> str:
    how = "byte for byte" if pair.alike.kind == IDENTICAL else "but for the signs of zeros"
    return f"{describe(pair.head)} is {short(pair.table.name)} {how}"


@rule("B014", "info", "an untied model's two tables are not the same", scans=True)
def equal_but_not_tied(facts: Facts) -> Told:
    """Two equal tables under a config that says untied: someone untied the model and has not trained it since, or a
    save wrote false for a tied model. Every loader makes the right model of it. Toolkits that shard a model clone a
    tied head on purpose, and write such pairs. Training parts the two ends from here on, and until then one of them is
    spare bytes.
    What to do: nothing if that is meant; else `tiewise tie --keep input` stores one table and says so.
    Sources: torchtitan: the Hugging Face backend clones the head for FSDP
    """
    pair = facts.pair
    if facts.tied is not True and pair is not None and pair.alike.equal and not facts.roles.headless:
        how = f"the config says {said(facts.tied)}" if facts.claims.levels else "no config says whether they tie"
        what = f"{_twice(pair)}, and {how}: {size(pair.head.nbytes)} twice"
        fix = f"nothing if training shall part them; else {facts.command('tie', '--keep input')}"
        yield short(pair.head.name), what, fix


@rule("B015", "warning", "two stored tables are the same, or two tables of their own", scans=True)
def drifted(facts: Facts) -> Told:
    """Tables that were trained apart share nothing: every row differs by about its own length. Tables that are equal
    after a cast, equal but for some rows, or within a tenth of each other were one table not long ago. Usual causes:
    one end saved in another precision; new tokens written at one end only (transformers#35141); an alias lost on the
    meta device or in FSDP, so that each end was trained alone from then on (pytorch#188346, Automodel#2571).
    What to do: decide whether the parting was meant. If not, `tiewise tie --keep input|output|mean` makes them one
    again, and says by how much any logit changes.
    Sources: transformers#35141; pytorch#188346; Automodel#2571; lmms-engine#157
    """
    if facts.pair is None or facts.pair.alike.kind not in (SAME_VALUES, SOME_ROWS, CLOSE) or facts.roles.headless:
        return
    table, head, alike = facts.pair
    if facts.tied is True and alike.differing:
        return  # B012 says it, with more weight
    types = f" ({table.dtype} and {head.dtype})" if table.dtype != head.dtype else ""
    what = f"{short(table.name)} and {short(head.name)}{types}: {difference(alike)}"
    keep = "--keep input" if alike.kind == SAME_VALUES else "--keep input (or output, or mean)"
    yield short(head.name), what, f"nothing if meant; else {facts.command('tie', keep)}"


@rule("B016", "error", "a single shared table is stored under the input table's name")
def only_head_stored(facts: Facts) -> Told:
    """Only the head's name is stored. transformers 5 ties in both directions; other loaders look for the input table
    and stop, or leave it random. CodeShell was published so, and llama.cpp had to learn it (llama.cpp#12456). It comes
    from saves that drop shared names in alphabetical order or by pointer, without asking which one is canonical
    (safetensors#98).
    What to do: `tiewise tie` stores the tensor under the input table's name, with the flag true; `tiewise repair` does
    it where the config says tied.
    Sources: llama.cpp#12456; safetensors#98
    """
    roles = facts.roles
    if roles.output is None or roles.input is not None or not facts.complete or facts.unplaced or roles.named_like_head:
        return
    if roles.headless and roles.input_name is None:
        return  # a class without a lookup: a CTC head has no input table beside it
    wanted = roles.input_name or "the input table's own name"
    what = f"only {describe(roles.output)} is stored, and no input table: loaders look for {short(wanted)}"
    plain = roles.input_name is not None and not roles.output_end.quantised
    safe = plain and facts.claims.tied is True and not facts.claims.t5_like
    fix = f"if it was trained tied: {facts.command('tie')}; else take the input table from its source"
    yield short(roles.output.name), what, facts.command("repair") if safe else fix, safe


@rule("B019", "error", "the layers between the body and the head are stored")
def head_layers(facts: Facts) -> Told:
    """BERT and its kin put a dense layer and a norm between the body and the head's table. A file may have the table
    and lack these layers: DeBERTa's publisher calls them `lm_predictions.lm_head` (transformers#15216), and a body
    that was saved alone has none. transformers then draws them at random, and the loss of a masked language model is
    near chance though both tables are right. The data of transformers' classes says which layers a head has.
    What to do: store them under the names that the class gives them, or load the body with a class without a head.
    Sources: transformers#15216; transformers#15673
    """
    if lost := [facts.named(name) for name in facts.missing_head]:
        what = f"tensors of the head's layers are not stored, and so drawn at random: {names(lost)}"
        fix = "store them under the names that the class gives them, or load the folder with a class without a head"
        yield short(lost[0]), what, fix


def _speaking(facts: Facts) -> list[Claim]:
    """Levels that some loader asks for the flag: the deciding one and the parts that hold a text model."""
    return [claim for claim in facts.claims.levels if claim.decides or claim.level.rpartition(".")[2] in TEXT_PARTS]


def _mend(facts: Facts) -> tuple[str, bool]:
    """The repair of a flag, and whether it is safe: only where the tensors decide and the flag means nothing else."""
    other_meaning = facts.claims.t5_like or (bool(facts.layer_ties) and facts.truth is not facts.tied)
    if facts.untrained_head:
        return f"settle the two tables first: {facts.command('tie', '--keep input')}", False
    scaled = facts.roles.output is None and facts.claims.tied is False and facts.scaled_up is not None
    if facts.truth is None or other_meaning or scaled:
        return f"{CONFIG_FIX}: write the flag that training used at every level", False
    return facts.command("repair"), True


@rule("B020", "warning", "the flag is written, as true or false")
def flag_absent(facts: Facts) -> Told:
    """Where tie_word_embeddings is absent, each loader takes a default of its own: transformers 4 true for every model,
    transformers 5 that of the class (false for Llama, true for Gemma), mlx-lm true for Llama. A head that is stored may
    so be dropped, and one that is not stored may be drawn at random (transformers#6692). Only noted where the class
    does not ask for it, or where the class's default is true and no head is stored, since all agree then.
    What to do: `tiewise repair` writes what the tensors say at every level that a loader reads.
    Sources: transformers#6692; transformers#42815; mlx-lm models/llama.py
    """
    roles = facts.roles
    for claim in facts.claims.levels:
        if claim.malformed is not None:
            what = f"{dotted(claim.level)} is {claim.malformed}, which is neither true nor false"
            yield dotted(claim.level), what, *_mend(facts)
    speaking = _speaking(facts)
    if not speaking or roles.headless or (roles.input is None and roles.output is None):
        return
    if any(claim.written is not None or claim.malformed is not None for claim in speaking):
        return
    stored = "no head of its own is stored" if roles.output is None else "a head is stored"
    default, kind = facts.claims.tied, facts.config.get("model_type")
    meant = "whose default is not known here" if default is None else f"whose class takes {said(default)}"
    harmless = (default is True and roles.output is None) or facts.claims.fixed is not None
    family = short(kind) if isinstance(kind, str) else "an unknown family"
    what = f"{FLAG} is absent in a config of {family}, {meant}, and {stored}; loaders' defaults differ"
    yield Said(FLAG, what, *_mend(facts), severity="info" if harmless else "warning")


@rule("B021", "error", "all levels of a nested config say the same")
def levels_disagree(facts: Facts) -> Told:
    """A multimodal config says it twice: at its root and in text_config (or decoder, generator). transformers reads the
    level of the class that owns the head, vLLM and mlx-lm read the text level, and each was wrong for some model: VLMs
    spoke gibberish where the nested true was not lifted to the root (transformers#43429, #43455, #45857), and vLLM
    dropped a real head where the root said true and the text level false (vllm#51063).
    An error where the class itself reads other than the tensors say; a warning where only other loaders go wrong, or
    where the tensors were not compared; a note where every loader has a version that is right. T5Gemma's own config
    class writes such a pair for an untied model.
    What to do: `tiewise repair` writes what the tensors say at every level.
    Sources: transformers#43429; transformers#43455; transformers#45857; vllm#51063; vllm#33359
    """
    written = [claim for claim in _speaking(facts) if claim.written is not None]
    if len({claim.written for claim in written}) < 2 or facts.roles.headless:
        return
    listed = ", ".join(f"{dotted(claim.level)} = {said(claim.written)}" for claim in written)
    tell = {True: "say tied", False: "say untied", None: "were not compared or do not tell"}[facts.truth]
    wrong = next((claim for claim in written if claim.written is not facts.truth), written[-1])
    # two stored tables are loaded as they are where the class reads false, whether or not they are equal
    both = facts.claims.tied is False and facts.complete and facts.roles.output is not None
    if both or (facts.truth is not None and facts.truth is facts.claims.tied):
        severity: Severity = "info" if _severity_of(predict(facts)) in (None, "info") else "warning"
    else:
        severity = "warning" if facts.truth is None else "error"
    repair, safe = _mend(facts)
    yield Said(dotted(wrong.level), f"{listed}; the tensors {tell}", repair, safe, severity)


@rule("B022", "error", "a T5-like model has one input table, and its flag is not taken for a switch")
def t5_ends(facts: Facts) -> Told:
    """T5 and its descendants always share one input table between encoder and decoder, and read tie_word_embeddings =
    false also as "do not scale before the head". With the flag false and only `shared` stored, transformers 4 draws the
    head at random and early versions of 5 the input tables too (transformers#47620, #43880, #42815). Files that store
    several input tables of different content load differently by version: MADLAD's encoder was read from its head
    (transformers#48154).
    What to do: never flip the flag blindly, as it also changes the scale. Find out how the model was trained and store
    the table that was.
    Sources: transformers#47620; transformers#43880; transformers#42815; transformers#48154
    """
    if not facts.claims.t5_like or not facts.complete:
        return
    roles, claim = facts.roles, facts.claims.deciding
    if claim.written is False and roles.output is None and roles.input is not None and not roles.headless:
        what = f"{FLAG} is false and no head is stored; this family reads false also as 'do not scale before the head'"
        fix = f"if it was trained tied, {CONFIG_FIX}: true, with scale_decoder_outputs as it was trained"
        yield FLAG, what, fix
    for other in roles.inputs[1:] if facts.claims.tied is not False else ():
        if (alike := facts.compare(roles.inputs[0], other)) is not None and alike.differing:
            both = f"{short(roles.inputs[0].name)} and {short(other.name)}"
            fix = "find out which one was trained, and store that one alone"
            yield short(other.name), f"{both} are one table in this family: {difference(alike)}", fix


@rule("B090", "info", "numbers that act at the boundary are known")
def boundary_numbers(facts: Facts) -> Told:
    """Some families multiply or cap at the vocabulary's ends: Granite embedding_multiplier and logits_scaling, Cohere
    logit_scale, Gemma the square root of the width and a soft cap, OPT and ALBERT a projection, T5 the scale before the
    head. A tied table then serves two scales at once, and a tool that unties, merges or factors without them changes
    every logit. Baichuan 2 and Bailing (Ling) divide the rows of the head by their lengths before every product, and
    converters that took the stored rows got other logits (vllm#1022, llama.cpp#3270). Such a class is found by its code
    in the folder, which is parsed and never run, or by norm_head in the config.
    What to do: nothing here; tiewise's verbs keep these numbers, and refuse what would change the function. Of a
    normalised head, write rows of length 1 before another class or tool reads them.
    Sources: transformers: configs of Granite, Cohere, Gemma, OPT, ALBERT, T5; vllm#1022; vllm#1876; llama.cpp#3270
    """
    if scalars := facts.roles.scalars:
        listed = names([f"{short(key)} = {value:g}" for key, value in scalars.items()])
        fix = "none needed; tie, untie and factor keep them, and other tools should"
        yield short(next(iter(scalars))), f"the model scales or caps at the boundary: {listed}", fix
    for where, how in normalised_heads(facts):
        what = f"{how}, so that a token's logit does not depend on the length of its stored row"
        yield where, what, "none for this class; a tool that takes the rows as they are stored changes every logit"


@rule("B018", "warning", "a table of layers for further tokens is the main one, or one of its own", scans=True)
def further_tokens(facts: Facts) -> Told:
    """DeepSeek-V3 stores its table and its head once more for the layer that predicts the token after next, and says
    that they are shared. Loaders differ in which they draft with: transformers 5 passes the copies by and takes the
    main ones (MtpModel in its modeling_layers.py), vLLM loads the copies (deepseek_mtp.py). A fine-tuning or a merge
    that changed the main tables alone leaves copies that are nearly equal: the text stays right, as every draft is
    verified, but fewer drafts are accepted where the copies are read. Tables of their own are only noted.
    What to do: store the main tables under the copies' names too, or leave the copies out where the loader shares.
    Sources: DeepSeek-V3 README_WEIGHTS.md; transformers modeling_layers.py (5.23.0); vLLM deepseek_mtp.py (03356f8)
    """
    yield from copies(facts, facts.roles)


@rule("B080", "warning", "every loader makes the same model of it")
def loaders_disagree(facts: Facts) -> Told:
    """Loaders decide by different things: transformers by the flag of one level of the config, vLLM by any level,
    llama.cpp mostly by which tensors are stored, mlx-lm by the flag with defaults of its own, and each has models that
    go their own way. One folder can so be two models, or a random one. The table of loaders in the report says for each
    what it will do, for which versions, and whether that was run or read in its source and threads. A note where a
    server refuses to load it or another version of the loader is right, a warning where a loader makes another model or
    an older version draws something at random, an error where no version of transformers loads it or a loader draws
    something at random in every version. Where another rule names the cause, repairing that settles this too. Some
    cases are the loader's own: llama.cpp passes over a separate head of Gemma 2 (llama.cpp#9065), and no stock loader
    knows tiewise's factored tables.
    What to do: repair the causes; where only the loader is to blame, use another, or make one table (`tiewise tie`).
    Sources: vllm#51063; vllm#51665; transformers#42507; llama.cpp#9065; llama.cpp#13328
    """
    outcomes = predict(facts)
    wrong = [outcome for outcome in outcomes if outcome.right is False]
    severity = _severity_of(outcomes)
    if severity is None:
        return
    listed = names([f"{outcome.loader} {outcome.versions}: {outcome.outcome}" for outcome in wrong], most=len(wrong))
    what = f"{len(wrong)} of {len(outcomes)} loaders make another model of these tensors, or none: {listed}"
    rest = f"; {wrong[0].loader} {wrong[0].versions}: {wrong[0].sentence}" if len(wrong) == len(outcomes) else ""
    fix = f"repair the other findings{rest or ', or load it with the rest'}"
    fix = f"export it dense: {facts.command('densify')}" if facts.is_own else fix
    yield Said(facts.path.name, what, fix, severity=severity)


def _severity_of(outcomes: Collection[LoaderOutcome]) -> Severity | None:
    """How bad it is what loaders make of a checkpoint; None if none goes wrong.

    An error if a loader draws something at random in every version, or transformers refuses; a warning if only an
    older or newer version of a loader does, or one makes another model; else a note.
    """
    wrong = [outcome for outcome in outcomes if outcome.right is False]
    if not wrong:
        return None
    mended = {outcome.loader for outcome in outcomes if outcome.right}
    # a server that refuses says so, and harms nobody: many lack a state that a sound checkpoint of the class may have
    silent = [outcome for outcome in wrong if outcome.outcome != ERROR or outcome.loader == "transformers"]
    lost = [outcome for outcome in silent if outcome.outcome in LOST]
    if any(outcome.loader not in mended for outcome in lost):
        return "error"
    unmended = any(outcome.loader not in mended for outcome in silent)
    return "warning" if lost or unmended else "info"
