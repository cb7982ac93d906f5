"""Rules on an adapter and its base, mostly about the two ends: B060 to B064."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import accumulate, chain
from typing import NamedTuple

from tiewise.checkpoint.adapter import DELTA, MERGED_PARTS, PREFIX, AdapterFacts, EndUpdate
from tiewise.checkpoint.claims import ends_with, family_type
from tiewise.checkpoint.facts import Facts, result_path
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG
from tiewise.checkpoint.peft_methods import COPY, LORA, TOKENS, UNKNOWN, UPDATE, is_lora, reasons_against_merge
from tiewise.checkpoint.rules.rule import Observation, Observations, Severity, counted, describe, dotted, names, rule
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.table_scans import changed_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import format_bytes
from tiewise.core.progress import progress_of


@rule("B060", "error", "an adapter leaves a tied pair tied", kind="adapter")
def adapter_on_tied(facts: AdapterFacts) -> Observations:
    """The two ends of a tied model are one Parameter, and PEFT adapts modules. A low-rank update of one end acts at
    that end in training; a merge writes it into the shared table, and so changes the other end too. A merge adds
    updates of both ends to it twice, with and without ensure_weight_tying (measured with PEFT 0.21). Full copies
    (modules_to_save) of both ends drift apart unless ensure_weight_tying is set, and a copy of one end alone unties the
    pair: the merged model has two tables. PEFT then sets tie_word_embeddings to false at the root of the config; a flag
    in text_config stays true, and a loader that believes it drops the trained head. Most other methods of PEFT (LoHa,
    OFT, IA3) change the one table too; LN tuning makes two, and the flag stays true. An adapter that is not merged
    works as it was trained.
    What to do: no merge, or `tiewise adapter merge`, which makes two tables if the merged ends differ. It merges LoRA
    only; for other methods, `tiewise untie` the base, and merge into the result with PEFT.
    Sources: peft#2777; peft#2018; peft#2864; peft#2944; transformers#45127; unsloth#9331
    """
    if not facts.method.merges:
        return
    if facts.base is None or facts.tied is None:
        yield from _unknown_effect(facts)
    elif facts.tied:
        yield from _changes_on_tied(facts, facts.base, _updates_of_form(facts, LORA, UPDATE))
        yield from _copies_on_tied(facts, facts.base, _updates_of_form(facts, COPY))
        yield from _rows_on_tied(facts, facts.base)


def _updates_of_form(facts: AdapterFacts, *forms: str) -> list[EndUpdate]:
    """Return the updates of the two ends whose form is one of `forms`."""
    updates = list[EndUpdate]()
    for update in (facts.input, facts.output):
        if update is not None and update.form in forms:
            updates.append(update)
    return updates


def _unknown_effect(facts: AdapterFacts) -> Observations:
    """Report that a merge has an unknown effect, because nothing says that the base ties."""
    updates = _updates_of_form(facts, LORA, UPDATE, COPY, TOKENS)
    if not updates:
        return
    why = "the base does not tell if it is tied"
    if facts.base is None:
        why = "no base was given"
    problem = f"the adapter changes {_modules(updates)}, and {why}; the effect of a merge is unknown"
    remedy = f"tiewise check {shlex.quote(str(facts.path))} --base BASE"
    yield Observation(short(facts.path.name), problem, remedy, severity="info")


def _rows_on_tied(facts: AdapterFacts, base: Facts) -> Observations:
    """Report that the two ends of a tied base train different rows."""
    rows = {name: ids for name, ids in facts.token_rows.items() if name}
    if len(set(rows.values())) > 1:
        problem = f"trainable_token_indices differs between {names(rows)}, and the base has one table for both"
        yield short(facts.path.name), problem, _training_advice(base, "new_tokens=[…]")


# {form of a change: its description, and the verb of a merge}
_WORDS_OF_CHANGES = {LORA: ("has a low-rank update of {}", "adds"), UPDATE: ("changes {} ({})", "applies")}


def _changes_on_tied(facts: AdapterFacts, base: Facts, changes: list[EndUpdate]) -> Observations:
    """Report changes of the ends of a tied base that a merge writes into its table."""
    if not changes:
        return
    description, does = _WORDS_OF_CHANGES[changes[0].form]
    described = description.format(_modules(changes), facts.config["peft_type"])
    effect = "a merge by PEFT changes the other end too, which was trained without the update"
    if len(changes) == 2:
        effect = f"a merge by PEFT {does} both updates to the one table"
        if facts.ensures_tying:
            effect = "a merge by PEFT adds the shared update twice to the one table"
    problem = f"{effect}. The adapter {described}, and the base is tied"
    yield short(facts.path.name), problem, _merge_fixes(facts, base)


def _merge_fixes(facts: AdapterFacts, base: Facts) -> tuple[str, ...]:
    """Return the ways to use an adapter of a tied base as it was trained."""
    if _is_merged_here(facts):
        return (facts.command("adapter merge"),)
    merge_elsewhere = f"to merge it: {base.command('untie')}, and merge into that with PEFT"
    return "load it with its base, without a merge", merge_elsewhere


def _is_merged_here(facts: AdapterFacts) -> bool:
    """Return whether no setting and no part keeps `adapter merge` from merging the adapter."""
    is_known = set[str]().union(*facts.parts.values()) <= MERGED_PARTS
    return is_known and not any(reasons_against_merge(facts.config))


def _copies_on_tied(facts: AdapterFacts, base: Facts, copies: list[EndUpdate]) -> Observations:
    """Report full copies that make the two ends of a tied base different."""
    if not copies:
        return
    severity: Severity = "error"
    if len(copies) == 1:
        # with ensure_weight_tying, PEFT loads the same table into the other end
        stays_tied = facts.ensures_tying
        described = f"a full copy of only {_modules(copies)}"
    else:
        stays_tied = facts.copies_are_equal is True
        described = _described_pair(facts, copies)
        if facts.copies_are_equal is None:
            severity = "warning"
    if stays_tied:
        return
    problem = f"{_effect_of_merge(facts, base)}. The adapter has {described}, and the base is tied"
    fixes = _merge_fixes(facts, base)
    if is_lora(facts.config):
        fixes = (*fixes, f"to keep the tie: {_training_advice(base, 'tables=True')}")
    yield Observation(short(facts.path.name), problem, fixes, severity=severity)


def _described_pair(facts: AdapterFacts, copies: list[EndUpdate]) -> str:
    """Return a clause on the full copies of both ends, and whether they differ."""
    read, flag = "which differ", "off"
    if facts.copies_are_equal is None:
        read = "whose rows were not compared"
    if facts.ensures_tying:
        flag = "on"
    return f"full copies of {_modules(copies)}, {read} (ensure_weight_tying is {flag})"


def _effect_of_merge(facts: AdapterFacts, base: Facts) -> str:
    """Return the effect on tables and flags of merging two tables into a tied base."""
    nested = [dotted(claim.level) for claim in base.claims.levels[1:] if claim.written]  # the first is the root
    if nested:
        return f"a merge by PEFT leaves {names(nested)} true, and loaders then drop the trained head"
    if facts.method.form == COPY:
        return "a merge by PEFT makes two tables, and leaves tie_word_embeddings true"
    return "a merge makes two tables, and only PEFT from 0.21 on then writes tie_word_embeddings = false"


def _training_advice(base: Facts, argument: str) -> str:
    """Return the call that returns PEFT settings under which a tied base stays tied."""
    return f"train again with tiewise.checkpoint.lora_config({str(base.path)!r}, {argument})"


def _modules(updates: list[EndUpdate]) -> str:
    """Return the names of the modules that some updates change."""
    return " and ".join(short(update.module) for update in updates)


class EmptyTensors(NamedTuple):
    """Finding about tensors of an adapter that contain no numbers."""

    first: Stored
    evidence: str
    repair: str


def empty_tensors(facts: AdapterFacts) -> EmptyTensors | None:
    """Return the finding about empty tensors, which a save under ZeRO-3 leaves.

    Return None if there are none.
    """
    empty = [tensor for tensor in facts.tensors.values() if 0 in tensor.shape]
    if not empty:
        return None
    problem = f"{len(empty):,} of {counted(len(facts.tensors), 'tensor')} are empty ({describe(empty[0])})"
    problem += ": ZeRO-3 saved them without gathering"
    remedy = "consolidate the shards of the training run (zero_to_fp32.py), or train it again"
    return EmptyTensors(empty[0], problem, remedy)


def _updated_tables(facts: AdapterFacts, base: Facts) -> list[tuple[EndUpdate, Stored]]:
    """Return the updates of both ends, each with the table of the base that it changes."""
    table, head = base.roles.input, base.roles.output
    if head is None:
        head = table
    updated = list[tuple[EndUpdate, Stored]]()
    if facts.input is not None and table is not None:
        updated.append((facts.input, table))
    if facts.output is not None and head is not None:
        updated.append((facts.output, head))
    return updated


@rule("B061", "error", "an adapter's tables have the shape of the base's", kind="adapter")
def adapter_shapes(facts: AdapterFacts) -> Observations:
    """The shape of an adapter's table must be the base's. A table with other rows or another width was trained on
    another base, or after a resize: the loader refuses it, or asks for a resize first. A tensor without a single number
    was saved under ZeRO-3 without gathering its shards: every process wrote its local part, which is an empty
    placeholder (peft#2450).
    What to do: resize the base to the adapter's rows, or give the base that it was trained on. An empty tensor is lost:
    consolidate the shards of the training run, or train again.
    Sources: unsloth-zoo#923; transformers#32852; peft#2450; peft#2451
    """
    empty = empty_tensors(facts)
    if empty is not None:
        module = _module_of(facts, empty.first)
        yield short(module), empty.evidence, empty.repair
    if facts.base is None:
        return
    for update, table in _updated_tables(facts, facts.base):
        yield from _other_shape(facts, facts.base, update, table)
    yield from _rows_beyond(facts, facts.base)


def _module_of(facts: AdapterFacts, tensor: Stored) -> str:
    """Return the module of a tensor of the adapter; the tensor's name if modules share it."""
    modules = (module for module, parts in facts.parts.items() if tensor in parts.values())
    return next(modules, tensor.name)


def _base_name(facts: AdapterFacts) -> str:
    """Return the base that the adapter's config names; "unnamed" if it names none."""
    name = facts.config.get("base_model_name_or_path")
    if isinstance(name, str) and name:
        return short(name)
    return "unnamed"


def _rows_beyond(facts: AdapterFacts, base: Facts) -> Observations:
    """Report trained rows that the base's table does not have."""
    stored = base.roles.input
    if stored is None:
        return
    last = max(chain.from_iterable(facts.token_rows.values()), default=-1)
    if last >= stored.rows:
        problem = f"trainable_token_indices names row {last:,}, and the base's table has {stored.rows:,} rows"
        yield ADAPTER_CONFIG, problem, base.command("vocab resize", f"--vocab {last + 1}")


_UNKNOWN = -1  # a length that does not follow from the adapter's tensors


def _other_shape(facts: AdapterFacts, base: Facts, update: EndUpdate, table: Stored) -> Observations:
    """Report an update whose table has another shape than the base's."""
    if update.shape is None or len(table.shape) != 2:
        return
    if 0 in update.shape:
        return  # `empty_tensors` reports it
    rows, width = update.shape
    has_right_width = width in (_UNKNOWN, table.shape[1])
    if has_right_width and rows in (_UNKNOWN, table.rows):
        return
    shape = f"[{rows}, {width}]".replace("-1", "?")
    problem = f"its {update.form} belongs to a table {shape}, and the base's is {describe(table)}"
    remedy = f"give the base that it was trained on ({_base_name(facts)})"
    if has_right_width and rows > table.rows:
        remedy = base.command("vocab resize", f"--vocab {rows}")
    yield short(update.module), problem, remedy


@rule("B062", "error", "an adapter's modules are modules of the base", kind="adapter")
def adapter_modules(facts: AdapterFacts) -> Observations:
    """Loaders find the modules of an adapter by name. An adapter that was trained on another class, on a model inside
    another model or behind a wrapper, has names that the base's class lacks. It loads, with a warning at most, and its
    updates at these names have no effect. The names are those of the loaded class, which may differ from those in the
    files.
    What to do: rename the adapter's tensors as the finding says, or load it into the class that it was trained on.
    Sources: vllm#41754; vllm#38844
    """
    base = facts.base
    if base is None or facts.method is UNKNOWN or not base.is_complete:
        return
    if facts.names_under("target_parameters") or facts.config.get("layer_replication"):
        return  # its tensors are named after parameters, or after layers that PEFT adds
    modules, possible = _modules_of_base(facts), _possible_targets(facts)
    lost = [module for module in modules if module not in possible]
    if not lost:
        return
    severity: Severity = "warning"
    if base.roles.class_ends is not None:
        severity = "error"
    problem = (
        f"the base lacks {len(lost):,} of the adapter's {len(modules):,} modules, which then do nothing"
        f": {names(lost, 2)}"
    )
    yield Observation(short(facts.path.name), problem, _advice_on_names(facts, lost), severity=severity)


def _possible_targets(facts: AdapterFacts) -> set[str]:
    """Return the modules of the base that the adapter's method may change."""
    modules = set(facts.base_modules)
    if facts.method.on_blocks:
        modules.update(*map(_with_parents, facts.base_modules))
    return modules


def _with_parents(module: str) -> Iterable[str]:
    """Return the name of a module, after those of the modules that contain it."""
    return accumulate(module.split("."), "{}.{}".format)


def _modules_of_base(facts: AdapterFacts) -> list[str]:
    """Return the modules that the base must have.

    A full module that the base lacks is a new head, and the adapter stores all of it.
    """
    modules = list[str]()
    for module, parts in facts.parts.items():
        is_full_module = parts.keys() <= {"weight", "bias"}
        if not is_full_module:
            modules.append(module)
    return modules


def _advice_on_names(facts: AdapterFacts, lost: list[str]) -> str:
    """Return the prefix that gives lost modules the base's names, else the base to give."""
    prefixes = matching_prefixes(lost[0], facts.base_modules)
    if prefixes is None:
        return f"give the base that it was trained on ({short(facts.config.get('base_model_name_or_path'))})"
    old, new = prefixes
    right = 0
    for module in lost:
        if module.startswith(old) and new + module.removeprefix(old) in facts.base_modules:
            right += 1
    remedy = f"in the names of its tensors, replace {short(PREFIX + old)} by {short(PREFIX + new)}"
    return f"{remedy}, which is right for {right:,} of {len(lost):,}"


def matching_prefixes(module: str, base_modules: Iterable[str]) -> tuple[str, str] | None:
    """Return the prefix of a module's name and the prefix that the base has instead.

    The base's module is the one with the longest common ending. Return None if no module has a common ending, or if
    several have the longest one.
    """
    parts = module.split(".")
    for start in range(len(parts) - 1):
        end = ".".join(parts[start:])
        prefixes = {name.removesuffix(end) for name in base_modules if ends_with(name, end)}
        if len(prefixes) == 1:
            return module.removesuffix(end), prefixes.pop()
    return None


@rule("B063", "info", "an adapter stores no row that the base has", kind="adapter", scans=True, reads="its tables")
def adapter_copies(facts: AdapterFacts) -> Observations:
    """Some adapters store full tables in which most rows equal the base's. They train some tokens as a module to save,
    or PEFT saved them together with the embedding layers. That costs hundreds of megabytes for one token.
    What to do: `tiewise adapter slim` stores only the rows that changed. To train only these from the start, give PEFT
    what tiewise.checkpoint.lora_config(base, new_tokens=[…]) returns.
    Sources: peft#2898
    """
    if facts.base is None:
        return
    copies = []
    for update, table in _updated_tables(facts, facts.base):
        if update.copy is None:
            continue
        if is_lora(facts.config):
            copies.append(_Copy(update.copy, table, _changed_rows(update.copy, table)))
        elif update.form != COPY:
            yield from _repeated_table(update.copy, table)
    commands = _commands_to_slim(facts, facts.base, any(copy.changed for copy in copies))
    for copy in copies:
        yield from _mostly_equal_copy(copy, commands)


def _repeated_table(copy: Stored, table: Stored) -> Observations:
    """Report a copy below an update that equals the base's table."""
    if copy.rows and _changed_rows(copy, table) == 0:
        problem = f"the adapter repeats a table of the base ({format_bytes(copy.nbytes)}), which PEFT saved with it"
        problem += f". {short(copy.name)} equals {describe(table)}"
        yield short(copy.name), problem, "save it again with save_pretrained(…, save_embedding_layers=False)"


def _changed_rows(copy: Stored, table: Stored) -> int:
    """Return the number of rows in which a copy differs; all if they are not comparable."""
    if copy.shape != table.shape or not {copy.dtype, table.dtype} <= set(FLOATING):
        return copy.rows
    with progress_of("comparing the adapter's copy with the base", copy.nbytes):
        return len(changed_rows(copy, table))


class _Copy(NamedTuple):
    """Full copy of a table of the base in an adapter."""

    stored: Stored
    table: Stored
    changed: int  # rows that differ


def _mostly_equal_copy(copy: _Copy, commands: str) -> Observations:
    """Report a full copy of a table if it changes at most half of the rows."""
    rows = copy.stored.rows
    if rows and copy.changed <= rows // 2:
        where, row_bytes = short(copy.stored.name), copy.stored.nbytes // rows
        problem = f"the adapter changes {copy.changed:,} of {rows:,} rows, and stores all of them"
        problem += f" ({format_bytes(copy.stored.nbytes)} instead of {format_bytes(copy.changed * row_bytes)})"
        problem += f". {where} is a copy of {describe(copy.table)}"
        yield where, problem, commands


def _commands_to_slim(facts: AdapterFacts, base: Facts, has_changed_rows: bool) -> str:
    """Return the commands after which only changed rows are stored."""
    if not has_changed_rows or facts.difference_of_ends is None:
        return facts.command("adapter slim")
    slim_for_untied = facts.command("adapter slim", base=result_path(base.path))
    return f"{base.command('untie')} && {slim_for_untied}"


# parts of a module at which llama.cpp's converter stops
STOPS = ("weight", "bias", "lora_B.bias", "lora_magnitude_vector", DELTA)


@rule("B064", "info", "engines that serve adapters serve this one", kind="adapter", reads="its headers")
def adapter_engines(facts: AdapterFacts) -> Observations:
    """Engines keep an adapter separate from its base, and support only products of two factors. vLLM refuses a full
    table (modules_to_save), trained rows of new tokens, use_dora and lora_bias. SGLang refuses use_dora, and
    target_modules if it is a pattern. It silently ignores tables and trained rows of an end that target_modules does
    not name, and serves the base's. llama.cpp's convert_lora_to_gguf.py stops at every tensor that is no factor: full
    tables, trained rows, lengths of DoRA. For families whose head its converter skips (Gemma, Gemma 2), it stops at
    factors of the head too. All this was read in the sources, not run.
    What to do: `tiewise adapter merge` makes a plain checkpoint of base and adapter, which every engine serves.
    Sources: vllm#48934; vllm 0.33.0 lora/peft_helper.py, lora/utils.py:231; sglang 0.5.23 srt/lora/lora_manager.py:349,
    lora.py:173, utils.py:290; llama.cpp convert_lora_to_gguf.py (0b03ada)
    """
    sentences = (_vllm(facts), _sglang(facts), _llama_cpp(facts))
    problem = "; ".join(filter(None, sentences))
    if problem:
        yield short(facts.path.name), problem, _plain_checkpoint(facts)


def _plain_checkpoint(facts: AdapterFacts) -> str:
    """Return the way to use the adapter outside these engines."""
    if _is_merged_here(facts):
        return facts.command("adapter merge")
    return "load it with its base in PEFT"


def _tensors(facts: AdapterFacts, *parts: str) -> list[str]:
    """Return the names of the adapter's tensors that are one of `parts`, such as "lora_B.bias"."""
    tensors = list[str]()
    for module, stored in facts.parts.items():
        for part in stored:
            if part in parts:
                tensors.append(f"{module}.{part}")
    return tensors


_CLASSIFIERS = ("classifier", "score")  # heads that are no tables of tokens


def _vllm(facts: AdapterFacts) -> str:
    """Return the sentence on the parts that vLLM refuses; empty if it serves all."""
    saved = [module for module in facts.names_under("modules_to_save") if module not in _CLASSIFIERS]
    if saved:
        return f"vLLM stops at modules_to_save ({names(saved)})"
    for flag in ("use_dora", "lora_bias"):
        if facts.config.get(flag) is True:
            return f"vLLM stops at {flag}"
    trained_rows = _tensors(facts, DELTA)
    if trained_rows:
        return f"vLLM stops at {names(trained_rows)}"
    return ""


def _sglang(facts: AdapterFacts) -> str:
    """Return the sentence on the parts that SGLang refuses or ignores; empty for none."""
    if facts.config.get("use_dora") is True:
        return "SGLang stops at use_dora"
    targets = facts.config.get("target_modules")
    if targets in ("all", "all-linear"):
        return ""  # it keeps tables and trained rows; their later use was not read
    if isinstance(targets, str):
        return "SGLang stops at target_modules, a pattern"
    ignored = _tables_without_target(facts)
    if ignored:
        return f"SGLang ignores {names(ignored)} silently"
    return ""


def _tables_without_target(facts: AdapterFacts) -> list[str]:
    """Return tables and trained rows of ends that target_modules does not name."""
    targets = {name.rpartition(".")[2] for name in facts.names_under("target_modules")}
    unnamed = {"embed_tokens", "lm_head"} - targets
    tables = list[str]()
    for name in _tensors(facts, "weight", DELTA):
        module = name.split(".")[-2]
        if module in unnamed:
            tables.append(name)
    return tables


def _llama_cpp(facts: AdapterFacts) -> str:
    """Return the sentence on the parts that llama.cpp's converter refuses; empty for none."""
    stops = _tensors(facts, *STOPS)
    if stops:
        return f"llama.cpp's converter stops at {names(stops)}"
    if facts.base is None or facts.output is None:
        return ""
    # "no head": its converter drops the head of this family (Gemma), and stops at an adapter's factors of it
    if family(family_type(facts.base.config)).llama_cpp == "no head":
        return f"llama.cpp's converter stops at {short(facts.output.module)}"
    return ""
