"""B050 and B051: a quantisation treats both ends of a pair alike, and its lists mean modules that exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import BESIDE, PACKED, module_of, unwrapped
from tiewise.checkpoint.rule import ERROR, WARNING, Told, names, rule
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short

# where the config of a quantisation stands, and under which keys it lists the modules that it leaves alone
_SECTIONS = ("quantization_config", "compression_config", "quantization")
_LISTS = (
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules", "exclude"),
    *("skip_modules", "modules_to_exclude", "exclude_layers"),
)
# a triple is whole only with these beside the packed numbers
_NEEDED = {"qweight": ("scales",), "weight_packed": ("weight_scale",)}
_CONFIG = "config.json"
# a list given for one of these replaces the default one, which would keep tied modules and the head plain
_REPLACED = ("bitsandbytes", "eetq", "fbgemm_fp8", "fp8", "higgs", "bitnet")
MOST_LISTED = 100_000


@dataclass(frozen=True)
class End:
    """One end of a quantised checkpoint."""

    module: str | None = None  # its name; None where none is known
    parts: tuple[str, ...] = ()  # last parts of the names of what is stored for it, sorted
    quantised: bool = False  # its numbers are packed, are of an integer or 8-bit type, or have scales beside them

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts without which the stored ones mean nothing: scales without numbers, packed numbers without scales."""
        if not self.quantised:
            return ()
        packed = [part for part in self.parts if part in ("weight", *PACKED)]
        if not packed:
            return ("qweight" if "qzeros" in self.parts else "weight",)
        return tuple(part for part in _NEEDED.get(packed[0], ()) if part not in self.parts)


@dataclass(frozen=True)
class Quantised:
    """Both ends, and what the config says."""

    input: End  # the input table
    output: End  # the output head; without parts where none is stored
    # `quant_method`, "" where a config of a quantisation names none; None without such a config
    method: str | None = None
    # modules left alone, by the key that lists them. Patterns stand as written and are never run.
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # the config's own statement that the head is quantised (GPTQ's `lm_head`); None where it has none
    says_head: bool | None = None


def quantised_ends(facts: Facts) -> Quantised:
    """Say of each end whether it is stored quantised, and what the config says of it."""
    table, head = (_end(facts.folder.tensors, name) for name in (facts.roles.input_name, facts.roles.output_name))
    nested = (facts.config.get(key) for key in ("text_config", "llm_config"))
    levels = [facts.config, *(level for level in nested if isinstance(level, Mapping))]
    found = (level.get(key) for level in levels for key in _SECTIONS)
    section = next((section for section in found if isinstance(section, Mapping)), None)
    if section is None:
        return Quantised(table, head)
    methods = (section.get(key) for key in ("quant_method", "quant_algo", "mode"))
    listed = {key: entries for key in _LISTS if isinstance(entries := section.get(key), list)}
    if isinstance(dynamic := section.get("dynamic"), Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        listed["dynamic"] = [key[2:] for key in dynamic if isinstance(key, str) and key.startswith("-:")]
    lists = {
        key: tuple(one for one in entries[:MOST_LISTED] if isinstance(one, str)) for key, entries in listed.items()
    }
    return Quantised(
        table,
        head,
        method=next((name for name in methods if isinstance(name, str)), ""),
        lists={key: entries for key, entries in lists.items() if entries or key != "dynamic"},
        says_head=says if isinstance(says := section.get("lm_head"), bool) else None,
    )


def leaves(end: End, entries: tuple[str, ...]) -> bool:
    """Whether a list of modules left alone names this end: by name, by a part above it, or within a pattern."""
    if end.module is None:
        return False
    last = end.module.rpartition(".")[2]
    return any(last in entry or end.module.startswith(f"{entry}.") for entry in entries if entry)


def _end(tensors: Mapping[str, Stored], name: str | None) -> End:
    if name is None:
        return End()
    module = module_of(name)[0]
    last = module.rpartition(".")[2]
    parts = {}
    for stored, tensor in tensors.items():
        if last in stored and (plain := unwrapped(stored)).startswith(f"{module}."):
            parts[plain.removeprefix(f"{module}.")] = tensor
    parts = {part: tensor for part, tensor in parts.items() if part in ("weight", *PACKED) or BESIDE.fullmatch(part)}
    quantised = any(part != "weight" or tensor.dtype not in FLOATING for part, tensor in parts.items())
    return End(module, tuple(sorted(parts)), quantised)


@rule("B050", ERROR, "a quantisation treats both ends of a tied pair alike")
def half_quantised(facts: Facts) -> Told:
    """A tied model has one table for both ends. Where a tool quantises the head and leaves the table plain, the config
    still says tied: loaders then drop the quantised head, or stop at a parameter for which they have no module, and the
    model that was measured is not the one that is served. Packed numbers without their scales, or scales without
    numbers, belong to no table at all. GPTQ's lm_head says whether the head is quantised, and loaders build the module
    by it. transformers leaves tied modules out of a quantisation of its own.
    What to do: state tie_word_embeddings as false where the head is quantised by itself, or quantise again.
    Sources: llm-compressor#2798; llm-compressor#1820; vllm#45535; vllm#45543; sglang#2935; auto-round#100
    """
    found = quantised_ends(facts)
    table, head = found.input, found.output
    for end in (table, head):
        if end.missing and facts.complete:
            what = f"it stores {names(end.parts)} of a quantised table, and no {names(end.missing)}"
            yield short(end.module), what, "take the checkpoint from its source again"
    if facts.claims.tied and table.parts and head.parts and table.quantised != head.quantised:
        one, other = (table, head) if table.quantised else (head, table)
        what = f"tie_word_embeddings is true, and {short(one.module)} is stored quantised ({names(one.parts)}) beside"
        what += f" a plain {short(other.module)}: a loader that ties drops one of the two, or finds no module for it"
        fix = (
            "set tie_word_embeddings to false at every level of config.json, or quantise again with the head left alone"
        )
        yield short(one.module), what, f"{fix}, or quantise again with the head left alone"
    says = found.says_head
    if says is None or not facts.complete or not table.parts:
        return
    if says and not head.quantised:
        how = "stores it plain" if head.parts else "stores none: the head is the plain input table"
        what = f"quantization_config.lm_head is true, and the checkpoint {how}"
        yield _CONFIG, what, "set quantization_config.lm_head to false by hand"
    elif head.quantised and not says:
        what = f"quantization_config.lm_head is false, and {short(head.module)} stores {names(head.parts)}"
        yield _CONFIG, what, "set quantization_config.lm_head to true by hand"


@rule("B051", WARNING, "what a quantisation leaves alone are modules of the model")
def left_alone(facts: Facts) -> Told:
    """Every method has a list of modules that it leaves plain. A list that is given to transformers replaces the
    default one for bitsandbytes, FP8 and others, and with it the exception of the head and of tied modules: the head is
    converted on loading although it is stored plain, or is the input table. A list that names one end of a tied pair
    keeps nothing plain where that one table is stored quantised, and a name with a wrong prefix matches nothing.
    What to do: name the head, and name modules as the model has them.
    Sources: transformers#45674; transformers#37905; vllm#53170; llm-compressor#2835
    """
    found = quantised_ends(facts)
    if facts.roles.headless or found.input.module is None or found.output.module is None:
        return
    # models made of several are named otherwise in memory than on disk
    one_model = facts.claims.tied and not any(claim.level for claim in facts.claims.levels)
    for key, entries in found.lists.items():
        where = f"quantization_config.{key}"
        for end, other in ((found.input, found.output), (found.output, found.input)) if facts.claims.tied else ():
            shared = other.quantised and not end.parts  # the listed end is the quantised one
            if leaves(end, entries) and not leaves(other, entries) and (end.quantised or shared):
                what = f"it leaves {short(end.module)} alone, and on a tied model that table is stored quantised"
                yield where, what, f'take "{short(end.module)}" out of it, or quantise again'
        for end in (found.input, found.output) if one_model else ():
            last = (end.module or "").rpartition(".")[2]
            for entry in entries:
                plain = all(c.isalnum() or c in "._" for c in entry)
                if plain and entry.endswith(f".{last}") and not f".{end.module}".endswith(f".{entry}"):
                    what = f'it names "{short(entry)}", and the module is {short(end.module)}'
                    yield where, what, f'write "{short(end.module)}"'
        default = found.method in _REPLACED and entries and not found.output.quantised
        if default and not leaves(found.output, entries):
            what = (
                f"{found.method} leaves alone {names(entries)}; a list replaces the default, so the head is converted"
            )
            stored = "it is the input table" if not found.output.parts else "it is stored plain"
            yield where, f"{what}, and {stored}", f'add "{short(found.output.module)}" to it'
