"""Files are whole, the index says what they hold, and code ties as transformers 5 asks: B001 to B004, B023."""

from __future__ import annotations

import re

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.claims import auto_map
from tiewise.checkpoint.custom_code import FLAG, KEYS, Class, Code, read_code
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import GgufFacts
from tiewise.checkpoint.hf_folder import INDEX, SINGLE, Fault, Folder, Index
from tiewise.checkpoint.rule import ANY, ERROR, FATAL, INFO, WARNING, Said, Told, names, rule, shown
from tiewise.checkpoint.untrusted import short

_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_MODEL_PICKLE = re.compile(r"(pytorch_model|model|tf_model|flax_model)[^/]*\.(bin|pt|pth|ckpt|h5|msgpack)")
_AGAIN = "download the file again, or write it again"
_MODEL = re.compile(r".*(PreTrainedModel|ForCausalLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
_PLAIN = re.compile(r"PreTrainedModel|.*Mixin|ABC|Module|Generic|Protocol|object")  # bases that bring no keys
_BASE_CONFIG = re.compile(r"Pre[tT]rainedConfig")
_SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"


@rule("B001", FATAL, "every file can be read, and every header describes exactly its file", kind=ANY)
def unreadable(facts: Facts | AdapterFacts | GgufFacts) -> Told:
    """A safetensors file is a length, a header and tensors that lie one behind the other up to the last byte. A file
    that was cut short by a full disk or a broken download, or that a tool wrote wrongly, breaks one of these. Loaders
    then fail late, or read a tensor's bytes from the wrong place. Config, generation config and tokenizer files must be
    JSON objects. Weights that exist only as pickles are named and never opened, because opening them runs code.
    What to do: take the damaged file from its source again; compare its size with what the source says.
    Sources: https://github.com/huggingface/safetensors#format
    """
    if isinstance(facts, AdapterFacts):
        yield from ((fault.file, fault.what, fault.fix or _AGAIN) for fault in facts.adapter.faults)
    if not isinstance(facts, Facts):
        return
    folder = facts.folder
    for fault in folder.faults:
        if fault.file != INDEX and folder.has(fault.file):
            yield short(fault.file), _plain(fault, folder), fault.fix or _AGAIN
    tokenizer = facts.tokenizer
    beside = list(tokenizer.faults) if tokenizer is not None else []
    beside += [facts.generation] if isinstance(facts.generation, Fault) else []
    for fault in beside:
        yield Said(fault.file, _plain(fault, folder), fault.fix or _AGAIN, severity=WARNING)
    if folder.pickles and not folder.headers and not folder.faults:
        what = f"its weights are only in {names(folder.pickles)}, which unpickling would execute: they are not opened"
        fix = "load it in a sandbox that you trust and save it as safetensors; then check that"
        yield folder.pickles[0], what, fix


def _plain(fault: Fault, folder: Folder) -> str:
    return fault.what.removeprefix(f"{folder.path}/")


@rule("B002", FATAL, "the index and the shards name the same tensors")
def index_and_shards(facts: Facts) -> Told:
    """model.safetensors.index.json maps every tensor to the shard that holds it. Tools that add, drop or rename tensors
    without rewriting it leave names that no shard holds, or tensors that no loader asks for. llama.cpp's converter
    stopped at a `wte` that only the index knew (llama.cpp#12456), and users edit the file by hand after merges
    (mergekit#385). A missing shard is fatal. Tensors that lie in another shard, or that the index forgot, can be mapped
    again from the headers; a name that no shard holds cannot be, unless it is the head of a tied model.
    What to do: `tiewise repair` rebuilds the index; a missing shard must be downloaded.
    Sources: llama.cpp#12456; mergekit#385
    """
    folder = facts.folder
    mapped: dict[str, list[str]] = {}
    for name, file in folder.index.weight_map.items() if folder.index is not None and folder.faults else ():
        mapped.setdefault(file, []).append(name)
    for fault in folder.faults:
        if fault.file == INDEX:
            yield INDEX, _plain(fault, folder), fault.fix
        elif not folder.has(fault.file) and folder.index is not None:
            held = mapped[fault.file]
            tensors = "1 tensor" if len(held) == 1 else f"{len(held):,} tensors"
            what = f"the index maps {tensors} to it ({names(held)}), and it is not there"
            yield short(fault.file), what, "download the missing file"
    if folder.index is None:
        yield from _without_index(folder)
    else:
        yield from _with_index(facts, folder.index)


def _without_index(folder: Folder) -> Told:
    if folder.config is None or folder.opened is not None or folder.has(INDEX) or not folder.headers:
        return
    shards = [name for name in folder.headers if _SHARD.fullmatch(name)]
    if shards:
        what = f"{len(shards)} shards ({names(shards)}) without an index: loaders of transformers find no weights"
        yield INDEX, what, "download the index, or write the checkpoint again"
    elif isinstance(folder.config.get("model_type"), str):
        what = f"transformers looks for {SINGLE} or {INDEX}, and the folder has {names(list(folder.headers))}"
        fix = f"rename it to {SINGLE}" if len(folder.headers) == 1 else "write the checkpoint again"
        yield Said(short(next(iter(folder.headers))), what, fix, severity=ERROR)


def _with_index(facts: Facts, index: Index) -> Told:
    folder, held = facts.folder, facts.folder.headers
    wrong = [name for name, file in index.weight_map.items() if file in held and name not in held[file].tensors]
    elsewhere = [name for name in wrong if name in folder.tensors]
    lost = [name for name in wrong if name not in folder.tensors]
    if elsewhere:
        where = index.weight_map[elsewhere[0]]
        what = f"{len(elsewhere):,} tensors lie in another shard than the index says ({names(elsewhere)})"
        yield Said(short(where), what, facts.command("repair"), True, severity=ERROR)
    if lost:
        spare = lost == [facts.roles.output_name] and facts.claims.tied is True
        what = f"the index names {len(lost):,} tensors that no shard holds ({names(lost)})"
        fix = facts.command("repair") if spare else "download the shards again, or the index that belongs to them"
        yield Said(INDEX, what, fix, spare, severity=ERROR)
    unknown = [name for name in folder.tensors if name not in index.weight_map]
    if unknown:
        file = folder.tensors[unknown[0]].path.name
        what = f"{len(unknown):,} stored tensors are missing from the index ({names(unknown)}): some loaders skip them"
        yield Said(short(file), what, facts.command("repair"), True, severity=ERROR)


@rule("B003", WARNING, "total_size is right, and no older weights lie beside the checkpoint")
def stale(facts: Facts) -> Told:
    """The index states the bytes of all tensors; a wrong number is harmless to most loaders and a sign that the file
    was edited or kept from before a rewrite. Files of weights that the index does not name are read by some tools all
    the same: mlx-lm takes every model*.safetensors of a folder. transformers deletes its own old shards before it
    writes new ones; other tools leave them. Optimizer states, adapters and training arguments are not meant here.
    What to do: `tiewise repair` corrects the number; move old weights out of the folder.
    Sources: transformers `save_pretrained`; mlx-lm `load_model`
    """
    folder = facts.folder
    claimed = None if folder.index is None else folder.index.metadata.get("total_size")
    held = sum(tensor.nbytes for tensor in folder.tensors.values())
    if claimed is not None and facts.complete and (isinstance(claimed, bool) or claimed != held):
        what = f"total_size is {shown(claimed)}, and the tensors have {held:,} bytes"
        yield INDEX, what, facts.command("repair"), True
    old = [name for name in folder.extra if name.startswith("model") or _SHARD.fullmatch(name)]
    if old:
        what = (
            f"{len(old)} more files beside the checkpoint's own ({names(old)}): mlx-lm reads every model*.safetensors"
        )
        first = SINGLE in old and folder.opened == SINGLE
        what += f"; transformers opens {SINGLE}, and not what the index names" if first else ""
        fix = "move them out of the folder if they are old"
        yield Said(short(old[0]), what, fix, severity=ERROR if first else WARNING)
    others = [name for name in folder.extra if name not in old]
    others += [name for name in folder.pickles if folder.headers and _MODEL_PICKLE.fullmatch(name)]
    if others:
        what = f"weights in other formats or layouts lie beside ({names(others)}); they are not compared"
        yield Said(short(others[0]), what, "remove them if they are older than the safetensors", severity=INFO)


@rule("B004", ERROR, "no name lies in two shards")
def name_in_two_shards(facts: Facts) -> Told:
    """Two shards that hold one name leave it to the loader which of the two it takes: the one that the index maps, or
    the one that is read last. Where both are equal this only wastes bytes; where they differ, two loaders make two
    models. It comes from merges and from expert or pipeline ranks that each wrote the shared table
    (Megatron-Bridge#919).
    What to do: `tiewise repair` drops copies that are equal. Where they differ, find out which one training ended with.
    Sources: Megatron-Bridge#919; mergekit#385
    """
    for copy in facts.folder.copies:
        kept = facts.folder.tensors[copy.name]
        equal = facts.same(copy, kept) if facts.scan else None
        how = {True: "equal", False: "different", None: "not compared"}[equal]
        where = f"{short(copy.path.name)}: {short(copy.name)}"
        what = f"{short(copy.name)} also lies in {short(kept.path.name)}, which is the one loaders should take; {how}"
        fix = facts.command("repair") if equal else "find out which one is meant, and write the shards again"
        yield where, what, fix, bool(equal)


@rule("B023", ERROR, "the code that comes with a checkpoint ties as transformers 5 asks")
def custom_code(facts: Facts) -> Told:
    """transformers 5 takes _tied_weights_keys as a dict {target: source}. A list, right in version 4, stops it while it
    builds or saves a model: 'list' object has no attribute 'keys'. An attribute of another name is not read at all, and
    a class without one stays untied where version 4 tied every class with get_output_embeddings: its head is random.
    tie_weights is called with missing_keys and recompute_mapping, which an override of the old form does not take. The
    base config lost its default for tie_word_embeddings, so a config class that gives none means tied in version 4 and
    untied in 5. The code is parsed as text and never imported; only classes of the folder itself are read.
    What to do: write the line that the finding gives.
    Sources: transformers#44861; prime-rl#1998; EXAONE-3.5#7; Model-Optimizer#2071; sglang#27234; transformers#42270
    """
    used = auto_map(facts.config)
    if not used:
        return
    code = read_code(facts.folder)
    for fault in code.faults:
        what = fault.what.removeprefix(f"{facts.folder.path}/")
        yield Said(short(fault.file), what, fault.fix, severity=WARNING)
    for found in code.classes.values():
        if _is_model(code, found, used):
            yield from _keys(facts, code, found)
            if found.tie_weights is not None and not found.takes_arguments:
                what = f"{found.name}.tie_weights does not take missing_keys and recompute_mapping"
                fix = f"write: {_SIGNATURE}"
                yield _finding(ERROR, found, found.tie_weights, f"{what}, which transformers 5 passes", fix)
    config = code.classes.get(used.get("AutoConfig", ""))
    if config is not None:
        yield from _default(facts, config)


def _is_model(code: Code, found: Class, used: dict[str, str]) -> bool:
    if any(found.name == name for auto, name in used.items() if auto.startswith("AutoModel")):
        return True
    lines = [line if isinstance(line, str) else line.name for line in code.ancestors(found)]
    return any(_MODEL.fullmatch(name) for name in lines)


def _keys(facts: Facts, code: Code, found: Class) -> Told:
    right = [tied for tied in found.tied if tied.name == KEYS]
    for tied in right:
        if tied.kind == "list":
            untied = facts.claims.tied is False
            how = "saving it raises" if untied else "transformers 5 stops while it builds the model:"
            what = f"{found.name}.{KEYS} is a list, and {how} 'list' object has no attribute 'keys'"
            yield _finding(WARNING if untied else ERROR, found, tied.line, what, _line(facts, tied.entries))
    for tied in found.tied:
        if tied.name != KEYS and not right and not _inherits_keys(code, found):
            what = f"{found.name} sets {tied.name}, which transformers 5 does not read: the name is {KEYS}"
            yield _finding(ERROR, found, tied.line, what, _line(facts, tied.entries))
    if found.output_embeddings is None or found.tied or found.tie_weights is not None or not facts.claims.tied:
        return
    if not _inherits_keys(code, found):
        what = (
            f"{found.name} has get_output_embeddings and no {KEYS}: transformers 5 leaves the head untied, and random"
        )
        yield _finding(ERROR, found, found.line, what, _line(facts, ()))


def _inherits_keys(code: Code, found: Class) -> bool:
    """Whether a class above declares keys, or may: one that is not in the folder and is no plain base."""
    for above in code.ancestors(found):
        if isinstance(above, Class):
            if any(tied.name == KEYS for tied in above.tied):
                return True
        elif not _PLAIN.fullmatch(above):
            return True
    return False


def _default(facts: Facts, config: Class) -> Told:
    deciding = facts.claims.deciding
    if config.names_flag or not config.bases or not all(_BASE_CONFIG.fullmatch(base) for base in config.bases):
        return
    if deciding is None or deciding.written is not None or facts.roles.headless:
        return
    what = f"{config.name} gives {FLAG} no value, nor does config.json: true for transformers 4, false for 5"
    said = "True" if facts.truth else "False"
    repair = f"write {FLAG} into config.json, or {FLAG}={said} among the arguments of {short(config.name)}.__init__"
    yield _finding(WARNING, config, config.line, what, repair)


def _line(facts: Facts, entries: tuple[str, ...]) -> str:
    """The assignment to write."""
    table = facts.roles.input_name or "model.embed_tokens.weight"
    heads = [entry for entry in entries if entry != table] or [facts.roles.output_name or "lm_head.weight"]
    pairs = ", ".join(f'"{short(head)}": "{short(table)}"' for head in heads[:8])
    return f"write: {KEYS} = {{{pairs}}}"


def _finding(severity: str, found: Class, line: int, evidence: str, repair: str) -> Said:
    return Said(f"{short(found.file)}:{line}", short(evidence, 400), repair, severity=severity)
