"""What `tie`, `untie`, `dedupe` and `repair` ask before they touch the two ends of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, open_folder
from tiewise.checkpoint.roles import BY_DATA
from tiewise.checkpoint.rule import difference
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import likeness
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.groups import Group, groups
from tiewise.rewrite.plain_ends import is_own, readable


def opened(source: Path) -> Facts:
    """Open the source of a rewrite.

    Raises:
        CheckpointError: it cannot be read, or holds no tensors of a model.
    """
    if Path(source).suffix == ".gguf":
        fix = "rewrite the Hugging Face folder from which it was made, and convert that"
        raise CheckpointError(f"{source}: a GGUF file is not rewritten", fix)
    folder = open_folder(source)
    if not folder.tensors and not folder.faults:
        fix = "merge it into its base first" if folder.has(ADAPTER_CONFIG) else "give a folder with model.safetensors"
        kind = "an adapter" if folder.has(ADAPTER_CONFIG) else "a folder without safetensors"
        raise CheckpointError(f"{source}: {kind} has no two ends to rewrite", fix)
    return Facts(folder)


def require_ends(facts: Facts, verb: str) -> None:
    """Raise unless the tables are plain numbers and the model has a head.

    Raises:
        CheckpointError: with the reason and the way out.
    """
    if facts.roles.input is not None or facts.roles.output is None or facts.roles.quantised_output:
        readable(facts, verb)
    if is_own(facts):
        raise CheckpointError(f"{facts.path}: its boundary has maps of its own", "tiewise densify it first")
    if facts.roles.headless or facts.roles.output_name is None:
        fix = "a model without a token head has one end only; give one with a head"
        raise CheckpointError(f"{facts.path}: no output head was found, so there is nothing to {verb}", fix)


def table_group(facts: Facts) -> Group:
    """Return the group of the table and the head.

    Raises:
        CheckpointError: the class keeps the two apart.
    """
    output = facts.roles.output_name or ""
    for group in groups(facts):
        if any(name.endswith(output) for name in (group.source, *group.targets)):
            return group
    what = f"{facts.path}: the class {_class(facts)} has no tie between its input table and its head"
    raise CheckpointError(what, "store both, as it expects")


def source_note(facts: Facts) -> tuple[str, ...]:
    """Return the note that says how the ends were found where the family is not known."""
    roles = facts.roles
    if roles.source == BY_DATA:
        return ()
    ends = f"{short(roles.input_name or 'none')} and {short(roles.output_name or 'none')}"
    return (f"the family is not in the architecture data: the two ends were found by {roles.source}, {ends}",)


def how_they_differ(facts: Facts, a: Stored, b: Stored) -> str:
    """Return half a sentence on two tensors that are not equal."""
    alike = likeness(a, b)
    if alike is None:
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return difference(alike)


def refuse(what: str, fix: str, force: bool) -> tuple[str, ...]:
    """Raise where an operation would change the model's function; with `force`, return the reason as a note.

    Raises:
        CheckpointError: unless `force`.
    """
    if not force:
        raise CheckpointError(what, f"{fix}; --force does it all the same")
    return (f"forced: {what}",)


def _class(facts: Facts) -> str:
    names = facts.config.get("architectures")
    return short(names[0]) if isinstance(names, list) and names else short(facts.config.get("model_type"))
