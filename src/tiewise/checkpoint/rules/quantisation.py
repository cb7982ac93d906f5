"""Quantisations of both ends, compared with each other and with the config: B050 to B054."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tiewise.checkpoint.claims import PACKED, ends_with, positive_int
from tiewise.checkpoint.config_parts import quantisation, quantisation_keys, quantisation_section
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.rules.flags import only_ties_ends, untying_edits
from tiewise.checkpoint.rules.quantisation_config import is_listed, lists_of, method_of, packs_module
from tiewise.checkpoint.rules.rule import (
    JsonEdit,
    Observation,
    Observations,
    describe,
    flag_text,
    names,
    rule,
)
from tiewise.checkpoint.stored import BITS, FLOATING, Stored
from tiewise.checkpoint.stored_modules import End
from tiewise.checkpoint.untrusted import object_of, short

# methods whose default list of unquantised modules has tied modules and the head; a list in the config replaces it
_REPLACES_DEFAULT = ("bitsandbytes", "eetq", "fbgemm_fp8", "fp8", "higgs", "bitnet")
_SCALE = re.compile(
    r"weight_\w*scale|scales|SCB|absmax"
)  # in the name of a tensor by which packed numbers are multiplied
_WEIGHT_SCALE = re.compile(r"^weight_scale")
_SCALE_OF = {"qweight": "scales", "weight_packed": "weight_scale"}  # packed part → part with its scales
_OF_ACTIVATIONS = "input_scale"  # part that is no property of the table
_MLX_BITS = (2, 3, 4, 5, 6, 8)  # bits of a number that mlx packs
_NAME = re.compile(r"[\w.]*")  # matches a module's name, and no pattern


def _matching(items: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the names that contain a match of a pattern."""
    return [name for name in items if pattern.search(name)]


def _module(end: End) -> str:
    """Return the name of an end's module; an empty text if it is unknown."""
    return end.module or ""


def _weight(end: End) -> Stored | None:
    """Return the stored weight of an end, packed or plain."""
    return end.parts.get("weight", end.parts.get("weight_packed"))


@rule("B050", "error", "a quantisation treats both ends of a tied pair alike")
def half_quantised(facts: Facts) -> Observations:
    """A tied model has one table for both ends. If a tool quantises the head and leaves the table plain, the config
    still says tied. Loaders then drop the quantised head, or stop at a parameter for which they have no module. The
    served model is not the measured one. Two packed tables that differ are such a pair, too. Packed numbers without
    their scales, or scales without numbers, belong to no table at all. GPTQ's lm_head says whether the head is
    quantised, and loaders build the module accordingly. transformers leaves tied modules out of its quantisations.
    What to do: set tie_word_embeddings to false if the config says that the head is quantised; or quantise again.
    Without a quantization_config that names the head, a loader would draw it at random.
    Sources: llm-compressor#2798; llm-compressor#1820; vllm#45535; vllm#45543; sglang#2935; auto-round#100
    """
    table, head = facts.roles.input_end, facts.roles.output_end
    if facts.is_complete:
        yield from _incomplete(table)
        yield from _incomplete(head)
    if facts.claims.tied:
        yield from _packed_next_to_plain(facts)
        yield from _packed_apart(facts)
    if facts.is_complete and table.parts:
        yield from _wrong_lm_head(facts, head)


def _packed_next_to_plain(facts: Facts) -> Observations:
    """Report that one end of a tied pair is stored quantised, and the other one plain."""
    table, head = facts.roles.input_end, facts.roles.output_end
    if table.quantised == head.quantised:
        return
    if not table.parts or not head.parts:
        return
    packed, plain = table, head
    if head.quantised:
        packed, plain = head, table
    where = short(packed.module)
    problem = f"the config says tied, but {where} is quantised and {short(plain.module)} is not"
    problem += f". A loader that ties drops one of the two, or fails. {where} has {names(packed.parts)}"
    yield _keep_both_packed(facts, packed, where, problem)


def _packed_apart(facts: Facts) -> Observations:
    """Report two quantised tables of a tied pair that differ."""
    table, head = facts.roles.input_end, facts.roles.output_end
    apart = [part for part in facts.parts_packed_apart if part != _OF_ACTIVATIONS]
    if not apart or not _have_all_parts(table, head) or facts.roles.headless:
        return
    where = short(head.module)
    problem = f"the config says tied, but {where} and {short(table.module)} are two packed tables"
    problem += f". They differ in {names(apart)}. A loader that ties drops one of the two, or fails"
    yield _keep_both_packed(facts, head, where, problem)


def _keep_both_packed(facts: Facts, packed: End, where: str, problem: str) -> Observation:
    """Return the finding about two tables of a tied pair, whose repair keeps both."""
    again = "to keep one table: quantise again without the head"
    packing_edits = _packing_edits(facts, packed)
    if packing_edits is None:
        remedy = f"set tie_word_embeddings to false, and name {where} as quantised, in config.json by hand"
        return Observation(where, f"{problem}. The config does not name {where} as quantised", (remedy, again))
    if _have_all_parts(facts.roles.input_end, facts.roles.output_end) and only_ties_ends(facts):
        fixes = (f"to keep both tables: {facts.command('repair')}", again)
        return Observation(where, problem, fixes, safe=True, edits=(*untying_edits(facts), *packing_edits))
    return Observation(where, problem, ("set tie_word_embeddings to false at every level of config.json", again))


def _packing_edits(facts: Facts, end: End) -> tuple[JsonEdit, ...] | None:
    """Return the edits with which a loader packs a stored quantised end; mostly none.

    Return None if the config does not name the end as quantised. A loader then builds a plain module, and draws it at
    random, or reads packed numbers without their scales.
    """
    if _config_packs(facts, end):
        return ()
    if _lacks_gptq_flag(facts, end):
        return (JsonEdit(CONFIG, f"{quantisation_section(facts.config).key}.lm_head", True),)
    return None


def _config_packs(facts: Facts, end: End) -> bool:
    """Return whether a loader that follows the config packs the module of an end."""
    if "quantization" in quantisation_keys(facts.config) and {"weight", "scales"} <= end.parts.keys():
        return True  # mlx-lm packs every module with scales
    section = quantisation(facts.config)
    if end is facts.roles.input_end:
        return packs_module(section, _module(end), "Embedding")
    class_name = "Linear"
    if method_of(section) == "compressed-tensors":
        class_name = ""  # SGLang drops the scales of a head that no target names
    return packs_module(section, _module(end), class_name) or _list_lacks_head(section, end)


def _list_lacks_head(section: Mapping[str, Any], head: End) -> bool:
    """Return whether a list without the head replaces a method's default list, which has it."""
    entries = _unquantised(section)
    if method_of(section) not in _REPLACES_DEFAULT or not entries:
        return False
    return not is_listed(_module(head), entries)


def _lacks_gptq_flag(facts: Facts, end: End) -> bool:
    """Return whether GPTQ's `lm_head` alone is missing to describe a head that GPTQ packed."""
    section = quantisation(facts.config)
    if end is facts.roles.input_end or method_of(section) != "gptq" or "qweight" not in end.parts:
        return False
    return not is_listed(_module(end), _unquantised(section))


def _unquantised(section: Mapping[str, Any]) -> list[str]:
    """Return the entries of all lists of modules that a quantisation leaves alone."""
    entries = list[str]()
    for listed in lists_of(section).values():
        entries += listed
    return entries


def _have_all_parts(*ends: End) -> bool:
    """Return whether no end is quantised without its numbers or its scales."""
    return all(not end.quantised or _needed_part(end) in end.parts for end in ends)


def _incomplete(end: End) -> Observations:
    """Report a quantised end that lacks its numbers or its scales."""
    if not end.quantised:
        return
    needed = _needed_part(end)
    if needed not in end.parts:
        problem = f"{short(end.module)} is quantised, and its {needed} is missing. It has {names(end.parts)}"
        yield short(end.module), problem, "take the checkpoint from its source again"


def _needed_part(end: End) -> str:
    """Return the name of the scales for packed numbers; without numbers, the name of the numbers."""
    for part in end.parts:
        if part in ("weight", *PACKED):
            return _SCALE_OF.get(part, part)
    if "qzeros" in end.parts:
        return "qweight"
    return "weight"


def _wrong_lm_head(facts: Facts, head: End) -> Observations:
    """Report that GPTQ's `lm_head`, which says if the head is quantised, is wrong."""
    section = quantisation_section(facts.config)
    flag = section.values.get("lm_head")
    if not isinstance(flag, bool) or flag is head.quantised:
        return
    stored = "the checkpoint stores no head"
    if head.quantised:
        stored = f"{short(head.module)} is quantised ({names(head.parts)})"
    elif head.parts:
        stored = "the stored head is not quantised"
    key = f"{section.key}.lm_head"
    problem = f"{key} is {flag_text(flag)}, and {stored}"
    edit = JsonEdit(CONFIG, key, head.quantised)
    yield Observation(CONFIG, problem, facts.command("repair"), safe=True, edits=(edit,))


@rule("B051", "warning", "modules that a quantisation leaves alone exist in the model")
def left_alone(facts: Facts) -> Observations:
    """Every method has a list of modules that it leaves plain. A list in the config replaces transformers' default list
    for bitsandbytes, FP8 and others, which exempts the head and tied modules. transformers then converts the head on
    loading, although it is stored plain or is the input table. A list that names one end of a tied pair has no effect
    if the shared table is stored quantised. A name with a wrong prefix matches nothing.
    What to do: name the head, and name modules as the model has them.
    Sources: transformers#45674; transformers#37905; vllm#53170; llm-compressor#2835
    """
    if not _has_both_modules(facts):
        return
    source, section = "quantization_config", quantisation(facts.config)
    if facts.quantise:
        source, section = "--quantise", facts.quantise
    method = method_of(section)
    for key, entries in lists_of(section).items():
        where = f"{source}.{key}"
        if facts.claims.tied:
            yield from _list_of_tied(facts, where, entries)
        yield from _replaced_default(where, entries, method, facts.roles.output_end)


def _has_both_modules(facts: Facts) -> bool:
    """Return whether the class has a head, and the modules of both ends are known."""
    modules = (facts.roles.input_end.module, facts.roles.output_end.module)
    return not facts.roles.headless and None not in modules


def _list_of_tied(facts: Facts, where: str, entries: list[str]) -> Observations:
    """Report entries of one list that contradict a tied pair, or misspell a module."""
    table, head = facts.roles.input_end, facts.roles.output_end
    yield from _packed_all_the_same(where, entries, table, head)
    yield from _packed_all_the_same(where, entries, head, table)
    if len(facts.claims.levels) < 2:  # models made of several are named otherwise in memory than on disk
        yield from _wrong_prefix(where, entries, _module(table))
        yield from _wrong_prefix(where, entries, _module(head))


def _packed_all_the_same(where: str, entries: list[str], end: End, other: End) -> Observations:
    """Report a list that leaves one end alone, where the shared table is stored quantised."""
    stored = end
    if not end.parts:
        stored = other
    if not stored.quantised or is_listed(_module(other), entries):
        return
    if is_listed(_module(end), entries):
        module = short(end.module)
        problem = f"the list excludes {module} from quantisation, and the shared table is quantised"
        yield where, problem, f'remove "{module}" from it, or quantise again'


def _wrong_prefix(where: str, entries: list[str], module: str) -> Observations:
    """Report names in a list that end as a module's name does, and are not it."""
    ending = "." + module.rpartition(".")[2]
    for entry in entries:
        if not entry.endswith(ending) or ends_with(module, entry):
            continue
        if _NAME.fullmatch(entry):
            problem = f'the list names "{short(entry)}", and the module is called {short(module)}'
            yield where, problem, f'write "{short(module)}"'


def _replaced_default(where: str, entries: list[str], method: str, head: End) -> Observations:
    """Report a list without the head that replaces a method's default, which has it."""
    if method not in _REPLACES_DEFAULT or not entries:
        return
    if head.quantised or is_listed(_module(head), entries):
        return
    stored = "it is the input table"
    if head.parts:
        stored = "it is stored unquantised"
    problem = f"{method} quantises the head on loading, because this list replaces the default list"
    problem += f". It excludes {names(entries)}. The head must stay as it is: {stored}"
    yield where, problem, f'add "{short(head.module)}" to it'


@rule("B052", "warning", "a packed head is stored with its scale, and is read with it")
def scale_lost(facts: Facts) -> Observations:
    """fp8 and int8 numbers have a meaning only if they are multiplied by their scale. Without a stored scale, a loader
    takes the numbers unscaled: logits have another size, rows another rank, and no message appears. That is an error if
    the config or other tensors mention scales; a plain cast to fp8 needs none, and looks the same. If the scale is
    stored, an engine that quantises linear layers only still reads the head without it, or fills no head at all. This
    happened in SGLang with compressed-tensors and in vLLM's Fp8Config (read in the threads, not run).
    What to do: take a missing scale from the source; keep the head in 16 bits for an engine that has no method for it.
    Sources: sglang#34895; sglang#35358; vllm#40999; TensorRT-LLM#17728
    """
    if not facts.is_complete:
        return
    for end in (facts.roles.input_end, facts.roles.output_end):
        weight = _weight(end)
        if weight is None or weight.dtype in FLOATING:
            continue
        scales = _matching(end.parts, _SCALE)
        if not scales:
            yield from _missing_scale(facts, weight)
        elif end is facts.roles.output_end:
            yield from _scaled_head(end, weight, scales)


def _scaled_head(head: End, weight: Stored, scales: list[str]) -> Observations:
    """Report a packed head whose scales an engine may drop."""
    if weight.dtype.startswith("F8") or "weight_packed" in head.parts:
        problem = f"some engines drop the scales of the head ({names(scales)}), as they quantise only linear layers"
        problem += f". {describe(weight)}"
        remedy = "use an engine that reads quantised heads, or keep the head in 16 bits"
        yield short(weight.name), problem, remedy


def _missing_scale(facts: Facts, weight: Stored) -> Observations:
    """Report packed numbers of 8 bits without a scale. A plain cast to fp8 needs none, and is a warning."""
    if BITS[weight.dtype] != 8:
        return
    where = short(weight.name)
    problem = f"{where} has no scale, and loaders use its numbers unscaled. It is {describe(weight)}"
    remedy = "take the scale from the checkpoint's source"
    speaks_of_scales = quantisation(facts.config) or _matching(facts.folder.tensor_names, _SCALE)
    if speaks_of_scales or not weight.dtype.startswith("F8"):
        yield Observation(where, problem, remedy, severity="error")
    else:
        fixes = (remedy, "none needed if it was cast without one")
        yield Observation(where, problem, fixes, severity="warning")


@rule("B054", "error", "both ends are packed as the quantisation says")
def packed_otherwise(facts: Facts) -> Observations:
    """A loader builds each module as the quantisation says, and then looks for that module's tensors. If a list leaves
    an end plain that is stored packed, vLLM stops at a scale for which it has no parameter (vllm#45132), and others
    read the packed bytes as weights. ModelOpt describes its quantisation in hf_quant_config.json too, whose list may be
    another one. MLX unpacks with the bits that config.json gives the module, or else with those of all modules: a table
    of other bits comes out as noise (mlx-vlm#1773). Its bits follow from the shapes: 32 bits a word, and a column of
    scales for each group. Bytes (U8) with scales hold one number, or two of four bits.
    What to do: describe the end as it is stored, or quantise again.
    Sources: vllm#45132; vllm#44081; mlxcel#291; mlx-vlm#1773; mlx-lm#1451; mlx-lm utils.py (read)
    """
    if facts.roles.headless or not facts.is_complete:
        return
    table, head = facts.roles.input_end, facts.roles.output_end
    for end, other in ((table, head), (head, table)):
        if not end.quantised or end.module is None:
            continue
        yield from _listed_as_plain(facts, end, other)
        yield from _wrong_width(facts, end)
        yield from _wrong_bits(facts, end)


def _listed_as_plain(facts: Facts, end: End, other: End) -> Observations:
    """Report lists that leave a packed end alone, except those that B051 reports."""
    module = _module(end)
    for listed in _lists(facts):
        patterns = [entry for entry in listed.entries if _is_pattern_of(entry, module)]
        if not patterns:
            continue
        may_be_reported = facts.claims.tied and listed.file != MODELOPT
        if may_be_reported and not is_listed(_module(other), listed.entries):
            continue
        problem = f'"{short(patterns[0])}" excludes {short(module)} from quantisation, and it is stored quantised'
        problem += f" ({names(end.parts)})"
        by_hand = f'remove "{short(patterns[0])}" from the list by hand, or quantise again'
        edit = _without_entries(facts, listed, patterns)
        if edit is None:
            yield listed.place, problem, by_hand
        else:
            yield Observation(listed.place, problem, facts.command("repair"), safe=True, edits=(edit,))


def _without_entries(facts: Facts, listed: _List, patterns: list[str]) -> JsonEdit | None:
    """Return the edit that removes patterns from a list.

    Return None if one of them may name a plain module, too.
    """
    written = listed.values
    if not isinstance(written, list):
        return None
    quantised = {_module(end) for end in (facts.roles.input_end, facts.roles.output_end) if end.quantised}
    for module in _plain_modules(facts) - quantised:
        if any(_is_pattern_of(pattern, module) for pattern in patterns):
            return None
    return JsonEdit(listed.file, listed.key, [entry for entry in written if entry not in patterns])


def _plain_modules(facts: Facts) -> set[str]:
    """Return the modules that are stored as a plain matrix without parts of a quantisation."""
    parts = dict[str, set[str]]()
    for name in facts.folder.tensors:
        module, _, part = name.rpartition(".")
        parts.setdefault(module, set()).add(part)
    return {module for module, names_of_parts in parts.items() if names_of_parts <= {"weight", "bias"}}


MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True)
class _List:
    """List of modules that a quantisation leaves alone."""

    file: str
    key: str  # dotted path in the file
    place: str  # as findings name it
    entries: list[str]
    values: Any  # the JSON value at the key


def _lists(facts: Facts) -> Iterator[_List]:
    """Yield the lists of modules that the folder's quantisations leave alone."""
    section = quantisation_section(facts.config)
    for key, entries in lists_of(section.values).items():
        place = f"quantization_config.{key}"
        yield _List(CONFIG, f"{section.key}.{key}", place, entries, section.values.get(key))
    separate = object_of(object_of(facts.modelopt).get("quantization"))
    for key, entries in lists_of(separate).items():
        path = f"quantization.{key}"
        yield _List(MODELOPT, path, f"{MODELOPT}.{path}", entries, separate.get(key))


def _is_pattern_of(entry: str, module: str) -> bool:
    """Return whether an entry of a list certainly names a module.

    The entry may be the end of its name, a module that contains it, or a pattern with stars. Regular expressions are
    never run; only the form "any prefix, then a name" is recognised.
    """
    plain = entry.removeprefix("re:").removeprefix("^").removesuffix("$")
    plain = plain.replace(r"\.", ".").replace(".*", "*")
    if re.fullmatch(r"[\w.*]+", plain) is None:
        return False
    letters = plain.replace("*", "")
    if letters in ("", plain):  # only stars, or no star
        return ends_with(module, plain) or module.startswith(f"{plain}.")
    dotted_module = f".{module}"
    for part in plain.split("*"):  # much faster than the match below
        if part not in dotted_module:
            return False
    return fnmatchcase(dotted_module, f"*.{plain}")


def _wrong_width(facts: Facts, end: End) -> Observations:
    """Report packed rows that are neither as wide as the model nor half as wide."""
    weight, hidden = _weight(end), facts.text.hidden_size
    if weight is None or hidden is None:
        return
    is_byte_matrix = weight.dtype == "U8" and len(weight.shape) == 2
    if not is_byte_matrix or not _matching(end.parts, _WEIGHT_SCALE):
        return
    rows, width = weight.shape
    for numbers_per_byte in (1, 2):
        unpacked = replace(weight, shape=(rows, numbers_per_byte * width))
        if facts.explains_width_of(unpacked):
            return
    problem = f"{short(weight.name)} is {width:,} bytes wide; {hidden:,} numbers take {hidden:,} bytes"
    problem += f", or {hidden / 2:,g} with four bits each"
    yield short(weight.name), problem, "take the checkpoint from its source again"


def _wrong_bits(facts: Facts, end: End) -> Observations:
    """Compare the bits of a table that MLX packed with those that config.json gives its module."""
    weight, scales = end.parts.get("weight"), end.parts.get("scales")
    if weight is None or scales is None:
        return
    if weight.dtype != "U32":
        return
    section = object_of(facts.config.get("quantization"))
    module = _module(end)
    by_module = section.get(module)
    if by_module is False:
        where = f"quantization.{short(module)}"
        problem = f"{where} is false, which means unquantised, and the module is quantised ({names(end.parts)})"
        yield _packed_as_stored(facts, end, where, problem)
        return
    settings = section
    if isinstance(by_module, Mapping):
        settings = by_module
    yield from _other_packing(facts, end, settings)


class _Packing(NamedTuple):
    """Packing of a table by MLX, as the shapes of its parts show."""

    bits: float  # bits of a number
    group: float  # numbers that share a scale

    @property
    def entry(self) -> dict[str, int]:
        """The entry of the config that describes it."""
        return {"group_size": int(self.group), "bits": int(self.bits)}


def _stored_packing(facts: Facts, end: End) -> _Packing | None:
    """Return the packing of an end; None if the shapes show none."""
    columns, groups = _columns(end.parts["weight"]), _columns(end.parts["scales"])
    width = facts.text.hidden_size
    if 0 in (columns, groups) or width is None:
        return None
    packing = _Packing(32 * columns / width, width / groups)
    if packing.bits not in _MLX_BITS or not packing.group.is_integer():
        return None
    return packing


def _packed_as_stored(facts: Facts, end: End, where: str, problem: str) -> Observation:
    """Return the finding about an end that is packed otherwise than the config says.

    `repair` writes the packing that the shapes show.
    """
    packing, module = _stored_packing(facts, end), _module(end)
    if packing is None:
        return Observation(where, problem, "take the checkpoint from its source again")
    problem += f'. "{short(module)}": {json.dumps(packing.entry)} would fit'
    keys = [key for key in ("quantization", "quantization_config") if isinstance(facts.config.get(key), Mapping)]
    edits = tuple(JsonEdit(CONFIG, key, {module: packing.entry}) for key in keys)  # mlx-lm writes both
    return Observation(where, problem, facts.command("repair"), safe=True, edits=edits)


def _other_packing(facts: Facts, end: End, settings: Mapping[str, Any]) -> Observations:
    """Report a table whose shapes show other bits or groups than the settings of its module."""
    weight, scales = end.parts["weight"], end.parts["scales"]
    bits, group = positive_int(settings.get("bits")), positive_int(settings.get("group_size"))
    if bits is None or group is None:
        return
    columns, groups = _columns(weight), _columns(scales)
    if 0 in (columns, groups) or 32 * columns == bits * group * groups:
        return
    width = facts.text.hidden_size or group * groups
    stored = _Packing(32 * columns / width, width / groups)
    problem = f"{short(end.module)} is packed at {stored.bits:g} bits in groups of {stored.group:g}"
    problem += f", and quantization says {bits} bits in groups of {group}"
    problem += f". It is {describe(weight)} with scales {list(scales.shape)}"
    yield _packed_as_stored(facts, end, short(weight.name), problem)


def _columns(tensor: Stored) -> int:
    """Return the length of the last axis; 0 for a single number."""
    if not tensor.shape:
        return 0
    return tensor.shape[-1]


@rule("B053", "warning", "a planned quantisation packs both ends of a tied pair, or neither")
def half_to_be_quantised(facts: Facts) -> Observations:
    """This rule does the check of B050 before the quantisation is run. It reads the quantisation of config.json if both
    tables are plain, or the one of --quantise. If it packs one end only, a tied model ends with two tables, which take
    more bytes than before (`tiewise plan` counts them). The flag still says one table: tools drop an end, or cannot
    save it. The rule reads the lists of modules that are left alone, the targets of compressed-tensors, lm_head and
    dynamic of GPTQ, extra_config of auto-round, include_input_output_embeddings of torchao. It searches patterns for
    the module's name and never runs them. A quantisation that names neither end counts as leaving both alone.
    What to do: leave both ends alone, pack both, or untie the model first.
    Sources: GPTQModel#3050; llm-compressor#2835; transformers#37905; auto-round#101
    """
    if not facts.tied or not _has_both_modules(facts):
        return
    table, head = facts.roles.input_end, facts.roles.output_end
    where, section = "config.json", quantisation(facts.config)
    are_plain = not table.quantised and not head.quantised
    if facts.quantise:
        where, section = "--quantise", facts.quantise
    elif not are_plain or "lm_head" in section:
        return  # B050 judges what is stored
    packs_table = packs_module(section, _module(table), "Embedding")
    packs_head = packs_module(section, _module(head), "Linear")
    if packs_table == packs_head:
        return
    packed, plain = table, head
    if packs_head:
        packed, plain = head, table
    problem = f"the quantisation converts {short(packed.module)} and not {short(plain.module)}"
    problem += ", but the two are one table"
    remedy = ("quantise both or neither", f"or untie them first: {facts.command('untie')}")
    yield where, problem, remedy
