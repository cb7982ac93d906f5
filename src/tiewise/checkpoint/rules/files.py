"""Rules on unreadable files, index and shard files of a checkpoint: B001 to B004."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.byte_order_marks import as_utf8
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, INDEX, SINGLE, Fault, Folder
from tiewise.checkpoint.hub_names import is_hub_path
from tiewise.checkpoint.rules.rule import (
    AnyFacts,
    Observation,
    Observations,
    Repair,
    Severity,
    counted,
    names,
    rule,
    value_text,
)
from tiewise.checkpoint.second_copy import SecondCopy
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import LEADS_OUTSIDE, short
from tiewise.core.errors import to_printable

_SHARD_FILE = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_SHARD_NUMBERS = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_SEVERITIES_OF_COPY: dict[SecondCopy, Severity] = {
    SecondCopy.EQUAL: "info",
    SecondCopy.ENDS_EQUAL: "warning",
    SecondCopy.UNKNOWN: "warning",
    SecondCopy.DIFFERENT: "error",
}
_ADAPTER_WEIGHTS = frozenset({"adapter_model.safetensors", "adapter_model.bin"})
_MODEL_PICKLE = re.compile(r"(pytorch_model|model|tf_model|flax_model)[^/]*\.(bin|pt|pth|ckpt|h5|msgpack)")


@rule("B001", "fatal", "every file can be read, and every header describes exactly its file", kind="any")
def unreadable(facts: AnyFacts) -> Observations:
    """A safetensors file has a length, a header and tensors. The tensors follow each other without gaps up to the last
    byte. A file breaks this if a full disk or a broken download cut it short, or if a tool wrote it wrongly. Loaders
    then fail late, or read a tensor's bytes from the wrong place. Config, generation config and tokenizer files must be
    JSON objects. `check` names weights that exist only as pickles and never opens them, because opening them runs code.
    What to do: take the damaged file from its source again; compare its size with what the source says.
    Sources: https://github.com/huggingface/safetensors#format
    """
    if isinstance(facts, AdapterFacts):
        for fault in facts.faults:
            yield fault.file, fault.problem, fault.remedy
    if isinstance(facts, Facts):
        yield from _unreadable_files(facts)


def _unreadable_files(facts: Facts) -> Observations:
    """Report files of a model's folder that cannot be read, and weights that are only pickles."""
    folder = facts.folder
    for fault in folder.faults:
        if fault.file != INDEX and folder.has(fault.file):  # B002 reports the index and missing shard files
            yield _unreadable_file(fault, facts)
    for fault in _further_faults(facts):
        repair = _encoding_repair(facts, fault)
        yield Observation(fault.file, _without_path(fault, folder), *repair, severity="warning")
    yield from _only_pickles(folder)


def _unreadable_file(fault: Fault, facts: Facts) -> Observation:
    """Return the finding about one file; links that the user may allow are errors."""
    where, problem = short(fault.file), _without_path(fault, facts.folder)
    if problem != to_printable(f"{fault.file}: {LEADS_OUTSIDE}"):
        return Observation(where, problem, *_encoding_repair(facts, fault))
    follow = f"if you trust the link: tiewise check {shlex.quote(str(facts.path))} --follow-links"
    problem = f"{where} is a link to a file outside the folder, and was not read"
    return Observation(where, problem, (follow, "else: copy the file into the folder"), severity="error")


def _encoding_repair(facts: Facts, fault: Fault) -> Repair:
    """Return the repair of an unreadable file.

    `repair` rewrites JSON that starts with a byte order mark as UTF-8.
    """
    if facts.folder.headers and as_utf8(facts.folder, fault.file) is not None:
        return Repair(facts.command("repair"), is_safe=True)
    return Repair(fault.remedy)


def _only_pickles(folder: Folder) -> Observations:
    """Report weights that exist only as pickles."""
    if folder.headers or folder.faults:
        return
    if folder.pickles:
        problem = f"its weights are pickles ({names(folder.pickles)}), and are not opened: a pickle can run any code"
        remedy = "load it in a sandbox, save it as safetensors, and check that"
        yield folder.pickles[0], problem, remedy


def _further_faults(facts: Facts) -> list[Fault]:
    """Return the faults of files that most loaders do not need."""
    faults = list[Fault]()
    if facts.tokenizer is not None:
        faults += facts.tokenizer.faults
    for record in (facts.generation, facts.modelopt):
        if isinstance(record, Fault):
            faults.append(record)
    return faults


def _without_path(fault: Fault, folder: Folder) -> str:
    """Return the problem of a fault, without the folder's path."""
    return fault.problem.removeprefix(f"{folder.path}/")


@rule("B002", "fatal", "the index and the shard files name the same tensors")
def index_and_shards(facts: Facts) -> Observations:
    """model.safetensors.index.json maps every tensor to the shard file that stores it. Tools that add, drop or rename
    tensors without rewriting the index leave names that no shard file stores, or tensors that no loader reads.
    llama.cpp's converter stopped at a `wte` that only the index named (llama.cpp#12456), and users edit the file by
    hand after merges (mergekit#385). A missing shard file is fatal. Tensors in another shard file, and tensors that the
    index lacks, can be mapped again from the headers. A name that no shard file stores can be removed only if it is the
    head of a tied model. transformers also needs an object `metadata`, which may be empty.
    What to do: `tiewise repair` rebuilds the index; a missing shard file must be downloaded.
    Sources: llama.cpp#12456; mergekit#385; transformers utils/hub.py (5.23.0)
    """
    yield from _missing_files(facts)
    weight_map = facts.folder.weight_map
    if weight_map is None:
        yield from _missing_index(facts)
    else:
        yield from _index_without_metadata(facts)
        yield from _wrong_index(facts, weight_map)


def _missing_files(facts: Facts) -> Observations:
    """Report an index that cannot be read, and shard files that the folder lacks."""
    folder = facts.folder
    if not folder.faults:
        return
    by_file = _tensors_by_file(folder.weight_map or {})
    for fault in folder.faults:
        if fault.file == INDEX:
            yield INDEX, _without_path(fault, folder), *_index_repair(facts, fault.remedy)
        elif fault.file in by_file and not folder.has(fault.file):
            lacking = by_file[fault.file]
            problem = f"the file {short(fault.file)} is missing; the index maps {counted(len(lacking), 'tensor')} to it"
            problem += f" ({names(lacking)})"
            yield short(fault.file), problem, "download the missing file"


def _index_repair(facts: Facts, by_hand: str) -> Repair:
    """Return the repair of a missing or unreadable index.

    `repair` writes it if every shard is there.
    """
    if has_all_shards(facts.folder):
        return Repair(facts.command("repair"), is_safe=True)
    return Repair(by_hand)


def has_all_shards(folder: Folder) -> bool:
    """Return whether the tensor files are the complete set that their names count, without an index.

    The names of n shards end in `-00001-of-0000n` to `-0000n-of-0000n`.
    """
    numbered = [_SHARD_NUMBERS.fullmatch(file) for file in folder.headers]
    shards = [match.groups() for match in numbered if match is not None]
    stems = {(stem, count) for stem, _, count in shards}
    if folder.weight_map is not None or folder.copies or len(shards) < len(folder.headers) or len(stems) != 1:
        return False
    ((_, count),) = stems
    return sorted(int(number) for _, number, _ in shards) == list(range(1, int(count) + 1))


def _tensors_by_file(weight_map: dict[str, str]) -> dict[str, list[str]]:
    """Return {file: names of its tensors} by the index."""
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    return by_file


def _missing_index(facts: Facts) -> Observations:
    """Report a folder in which loaders find no weights because it has no index."""
    folder = facts.folder
    if folder.config is None or not folder.headers:
        return
    if folder.opened is not None or folder.has(INDEX):
        return
    shard_files = list(filter(_SHARD_FILE.fullmatch, folder.headers))
    if shard_files:
        problem = f"the index of {counted(len(shard_files), 'shard file')} is missing, so transformers finds no weights"
        problem += f" ({names(shard_files)})"
        yield INDEX, problem, *_index_repair(facts, "download the index, or write the checkpoint again")
    elif isinstance(folder.config.get("model_type"), str):
        yield _other_file_names(facts, list(folder.headers))


def _other_file_names(facts: Facts, files: list[str]) -> Observation:
    """Return the finding about files of tensors under names that transformers does not look for."""
    remedy = "write the checkpoint again"
    if len(files) == 1 and is_hub_path(facts.folder.path):
        remedy = f"rename it to {SINGLE}"
    elif len(files) == 1:
        remedy = f"mv -- {_quoted(facts.folder.path / files[0])} {_quoted(facts.folder.path / SINGLE)}"
    problem = f"transformers looks for {SINGLE} or {INDEX}, and the folder has {names(files)}"
    return Observation(short(files[0]), problem, remedy, severity="error")


def _quoted(path: Path) -> str:
    """Return a path quoted for a shell."""
    return shlex.quote(str(path))


def _index_without_metadata(facts: Facts) -> Observations:
    """Report an index at which transformers stops."""
    if facts.folder.index_lacks_metadata and facts.folder.opened == INDEX:
        problem = "the index has no metadata object, and transformers stops at it"
        yield Observation(INDEX, problem, facts.command("repair"), True, severity="error")


def _wrong_index(facts: Facts, weight_map: dict[str, str]) -> Observations:
    """Report tensors whose file differs from the index, or that one of the two lacks."""
    tensors = facts.folder.tensors
    misplaced = _not_in_their_file(facts.folder, weight_map)
    elsewhere = [name for name in misplaced if name in tensors]
    if elsewhere:
        yield _in_other_files(facts, elsewhere, weight_map[elsewhere[0]])
    lost = [name for name in misplaced if name not in tensors]
    if lost:
        yield _in_no_file(facts, lost)
    unknown = [name for name in tensors if name not in weight_map]
    if unknown:
        yield _without_entry(facts, unknown)


def _in_other_files(facts: Facts, elsewhere: list[str], file: str) -> Observation:
    """Return the finding about tensors in another shard file than the index says.

    Args:
        file: shard file to which the index maps the first of them.
    """
    problem = f"the index names the wrong shard file for {counted(len(elsewhere), 'tensor')} ({names(elsewhere)})"
    return Observation(short(file), problem, facts.command("repair"), True, severity="error")


def _without_entry(facts: Facts, unknown: list[str]) -> Observation:
    """Return the finding about stored tensors that the index lacks."""
    file = facts.folder.tensors[unknown[0]].path.name
    problem = f"the index lacks {counted(len(unknown), 'stored tensor')} ({names(unknown)}), and some loaders skip them"
    return Observation(short(file), problem, facts.command("repair"), True, severity="error")


def _in_no_file(facts: Facts, lost: list[str]) -> Observation:
    """Return the finding about tensors that no shard file stores.

    It can be repaired if the only such tensor is the head of a tied model.
    """
    problem = f"the index names {counted(len(lost), 'tensor')} that no shard file stores ({names(lost)})"
    if facts.claims.tied is True and lost == [facts.roles.output_name]:
        return Observation(INDEX, problem, facts.command("repair"), True, severity="error")
    remedy = "download the shard files again, or their index"
    return Observation(INDEX, problem, remedy, severity="error")


def _not_in_their_file(folder: Folder, weight_map: dict[str, str]) -> list[str]:
    """Return the tensors that are not in the shard file to which the index maps them.

    Files that were not read are skipped.
    """
    misplaced = list[str]()
    for name, file in weight_map.items():
        header = folder.headers.get(file)
        if header is not None and name not in header.tensors:
            misplaced.append(name)
    return misplaced


@rule("B003", "warning", "total_size is right, and the folder holds no older weights")
def stale(facts: Facts) -> Observations:
    """The index states the bytes of all tensors. A wrong number is harmless to most loaders. It shows that the file was
    edited, or is older than a rewrite. Some tools also read files of weights that the index does not name: mlx-lm takes
    every model*.safetensors of a folder. transformers deletes its own old files before it writes new ones; other tools
    leave them. The rule ignores optimizer states and training arguments. If model.safetensors equals the
    shard files tensor by tensor, all loaders agree, and the rule only notes it. If an adapter is next to a full model,
    transformers with peft loads it on top of the model, and other loaders do not.
    What to do: `tiewise repair` corrects the number; move old weights out of the folder.
    Sources: transformers `save_pretrained`; mlx-lm `load_model`
    """
    yield from _wrong_total(facts)
    old = [name for name in facts.folder.extra if _is_of_model(name)]
    if facts.second_copy is SecondCopy.EQUAL:
        yield _equal_copy()
        old.remove(SINGLE)
    yield from _older_weights(facts, old)
    yield from _other_formats(facts.folder, [*old, SINGLE])
    if facts.folder.has(ADAPTER_CONFIG):
        yield _adapter_on_top(facts.folder)


def _is_of_model(file: str) -> bool:
    """Return whether a file of tensors has the name of a model's weights."""
    return file.startswith("model") or _SHARD_FILE.fullmatch(file) is not None


def _wrong_total(facts: Facts) -> Observations:
    """Report that the index states another number of bytes than the tensors have."""
    claimed = facts.folder.total_size
    if claimed is None or not facts.is_complete or facts.folder.unread:
        return
    total = sum(tensor.nbytes for tensor in facts.folder.tensors.values())
    if isinstance(claimed, bool) or claimed != total:  # True equals 1
        problem = f"the index states total_size = {value_text(claimed)}, and the tensors have {total:,} bytes"
        yield INDEX, problem, facts.command("repair"), True


def _equal_copy() -> Observation:
    """Return the note on a model.safetensors that equals the shard files."""
    problem = f"{SINGLE} and the shard files of the index store equal tensors. transformers opens {SINGLE}"
    remedy = "none needed: to save space, remove one of the two"
    return Observation(SINGLE, problem, remedy, severity="info")


def _older_weights(facts: Facts, old: list[str]) -> Observations:
    """Report files of weights outside the index; an error if loaders open another model."""
    if not old:
        return
    problem = f"{counted(len(old), 'file')} of weights that the index does not name ({names(old)})"
    problem += ". mlx-lm reads every model*.safetensors"
    remedy = "if they are old: move them out of the folder"
    severity: Severity = "warning"
    if SINGLE in old and facts.folder.opened == SINGLE:
        problem += f". transformers opens {SINGLE}, and ignores the index"
        if facts.second_copy is not None:
            problem += f". Compared with the shard files: {facts.second_copy.value}"
            severity = _SEVERITIES_OF_COPY[facts.second_copy]
    yield Observation(short(old[0]), problem, remedy, severity=severity)


def _adapter_on_top(folder: Folder) -> Observation:
    """Return the note on an adapter next to a full model.

    It is a warning if the adapter's weights are missing.
    """
    problem = f"the folder has a full model and {ADAPTER_CONFIG}. If peft is installed, transformers loads the adapter"
    problem += " on top of the model, and other loaders do not"
    remedy = "none needed if that is intended; else move the adapter's files out of the folder"
    severity: Severity = "info"
    if _ADAPTER_WEIGHTS.isdisjoint(folder.files):
        problem += ". The adapter's weights are missing, so transformers then stops"
        remedy = f"move {ADAPTER_CONFIG} out of the folder, or add adapter_model.safetensors"
        severity = "warning"
    return Observation(ADAPTER_CONFIG, problem, remedy, severity=severity)


def _other_formats(folder: Folder, old: list[str]) -> Observations:
    """Report weights in other formats or layouts than the checkpoint's.

    Args:
        old: files that `_older_weights` reports.
    """
    others = [name for name in folder.extra if name not in old]
    if folder.headers:
        others += filter(_MODEL_PICKLE.fullmatch, folder.pickles)
    if others:
        problem = f"the folder also has weights in other formats, which are not compared ({names(others)})"
        remedy = "if they are older than the safetensors: remove them"
        yield Observation(short(others[0]), problem, remedy, severity="info")


@rule("B004", "error", "no name is in two shard files")
def name_in_two_files(facts: Facts) -> Observations:
    """If two shard files store one name, each loader chooses one of the two tensors. It takes the one that the index
    maps, or the one that it reads last. Two equal tensors only waste bytes; with different ones, two loaders make two
    models.
    It comes from merges and from expert or pipeline ranks that each wrote the shared table (Megatron-Bridge#919).
    What to do: `tiewise repair` drops copies that are equal. If they differ, find out which one is the result of
    training.
    Sources: Megatron-Bridge#919; mergekit#385
    """
    for copy in facts.folder.copies:
        yield _copy_in_file(facts, copy)


def _copy_in_file(facts: Facts, copy: Stored) -> Observation:
    """Return the finding about a tensor whose name is in two shard files.

    An equal copy can be dropped.
    """
    first = facts.folder.tensors[copy.name]  # the tensor that loaders should take
    how, is_safe = "The two were not compared", False
    remedy = "find out which copy was trained, and write the shard files again"
    if facts.scan:
        is_safe = facts.are_equal(copy, first)
        how = "The two differ"
    if is_safe:
        how = "The two are equal"
        remedy = facts.command("repair")
    name = short(copy.name)
    problem = f"two shard files store {name}, {short(copy.path.name)} and {short(first.path.name)}"
    choice = "no index names one of them"
    if (facts.folder.weight_map or {}).get(copy.name) == first.path.name:
        choice = "the index names the second"
    problem += f". {how}; {choice}"
    return Observation(f"{short(copy.path.name)}: {name}", problem, remedy, is_safe)
