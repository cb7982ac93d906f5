"""Rules on types, values and repeated storage of tables: B040 to B043, B081."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, json_object, recording_faults
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    Observation,
    Observations,
    Severity,
    counted,
    describe,
    names,
    numbers,
    rule,
)
from tiewise.checkpoint.stored import BITS, FLOATING, TORCH_TYPES, Stored
from tiewise.checkpoint.table_scans import RowScan, all_zero, duplicates, outlying, scan_rows
from tiewise.checkpoint.tokenizer_ids import Tokenizer
from tiewise.checkpoint.untrusted import items_of, short
from tiewise.core.files import format_bytes
from tiewise.core.progress import progress_of

FP32_ROUNDING = 2.0**-23  # next to rows of the median length, the logits of shorter rows vanish in fp32
MOST_TEMPLATE, MOST_ADDED = 2**20, 10_000  # limits: letters of chat templates, added tokens to search in them


@rule("B040", "warning", "types agree: both tables with each other, and the config with the bytes")
def types_disagree(facts: Facts) -> Observations:
    """Two tables of different types cannot be compared or shared by bytes. A loader casts one of them. transformers 5
    and vLLM load in the config's dtype by default. If the files are more precise, they silently round the weights. If
    the files are less precise, loading only takes more memory, which is merely noted. The type of most bytes counts, so
    norms in fp32 next to bf16 weights are no finding. B050 checks quantised models.
    What to do: correct the config's dtype, or save the model in one type.
    Sources: transformers: dtype='auto'
    """
    tables = _plain_tables(facts)
    if len(tables) == 2:
        yield from _unequal_types(*tables)
    if not facts.quantised:
        yield from _other_type_than_config(facts)


def _plain_tables(facts: Facts) -> list[Stored]:
    """Return the tables of the two ends that are stored as floating-point numbers."""
    return [table for table in facts.roles.one_table_per_end if table.dtype in FLOATING]


def _unequal_types(table: Stored, head: Stored) -> Observations:
    """Report two tables of different types."""
    if table.dtype != head.dtype:
        problem = f"the two tables have different types, {table.dtype} and {head.dtype}"
        problem += f". {describe(table)} and {describe(head)}"
        remedy = ("save the model again in one type", "none needed if the head is more precise on purpose")
        yield short(head.name), problem, remedy


def _other_type_than_config(facts: Facts) -> Observations:
    """Report that most bytes are of another type than the config says."""
    key = _dtype_key(facts.config)
    claimed = TORCH_TYPES.get(str(facts.config.get(key)).removeprefix("torch."))
    bytes_of_type = _bytes_of_types(facts.folder)
    if claimed is None or not bytes_of_type:
        return
    stored, nbytes = bytes_of_type.most_common(1)[0]
    if stored == claimed:
        return
    problem = f"{key} is {claimed}, and {nbytes / bytes_of_type.total():.0%} of the bytes are {stored}"
    remedy = f"{CONFIG_FIX}: {key}"
    if BITS[stored] > BITS[claimed]:
        yield Observation(
            key, f"{problem}; loaders that follow the config round the weights", remedy, severity="warning"
        )
    else:
        yield Observation(key, f"{problem}; loaders only widen the weights", remedy, severity="info")


def _dtype_key(config: Mapping[str, Any]) -> str:
    """Return the key under which a config names its type."""
    for key in ("dtype", "torch_dtype"):
        if isinstance(config.get(key), str):
            return key
    return "dtype"


def _bytes_of_types(folder: Folder) -> Counter[str]:
    """Return {floating-point type: bytes of all its tensors}."""
    nbytes: Counter[str] = Counter()
    for tensor in folder.tensors.values():
        if tensor.dtype in FLOATING:
            nbytes[tensor.dtype] += tensor.nbytes
    return nbytes


@rule("B041", "error", "rows of tokens in use are finite, not zero, and not equal to one another", deep=True)
def rows_in_use(facts: Facts) -> Observations:
    """NaN or an infinity in one row of a head makes every loss NaN: an error. A row of zeros gives its token the same
    logit everywhere, and two equal rows cannot be distinguished: a warning, since only these tokens are affected.
    Without a tokenizer that lists the tokens, zeros are only noted. Such rows belong to tokens that were added and
    never trained, or that mean_resizing gave one mean vector (trl#5608, LlamaFactory#6749: new tokens are never
    emitted). The rule skips padding ids and placeholders such as [unused12] or <|reserved_special_token_3|>, except
    those that the chat template names. Base models leave the tokens of their chat template untrained, at about 1e-23
    (unsloth#658): such rows are a warning if the template names them, else a note. Rows ten times as long as the median
    are noted.
    What to do: initialise the rows again and train them.
    Sources: trl#5608; LlamaFactory#6749; transformers#35141; unsloth#658; unsloth#1056
    """
    tokens = _tokens_in_use(facts)
    for table in _plain_tables(facts):
        if len(table.shape) != 2:
            continue
        with progress_of(f"reading {short(table.name)}", table.nbytes):
            scan = scan_rows(table)
        used = tokens.rows(table)
        yield from _bad_rows(table, scan, used, knows_tokens=tokens.used is not None)
        yield from _rows_of_other_length(table, scan, used, tokens.named)


class _TokensInUse(NamedTuple):
    """Ids that text can produce, and padding ids, which need no trained row."""

    used: frozenset[int] | None  # ids that text can produce; None without a tokenizer
    named: frozenset[int]  # ids of tokens in the chat template
    pads: frozenset[int]  # padding ids of the config

    def rows(self, table: Stored) -> frozenset[int]:
        """Return the rows of a table that tokens in use have."""
        if self.used is None:
            return frozenset(range(table.rows)) - self.pads
        return self.used - self.pads


def _tokens_in_use(facts: Facts) -> _TokensInUse:
    """Return the tokens in use, by tokenizer, chat template and config."""
    tokenizer, pads = facts.tokenizer, _padding_ids(facts)
    if tokenizer is None or tokenizer.max_id < 0:  # a tokenizer without tokens
        return _TokensInUse(None, frozenset(), pads)
    named = _named_by_template(facts.folder, tokenizer)
    return _TokensInUse(tokenizer.used | named, named, pads)


def _padding_ids(facts: Facts) -> frozenset[int]:
    """Return the padding ids that the config names at any level."""
    ids = [level.get("pad_token_id") for level in facts.levels.values()]
    return frozenset(items_of(int, ids))


def _bad_rows(table: Stored, scan: RowScan, used: Set[int], *, knows_tokens: bool) -> Observations:
    """Report rows that are not finite, and rows in use that are zero or equal."""
    where, again = short(table.name), "initialise these rows again, or take them from the source"
    if scan.not_finite:
        yield where, f"{where} has NaN or infinity in {_rows(scan.not_finite)}", again
    zero = [row for row in scan.zero if row in used]
    if zero:
        problem = f"{where} is zero for tokens in use, in {_rows(zero)}"
        severity: Severity = "info"
        if knows_tokens:
            severity = "warning"
        yield Observation(where, problem, again, severity=severity)
    yield from _equal_rows(where, scan, used)


def _equal_rows(where: str, scan: RowScan, used: Set[int]) -> Observations:
    """Report groups of rows of tokens in use that are equal to one another."""
    groups, repeated_rows = list[str](), 0
    for group in scan.repeated:
        in_use = [row for row in group if row in used]
        if len(in_use) > 1:
            groups.append(numbers(in_use[:4], len(in_use)))
            repeated_rows += len(in_use)
    if groups:
        listed = "; ".join(groups[:4])
        problem = f"{where} has {repeated_rows:,} equal rows of tokens in use ({listed}), so their logits are equal"
        yield Observation(where, problem, "train these tokens, or give them different rows", severity="warning")


def _rows_of_other_length(table: Stored, scan: RowScan, used: Set[int], named: frozenset[int]) -> Observations:
    """Report rows in use that are near zero or far longer than the median.

    Args:
        named: ids of tokens in the chat template.
    """
    where, lengths = short(table.name), scan.lengths
    far, median = outlying(lengths, used)
    least = median * FP32_ROUNDING
    near = [row for row in used if row < table.rows and 0 < lengths[row] < least]
    untrained = f"are near zero (median length {median:.3g}), so they were never trained"
    train = "train these tokens before they are used, or initialise them again"
    in_chat = sorted(named.intersection(near))
    if in_chat:
        problem = f"{where}: {_rows(in_chat)} of tokens in the chat template {untrained}"
        yield Observation(where, problem, train, severity="warning")
    others = sorted(set(near) - named)
    if others:
        yield Observation(where, f"{where}: {_rows(others)} of tokens in use {untrained}", train, severity="info")
    if far:
        problem = f"{where}: {_rows(far)} are at least ten times as long as the median row"
        problem += f" ({lengths[far].max():.3g} and {median:.3g})"
        remedy = "none needed; tokens that were added and not trained look like this"
        yield Observation(where, problem, remedy, severity="info")


def _named_by_template(folder: Folder, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of added tokens whose texts are in the folder's chat template."""
    template = "\n".join(_chat_templates(folder))[:MOST_TEMPLATE]
    added = list(tokenizer.added.items())[:MOST_ADDED]
    return frozenset(number for number, token in added if token and token in template)


def _chat_templates(folder: Folder) -> Iterator[str]:
    """Yield every chat template of the folder; B001 reports files that cannot be read."""
    if folder.has("chat_template.jinja"):
        with recording_faults([], "chat_template.jinja"):
            yield folder.source.read_bytes("chat_template.jinja", MOST_TEMPLATE).decode("utf-8", "replace")
    for name in filter(folder.has, ("chat_template.json", "tokenizer_config.json")):
        with recording_faults([], name):
            template = json_object(folder.source, name).get("chat_template")
            yield from _texts_of_template(template)


def _texts_of_template(template: Any) -> tuple[str, ...]:
    """Return the texts of a value `chat_template`: one, or a list with one for each purpose."""
    if not isinstance(template, list):
        return items_of(str, [template])
    return items_of(str, [record.get("template") for record in items_of(dict, template)])


def _rows(numbers_of_rows: Sequence[int]) -> str:
    """Return the number of rows and the first of them, as text."""
    count = len(numbers_of_rows)
    return f"{counted(count, 'row')} ({numbers(numbers_of_rows[:8], count)})"


@rule(
    "B043",
    "error",
    "the tables are not all zeros",
    scans=True,
    reads="both tables, up to the first number that is not zero",
)
def zero_tables(facts: Facts) -> Observations:
    """A model whose tables are all zero gives every token the same logit. The loss stays at the logarithm of the
    vocabulary's size, and no gradient reaches either table (Automodel#3808: 12.0066 for 163,840 tokens). It comes from
    a save before the weights were loaded, or of parameters that were offloaded. An input table of zeros alone makes all
    tokens alike. Some recipes start training with a head of zeros, so zeros in the head alone are only noted. Reading
    stops at the first number that is not zero.
    What to do: take the checkpoint from its source again, or save it once its weights are loaded.
    Sources: Automodel#3808
    """
    tables = facts.roles.one_table_per_end
    zero = [table for table in _plain_tables(facts) if all_zero(table)]
    if not zero:
        return
    first = zero[0]
    where, remedy = (
        short(first.name),
        "take the checkpoint from its source again, or save it again after its weights are loaded",
    )
    if len(zero) == len(tables):
        listed = " and ".join(map(describe, zero))
        problem = f"every number of the table is zero, so training starts at ln {first.rows:,}"
        problem += f" = {math.log(first.rows):.4g} nats and never moves. {listed}"
        yield where, problem, remedy
    elif first is facts.roles.input:
        yield where, f"every number of the input table is zero, so all tokens look alike. {describe(first)}", remedy
    else:
        problem = f"every number of the head is zero, so every token has the same logit. {describe(first)}"
        fixes = ("none needed if training starts from here", f"else: {remedy}")
        yield Observation(where, problem, fixes, severity="info")


@rule("B042", "info", "the number of rows divides by 64")
def not_divisible(facts: Facts) -> Observations:
    """Matrix kernels are fastest if the number of rows divides by 64. Tensor parallelism and FSDP need a number that
    divides by the number of ranks: with an uneven vocabulary, FSDP2 left the last rank without updates
    (accelerate#4171). Many good models have odd vocabularies (GPT-2 has 50,257), so this is only noted. Padding rows
    cost their bytes and take part in the softmax until training has pushed them down.
    With --world N, the finding says how N ranks split the rows. torch's Shard(0) (FSDP2, tensor parallelism) gives each
    the same number rounded up, and the last fewer or none. vLLM pads to a multiple of 64 and stops if N does not divide
    that. Megatron-LM pads to a multiple of 128 N.
    What to do: if the model is to be trained on many ranks, `tiewise vocab resize --multiple-of 64` pads both ends.
    Sources: accelerate#4171; pytorch#176076; NeMo-RL#403; vLLM vocab_parallel_embedding.py, Megatron-LM's
    make_vocab_size_divisible_by (read)
    """
    table, ranks = facts.roles.input, facts.world or 1
    if table is None or facts.quantised:
        return
    step = math.lcm(64, ranks)
    left_over = table.rows % step
    if left_over == 0:
        return
    problem = f"the number of rows, {table.rows:,}, does not divide by {step}"
    if ranks > 1:
        problem += f". {_division_over_ranks(table.rows, ranks)}"
    resize = facts.command("vocab resize", f"--multiple-of {step}")
    yield short(table.name), problem, f"if you want {_rounded_up(table.rows, step):,} rows: {resize}"


def _rounded_up(rows: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `rows`."""
    return -(-rows // step) * step


def _division_over_ranks(rows: int, ranks: int) -> str:
    """Return how torch, vLLM and Megatron-LM spread rows over ranks."""
    each = -(-rows // ranks)
    with_rows = -(-rows // each)  # ranks that get at least one row
    torch = f"On {ranks} ranks torch gives {each:,} to each, {rows - (with_rows - 1) * each:,} to the last"
    if with_rows < ranks:
        torch += f", {ranks - with_rows:,} ranks none"
    padded = _rounded_up(rows, 64)
    vllm = f"vLLM gives {padded // ranks:,} to each"
    if padded % ranks:
        vllm = f"vLLM stops, since {ranks} does not divide the {padded:,} that it pads to"
    return f"{torch}; {vllm}; Megatron-LM pads to {_rounded_up(rows, 128 * ranks):,}"


@rule("B081", "info", "no large tensor is stored twice", deep=True)
def stored_twice(facts: Facts) -> Observations:
    """A checkpoint may store the same bytes under several names. Examples are layers that share parameters, encoder and
    decoder tables of one vocabulary, and exports that fold a transpose of the table (optimum#2241, over 30 % larger).
    It only wastes space, and is often intended. The rule compares tensors from 1 MiB on, first samples and then every
    byte; B013 compares the two ends.
    What to do: nothing, or save through a library that supports the sharing.
    Sources: optimum#2241; optimum#1333
    """
    ends = {table.name for table in facts.roles.one_table_per_end}
    for group in duplicates(facts.folder.tensors.values(), facts.are_equal):
        alike = [tensor.name for tensor in group]
        if ends.issuperset(alike):
            continue  # B013 and B014 report it
        first = group[0]
        spare = first.nbytes * (len(group) - 1)
        problem = f"equal tensors are stored more than once, which costs {format_bytes(spare)} ({names(alike)})"
        remedy = "none needed; a loader that knows the sharing of layers needs one copy"
        yield short(first.name), problem, remedy
