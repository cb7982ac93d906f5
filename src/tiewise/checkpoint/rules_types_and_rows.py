"""Tables are of one type, quantised alike, in sound rows, and stored once: B040 to B042, B050, B051, B081."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiewise.checkpoint.claims import BESIDE, PACKED, module_of, unwrapped
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import (
    CONFIG_FIX,
    ERROR,
    INFO,
    WARNING,
    Said,
    Told,
    describe,
    names,
    numbers,
    rule,
)
from tiewise.checkpoint.stored import BITS, FLOATING, TORCH_TYPES, Stored
from tiewise.checkpoint.table_scans import duplicates, outlying, scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size
from tiewise.core.long_work import doing


@rule("B040", WARNING, "types agree: both tables with each other, and the config with the bytes")
def types_disagree(facts: Facts) -> Told:
    """A head in another type than its table cannot be compared or shared by bytes, and a loader casts one of them. The
    config's dtype is what transformers 5 and vLLM load by default: where the files are more precise than it says, the
    weights are rounded without a word; where they are less precise, loading only takes more memory, which is merely
    noted. The type of most bytes counts, so that norms in fp32 beside bf16 weights are no finding. Quantised models are
    left to B050.
    What to do: correct the config's dtype, or save the model in one type.
    Sources: transformers: dtype='auto'
    """
    stored = (facts.roles.input, facts.roles.output)
    ends = [end for end in stored if end is not None and end.dtype in FLOATING]
    if len({end.dtype for end in ends}) == 2:
        what = f"{describe(ends[0])} and {describe(ends[1])} have different types"
        fix = "none if the head is meant to be more precise; else save the model again in one type"
        yield short(ends[1].name), what, fix
    key = next((key for key in ("dtype", "torch_dtype") if isinstance(facts.config.get(key), str)), "dtype")
    claimed = TORCH_TYPES.get(str(facts.config.get(key)).removeprefix("torch."))
    held: Counter[str] = Counter()
    for tensor in facts.folder.tensors.values():
        if tensor.dtype in FLOATING:
            held[tensor.dtype] += tensor.nbytes
    if facts.quantised or claimed is None or not held:
        return
    (most, count), total = held.most_common(1)[0], held.total()
    if most != claimed:
        rounds = BITS[most] > BITS[claimed]
        effect = "loaders that follow the config round the weights" if rounds else "loaders only widen the weights"
        what = f"{key} says {claimed}, and {most} is the type of {count / total:.0%} of the bytes: {effect}"
        yield Said(key, what, f"{CONFIG_FIX}: {key}", severity=WARNING if rounds else INFO)


@rule("B041", ERROR, "rows of tokens in use are finite, not zero, and not equal to one another", deep=True)
def rows_in_use(facts: Facts) -> Told:
    """NaN or an infinity in one row of a head makes every loss NaN: an error. A row of zeros gives its token the same
    logit everywhere, and two equal rows cannot be told apart: a warning, since only these tokens suffer (of zeros only
    noted where no tokenizer tells which tokens there are). Such rows are tokens that were added and never trained, or
    that mean_resizing gave one mean vector (trl#5608, LlamaFactory#6749: new tokens are never emitted). Padding ids and
    placeholders such as [unused12] or <|reserved_special_token_3|> are left out. Rows ten times as long as the median
    are noted.
    What to do: initialise the rows again and train them.
    Sources: trl#5608; LlamaFactory#6749; transformers#35141
    """
    tokenizer = facts.tokenizer if facts.tokenizer is not None and facts.tokenizer.count else None
    pads = {value for level in facts.levels.values() if type(value := level.get("pad_token_id")) is int}
    again = "initialise these rows again, or take them from the source"
    for table in (facts.roles.input, facts.roles.output):
        if table is None or table.dtype not in FLOATING or len(table.shape) != 2:
            continue
        used = (tokenizer.used if tokenizer is not None else frozenset(range(table.rows))) - pads
        where = short(table.name)
        with doing(f"reading {where}", table.nbytes):
            scan = scan_rows(table)
        if scan.not_finite:
            yield where, f"{where}: {_rows(scan.not_finite)} hold NaN or infinity", again
        if zero := [row for row in scan.zero if row in used]:
            what = f"{where}: {_rows(zero)} of tokens in use are zero"
            yield Said(where, what, again, severity=INFO if tokenizer is None else WARNING)
        in_use = ([row for row in group if row in used] for group in scan.repeated)
        if groups := [group for group in in_use if len(group) > 1]:
            listed = "; ".join(numbers(group[:4], len(group)) for group in groups[:4])
            what = f"{where}: {sum(map(len, groups)):,} rows of tokens in use are equal to another ({listed})"
            fix = "train these tokens, or initialise them apart"
            yield Said(where, f"{what}: one logit for each group", fix, severity=WARNING)
        far, median = outlying(scan.lengths, used)
        if far:
            what = f"{where}: {_rows(far)} are at least ten times as long as the median {median:.3g}"
            fix = "look at these tokens: were they added and not trained?"
            yield Said(where, f"{what}, up to {scan.lengths[far].max():.3g}", fix, severity=INFO)


def _rows(found: Sequence[int]) -> str:
    return f"{len(found):,} rows ({numbers(found[:8], len(found))})"


@rule("B042", INFO, "the number of rows divides by 64")
def not_divisible(facts: Facts) -> Told:
    """Matrix kernels are fastest where the vocabulary divides by 64, and tensor parallelism and FSDP want it to divide
    by the number of ranks: with an uneven vocabulary FSDP2 left the last rank without updates (accelerate#4171). Many
    good models have odd vocabularies (GPT-2 has 50,257), so this is only noted. Padding rows cost their bytes and take
    part in the softmax until training has pushed them down.
    What to do: if the model is to be trained on many ranks, `tiewise resize --multiple-of 64` pads both ends.
    Sources: accelerate#4171; pytorch#176076
    """
    table, step = facts.roles.input, 64
    if table is None or facts.quantised or table.rows % step == 0:
        return
    what = f"{table.rows:,} rows leave {table.rows % step} over when divided by {step}"
    fix = f"none needed; {facts.command('resize', f'--multiple-of {step}')}"
    yield short(table.name), what, f"{fix} makes {math.ceil(table.rows / step) * step:,} at both ends"


@rule("B081", INFO, "no large tensor is stored twice", deep=True)
def stored_twice(facts: Facts) -> Told:
    """Layers that share parameters, encoder and decoder tables of one vocabulary, and exports that fold a transpose of
    the table (optimum#2241, over 30 % larger) store the same bytes under several names. It is only waste, and often
    meant. Tensors from 1 MiB on are compared, by samples first and then byte for byte; the two ends are left to B013.
    What to do: nothing, or save through a library that knows of the sharing.
    Sources: optimum#2241; optimum#1333
    """
    ends = {end.name for end in (facts.roles.input, facts.roles.output) if end is not None}
    for group in duplicates(facts.folder.tensors.values(), facts.same):
        if {tensor.name for tensor in group} <= ends:
            continue  # B013 and B014 say it
        spare = group[0].nbytes * (len(group) - 1)
        what = f"{names([tensor.name for tensor in group])} hold the same bytes: {size(spare)} stored more than once"
        fix = "none needed; layers that share parameters need one copy where their loader knows of it"
        yield short(group[0].name), what, fix


_NEEDED = {"qweight": ("scales",), "weight_packed": ("weight_scale",)}  # without which packed numbers mean nothing
_CONFIG = "config.json"


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


_LISTS = (  # keys under which the config of a quantisation lists the modules that it leaves alone
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignore", "ignored_layers", "exclude_modules", "exclude"),
    *("skip_modules", "modules_to_exclude", "exclude_layers"),
)
MOST_LISTED = 100_000


def quantised_ends(facts: Facts) -> Quantised:
    """Say of each end whether it is stored quantised, and what the config says of it."""
    table, head = (_end(facts.folder.tensors, name) for name in (facts.roles.input_name, facts.roles.output_name))
    levels = (facts.config, facts.config.get("text_config"), facts.config.get("llm_config"))
    keys = ("quantization_config", "compression_config", "quantization")
    found = (level.get(key) for level in levels if isinstance(level, Mapping) for key in keys)
    section = next((section for section in found if isinstance(section, Mapping)), None)
    if section is None:
        return Quantised(table, head)
    methods = (section.get(key) for key in ("quant_method", "quant_algo", "mode"))
    listed = {key: entries for key in _LISTS if isinstance(entries := section.get(key), list)}
    if isinstance(dynamic := section.get("dynamic"), Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        left = [key[2:] for key in dynamic if isinstance(key, str) and key.startswith("-:")]
        listed |= {"dynamic": left} if left else {}
    return Quantised(
        table,
        head,
        method=next((name for name in methods if isinstance(name, str)), ""),
        lists={
            key: tuple(one for one in entries[:MOST_LISTED] if isinstance(one, str)) for key, entries in listed.items()
        },
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
    last, parts = module.rpartition(".")[2], {}
    for stored, tensor in tensors.items():
        if last not in stored or not (plain := unwrapped(stored)).startswith(f"{module}."):
            continue
        part = plain.removeprefix(f"{module}.")
        if part in ("weight", *PACKED) or BESIDE.fullmatch(part):
            parts[part] = tensor
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
        fix = "set tie_word_embeddings to false at every level of config.json"
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
        # a list given for one of these replaces the default one, which would keep tied modules and the head plain
        replaced = found.method in ("bitsandbytes", "eetq", "fbgemm_fp8", "fp8", "higgs", "bitnet")
        if replaced and entries and not found.output.quantised and not leaves(found.output, entries):
            what = f"{found.method} leaves alone {names(entries)}; a list replaces the default"
            stored = "it is the input table" if not found.output.parts else "it is stored plain"
            yield where, f"{what}, so the head is converted, and {stored}", f'add "{short(found.output.module)}" to it'
