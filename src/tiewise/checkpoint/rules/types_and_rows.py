"""Tables are of one type, in sound rows, stored once, and quantised alike: B040 to B043, B050 to B054, B081."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from tiewise.checkpoint.claims import PACKED, count, ends_with
from tiewise.checkpoint.facts import Facts, quantisation
from tiewise.checkpoint.hf_folder import Tokenizer, json_object
from tiewise.checkpoint.rules.rule import CONFIG_FIX, Said, Told, describe, names, numbers, rule, said
from tiewise.checkpoint.stored import BITS, FLOATING, TORCH_TYPES
from tiewise.checkpoint.stored_modules import End
from tiewise.checkpoint.table_scans import all_zero, duplicates, outlying, scan_rows
from tiewise.checkpoint.untrusted import inside, items_of, read_whole, short
from tiewise.core.errors import CheckpointError, doing
from tiewise.core.files import size

FP32_ROUNDING = 2.0**-23  # beside rows of the median length, the logits of shorter rows vanish in fp32
MOST_TEMPLATE, MOST_ADDED = 2**20, 10_000  # letters of chat templates, and added tokens that are looked for in them


@rule("B040", "warning", "types agree: both tables with each other, and the config with the bytes")
def types_disagree(facts: Facts) -> Told:
    """A head in another type than its table cannot be compared or shared by bytes, and a loader casts one of them. The
    config's dtype is what transformers 5 and vLLM load by default: where the files are more precise than it says, the
    weights are rounded without a word; where they are less precise, loading only takes more memory, which is merely
    noted. The type of most bytes counts, so that norms in fp32 beside bf16 weights are no finding. Quantised models are
    left to B050.
    What to do: correct the config's dtype, or save the model in one type.
    Sources: transformers: dtype='auto'
    """
    ends = [end for end in facts.roles.pair if end.dtype in FLOATING]
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
        yield Said(key, what, f"{CONFIG_FIX}: {key}", severity="warning" if rounds else "info")


@rule("B041", "error", "rows of tokens in use are finite, not zero, and not equal to one another", deep=True)
def rows_in_use(facts: Facts) -> Told:
    """NaN or an infinity in one row of a head makes every loss NaN: an error. A row of zeros gives its token the same
    logit everywhere, and two equal rows cannot be told apart: a warning, since only these tokens suffer (of zeros only
    noted where no tokenizer tells which tokens there are). Such rows are tokens that were added and never trained, or
    that mean_resizing gave one mean vector (trl#5608, LlamaFactory#6749: new tokens are never emitted). Padding ids and
    placeholders such as [unused12] or <|reserved_special_token_3|> are left out, unless the chat template names them.
    Base models leave the tokens of their chat template untrained, at about 1e-23 (unsloth#658): such rows are a warning
    where the template names them, and noted elsewhere. Rows ten times as long as the median are noted.
    What to do: initialise the rows again and train them.
    Sources: trl#5608; LlamaFactory#6749; transformers#35141; unsloth#658; unsloth#1056
    """
    tokenizer = facts.tokenizer if facts.tokenizer is not None and facts.tokenizer.max_id >= 0 else None
    pads = {value for level in facts.levels.values() if type(value := level.get("pad_token_id")) is int}
    again = "initialise these rows again, or take them from the source"
    named = _named_by_template(facts, tokenizer)
    for table in facts.roles.pair:
        if table.dtype not in FLOATING or len(table.shape) != 2:
            continue
        used = ((tokenizer.used | named) if tokenizer is not None else frozenset(range(table.rows))) - pads
        where = short(table.name)
        with doing(f"reading {where}", table.nbytes):
            scan = scan_rows(table)
        if scan.not_finite:
            yield where, f"{where}: {_rows(scan.not_finite)} hold NaN or infinity", again
        if zero := [row for row in scan.zero if row in used]:
            what = f"{where}: {_rows(zero)} of tokens in use are zero"
            yield Said(where, what, again, severity="info" if tokenizer is None else "warning")
        in_use = ([row for row in group if row in used] for group in scan.repeated)
        if groups := [group for group in in_use if len(group) > 1]:
            listed = "; ".join(numbers(group[:4], len(group)) for group in groups[:4])
            what = f"{where}: {sum(map(len, groups)):,} rows of tokens in use are equal to another ({listed})"
            fix = "train these tokens, or initialise them apart"
            yield Said(where, f"{what}: one logit for each group", fix, severity="warning")
        far, median = outlying(scan.lengths, used)
        near = [row for row in used if row < table.rows and 0 < scan.lengths[row] < median * FP32_ROUNDING]
        untrained = f"are near zero beside the median {median:.3g}: they were never trained"
        train = "train these tokens before they are used, or initialise them again"
        if chat := sorted(named.intersection(near)):
            what = f"{where}: {_rows(chat)} of tokens that the chat template names {untrained}"
            yield Said(where, what, train, severity="warning")
        if others := sorted(set(near) - named):
            yield Said(where, f"{where}: {_rows(others)} of tokens in use {untrained}", train, severity="info")
        if far:
            what = f"{where}: {_rows(far)} are at least ten times as long as the median {median:.3g}"
            fix = "look at these tokens: were they added and not trained?"
            yield Said(where, f"{what}, up to {scan.lengths[far].max():.3g}", fix, severity="info")


def _named_by_template(facts: Facts, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids of added tokens whose texts are in the folder's chat template."""
    if tokenizer is None:
        return frozenset()
    templates = list[str]()
    for name in filter(facts.folder.has, ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")):
        with suppress(CheckpointError):  # B001 reports a file that cannot be read
            if name.endswith(".jinja"):
                whole = read_whole(inside(facts.folder.path, name), MOST_TEMPLATE)
                templates.append(whole.decode("utf-8", "replace"))
                continue
            given = json_object(facts.folder.path, name).get("chat_template")
            several = items_of(dict, given) if isinstance(given, list) else ({"template": given},)
            templates += [text for one in several if isinstance(text := one.get("template"), str)]
    text = "\n".join(templates)[:MOST_TEMPLATE]
    added = list(tokenizer.added.items())[:MOST_ADDED]
    return frozenset(number for number, token in added if token and token in text)


def _rows(found: Sequence[int]) -> str:
    return f"{len(found):,} rows ({numbers(found[:8], len(found))})"


@rule(
    "B043",
    "error",
    "the tables are not all zeros",
    scans=True,
    reads="both tables, up to the first number that is not zero",
)
def zero_tables(facts: Facts) -> Told:
    """A model whose tables are all zero gives every token the same logit: the loss stays at the logarithm of the
    vocabulary's size, and no gradient reaches either table (Automodel#3808: 12.0066 for 163,840 tokens). It comes from
    a save before the weights were loaded, or of parameters that were offloaded. An input table of zeros alone makes all
    tokens alike. A head of zeros alone is how some recipes start training, and is only noted. Reading stops at the
    first number that is not zero.
    What to do: take the checkpoint from its source again, or save it once its weights are loaded.
    Sources: Automodel#3808
    """
    tables = [table for table in facts.roles.pair if table.dtype in FLOATING]
    zero = [table for table in tables if all_zero(table)]
    if not zero:
        return
    fix = "take the checkpoint from its source again, or save it once its weights are loaded"
    if len(zero) == len(facts.roles.pair):
        what = f"{' and '.join(describe(table) for table in zero)}: every number is zero"
        loss = f"the first loss is ln {zero[0].rows:,} = {math.log(zero[0].rows):.4g}, and no gradient moves it"
        yield short(zero[0].name), f"{what}; {loss}", fix
    elif zero[0] is facts.roles.input:
        yield short(zero[0].name), f"{describe(zero[0])}: every number is zero, and all tokens look alike", fix
    else:
        what = f"{describe(zero[0])}: every number is zero, and every token has the same logit"
        yield Said(short(zero[0].name), what, f"nothing if training is to start so; else {fix}", severity="info")


@rule("B042", "info", "the number of rows divides by 64")
def not_divisible(facts: Facts) -> Told:
    """Matrix kernels are fastest where the vocabulary divides by 64, and tensor parallelism and FSDP want it to divide
    by the number of ranks: with an uneven vocabulary FSDP2 left the last rank without updates (accelerate#4171). Many
    good models have odd vocabularies (GPT-2 has 50,257), so this is only noted. Padding rows cost their bytes and take
    part in the softmax until training has pushed them down.
    With --world N it says what N ranks make of the rows: torch's Shard(0) (FSDP2, tensor parallelism) gives each the
    same number rounded up, and the last fewer or none; vLLM pads to a multiple of 64 and stops where N does not divide
    that; Megatron-LM pads to a multiple of 128 N.
    What to do: if the model is to be trained on many ranks, `tiewise resize --multiple-of 64` pads both ends.
    Sources: accelerate#4171; pytorch#176076; NeMo-RL#403; vLLM vocab_parallel_embedding.py, Megatron-LM's
    make_vocab_size_divisible_by (read)
    """
    table, ranks = facts.roles.input, facts.world or 1
    step = math.lcm(64, ranks)
    if table is None or facts.quantised or table.rows % step == 0:
        return
    rows, padded = table.rows, -(-table.rows // 64) * 64
    what = f"{rows:,} rows leave {rows % step} over when divided by {step}"
    if ranks > 1:
        each = -(-rows // ranks)
        used = -(-rows // each)  # ranks that get any
        empty = f", {ranks - used:,} ranks none" if used < ranks else ""
        stops = f"vLLM stops, since {ranks} does not divide the {padded:,} that it pads to"
        what += f". On {ranks} ranks torch gives {each:,} to each, {rows - (used - 1) * each:,} to the last{empty}; "
        what += f"vLLM gives {padded // ranks:,} to each" if padded % ranks == 0 else stops
        what += f"; Megatron-LM pads to {-(-rows // (128 * ranks)) * 128 * ranks:,}"
    fix = f"none needed; {facts.command('resize', f'--multiple-of {step}')}"
    yield short(table.name), what, f"{fix} makes {-(-rows // step) * step:,} at both ends"


@rule("B081", "info", "no large tensor is stored twice", deep=True)
def stored_twice(facts: Facts) -> Told:
    """Layers that share parameters, encoder and decoder tables of one vocabulary, and exports that fold a transpose of
    the table (optimum#2241, over 30 % larger) store the same bytes under several names. It is only waste, and often
    meant. Tensors from 1 MiB on are compared, by samples first and then byte for byte; the two ends are left to B013.
    What to do: nothing, or save through a library that knows of the sharing.
    Sources: optimum#2241; optimum#1333
    """
    ends = {table.name for table in facts.roles.pair}
    for group in duplicates(facts.folder.tensors.values(), facts.same):
        if {tensor.name for tensor in group} <= ends:
            continue  # B013 and B014 say it
        spare = group[0].nbytes * (len(group) - 1)
        what = f"{names([tensor.name for tensor in group])} hold the same bytes: {size(spare)} stored more than once"
        fix = "none needed; layers that share parameters need one copy where their loader knows of it"
        yield short(group[0].name), what, fix


_LEFT_ALONE = "modules_to_not_convert llm_int8_skip_modules ignore ignored_layers exclude_modules exclude skip_modules"
_LEFT_ALONE += " modules_to_exclude exclude_layers"
MOST_LISTED = 100_000
_SCALE = re.compile(r"weight_\w*scale|scales|SCB|absmax")  # in the name of what packed numbers are multiplied by


def lists_of(section: Mapping[str, Any]) -> dict[str, list[str]]:
    """Modules that a quantisation leaves alone, by the key that lists them. Patterns stand as written, never run."""
    lists = {key: entries for key in _LEFT_ALONE.split() if isinstance(entries := section.get(key), list)}
    if isinstance(dynamic := section.get("dynamic"), Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        lists["dynamic"] = [key[2:] for key in dynamic if key.startswith("-:")]
    return {key: list(items_of(str, entries[:MOST_LISTED])) for key, entries in lists.items()}


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
        held = next((part for part in end.parts if part in ("weight", *PACKED)), "")
        needed = {"qweight": "scales", "weight_packed": "weight_scale"}.get(held, held)
        needed = needed or ("qweight" if "qzeros" in end.parts else "weight")
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
            what = f"{describe(weight)} counts times {names(scales)}"
            fix = "serve it by an engine that reads packed heads, or keep the head in 16 bits"
            yield short(weight.name), f"{what}: an engine that packs linear layers alone drops these", fix


@rule("B054", "error", "both ends are packed as the quantisation says")
def packed_otherwise(facts: Facts) -> Told:
    """A loader builds each module as the quantisation says, and then looks for that module's tensors. If a list leaves
    an end plain that is stored packed, vLLM stops at a scale for which it has no parameter (vllm#45132), and others
    read the packed bytes as weights. ModelOpt describes its quantisation in hf_quant_config.json too, whose list may be
    another one. MLX unpacks with the bits that config.json gives the module, or else with those of all modules: a table
    of other bits comes out as noise (mlx-vlm#1773). Its bits follow from the shapes: 32 bits a word, and a column of
    scales for each group. Bytes (U8) with scales hold one number, or two of four bits.
    What to do: describe the end as it is stored, or quantise again.
    Sources: vllm#45132; vllm#44081; mlxcel#291; mlx-vlm#1773; mlx-lm#1451; mlx-lm utils.py (read)
    """
    if facts.roles.headless or not facts.complete:
        return
    for end, other in (
        (facts.roles.input_end, facts.roles.output_end),
        (facts.roles.output_end, facts.roles.input_end),
    ):
        if not end.quantised or end.module is None:
            continue
        for where, entries in _lists(facts).items():
            # of a tied pair, one end of which is listed, B051 speaks
            spoken = facts.claims.tied and not where.startswith(MODELOPT) and not leaves(other, entries)
            entry = next((entry for entry in entries if _is_pattern_of(entry, end.module)), None)
            if entry is not None and not spoken:
                what = (
                    f'"{short(entry)}" leaves {short(end.module)} alone, and it is stored packed ({names(end.parts)})'
                )
                yield where, what, f'take "{short(entry)}" out of the list by hand, or quantise again'
        yield from _wrong_width(facts, end)
        yield from _wrong_bits(facts, end)


MODELOPT = "hf_quant_config.json"


def _lists(facts: Facts) -> dict[str, list[str]]:
    """Return the modules that the folder's quantisations leave alone, by the place of the list."""
    lists = {f"quantization_config.{key}": entries for key, entries in lists_of(quantisation(facts.config)).items()}
    beside = facts.modelopt.get("quantization") if isinstance(facts.modelopt, Mapping) else None
    if isinstance(beside, Mapping):
        lists |= {f"{MODELOPT}.quantization.{key}": entries for key, entries in lists_of(beside).items()}
    return lists


def _is_pattern_of(entry: str, module: str) -> bool:
    """Whether an entry of a list surely names a module: as a name, its end or a part above it, or with stars.

    Of regular expressions, which are never run, those that mean a name behind anything are known.
    """
    plain = entry.removeprefix("re:").removeprefix("^").removesuffix("$").replace(r"\.", ".").replace(".*", "*")
    if re.fullmatch(r"[\w.*]+", plain) is None:
        return False
    if plain.strip("*") and "*" in plain:
        if not all(part in f".{module}" for part in plain.split("*")):  # far cheaper than the match
            return False
        return fnmatchcase(module, plain) or fnmatchcase(module, f"*.{plain}")
    return ends_with(module, plain) or module.startswith(f"{plain}.")


def _wrong_width(facts: Facts, end: End) -> Told:
    weight = end.parts.get("weight", end.parts.get("weight_packed"))
    scaled = any(part.startswith("weight_scale") for part in end.parts)
    if weight is None or weight.dtype != "U8" or len(weight.shape) != 2 or not scaled or not facts.text.hidden_size:
        return
    rows, width = weight.shape
    if not any(facts.explains(replace(weight, shape=(rows, numbers * width))) for numbers in (1, 2)):
        hidden = facts.text.hidden_size
        what = f"{describe(weight)} is {width:,} bytes wide, and a row of {hidden:,} numbers takes {hidden:,}"
        what += f", or {hidden / 2:,g} of four bits"
        yield short(weight.name), what, "take the checkpoint from its source again"


def _wrong_bits(facts: Facts, end: End) -> Told:
    """Compare the bits of a table that MLX packed with those that config.json gives its module."""
    section, weight, scales = facts.config.get("quantization"), end.parts.get("weight"), end.parts.get("scales")
    if not isinstance(section, Mapping) or weight is None or weight.dtype != "U32" or scales is None:
        return
    own, where = section.get(end.module), f"quantization.{short(end.module)}"
    if own is False:
        what = f"{where} is false, so that the module is left plain, and it is stored packed ({names(end.parts)})"
        yield where, what, f"write its bits and group_size there: {CONFIG_FIX}"
        return
    said = own if isinstance(own, Mapping) else section
    bits, group = count(said.get("bits")), count(said.get("group_size"))
    columns, groups = (one.shape[-1] if one.shape else 0 for one in (weight, scales))
    if bits is None or group is None or not columns or not groups or 32 * columns == bits * group * groups:
        return
    width = facts.text.hidden_size or group * groups
    stored, per_group = 32 * columns / width, width / groups
    what = (
        f"{describe(weight)} with scales {list(scales.shape)} is packed at {stored:g} bits in groups of {per_group:g}"
    )
    what += f", and quantization says {bits} bits in groups of {group} for {short(end.module)}"
    entry = f'"{short(end.module)}": {{"group_size": {per_group:g}, "bits": {stored:g}}}'
    yield short(weight.name), what, f"write {entry} into quantization of config.json"


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
        what = f"the quantisation packs {one} and leaves {other} plain, and the model is tied"
        fix = f"leave both alone or pack both; or first {facts.command('untie')}"
        yield "--quantise" if facts.quantise else "config.json", f"{what}: one table would become two", fix


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
        named = [one for some in targets for one in items_of(str, some)[:MOST_LISTED]]
        return kind in named or leaves(end, named)
    both = section.get("include_input_output_embeddings") is True
    return both or (kind == "Linear" and section.get("lm_head") is True)
