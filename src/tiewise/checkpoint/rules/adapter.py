"""What an adapter does to its base, at the two ends above all: B060 to B064."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import NamedTuple

from tiewise.checkpoint.adapter import COPY, DELTA, LORA, PREFIX, AdapterFacts, EndUpdate
from tiewise.checkpoint.claims import ends_with, family_type
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG
from tiewise.checkpoint.rules.rule import Said, Told, describe, dotted, names, rule
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import doing
from tiewise.core.files import size


@rule("B060", "error", "an adapter leaves a tied pair tied", kind="adapter")
def adapter_on_tied(facts: AdapterFacts) -> Told:
    """The two ends of a tied model are one Parameter, and PEFT adapts modules. A low-rank update of one end acts at
    that end in training; a merge writes it into the shared table, and so changes the other end too. Updates of both
    ends are added to it twice, with ensure_weight_tying as without (measured with PEFT 0.21). Full copies
    (modules_to_save) of both ends drift apart unless ensure_weight_tying is set, and a copy of one end alone unties the
    pair: the merged model has two tables. PEFT then sets tie_word_embeddings to false at the root of the config; a flag
    in text_config stays true, and a loader that believes it drops the trained head. Unmerged, the adapter works as it
    was trained.
    What to do: tiewise merge, which makes two tables where the ends come out different, or no merge at all.
    Sources: peft#2777; peft#2018; peft#2864; peft#2944; transformers#45127; unsloth#9331
    """
    where, base = short(facts.path.name), facts.base
    ends = [end for end in (facts.input, facts.output) if end is not None]
    if base is None or facts.tied is None:
        if ends:
            why = "no base was given" if base is None else "whether the base ties its ends is not known"
            what = f"it changes {_modules(ends)}; {why}, so what a merge makes of that is not known"
            yield Said(where, what, f"tiewise check {shlex.quote(str(facts.path))} --base BASE", severity="info")
        return
    if not facts.tied:
        return
    merge = f"{facts.command('merge')}, not PEFT's"
    suggested = f"tiewise.lora_config({str(base.path)!r}, {{}}) keeps the tie: train with that"
    if low_rank := [end for end in ends if end.kind == LORA]:
        what = f"low-rank update of {_modules(low_rank)} on a base whose two ends are one table"
        adds = "a merge adds it to the other end too, which was trained without"
        if len(low_rank) == 2:
            twice = "the two share their factors, and a merge adds the update twice to that table"
            adds = twice if facts.ties else "a merge adds both updates to that table"
        yield where, f"{what}: {adds}", merge
    copies = [end for end in ends if end.kind == COPY]
    # where one is alone and the two shall be tied, PEFT wraps the other end with the same table when it loads it
    if copies and not (facts.ties if len(copies) == 1 else facts.equal):
        what = f"full copy of {_modules(copies)} alone"
        if len(copies) == 2:
            read = "whose rows were not compared" if facts.equal is None else "which differ"
            flag = "on" if facts.ties else "off"
            what = f"full copies of {_modules(copies)}, {read} (ensure_weight_tying is {flag})"
        merged = "a merge makes two tables, and only a merge by PEFT (0.21) sets tie_word_embeddings to false"
        if nested := [dotted(claim.level) for claim in base.claims.levels if claim.level and claim.written]:
            merged = f"a merge leaves {names(nested)} true, and loaders that believe it drop the trained head"
        what = f"{what}, on a base whose two ends are one table: {merged}"
        fix = f"{merge}; or {suggested.format('tables=True')}"
        yield Said(where, what, fix, severity="warning" if len(copies) == 2 and facts.equal is None else "error")
    rows = {name: ids for name, ids in facts.token_rows.items() if name}
    if len(set(rows.values())) > 1:
        what = f"trainable_token_indices differ between {names(rows)}, which are one table in the base"
        yield where, what, suggested.format("new_tokens=[…]")


def _modules(ends: list[EndUpdate]) -> str:
    return " and ".join(short(end.module) for end in ends)


class EmptyTensors(NamedTuple):
    """Tensors of an adapter that hold no numbers: the first of them, what is wrong, and what to do."""

    first: Stored
    evidence: str
    repair: str


def empty_tensors(facts: AdapterFacts) -> EmptyTensors | None:
    """Return the tensors without numbers that a save under ZeRO-3 leaves; None if every tensor has some."""
    empty = [tensor for tensor in facts.tensors.values() if 0 in tensor.shape]
    if not empty:
        return None
    what = f"{len(empty):,} of its {len(facts.tensors):,} tensors hold no numbers ({describe(empty[0])})"
    what += ": they were saved under ZeRO-3 without gathering"
    return EmptyTensors(
        empty[0], what, "consolidate the shards of that training run (zero_to_fp32.py), or train it again"
    )


@rule("B061", "error", "an adapter's tables have the shape of the base's", kind="adapter")
def adapter_shapes(facts: AdapterFacts) -> Told:
    """An adapter whose table has other rows or another width than the base's was trained on another base, or after a
    resize: the loader refuses it, or asks for a resize first. A tensor without a single number was saved under ZeRO-3
    without gathering its shards: every process wrote what it held itself, which is an empty placeholder (peft#2450).
    What to do: resize the base to the adapter's rows, or give the base that it was trained on. An empty tensor is lost:
    consolidate the shards of the training run, or train again.
    Sources: unsloth-zoo#923; transformers#32852; peft#2450; peft#2451
    """
    empty = empty_tensors(facts)
    if empty is not None:
        module = next(module for module, parts in facts.parts.items() if empty.first in parts.values())
        yield short(module), empty.evidence, empty.repair
    if facts.base is None:
        return
    roles, name = facts.base.roles, facts.config.get("base_model_name_or_path")
    named = short(name) if isinstance(name, str) and name else "unnamed"
    for update, stored in ((facts.input, roles.input), (facts.output, roles.output or roles.input)):
        rows, width = (update and update.shape) or (-1, -1)
        if update is None or stored is None or len(stored.shape) != 2 or 0 in (rows, width):
            continue
        narrow = width not in (-1, stored.shape[1])
        if narrow or rows not in (-1, stored.rows):
            shape = f"[{rows}, {width}]".replace("-1", "?")
            what = f"its {update.kind} is of a table {shape}, and the base stores {describe(stored)}"
            fix = f"give the base that it was trained on ({named})"
            more = rows > stored.rows and not narrow
            yield short(update.module), what, facts.base.command("resize", f"--vocab {rows}") if more else fix
    worst = max((row for ids in facts.token_rows.values() for row in ids), default=-1)
    if roles.input is not None and worst >= roles.input.rows:
        what = f"trainable_token_indices name row {worst:,}, and the base stores {describe(roles.input)}"
        yield ADAPTER_CONFIG, what, facts.base.command("resize", f"--vocab {worst + 1}")


@rule("B062", "error", "an adapter's modules are modules of the base", kind="adapter")
def adapter_modules(facts: AdapterFacts) -> Told:
    """Loaders find the modules of an adapter by name. One that was trained on another class, on a model inside another
    or behind a wrapper, has names that the base's class does not have: it loads, with a warning at most, and what it
    learned at these names does nothing. Names are those of the class once loaded, which may not be those of the files.
    What to do: rename the adapter's tensors as the finding says, or load it into the class that it was trained on.
    Sources: vllm#41754; vllm#38844
    """
    base = facts.base
    if base is None or not base.complete or facts.listed("target_parameters"):
        return
    # a whole module that the base lacks is a new head: of it the adapter brings every number
    modules = [m for m, parts in facts.parts.items() if not parts.keys() <= {"weight", "bias"}]
    lost = [module for module in modules if module not in facts.base_modules]
    if not lost:
        return
    what = f"{len(lost):,} of its {len(modules):,} modules are not in the base, and do nothing there: {names(lost, 2)}"
    fix = f"give the base that it was trained on ({short(facts.config.get('base_model_name_or_path'))})"
    if (other := renamed(lost[0], facts.base_modules)) is not None:
        old, new = f"{PREFIX}{other[0]}", f"{PREFIX}{other[1]}"
        right = sum(m.startswith(other[0]) and other[1] + m.removeprefix(other[0]) in facts.base_modules for m in lost)
        fix = f"in the names of its tensors put {short(new)} in the place of {short(old)}: right for {right:,} of them"
    yield Said(short(facts.path.name), what, fix, severity="error" if base.roles.known is not None else "warning")


def renamed(module: str, known: Iterable[str]) -> tuple[str, str] | None:
    """(what stands before a module's name, what should) for the known one with the longest end in common; else None."""
    parts = module.split(".")
    for start in range(len(parts) - 1):
        end = ".".join(parts[start:])
        found = {name.removesuffix(end) for name in known if ends_with(name, end)}
        if len(found) == 1:
            return module.removesuffix(end), found.pop()
    return None


@rule("B063", "info", "an adapter stores no row that the base has", kind="adapter", scans=True, reads="its tables")
def adapter_copies(facts: AdapterFacts) -> Told:
    """An adapter that trains some tokens as a module to save, or that PEFT saves together with its embedding layers,
    stores whole tables of which most rows are the base's own: hundreds of megabytes for one token.
    What to do: tiewise slim keeps the rows that changed. To train only these from the start, give PEFT what
    tiewise.lora_config(base, new_tokens=[…]) returns.
    Sources: peft#2898
    """
    if facts.base is None:
        return
    roles = facts.base.roles
    for update, table in ((facts.input, roles.input), (facts.output, roles.output or roles.input)):
        copy = None if update is None else update.copy
        if copy is None or table is None or copy.shape != table.shape or not {copy.dtype, table.dtype} <= set(FLOATING):
            continue
        with doing("comparing the adapter's copy with the base", copy.nbytes):
            rows = len(changed_rows(copy, table))
        if copy.rows and rows <= copy.rows // 2:
            own = f"{rows:,} of {copy.rows:,}, {size(rows * (copy.nbytes // copy.rows))} of {size(copy.nbytes)}"
            said = f"{short(copy.name)} is a copy of {describe(table)}; rows that are not the base's: {own}"
            yield short(copy.name), said, facts.command("slim")


# parts of a module at which llama.cpp's converter stops
STOPS = ("weight", "bias", "lora_B.bias", "lora_magnitude_vector", DELTA)


@rule("B064", "info", "engines that serve adapters serve this one", kind="adapter", reads="its headers")
def adapter_engines(facts: AdapterFacts) -> Told:
    """Engines keep an adapter apart from its base, and know sums of two factors alone. vLLM refuses a whole table
    (modules_to_save), trained rows of new tokens, use_dora and lora_bias. SGLang refuses use_dora and target_modules
    that is a pattern; tables and trained rows of an end that target_modules does not name it passes by without a word,
    and serves the base's. llama.cpp's convert_lora_to_gguf.py stops at every tensor that is no factor: whole tables,
    trained rows, lengths of DoRA. For families whose head its converter passes by (Gemma, Gemma 2) it stops at factors
    of the head too. Read, not run.
    What to do: tiewise merge makes a plain checkpoint of base and adapter, which every engine serves.
    Sources: vllm#48934; vllm 0.33.0 lora/peft_helper.py, lora/utils.py:231; sglang 0.5.23 srt/lora/lora_manager.py:349,
    lora.py:173, utils.py:290; llama.cpp convert_lora_to_gguf.py (0b03ada)
    """

    def tensors(*parts: str) -> list[str]:
        return [f"{module}.{part}" for module, stored in facts.parts.items() for part in stored if part in parts]

    wanted, asked = facts.config.get("target_modules"), facts.listed("target_modules")
    saved = [module for module in facts.listed("modules_to_save") if module not in ("classifier", "score")]
    flag = next((name for name in ("use_dora", "lora_bias") if facts.config.get(name) is True), "")
    vllm = f"modules_to_save ({names(saved)})" if saved else flag or names(tensors(DELTA))
    pattern = isinstance(wanted, str) and wanted not in ("all", "all-linear")
    sglang = "use_dora" if flag == "use_dora" else "target_modules, a pattern" if pattern else ""
    unnamed = {"embed_tokens", "lm_head"} - {name.rpartition(".")[2] for name in asked}
    lost = [name for name in tensors("weight", DELTA) if name.split(".")[-2] in unnamed]
    llama, kind = names(tensors(*STOPS)), None if facts.base is None else family_type(facts.base.config)
    if not llama and facts.output is not None and family(kind).llama_cpp == "no head":
        llama = short(facts.output.module)
    stops = [f"vLLM stops at {vllm}"] if vllm else []
    if sglang:
        stops.append(f"SGLang stops at {sglang}")
    elif lost and not isinstance(wanted, str):  # under all-linear they are kept; what then becomes of them was not read
        stops.append(f"SGLang passes by {names(lost)} without a word")
    stops += [f"llama.cpp's converter stops at {llama}"] if llama else []
    if stops:
        yield short(facts.path.name), "; ".join(stops), facts.command("merge")
