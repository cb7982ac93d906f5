"""B050 and B051: a quantisation treats both ends of a pair alike, and its lists mean modules that exist."""

from __future__ import annotations

from collections.abc import Iterator

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.quantised import End, Quantised, leaves, quantised_ends
from tiewise.checkpoint.rule import ERROR, WARNING, Finding, Rule, names
from tiewise.checkpoint.untrusted import short

_CONFIG = "config.json"
# a list given for one of these replaces the default one, which would keep tied modules and the head plain
_REPLACED = ("bitsandbytes", "eetq", "fbgemm_fp8", "fp8", "higgs", "bitnet")


def _ends(facts: Facts) -> Quantised:
    return quantised_ends(facts.folder.tensors, facts.config, facts.roles)


def _pair(facts: Facts) -> Iterator[Finding]:
    found = _ends(facts)
    table, head = found.input, found.output
    for end in (table, head):
        if end.missing and facts.complete:
            what = f"it stores {names(end.parts)} of a quantised table, and no {names(end.missing)}"
            yield Finding("B050", ERROR, short(end.module), what, "take the checkpoint from its source again")
    if facts.claims.tied and table.parts and head.parts and table.quantised != head.quantised:
        yield _half(table, head)
    says = found.says_head
    if says is None or not facts.complete or not table.parts:
        return
    if says and not head.quantised:
        how = "stores it plain" if head.parts else "stores none: the head is the plain input table"
        what = f"quantization_config.lm_head is true, and the checkpoint {how}"
        yield Finding("B050", ERROR, _CONFIG, what, "set quantization_config.lm_head to false by hand")
    elif head.quantised and not says:
        what = f"quantization_config.lm_head is false, and {short(head.module)} stores {names(head.parts)}"
        yield Finding("B050", ERROR, _CONFIG, what, "set quantization_config.lm_head to true by hand")


def _half(table: End, head: End) -> Finding:
    one, other = (table, head) if table.quantised else (head, table)
    what = (
        f"tie_word_embeddings is true, and {short(one.module)} is stored quantised ({names(one.parts)}) beside a plain "
        f"{short(other.module)}: a loader that ties drops one of the two, or finds no module for it"
    )
    repair = (
        "set tie_word_embeddings to false at every level of config.json, or quantise again with the head left alone"
    )
    return Finding("B050", ERROR, short(one.module), what, repair)


def _listed(facts: Facts) -> Iterator[Finding]:
    found = _ends(facts)
    if facts.roles.headless or found.input.module is None or found.output.module is None:
        return
    for key, entries in found.lists.items():
        where = f"quantization_config.{key}"
        yield from _one_of_the_pair(facts, found, where, entries)
        yield from _no_such_module(facts, found, where, entries)
        default = found.method in _REPLACED and entries and not found.output.quantised
        if default and not leaves(found.output, entries):
            what = (
                f"{found.method} leaves alone {names(entries)}; a list replaces the default, so the head is converted"
            )
            stored = "it is the input table" if not found.output.parts else "it is stored plain"
            yield Finding("B051", WARNING, where, f"{what}, and {stored}", f'add "{short(found.output.module)}" to it')


def _one_of_the_pair(facts: Facts, found: Quantised, where: str, entries: tuple[str, ...]) -> Iterator[Finding]:
    if not facts.claims.tied:
        return
    for end, other in ((found.input, found.output), (found.output, found.input)):
        shared = other.quantised and not end.parts  # the listed end is the quantised one
        if leaves(end, entries) and not leaves(other, entries) and (end.quantised or shared):
            what = f"it leaves {short(end.module)} alone, and on a tied model that table is stored quantised"
            yield Finding("B051", WARNING, where, what, f'take "{short(end.module)}" out of it, or quantise again')


def _no_such_module(facts: Facts, found: Quantised, where: str, entries: tuple[str, ...]) -> Iterator[Finding]:
    if not facts.claims.tied or any(claim.level for claim in facts.claims.levels):
        return  # models made of several are named otherwise in memory than on disk
    for end in (found.input, found.output):
        module = end.module or ""
        last = module.rpartition(".")[2]
        for entry in entries:
            plain = all(c.isalnum() or c in "._" for c in entry)
            if plain and entry.endswith(f".{last}") and not f".{module}".endswith(f".{entry}"):
                what = f'it names "{short(entry)}", and the module is {short(module)}'
                yield Finding("B051", WARNING, where, what, f'write "{short(module)}"')


RULES: tuple[Rule, ...] = (
    Rule(
        "B050",
        ERROR,
        "a quantisation treats both ends of a tied pair alike",
        """A tied model has one table for both ends. Where a tool quantises the head and leaves the table plain, the
config still says tied: loaders then drop the quantised head, or stop at a parameter for which they have no module, and
the model that was measured is not the one that is served. Packed numbers without their scales, or scales without
numbers, belong to no table at all. GPTQ's lm_head says whether the head is quantised, and loaders build the module by
it. transformers leaves tied modules out of a quantisation of its own.
What to do: state tie_word_embeddings as false where the head is quantised by itself, or quantise again.""",
        ("llm-compressor#2798", "llm-compressor#1820", "vllm#45535", "vllm#45543", "sglang#2935", "auto-round#100"),
        _pair,
    ),
    Rule(
        "B051",
        WARNING,
        "what a quantisation leaves alone are modules of the model",
        """Every method has a list of modules that it leaves plain. A list that is given to transformers replaces the
default one for bitsandbytes, FP8 and others, and with it the exception of the head and of tied modules: the head is
converted on loading although it is stored plain, or is the input table. A list that names one end of a tied pair keeps
nothing plain where that one table is stored quantised, and a name with a wrong prefix matches nothing.
What to do: name the head, and name modules as the model has them.""",
        ("transformers#45674", "transformers#37905", "vllm#53170", "llm-compressor#2835"),
        _listed,
    ),
)
