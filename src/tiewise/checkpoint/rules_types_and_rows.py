"""Tables are of one type, in sound rows, and stored once: B040 to B042, B081."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import CONFIG_FIX, Said, Told, describe, names, numbers, rule
from tiewise.checkpoint.stored import BITS, FLOATING, TORCH_TYPES
from tiewise.checkpoint.table_scans import duplicates, outlying, scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import size
from tiewise.core.long_work import doing


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
    placeholders such as [unused12] or <|reserved_special_token_3|> are left out. Rows ten times as long as the median
    are noted.
    What to do: initialise the rows again and train them.
    Sources: trl#5608; LlamaFactory#6749; transformers#35141
    """
    tokenizer = facts.tokenizer if facts.tokenizer is not None and facts.tokenizer.count else None
    pads = {value for level in facts.levels.values() if type(value := level.get("pad_token_id")) is int}
    again = "initialise these rows again, or take them from the source"
    for table in facts.roles.pair:
        if table.dtype not in FLOATING or len(table.shape) != 2:
            continue
        used = (tokenizer.used if tokenizer is not None else frozenset(range(table.rows))) - pads
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
        if far:
            what = f"{where}: {_rows(far)} are at least ten times as long as the median {median:.3g}"
            fix = "look at these tokens: were they added and not trained?"
            yield Said(where, f"{what}, up to {scan.lengths[far].max():.3g}", fix, severity="info")


def _rows(found: Sequence[int]) -> str:
    return f"{len(found):,} rows ({numbers(found[:8], len(found))})"


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
    rows, padded = table.rows, math.ceil(table.rows / 64) * 64
    what = f"{rows:,} rows leave {rows % step} over when divided by {step}"
    if ranks > 1:
        each = math.ceil(rows / ranks)
        last = [min(each, max(0, rows - rank * each)) for rank in range(ranks)]
        empty = f", {last.count(0):,} ranks none" if 0 in last else ""
        stops = f"vLLM stops, since {ranks} does not divide the {padded:,} that it pads to"
        what += f". On {ranks} ranks torch gives {each:,} to each, {min(filter(None, last)):,} to the last{empty}; "
        what += f"vLLM gives {padded // ranks:,} to each" if padded % ranks == 0 else stops
        what += f"; Megatron-LM pads to {math.ceil(rows / (128 * ranks)) * 128 * ranks:,}"
    fix = f"none needed; {facts.command('resize', f'--multiple-of {step}')}"
    yield short(table.name), what, f"{fix} makes {math.ceil(rows / step) * step:,} at both ends"


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


# keys under which the config of a quantisation lists the modules that it leaves alone
