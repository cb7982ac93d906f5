"""Files are whole, the index says what they hold: B001 to B004."""

from __future__ import annotations

import re

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import GgufFacts
from tiewise.checkpoint.hf_folder import INDEX, SINGLE, Fault, Folder
from tiewise.checkpoint.rule import ANY, ERROR, FATAL, INFO, WARNING, Said, Told, names, rule, shown
from tiewise.checkpoint.untrusted import short

_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_MODEL_PICKLE = re.compile(r"(pytorch_model|model|tf_model|flax_model)[^/]*\.(bin|pt|pth|ckpt|h5|msgpack)")
_AGAIN = "download the file again, or write it again"


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
            lacking = mapped[fault.file]
            tensors = "1 tensor" if len(lacking) == 1 else f"{len(lacking):,} tensors"
            what = f"the index maps {tensors} to it ({names(lacking)}), and it is not there"
            yield short(fault.file), what, "download the missing file"
    index, held = folder.index, folder.headers
    if index is None:
        if folder.config is None or folder.opened is not None or folder.has(INDEX) or not held:
            return
        shards = [name for name in held if _SHARD.fullmatch(name)]
        if shards:
            what = f"{len(shards)} shards ({names(shards)}) without an index: loaders of transformers find no weights"
            yield INDEX, what, "download the index, or write the checkpoint again"
        elif isinstance(folder.config.get("model_type"), str):
            what = f"transformers looks for {SINGLE} or {INDEX}, and the folder has {names(list(held))}"
            fix = f"rename it to {SINGLE}" if len(held) == 1 else "write the checkpoint again"
            yield Said(short(next(iter(held))), what, fix, severity=ERROR)
        return
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
