"""Tables, config and tokenizer count the same tokens, in sound rows of one type: B030 to B035, B040 to B042, B081."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of, usual
from tiewise.checkpoint.hf_folder import is_id
from tiewise.checkpoint.rule import (
    CONFIG_FIX,
    ERROR,
    FATAL,
    INFO,
    WARNING,
    Said,
    Told,
    describe,
    dotted,
    names,
    numbers,
    rule,
    shown,
    size,
)
from tiewise.checkpoint.stored import BITS, FLOATING, TORCH_TYPES, Stored
from tiewise.checkpoint.table_scans import duplicates, outlying, scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.progress import doing

MULTIPLE = 64  # that kernels and ranks like the number of rows to be of
_MODALITY = re.compile(r"image|audio|video|vision", re.IGNORECASE)


def _plain(table: Stored | None) -> Stored | None:
    """The table where its shape is that of its values; None where it is packed."""
    return table if table is not None and table.dtype in FLOATING and len(table.shape) == 2 else None


@rule("B030", FATAL, "both tables have the shapes that the model needs")
def table_shapes(facts: Facts) -> Told:
    """Input and output table must count the same tokens unless the config names two vocabularies, and be as wide as the
    model unless a projection or a factored table stands between (ALBERT, ELECTRA, OPT-350m, tiewise's own). A resize
    that reached one end only leaves them apart (transformers#35141), and loaders stop or draw the smaller one anew.
    What to do: `tiewise resize --vocab` brings both ends and the bias to one size; a wrong width is a wrong table.
    Sources: transformers#35141; transformers#45236; llama.cpp#12483
    """
    table, head = _plain(facts.roles.input), _plain(facts.roles.output)
    if table is not None and head is not None and table.rows != head.rows:
        # two sizes are meant where the config names both, as for Marian with `decoder_vocab_size`
        meant = SPEC in facts.config or {table.rows, head.rows} <= facts.vocabularies
        if facts.tied is True or not meant:
            what = f"{describe(table)} and {describe(head)} count different tokens"
            yield short(head.name), what, facts.command("resize", f"--vocab {max(table.rows, head.rows)}")
    text = facts.text
    if text is None or text.hidden_size is None:
        return
    for end in (table, head):
        if end is not None and not facts.explains(end):
            what = f"{describe(end)} is {end.shape[1]:,} wide, the model {text.hidden_size:,}"
            what += ", and neither a projection nor a width in the config explains it"
            yield short(end.name), what, f"{CONFIG_FIX}, or take the table from its source"


def _room(facts: Facts) -> int | None:
    """Ids that have a row: those of the input table, and of the extra table of Idefics; None without a table."""
    table = facts.roles.input
    if table is None:
        return None
    extra = [count(level.get("additional_vocab_size")) for level in facts.levels.values()]
    return table.rows + max((number for number in extra if number is not None), default=0)


@rule("B031", FATAL, "every id of the tokenizer has a row")
def ids_without_row(facts: Facts) -> Told:
    """An id beyond the table reads outside it: a crash on the CPU, a device-side assert on a GPU, a wrong row in
    kernels that do not check. It comes from adding tokens to the tokenizer without resizing the model, or from saving
    the tokenizer of another version beside the weights. Where only added tokens lie beyond, text without them still
    works, and this is an error rather than fatal; where they stand for images or sounds that a text model cannot see,
    as in Gemma 3 1B, a warning.
    What to do: `tiewise resize --vocab N` gives both ends the missing rows, drawn like the existing ones.
    Sources: LlamaFactory#10547; unsloth-zoo#923; transformers#32852
    """
    tokenizer, room = facts.tokenizer, _room(facts)
    if tokenizer is None or room is None or tokenizer.max_id < room:
        return
    over = sorted(number for number in tokenizer.added if number >= room)
    base = tokenizer.base_max >= room
    shown = names([f"{number} {tokenizer.added[number]!r}" for number in over])
    how = f"its vocabulary reaches id {tokenizer.base_max:,}" if base else f"{len(over):,} added tokens: {shown}"
    what = f"the tokenizer ({', '.join(tokenizer.files)}) gives ids up to {tokenizer.max_id:,}"
    what += f" and the input table has {room:,} rows; {how}"
    fix = facts.command("resize", f"--vocab {tokenizer.max_id + 1}")
    foreign = all(_MODALITY.search(tokenizer.added[number]) for number in over)
    yield Said(tokenizer.files[0], what, fix, severity=FATAL if base else WARNING if foreign else ERROR)


@rule("B032", INFO, "rows without a token are padding")
def padding(facts: Facts) -> Told:
    """Tables are often longer than the tokenizer, so that the row count divides by 64 or by the number of ranks. That
    is healthy. It bites when a script calls resize_token_embeddings(len(tokenizer)), which then shrinks the table, or
    when new tokens land on padding rows that were never trained (unsloth-zoo#923, LlamaFactory#10547). Those rows have
    drifted by weight decay and by being the wrong answer at every step, so that they are long or short beside the
    others.
    What to do: nothing. tiewise never shrinks padded rows unless told to, and initialises rows that become tokens.
    Sources: unsloth-zoo#923; LlamaFactory#10547
    """
    tokenizer, table = facts.tokenizer, facts.roles.input
    if tokenizer is None or table is None or not 0 <= tokenizer.max_id < table.rows - 1:
        return
    spare = table.rows - tokenizer.max_id - 1
    what = f"{table.rows:,} rows, ids up to {tokenizer.max_id:,}: {spare:,} rows of padding"
    fix = "none; new tokens may use them, and resize_token_embeddings(len(tokenizer)) would cut them off"
    yield short(table.name), what, fix


@rule("B033", ERROR, "vocab_size is the number of rows")
def vocab_size(facts: Facts) -> Told:
    """Loaders size both tables by vocab_size and then find other shapes in the files: transformers stops, or with
    ignore_mismatched_sizes draws the table anew; vLLM and llama.cpp stop. It comes from resizing in one tool and
    writing the config in another, and in nested configs from changing one level only. Sizes of other vocabularies in
    the config (decoder_vocab_size, per-layer tables) are respected, and so are paddings that the config declares.
    What to do: set vocab_size to the number of rows, or resize the tables.
    Sources: transformers#45236; LlamaFactory#6749
    """
    text, table = facts.text, facts.roles.input
    if text is None or text.vocab_size is None or table is None or table.rows == text.vocab_size:
        return
    padded = ("pad_vocab_size_multiple", "pad_vocab_size_multiple_of", "make_vocab_size_divisible_by")
    multiples = (count(level.get(key)) for level in facts.levels.values() for key in padded)
    multiple = next((number for number in multiples if number is not None), 1)
    if table.rows in facts.vocabularies or math.ceil(text.vocab_size / multiple) * multiple == table.rows:
        return
    key = dotted(text.level, "vocab_size")
    what = f"{key} is {text.vocab_size:,}, and {describe(table)} has {table.rows:,} rows"
    yield key, what, f"{CONFIG_FIX}: {key} = {table.rows}"


@rule("B034", WARNING, "special ids lie inside the vocabulary")
def special_ids_outside(facts: Facts) -> Told:
    """bos, eos, pad, unk and decoder_start ids are read from config.json, its text level and generation_config.json.
    One beyond the tables crashes at the first padded batch, or generation never stops because no token can be the end.
    A negative pad id counts rows from the end. They go stale when a vocabulary is trimmed, or a tokenizer replaced. Ids
    that are absent are not reported: many families have none.
    What to do: write the ids that the tokenizer has.
    Sources: LlamaFactory#6749; skeletoken#108
    """
    rows = [table.rows for table in (*facts.roles.inputs, facts.roles.output) if table is not None]
    if not rows:
        return
    room = max(*rows, *facts.vocabularies, _room(facts) or 0)
    levels: list[tuple[str, Mapping[str, Any]]] = [("", facts.config)]
    if facts.text is not None and facts.text.level:
        levels.append((short(facts.text.level), facts.levels.get(facts.text.level, {})))
    if isinstance(facts.generation, Mapping):
        levels.append(("generation_config.json", facts.generation))
    for level, record in levels:
        for name in ("bos", "eos", "pad", "unk", "decoder_start"):
            key = f"{level}.{name}_token_id" if level else f"{name}_token_id"
            value = record.get(f"{name}_token_id")
            ids = [number for number in (value if isinstance(value, list) else [value]) if number is not None]
            bad = [number for number in ids if not is_id(number) or number >= room]
            if bad:
                listed = ", ".join(f"{number:,}" if is_id(number) else shown(number) for number in bad[:4])
                what = f"{key} is {listed}; ids are whole numbers from 0 to {room - 1:,}, the largest vocabulary's last"
                yield key, what, f"{CONFIG_FIX}: {key}"


@rule("B035", WARNING, "the head's bias is as long as the vocabulary, and one")
def head_biases(facts: Facts) -> Told:
    """A bias of the head has one entry for each row, in the shape that its class gives it; transformers 5 refuses any
    other. Resizing a table without it leaves it short (transformers#35141, skeletoken#108). A bias on a tied causal
    head is noted for another reason: loaders that skip every tensor under a tied head's prefix drop the bias too, and
    the model speaks garbage (vllm#46835). BERT and its kin store the bias under two names, which is healthy while the
    two are equal, and encoders are not meant by that note.
    What to do: take the bias from the source; `tiewise resize` changes tables and bias together.
    Sources: vllm#46835; transformers#35141; skeletoken#108
    """
    roles = facts.roles
    refused = facts.misfits
    stored = {bias.name: bias for bias in roles.biases}
    for target, source in roles.ties.items():  # names that the class holds to be one bias
        a, b = stored.get(target), stored.get(source)
        if facts.tied is True and facts.scan and a is not None and b is not None and not facts.same(a, b):
            what = f"{short(target)} is not {short(source)}, and the two are one in this class: loaders differ in which"
            fix = "find out which one was trained, and store that one alone"
            yield Said(short(target), what, fix, severity=ERROR)
    for target, source in facts.fresh:
        if target not in stored and target.endswith("bias"):
            what = f"{short(source)} is stored alone, and an untied model of this class starts {short(target)} anew"
            yield Said(short(target), what, f"store it as {short(target)} too", severity=ERROR)
    classes = facts.config.get("architectures")
    named = classes if isinstance(classes, list) else []
    generates = any(isinstance(name, str) and name.endswith("ForCausalLM") for name in named)
    rows = {end.rows for end in (*roles.inputs, roles.output) if end is not None} | facts.vocabularies
    for bias in _head_biases(facts):
        if rows and bias.shape[-1] not in rows:
            what = f"{describe(bias)} has {bias.shape[-1]:,} entries, the tables {names(sorted(map(str, rows)))} rows"
            what += ": transformers refuses to load it" if bias.name in refused else ""
            fix = "take the bias from the source; `tiewise resize` changes tables and bias together"
            yield Said(short(bias.name), what, fix, severity=ERROR if bias.name in refused else WARNING)
        elif bias.name in refused:
            what = f"{describe(bias)} has the shape {list(refused[bias.name])} in its class: transformers refuses it"
            yield Said(short(bias.name), what, "store it in that shape", severity=ERROR)
        elif facts.tied is True and bias.name.endswith("lm_head.bias") and generates:
            what = f"{describe(bias)} belongs to a tied head: a loader that skips tied heads by prefix drops it"
            yield Said(short(bias.name), what, "none needed; vLLM before its fix of #46835 drops it", severity=INFO)


def _head_biases(facts: Facts) -> list[Stored]:
    """Vectors under a name of the head's bias, whatever their length."""
    named = set(usual().biases)
    if facts.roles.output_name is not None:
        named.add(f"{module_of(facts.roles.output_name)[0]}.bias")
    found = {tensor.name: tensor for tensor in facts.roles.biases}
    found |= {name: facts.folder.tensors[name] for name in facts.misfits}
    for name, tensor in facts.folder.tensors.items():
        vector = len(tensor.shape) in (1, 2) and (len(tensor.shape) == 1 or tensor.shape[0] == 1)
        if vector and any(name == bias or name.endswith(f".{bias}") for bias in named):
            found[name] = tensor
    return list(found.values())


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
    table, head = facts.roles.input, facts.roles.output
    ends = [end for end in (table, head) if end is not None and end.dtype in FLOATING]
    if table is not None and head is not None and len(ends) == 2 and table.dtype != head.dtype:
        what = f"{describe(table)} and {describe(head)} have different types"
        fix = "none if the head is meant to be more precise; else save the model again in one type"
        yield short(head.name), what, fix
    if facts.quantised:
        return
    key = next((key for key in ("dtype", "torch_dtype") if isinstance(facts.config.get(key), str)), "dtype")
    claimed = TORCH_TYPES.get(str(facts.config.get(key)).removeprefix("torch."))
    held: Counter[str] = Counter()
    for tensor in facts.folder.tensors.values():
        if tensor.dtype in FLOATING:
            held[tensor.dtype] += tensor.nbytes
    if claimed is None or not held:
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
    tokenizer = facts.tokenizer
    known = tokenizer is not None and tokenizer.count > 0
    pads = {value for level in facts.levels.values() if type(value := level.get("pad_token_id")) is int}
    again = "initialise these rows again, or take them from the source"
    for table in (facts.roles.input, facts.roles.output):
        if table is None or table.dtype not in FLOATING or len(table.shape) != 2:
            continue
        used = (tokenizer.used if tokenizer is not None and known else frozenset(range(table.rows))) - pads
        where = short(table.name)
        with doing(f"reading {where}", table.nbytes):
            scan = scan_rows(table)
        if scan.not_finite:
            yield where, f"{where}: {_rows(scan.not_finite)} hold NaN or infinity", again
        zero = [row for row in scan.zero if row in used]
        if zero:
            what = f"{where}: {_rows(zero)} of tokens in use are zero"
            yield Said(where, what, again, severity=WARNING if known else INFO)
        in_use = ([row for row in group if row in used] for group in scan.repeated)
        groups = [group for group in in_use if len(group) > 1]
        if groups:
            listed = "; ".join(numbers(group[:4], len(group)) for group in groups[:4])
            what = f"{where}: {sum(map(len, groups)):,} rows of tokens in use are equal to another ({listed})"
            fix = "train these tokens, or initialise them apart"
            yield Said(where, f"{what}: one logit for each group", fix, severity=WARNING)
        far, median = outlying(scan.lengths, used)
        if far:
            longest = max(float(scan.lengths[row]) for row in far)
            what = f"{where}: {_rows(far)} are at least ten times as long as the median {median:.3g}"
            fix = "look at these tokens: were they added and not trained?"
            yield Said(where, f"{what}, up to {longest:.3g}", fix, severity=INFO)


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
    table = facts.roles.input
    if table is None or facts.quantised or table.rows % MULTIPLE == 0:
        return
    wanted = math.ceil(table.rows / MULTIPLE) * MULTIPLE
    what = f"{table.rows:,} rows leave {table.rows % MULTIPLE} over when divided by {MULTIPLE}"
    fix = f"none needed; {facts.command('resize', f'--multiple-of {MULTIPLE}')} makes {wanted:,} at both ends"
    yield short(table.name), what, fix


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
