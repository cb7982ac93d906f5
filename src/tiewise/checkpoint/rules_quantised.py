"""What a quantisation makes of the two ends, which in a tied model are one: B050 to B052, and B053 beforehand."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint.claims import PACKED
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.roles import End
from tiewise.checkpoint.rule import Said, Told, describe, names, rule, said
from tiewise.checkpoint.stored import BITS, FLOATING
from tiewise.checkpoint.untrusted import read_json, short
from tiewise.core.errors import CheckpointError

_LEFT_ALONE = (
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules", "exclude"),
    *("skip_modules", "modules_to_exclude", "exclude_layers"),
)
MOST_LISTED = 100_000
_SCALE = re.compile(r"weight_\w*scale|scales|SCB|absmax")  # in the name of what packed numbers are multiplied by


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes a quantisation; empty where none does."""
    levels = (config, config.get("text_config"), config.get("llm_config"))
    keys = ("quantization_config", "compression_config", "quantization")
    found = (level.get(key) for level in levels if isinstance(level, Mapping) for key in keys)
    return next((section for section in found if isinstance(section, Mapping)), {})


def read_quantisation(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read the config of a quantisation: a config.json that has one, or a file of the tool's own.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object that says anything.
    """
    record = read_json(os.fspath(path), most=2**24)
    if not isinstance(record, dict) or not record or ("model_type" in record and not quantisation(record)):
        fix = "give a JSON file with quant_method, or a config.json that has quantization_config"
        raise CheckpointError(f"{path}: no config of a quantisation", fix)
    return quantisation(record) or record


def lists_of(section: Mapping[str, Any]) -> dict[str, list[str]]:
    """Modules that a quantisation leaves alone, by the key that lists them. Patterns stand as written, never run."""
    lists = {key: entries for key in _LEFT_ALONE if isinstance(entries := section.get(key), list)}
    if isinstance(dynamic := section.get("dynamic"), Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        lists["dynamic"] = [key[2:] for key in dynamic if isinstance(key, str) and key.startswith("-:")]
    return {key: [one for one in entries[:MOST_LISTED] if isinstance(one, str)] for key, entries in lists.items()}


def leaves(end: End, entries: list[str]) -> bool:
    """Whether a list of modules left alone names this end: by name, by a part above it, or within a pattern."""
    module = end.module or ""
    return any(module.rpartition(".")[2] in entry or module.startswith(f"{entry}.") for entry in entries if entry)


@rule("B050", "error", "a quantisation treats both ends of a tied pair alike")
def half_quantised(facts: Facts) -> Told:
    """A tied model has one table for both ends. Where a tool quantises the head and leaves the table plain, the config
    still says tied: loaders then drop the quantised head, or stop at a parameter for which they have no module, and the
    model that was measured is not the one that is served. Packed numbers without their scales, or scales without
    numbers, belong to no table at all. GPTQ's lm_head says whether the head is quantised, and loaders build the module
    by it. transformers leaves tied modules out of a quantisation of its own.
    What to do: state tie_word_embeddings as false where the head is quantised by itself, or quantise again.
    Sources: llm-compressor#2798; llm-compressor#1820; vllm#45535; vllm#45543; sglang#2935; auto-round#100
    """
    table, head = facts.roles.input_end, facts.roles.output_end
    for end in (table, head) if facts.complete else ():
        numbers_in = next((part for part in end.parts if part in ("weight", *PACKED)), None)
        needed = {"qweight": "scales", "weight_packed": "weight_scale"}.get(numbers_in or "", numbers_in)
        if needed is None:
            needed = "qweight" if "qzeros" in end.parts else "weight"
        if end.quantised and needed not in end.parts:
            what = f"it stores {names(end.parts)} of a quantised table, and no {needed}"
            yield short(end.module), what, "take the checkpoint from its source again"
    if facts.claims.tied and table.parts and head.parts and table.quantised != head.quantised:
        one, other = (table, head) if table.quantised else (head, table)
        what = f"tie_word_embeddings is true, and {short(one.module)} is stored quantised ({names(one.parts)}) beside"
        what += f" a plain {short(other.module)}: a loader that ties drops one of the two, or finds no module for it"
        fix = "set tie_word_embeddings to false at every level of config.json"
        yield short(one.module), what, f"{fix}, or quantise again with the head left alone"
    says = quantisation(facts.config).get("lm_head")
    if says is (not head.quantised) and facts.complete and table.parts:
        how = "stores it plain" if head.parts else "stores none: the head is the plain input table"
        read = f"{short(head.module)} stores {names(head.parts)}" if head.quantised else f"the checkpoint {how}"
        what = f"quantization_config.lm_head is {said(says)}, and {read}"
        yield "config.json", what, f"set quantization_config.lm_head to {said(not says)} by hand"


@rule("B051", "warning", "what a quantisation leaves alone are modules of the model")
def left_alone(facts: Facts) -> Told:
    """Every method has a list of modules that it leaves plain. A list that is given to transformers replaces the
    default one for bitsandbytes, FP8 and others, and with it the exception of the head and of tied modules: the head is
    converted on loading although it is stored plain, or is the input table. A list that names one end of a tied pair
    keeps nothing plain where that one table is stored quantised, and a name with a wrong prefix matches nothing.
    What to do: name the head, and name modules as the model has them.
    Sources: transformers#45674; transformers#37905; vllm#53170; llm-compressor#2835
    """
    table, head, section = facts.roles.input_end, facts.roles.output_end, facts.quantise or quantisation(facts.config)
    if facts.roles.headless or table.module is None or head.module is None:
        return
    methods = (section.get(key) for key in ("quant_method", "quant_algo", "mode"))
    method = next((name for name in methods if isinstance(name, str)), "")
    # models made of several are named otherwise in memory than on disk
    one_model = facts.claims.tied and not any(claim.level for claim in facts.claims.levels)
    for key, entries in lists_of(section).items():
        where = f"{'--quantise' if facts.quantise else 'quantization_config'}.{key}"
        for end, other in ((table, head), (head, table)) if facts.claims.tied else ():
            shared = other.quantised and not end.parts  # the listed end is the quantised one
            if leaves(end, entries) and not leaves(other, entries) and (end.quantised or shared):
                what = f"it leaves {short(end.module)} alone, and on a tied model that table is stored quantised"
                yield where, what, f'take "{short(end.module)}" out of it, or quantise again'
        for end in (table, head) if one_model else ():
            last = (end.module or "").rpartition(".")[2]
            for entry in entries:
                plain = all(c.isalnum() or c in "._" for c in entry)
                if plain and entry.endswith(f".{last}") and not f".{end.module}".endswith(f".{entry}"):
                    what = f'it names "{short(entry)}", and the module is {short(end.module)}'
                    yield where, what, f'write "{short(end.module)}"'
        # a list given for one of these replaces the default one, which would keep tied modules and the head plain
        replaced = method in ("bitsandbytes", "eetq", "fbgemm_fp8", "fp8", "higgs", "bitnet")
        if replaced and entries and not head.quantised and not leaves(head, entries):
            what = f"{method} leaves alone {names(entries)}; a list replaces the default"
            stored = "it is the input table" if not head.parts else "it is stored plain"
            yield where, f"{what}, so the head is converted, and {stored}", f'add "{short(head.module)}" to it'


@rule("B052", "warning", "a packed head has its scale beside it, and is read with it")
def scale_lost(facts: Facts) -> Told:
    """fp8 and int8 numbers mean something only times their scale. Where none is stored, a loader takes the numbers as
    they stand: logits are of another size, rows rank otherwise, and nothing is said. That is an error where the config
    or other tensors speak of scales; a plain cast to fp8 needs none, and looks the same. Where the scale is stored, an
    engine whose quantisation knows linear layers alone still reads the head without it, or fills no head at all: so it
    was in SGLang with compressed-tensors and in vLLM's Fp8Config (read in the threads, not run).
    What to do: take a missing scale from the source; keep the head in 16 bits where an engine has no method for it.
    Sources: sglang#34895; sglang#35358; vllm#40999; TensorRT-LLM#17728
    """
    for end in (facts.roles.input_end, facts.roles.output_end) if facts.complete else ():
        weight = end.parts.get("weight", end.parts.get("weight_packed"))
        if weight is None or weight.dtype in FLOATING:
            continue
        scales, fp8 = [part for part in end.parts if _SCALE.search(part)], weight.dtype.startswith("F8")
        if not scales and BITS[weight.dtype] == 8:
            sure = not fp8 or quantisation(facts.config) or any(map(_SCALE.search, facts.folder.tensors))
            what = f"{describe(weight)} has no scale beside it, and loaders take its numbers as they stand"
            fix = "take the scale from the checkpoint's source" + ("" if sure else "; none if it was cast without one")
            yield Said(short(weight.name), what, fix, severity="error" if sure else "warning")
        elif scales and end is facts.roles.output_end and (fp8 or "weight_packed" in end.parts):
            what = (
                f"{describe(weight)} counts times {names(scales)}: an engine that packs linear layers alone drops these"
            )
            yield short(weight.name), what, "serve it by an engine that reads packed heads, or keep the head in 16 bits"


@rule("B053", "warning", "a quantisation that is to come packs both ends of a tied pair, or neither")
def half_to_be_quantised(facts: Facts) -> Told:
    """B050 before the work is done: the quantisation of config.json while both tables are plain, or the one that
    --quantise names. Where it packs one end alone, a tied model ends with two tables, which take more bytes than before
    (`tiewise plan` counts them), and a flag that says one: tools drop an end, or cannot save it. Read are lists of what
    is left alone, the targets of compressed-tensors, lm_head and dynamic of GPTQ, extra_config of auto-round,
    include_input_output_embeddings of torchao. Patterns are searched for the module's name and never run; what names
    neither end is taken to leave both alone.
    What to do: leave both ends alone, pack both, or untie the model first.
    Sources: GPTQModel#3050; llm-compressor#2835; transformers#37905; auto-round#101
    """
    table, head = facts.roles.input_end, facts.roles.output_end
    section = facts.quantise or quantisation(facts.config)
    done = table.quantised or head.quantised or "lm_head" in section  # B050 judges what is there
    if not facts.tied or facts.roles.headless or table.module is None or head.module is None:
        return
    table_too, head_too = _packs(section, table, "Embedding"), _packs(section, head, "Linear")
    if table_too != head_too and (facts.quantise or not done):
        one, other = (short(end.module) for end in ((table, head) if table_too else (head, table)))
        what = (
            f"the quantisation packs {one} and leaves {other} plain, and the model is tied: one table would become two"
        )
        fix = f"leave both alone or pack both; or first {facts.command('untie')}"
        yield "--quantise" if facts.quantise else "config.json", what, fix


def _packs(section: Mapping[str, Any], end: End, kind: str) -> bool:
    """Whether a quantisation packs an end, a module of class `kind`; what names neither end leaves both alone."""
    if any(leaves(end, entries) for entries in lists_of(section).values()):
        return False
    for key in ("dynamic", "extra_config"):
        by_module = section.get(key)
        for name, how in by_module.items() if isinstance(by_module, Mapping) else ():
            if isinstance(how, Mapping) and leaves(end, [name.removeprefix("+:")]) and not name.startswith("-:"):
                return how.get("bits") not in (16, 32)
    groups = section.get("config_groups")
    groups = [section, *(groups.values() if isinstance(groups, Mapping) else ())]
    targets = [group["targets"] for group in groups if isinstance(group, Mapping) and "targets" in group]
    if targets:
        named = [
            one for some in targets if isinstance(some, list) for one in some[:MOST_LISTED] if isinstance(one, str)
        ]
        return kind in named or leaves(end, named)
    if section.get("include_input_output_embeddings") is True:
        return True
    return kind == "Linear" and section.get("lm_head") is True
