"""B010 to B016: which tables are stored, and whether that agrees with what the config says of tying."""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import (
    ERROR,
    FATAL,
    INFO,
    WARNING,
    Finding,
    Rule,
    describe,
    difference,
    flag_at,
    names,
    said,
    size,
)
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SOME_ROWS
from tiewise.checkpoint.untrusted import short


def _no_input(facts: Facts) -> Iterator[Finding]:
    text, roles = facts.text, facts.roles
    yield from _misnamed(facts)
    if text is None or text.vocab_size is None or not facts.complete or roles.input is not None:
        return
    if (roles.headless and roles.known is None) or (facts.quantised and roles.opaque):
        return
    like = [tensor.name for tensor in facts.unplaced]
    if roles.output is not None and (not like or _is_canonical(facts, roles.output)):
        return  # B016 says it, or there is nothing to say
    what = f"vocab_size is {text.vocab_size:,}, and none of {len(facts.folder.tensors):,} tensors is its input table"
    what += f"; one of these may be: {names(like)}" if like else ""
    fix = f"store it as {roles.input_name}" if roles.input_name else "store it under the name that its class gives it"
    yield Finding("B010", FATAL, roles.input_name or "input table", what, fix)


def _misnamed(facts: Facts) -> Iterator[Finding]:
    """An input table that is stored where transformers does not look, or that an untied class does not copy."""
    roles = facts.roles
    if roles.input is not None and roles.read_input is None:
        name, wanted = roles.input.name, roles.unread[roles.input.name]
        lost = facts.tied is not True or roles.read_output is None
        how = "the table is drawn at random" if lost else "the head takes its place"
        what = f"{short(name)} is not a name that its class is loaded from, which looks for {wanted}: {how}"
        fix = f"store it as {wanted}, and every tensor that is named like it likewise"
        yield Finding("B010", FATAL if lost else ERROR, wanted, what, fix)
    for table in facts.half_read:
        wanted = roles.unread[table.name]
        what = f"{short(table.name)} is not a name that its class is loaded from, which looks for {wanted}"
        yield Finding("B010", ERROR, wanted, what, f"store it as {wanted}")
    for target, source in facts.fresh:
        if not target.endswith("bias"):
            what = f"{source} is stored alone, and an untied model of this class draws {target} at random"
            fix = f"store it as {target} too, or write the flag as true if it was trained so"
            yield Finding("B010", ERROR, target, what, fix)


def _is_canonical(facts: Facts, head: Stored) -> bool:
    """Whether the class saves the shared table under the head's name."""
    return facts.roles.ties.get(facts.roles.input_name or "") == head.name


def _no_output(facts: Facts) -> Iterator[Finding]:
    claims, roles = facts.claims, facts.roles
    if facts.tied is not False or claims.t5_like or roles.headless or not facts.complete:
        return
    if roles.input is None or roles.read_output is not None or (facts.quantised and roles.opaque):
        return
    like = [tensor.name for tensor in facts.unplaced]
    if not claims.known and (like or facts.quantised):
        return  # its own code may know them
    deciding = claims.deciding
    assert deciding is not None
    how = "false" if deciding.written is False else "absent, which this class reads as false"
    why = "this class never ties" if claims.fixed is False else f"{flag_at(deciding.level)} is {how}"
    what = f"{why}, and no output head is stored: transformers draws it at random"
    if roles.output is not None:
        wanted = roles.unread[roles.output.name]
        what = f"{why}, and the head is stored as {short(roles.output.name)}: transformers looks for {wanted}"
        yield Finding("B011", FATAL, wanted, what, f"store it as {wanted}")
        return
    what += f"; one of these may be it: {names(like)}" if like else ""
    below = [claim for claim in claims.levels if claim.written is True]
    if below and claims.fixed is None:
        what += f"; {flag_at(below[0].level)} is true"
        fix, safe = facts.command("repair"), True
    else:
        safe = False
        fix = f"if it was trained tied: {facts.command('tie', '--keep input')}; else take the head from its source"
    yield Finding("B011", FATAL, roles.output_name or "output head", what, fix, safe)


def _tied_but_different(facts: Facts) -> Iterator[Finding]:
    alike, head = facts.ends, facts.roles.output
    if facts.tied is not True or alike is None or head is None or not alike.differing:
        return
    claims = facts.claims
    if claims.t5_like and claims.deciding is not None and claims.deciding.written is False:
        return  # T5 1.1 and its kin: a head of its own, said by the flag, which their class then does not follow
    safe = claims.fixed is None and not claims.t5_like
    one = f"choose one: {facts.command('tie', '--keep input')}"
    fix = f"keep both tables: {facts.command('repair')}; or {one}" if safe else one
    what = f"the config ties, and {short(head.name)} is not {short(_input(facts).name)}: {difference(alike)}"
    yield Finding("B012", ERROR, short(head.name), what, fix, safe)


def _tied_and_stored_twice(facts: Facts) -> Iterator[Finding]:
    alike, head = facts.ends, facts.roles.output
    if facts.tied is True and alike is not None and head is not None and alike.equal:
        how = "byte for byte" if alike.kind == IDENTICAL else "but for the signs of zeros"
        what = f"{describe(head)} is {short(_input(facts).name)} {how}, {size(head.nbytes)} stored twice"
        what += "; some values are NaN, so that transformers 5 keeps both" if alike.nan else ""
        yield Finding("B013", WARNING, short(head.name), what, facts.command("dedupe"), safe=True)


def _equal_but_not_tied(facts: Facts) -> Iterator[Finding]:
    alike, head = facts.ends, facts.roles.output
    if facts.tied is not True and alike is not None and head is not None and alike.equal:
        how = f"the config says {said(facts.tied)}" if facts.claims.levels else "no config says whether they tie"
        equal = "byte for byte" if alike.kind == IDENTICAL else "but for the signs of zeros"
        what = f"{describe(head)} is {short(_input(facts).name)} {equal}, and {how}: {size(head.nbytes)} twice"
        fix = f"nothing if training shall part them; else {facts.command('tie', '--keep input')}"
        yield Finding("B014", INFO, short(head.name), what, fix)


def _drift(facts: Facts) -> Iterator[Finding]:
    alike, head = facts.ends, facts.roles.output
    if alike is None or head is None or alike.kind not in (SAME_VALUES, SOME_ROWS, CLOSE):
        return
    if facts.tied is True and alike.differing:
        return  # B012 says it, with more weight
    table = _input(facts)
    types = f" ({table.dtype} and {head.dtype})" if table.dtype != head.dtype else ""
    what = f"{short(table.name)} and {short(head.name)}{types}: {difference(alike)}"
    keep = "--keep input" if alike.kind == SAME_VALUES else "--keep input (or output, or mean)"
    yield Finding("B015", WARNING, short(head.name), what, f"nothing if meant; else {facts.command('tie', keep)}")


def _inverted(facts: Facts) -> Iterator[Finding]:
    roles = facts.roles
    if roles.output is None or roles.input is not None or not facts.complete or facts.unplaced:
        return
    if _is_canonical(facts, roles.output):
        return
    wanted = roles.input_name or "the input table's own name"
    what = f"only {describe(roles.output)} is stored, and no input table: loaders look for {short(wanted)}"
    safe = facts.claims.tied is True and not facts.claims.t5_like and roles.input_name is not None
    safe = safe and not roles.quantised_output
    fix = facts.command("repair" if safe else "tie")
    if not safe:
        fix = f"if it was trained tied: {fix}; else take the input table from its source"
    yield Finding("B016", ERROR, short(roles.output.name), what, fix, safe)


def _input(facts: Facts) -> Stored:
    assert facts.roles.input is not None  # as `facts.ends` is there
    return facts.roles.input


RULES = (
    Rule(
        "B010",
        FATAL,
        "the input table is stored under a name that a loader knows",
        """Without an input table every token is a random vector, or loading stops. It happens where a tool saved only
part of a model, or saved it under names of its own: wrappers of DDP, FSDP and torch.compile put prefixes before every
name, and rules that match `lm_head.weight` exactly then find nothing (OpenRLHF#1316, tinker-cookbook#593). Names are
looked for in the data of transformers' classes, then among the usual ones, then by shape.
What to do: store the table under the name that the model's class gives it.""",
        ("OpenRLHF#1316", "tinker-cookbook#593", "sglang#16215"),
        _no_input,
    ),
    Rule(
        "B011",
        FATAL,
        "an untied model stores its output head",
        """The config says that the two ends do not share a table, and the head is not there. transformers 4 and 5
draw it at random; 5 names it as missing, 4 says nothing. vLLM left it uninitialised before August 2026 (#51665) and
has tied it since; llama.cpp ties it; mlx-lm refuses. A VLM whose nested config says tied while its root says untied
is the usual cause (Qwen3-VL-Embedding#89), a save that dropped the head of a diverged pair the dangerous one.
What to do: if the model was trained tied, write the flag as true at every level. If not, the head is lost: take the
checkpoint from its source again.""",
        ("Qwen3-VL-Embedding#89", "vllm#51063", "transformers#43429"),
        _no_output,
    ),
    Rule(
        "B012",
        ERROR,
        "a tied model stores no head that differs from its table",
        """The config says tied, and two different tables are stored. transformers 4 overwrote the head with the input
table, and so did vLLM before August 2026 (vllm#51063); mlx-lm still drops it; transformers 5 keeps both, warns, and
leaves the config wrong (transformers#42507). So one folder is two models. It comes from merging an adapter trained at
both ends (peft#2777, transformers#45127), from FSDP or ZeRO gathering two copies of a tied table (verl#6334), and
from training that silently ran untied.
What to do: if the head was trained on purpose, write the flag as false at every level. If one side is an accident,
keep the other with `tiewise tie --keep input|output`.""",
        ("vllm#51063", "transformers#42507", "peft#2777", "transformers#45127", "verl#6334", "llama.cpp#9065"),
        _tied_but_different,
        scans=True,
    ),
    Rule(
        "B013",
        WARNING,
        "a tied model stores its table once",
        """The head is a byte-for-byte copy of the input table. It costs disk, download and, in loaders that take what
is stored, memory: a merge of Gemma 2 gained a billion parameters so (mergekit#385), and llama.cpp keeps both
(llama.cpp#13328). transformers 5.0 left such a pair untied, so that later training drifted apart; 5.23 ties it. It
comes from any save that lost the alias: FSDP, ZeRO consolidation, merges, "clone before saving" recipes.
What to do: `tiewise dedupe` drops the head. Nothing else changes.""",
        ("mergekit#385", "llama.cpp#13328", "transformers#42507", "DeepSpeed#3824"),
        _tied_and_stored_twice,
        scans=True,
    ),
    Rule(
        "B014",
        INFO,
        "an untied model's two tables are not the same",
        """Two equal tables under a config that says untied: someone untied the model and has not trained it since, or
a save wrote false for a tied model. Every loader makes the right model of it. Toolkits that shard a model clone a
tied head on purpose, and write such pairs. Training parts the two ends from here on, and until then one of them is
spare bytes.
What to do: nothing if that is meant; else `tiewise tie --keep input` stores one table and says so.""",
        ("torchtitan: the Hugging Face backend clones the head for FSDP",),
        _equal_but_not_tied,
        scans=True,
    ),
    Rule(
        "B015",
        WARNING,
        "two stored tables are the same, or two tables of their own",
        """Tables that were trained apart share nothing: every row differs by about its own length. Tables that are
equal after a cast, equal but for some rows, or within a tenth of each other were one table not long ago. Usual
causes: one end saved in another precision; new tokens written at one end only (transformers#35141); an alias lost on
the meta device or in FSDP, so that each end was trained alone from then on (pytorch#188346, Automodel#2571).
What to do: decide whether the parting was meant. If not, `tiewise tie --keep input|output|mean` makes them one
again, and says by how much any logit changes.""",
        ("transformers#35141", "pytorch#188346", "Automodel#2571", "lmms-engine#157"),
        _drift,
        scans=True,
    ),
    Rule(
        "B016",
        ERROR,
        "a single shared table is stored under the input table's name",
        """Only the head's name is stored. transformers 5 ties in both directions; other loaders look for the input
table and stop, or leave it random. CodeShell was published so, and llama.cpp had to learn it (llama.cpp#12456). It
comes from saves that drop shared names in alphabetical order or by pointer, without asking which one is canonical
(safetensors#98).
What to do: `tiewise tie` stores the tensor under the input table's name, with the flag true; `tiewise repair` does it
where the config says tied.""",
        ("llama.cpp#12456", "safetensors#98"),
        _inverted,
    ),
)
