"""B040 to B042 and B081: types, what the rows hold, and tensors that are stored twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import CONFIG_FIX, ERROR, INFO, WARNING, Finding, Rule, describe, names, numbers, size
from tiewise.checkpoint.stored import BITS, FLOATING, Stored
from tiewise.checkpoint.table_scans import RowScan, duplicates, outlying, scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.progress import progress

MULTIPLE = 64
_TORCH = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _types(facts: Facts) -> Iterator[Finding]:
    table, head = facts.roles.input, facts.roles.output
    if table is not None and head is not None and table.dtype != head.dtype and {table.dtype, head.dtype} <= _FLOATING:
        what = f"{describe(table)} and {describe(head)} have different types"
        fix = "none if the head is meant to be more precise; else save the model again in one type"
        yield Finding("B040", WARNING, short(head.name), what, fix)
    if facts.quantised:
        return
    key, claimed = _claimed_type(facts)
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
        yield Finding("B040", WARNING if rounds else INFO, key, what, f"{CONFIG_FIX}: {key}")


_FLOATING = set(FLOATING)


def _claimed_type(facts: Facts) -> tuple[str, str | None]:
    for key in ("dtype", "torch_dtype"):
        value = facts.config.get(key)
        if isinstance(value, str):
            return key, _TORCH.get(value.removeprefix("torch."))
    return "dtype", None


def _tables(facts: Facts) -> list[Stored]:
    ends = (facts.roles.input, facts.roles.output)
    return [end for end in ends if end is not None and end.dtype in FLOATING and len(end.shape) == 2]


def _values(facts: Facts) -> Iterator[Finding]:
    tokenizer = facts.tokenizer
    known = tokenizer is not None and tokenizer.count > 0
    pads = {value for level in facts.levels.values() if type(value := level.get("pad_token_id")) is int}
    for table in _tables(facts):
        used = (tokenizer.used if tokenizer is not None and known else frozenset(range(table.rows))) - pads
        yield from _bad_rows(table, scan_rows(table, partial(_tick, facts, table)), used, known)


def _tick(facts: Facts, table: Stored, done: int) -> None:
    progress(f"reading {short(table.name)}", done, table.nbytes)


def _bad_rows(table: Stored, scan: RowScan, used: frozenset[int], known: bool) -> Iterator[Finding]:
    where, again = short(table.name), "initialise these rows again, or take them from the source"
    if scan.not_finite:
        what = f"{where}: {_rows(scan.not_finite)} hold NaN or infinity"
        yield Finding("B041", ERROR, where, what, again)
    zero = [row for row in scan.zero if row in used]
    if zero:
        what = f"{where}: {_rows(zero)} of tokens in use are zero"
        yield Finding("B041", WARNING if known else INFO, where, what, again)
    yield from _repeated(where, [[row for row in group if row in used] for group in scan.repeated])
    far, median = outlying(scan.lengths, used)
    if far:
        longest = max(float(scan.lengths[row]) for row in far)
        what = f"{where}: {_rows(far)} are at least ten times as long as the median {median:.3g}, up to {longest:.3g}"
        yield Finding("B041", INFO, where, what, "look at these tokens: were they added and not trained?")


def _rows(found: Sequence[int]) -> str:
    return f"{len(found):,} rows ({numbers(found[:8], len(found))})"


def _repeated(where: str, groups: list[list[int]]) -> Iterator[Finding]:
    groups = [group for group in groups if len(group) > 1]
    if groups:
        shown = "; ".join(numbers(group[:4], len(group)) for group in groups[:4])
        what = (
            f"{sum(map(len, groups)):,} rows of tokens in use are equal to another ({shown}): one logit for each group"
        )
        fix = "train these tokens, or initialise them apart"
        yield Finding("B041", WARNING, where, f"{where}: {what}", fix)


def _divisible(facts: Facts) -> Iterator[Finding]:
    table = facts.roles.input
    if table is None or facts.quantised or table.rows % MULTIPLE == 0:
        return
    wanted = math.ceil(table.rows / MULTIPLE) * MULTIPLE
    what = f"{table.rows:,} rows leave {table.rows % MULTIPLE} over when divided by {MULTIPLE}"
    fix = f"none needed; {facts.command('resize', f'--multiple-of {MULTIPLE}')} makes {wanted:,} at both ends"
    yield Finding("B042", INFO, short(table.name), what, fix)


def _duplicates(facts: Facts) -> Iterator[Finding]:
    ends = {end.name for end in (facts.roles.input, facts.roles.output) if end is not None}
    for group in duplicates(facts.folder.tensors.values(), facts.same):
        if {tensor.name for tensor in group} <= ends:
            continue  # B013 and B014 say it
        spare = group[0].nbytes * (len(group) - 1)
        what = f"{names([tensor.name for tensor in group])} hold the same bytes: {size(spare)} stored more than once"
        fix = "none needed; layers that share parameters need one copy where their loader knows of it"
        yield Finding("B081", INFO, short(group[0].name), what, fix)


RULES = (
    Rule(
        "B040",
        WARNING,
        "types agree: both tables with each other, and the config with the bytes",
        """A head in another type than its table cannot be compared or shared by bytes, and a loader casts one of
them. The config's dtype is what transformers 5 and vLLM load by default: where the files are more precise than it
says, the weights are rounded without a word; where they are less precise, loading only takes more memory, which is
merely noted. The type of most bytes counts, so that norms in fp32 beside bf16 weights are no finding. Quantised
models are left to B050.
What to do: correct the config's dtype, or save the model in one type.""",
        ("transformers: dtype='auto'",),
        _types,
    ),
    Rule(
        "B041",
        ERROR,
        "rows of tokens in use are finite, not zero, and not equal to one another",
        """NaN or an infinity in one row of a head makes every loss NaN: an error. A row of zeros gives its token the
same logit everywhere, and two equal rows cannot be told apart: a warning, since only these tokens suffer (of zeros only
noted where no tokenizer tells which tokens there are). Such rows are tokens that were added and never trained, or that
mean_resizing gave one mean vector (trl#5608, LlamaFactory#6749: new tokens are never emitted). Padding ids and
placeholders such as [unused12] or <|reserved_special_token_3|> are left out. Rows ten times as long as the median are
noted.
What to do: initialise the rows again and train them.""",
        ("trl#5608", "LlamaFactory#6749", "transformers#35141"),
        _values,
        deep=True,
    ),
    Rule(
        "B042",
        INFO,
        "the number of rows divides by 64",
        """Matrix kernels are fastest where the vocabulary divides by 64, and tensor parallelism and FSDP want it to
divide by the number of ranks: with an uneven vocabulary FSDP2 left the last rank without updates (accelerate#4171).
Many good models have odd vocabularies (GPT-2 has 50,257), so this is only noted. Padding rows cost their bytes and
take part in the softmax until training has pushed them down.
What to do: if the model is to be trained on many ranks, `tiewise resize --multiple-of 64` pads both ends.""",
        ("accelerate#4171", "pytorch#176076"),
        _divisible,
    ),
    Rule(
        "B081",
        INFO,
        "no large tensor is stored twice",
        """Layers that share parameters, encoder and decoder tables of one vocabulary, and exports that fold a
transpose of the table (optimum#2241, over 30 % larger) store the same bytes under several names. It is only waste,
and often meant. Tensors from 1 MiB on are compared, by samples first and then byte for byte; the two ends are left to
B013.
What to do: nothing, or save through a library that knows of the sharing.""",
        ("optimum#2241", "optimum#1333"),
        _duplicates,
        deep=True,
    ),
)
