"""Rules on all tensors of the model's class, which the installed transformers names: B036."""

from __future__ import annotations

from tiewise.checkpoint.built_class import NotBuilt
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.new_tensors import NewTensors
from tiewise.checkpoint.rules.rule import Observation, Observations, names, rule
from tiewise.checkpoint.untrusted import short

_LOAD_IT = "load it with from_pretrained on a larger machine and read which tensors it reports as newly initialised"
_LEAVE_OUT = "add --no-build if the two ends are enough"


@rule("B036", "error", "the class finds all its tensors outside the embedding and head")
def other_tensors(facts: Facts) -> Observations:
    """Both ends may be right, and the rest of the model may not load. A save lost some layers, a tool renamed them, or
    a false flag parted layers that share their weights, as in Zamba. transformers then initialises the missing tensors,
    matrices at random and others with fixed numbers, and only a warning says so. If transformers is installed, `check`
    builds the class without weights for this config and lets it look for each tensor by name and shape. Without
    transformers, the rule reports nothing. If the class needs more than 20 s of processor time or 2 GB, a note says
    that only the embedding and head were judged.
    What to do: take the tensors from the checkpoint's source, or store them under the names that the class gives them.
    Sources: transformers: from_pretrained, loading_info
    """
    load = facts.class_load
    if isinstance(load, NotBuilt) and load.is_stopped:
        problem = f"tensors outside the embedding and head were not judged: {load.reason}"
        yield Observation("config.json", problem, (_LOAD_IT, _LEAVE_OUT), severity="info")
    if isinstance(load, NotBuilt) or facts.foreign_layers is not None:
        return
    if facts.is_packed_for_mlx:
        return
    lost = facts.missing_elsewhere
    if lost:
        problem = NewTensors.among(lost, load).active(f"transformers {load.version}")
        problem += f", outside the embedding and head: {names(lost)}"
        yield short(lost[0]), problem, "take them from the source, or store them under these names"
    for mismatch in load.mismatched:
        if mismatch.name in facts.names_at_the_ends:
            continue
        problem = f"{short(mismatch.name)} is stored as {list(mismatch.stored)}, and its class has"
        problem += f" {list(mismatch.needed)}"
        yield short(mismatch.name), problem, "correct the sizes in config.json, or take the tensor from its source"
    for name in load.failed:
        problem = f"the stored tensors cannot be converted to {short(name)}, so that transformers does not load them"
        yield short(name), problem, "take the checkpoint from its source again"
