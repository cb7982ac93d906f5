"""B030 to B035: tables, config and tokenizer count the same tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of, usual
from tiewise.checkpoint.hf_folder import is_id, special_ids
from tiewise.checkpoint.rule import (
    CONFIG_FIX,
    ERROR,
    FATAL,
    INFO,
    WARNING,
    Finding,
    Rule,
    describe,
    dotted,
    names,
    shown,
)
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short

_MODALITY = re.compile(r"image|audio|video|vision", re.IGNORECASE)


def _plain(table: Stored | None) -> Stored | None:
    """The table where its shape is that of its values; None where it is packed."""
    return table if table is not None and table.dtype in FLOATING and len(table.shape) == 2 else None


def _shapes(facts: Facts) -> Iterator[Finding]:
    table, head = _plain(facts.roles.input), _plain(facts.roles.output)
    if table is not None and head is not None and table.rows != head.rows and _rows_must_agree(facts, table, head):
        least = max(table.rows, head.rows)
        what = f"{describe(table)} and {describe(head)} count different tokens"
        yield Finding("B030", FATAL, short(head.name), what, facts.command("resize", f"--vocab {least}"))
    text = facts.text
    if text is None or text.hidden_size is None:
        return
    for end in (table, head):
        if end is not None and not facts.explains(end):
            what = f"{describe(end)} is {end.shape[1]:,} wide, the model {text.hidden_size:,}"
            what += ", and neither a projection nor a width in the config explains it"
            yield Finding("B030", FATAL, short(end.name), what, f"{CONFIG_FIX}, or take the table from its source")


def _rows_must_agree(facts: Facts, table: Stored, head: Stored) -> bool:
    """Two sizes are meant where the config names both, as for Marian with `decoder_vocab_size`."""
    if facts.tied is True:
        return True
    return SPEC not in facts.config and not {table.rows, head.rows} <= facts.vocabularies


def _room(facts: Facts) -> int | None:
    """Ids that have a row: those of the input table, and of the extra table of Idefics; None without a table."""
    table = facts.roles.input
    if table is None:
        return None
    extra = [count(level.get("additional_vocab_size")) for level in facts.levels.values()]
    return table.rows + max((number for number in extra if number is not None), default=0)


def _tokenizer_fits(facts: Facts) -> Iterator[Finding]:
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
    yield Finding("B031", FATAL if base else WARNING if foreign else ERROR, tokenizer.files[0], what, fix)


def _padding(facts: Facts) -> Iterator[Finding]:
    tokenizer, table = facts.tokenizer, facts.roles.input
    if tokenizer is None or table is None or not 0 <= tokenizer.max_id < table.rows - 1:
        return
    spare = table.rows - tokenizer.max_id - 1
    what = f"{table.rows:,} rows, ids up to {tokenizer.max_id:,}: {spare:,} rows of padding"
    fix = "none; new tokens may use them, and resize_token_embeddings(len(tokenizer)) would cut them off"
    yield Finding("B032", INFO, short(table.name), what, fix)


def _vocab_size(facts: Facts) -> Iterator[Finding]:
    text, table = facts.text, facts.roles.input
    if text is None or text.vocab_size is None or table is None or table.rows == text.vocab_size:
        return
    if table.rows in facts.vocabularies or _padded(facts, text.vocab_size) == table.rows:
        return
    key = dotted(text.level, "vocab_size")
    what = f"{key} is {text.vocab_size:,}, and {describe(table)} has {table.rows:,} rows"
    yield Finding("B033", ERROR, key, what, f"{CONFIG_FIX}: {key} = {table.rows}")


def _padded(facts: Facts, size: int) -> int | None:
    for level in facts.levels.values():
        for key in ("pad_vocab_size_multiple", "pad_vocab_size_multiple_of", "make_vocab_size_divisible_by"):
            multiple = count(level.get(key))
            if multiple is not None:
                return math.ceil(size / multiple) * multiple
    return None


def _special(facts: Facts) -> Iterator[Finding]:
    rows = [table.rows for table in (*facts.roles.inputs, facts.roles.output) if table is not None]
    if not rows:
        return
    room = max(*rows, *facts.vocabularies, _room(facts) or 0)
    levels: list[tuple[str, Mapping[str, Any]]] = [("", facts.config)]
    if facts.text is not None and facts.text.level:
        levels.append((short(facts.text.level), facts.levels.get(facts.text.level, {})))
    if isinstance(facts.generation, Mapping):
        levels.append(("generation_config.json", facts.generation))
    bad: dict[str, list[Any]] = {}
    for key, value in special_ids(levels):
        bad.setdefault(key, []).extend([value] if not is_id(value) or value >= room else [])
    for key, values in bad.items():
        if values:
            shown_values = ", ".join(f"{value:,}" if is_id(value) else shown(value) for value in values[:4])
            what = (
                f"{key} is {shown_values}; ids are whole numbers from 0 to {room - 1:,}, the largest vocabulary's last"
            )
            yield Finding("B034", WARNING, key, what, f"{CONFIG_FIX}: {key}")


def _biases(facts: Facts) -> Iterator[Finding]:
    roles = facts.roles
    refused = facts.misfits
    yield from _two_biases(facts)
    rows = {end.rows for end in (*roles.inputs, roles.output) if end is not None} | facts.vocabularies
    for bias in _head_biases(facts):
        if rows and bias.shape[-1] not in rows:
            what = f"{describe(bias)} has {bias.shape[-1]:,} entries, the tables {names(sorted(map(str, rows)))} rows"
            what += ": transformers refuses to load it" if bias.name in refused else ""
            fix = "take the bias from the source; `tiewise resize` changes tables and bias together"
            yield Finding("B035", ERROR if bias.name in refused else WARNING, short(bias.name), what, fix)
        elif bias.name in refused:
            what = f"{describe(bias)} has the shape {list(refused[bias.name])} in its class: transformers refuses it"
            yield Finding("B035", ERROR, short(bias.name), what, "store it in that shape")
        elif facts.tied is True and bias.name.endswith("lm_head.bias") and _generates(facts):
            what = f"{describe(bias)} belongs to a tied head: a loader that skips tied heads by prefix drops it"
            yield Finding("B035", INFO, short(bias.name), what, "none needed; vLLM before its fix of #46835 drops it")


def _two_biases(facts: Facts) -> Iterator[Finding]:
    """Names that a class holds to be one bias: stored apart, or one of them missing where they are two."""
    stored = {bias.name: bias for bias in facts.roles.biases}
    for target, source in facts.roles.ties.items():
        a, b = stored.get(target), stored.get(source)
        if facts.tied is True and facts.scan and a is not None and b is not None and not facts.same(a, b):
            what = f"{short(target)} is not {short(source)}, and the two are one in this class: loaders differ in which"
            fix = "find out which one was trained, and store that one alone"
            yield Finding("B035", ERROR, short(target), what, fix)
    for target, source in facts.fresh:
        if target in stored or not target.endswith("bias"):
            continue
        what = f"{short(source)} is stored alone, and an untied model of this class starts {short(target)} anew"
        yield Finding("B035", ERROR, short(target), what, f"store it as {short(target)} too")


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


def _generates(facts: Facts) -> bool:
    classes = facts.config.get("architectures")
    return isinstance(classes, list) and any(isinstance(c, str) and c.endswith("ForCausalLM") for c in classes)


RULES = (
    Rule(
        "B030",
        FATAL,
        "both tables have the shapes that the model needs",
        """Input and output table must count the same tokens unless the config names two vocabularies, and be as wide
as the model unless a projection or a factored table stands between (ALBERT, ELECTRA, OPT-350m, tiewise's own). A
resize that reached one end only leaves them apart (transformers#35141), and loaders stop or draw the smaller one
anew.
What to do: `tiewise resize --vocab` brings both ends and the bias to one size; a wrong width is a wrong table.""",
        ("transformers#35141", "transformers#45236", "llama.cpp#12483"),
        _shapes,
    ),
    Rule(
        "B031",
        FATAL,
        "every id of the tokenizer has a row",
        """An id beyond the table reads outside it: a crash on the CPU, a device-side assert on a GPU, a wrong row in
kernels that do not check. It comes from adding tokens to the tokenizer without resizing the model, or from saving the
tokenizer of another version beside the weights. Where only added tokens lie beyond, text without them still works,
and this is an error rather than fatal; where they stand for images or sounds that a text model cannot see, as in
Gemma 3 1B, a warning.
What to do: `tiewise resize --vocab N` gives both ends the missing rows, drawn like the existing ones.""",
        ("LlamaFactory#10547", "unsloth-zoo#923", "transformers#32852"),
        _tokenizer_fits,
    ),
    Rule(
        "B032",
        INFO,
        "rows without a token are padding",
        """Tables are often longer than the tokenizer, so that the row count divides by 64 or by the number of ranks.
That is healthy. It bites when a script calls resize_token_embeddings(len(tokenizer)), which then shrinks the table,
or when new tokens land on padding rows that were never trained (unsloth-zoo#923, LlamaFactory#10547). Those rows have
drifted by weight decay and by being the wrong answer at every step, so that they are long or short beside the others.
What to do: nothing. tiewise never shrinks padded rows unless told to, and initialises rows that become tokens.""",
        ("unsloth-zoo#923", "LlamaFactory#10547"),
        _padding,
    ),
    Rule(
        "B033",
        ERROR,
        "vocab_size is the number of rows",
        """Loaders size both tables by vocab_size and then find other shapes in the files: transformers stops, or with
ignore_mismatched_sizes draws the table anew; vLLM and llama.cpp stop. It comes from resizing in one tool and writing
the config in another, and in nested configs from changing one level only. Sizes of other vocabularies in the config
(decoder_vocab_size, per-layer tables) are respected, and so are paddings that the config declares.
What to do: set vocab_size to the number of rows, or resize the tables.""",
        ("transformers#45236", "LlamaFactory#6749"),
        _vocab_size,
    ),
    Rule(
        "B034",
        WARNING,
        "special ids lie inside the vocabulary",
        """bos, eos, pad, unk and decoder_start ids are read from config.json, its text level and
generation_config.json. One beyond the tables crashes at the first padded batch, or generation never stops because no
token can be the end. A negative pad id counts rows from the end. They go stale when a vocabulary is trimmed, or a
tokenizer replaced. Ids that are absent are not reported: many families have none.
What to do: write the ids that the tokenizer has.""",
        ("LlamaFactory#6749", "skeletoken#108"),
        _special,
    ),
    Rule(
        "B035",
        WARNING,
        "the head's bias is as long as the vocabulary, and one",
        """A bias of the head has one entry for each row, in the shape that its class gives it; transformers 5 refuses
any other. Resizing a table without it leaves it short (transformers#35141, skeletoken#108). A bias on a tied causal
head is noted for another reason: loaders that skip every tensor under a tied head's prefix drop the bias too, and the
model speaks garbage (vllm#46835). BERT and its kin store the bias under two names, which is healthy while the two are
equal, and encoders are not meant by that note.
What to do: take the bias from the source; `tiewise resize` changes tables and bias together.""",
        ("vllm#46835", "transformers#35141", "skeletoken#108"),
        _biases,
    ),
)
