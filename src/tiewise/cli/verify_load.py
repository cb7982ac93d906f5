"""Verification of a rewritten checkpoint: load it and its source with transformers, and compare.

Loading runs the library's code on files that may be untrusted, so it happens in a child process (`load_child.py`) with
limits of memory and time: safetensors only, local files only, classes of transformers itself only. Nothing here imports
torch or transformers. What cannot be loaded under these terms is reported as not verified, with the reason.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tiewise.checkpoint.claims import architecture, needs_tiewise
from tiewise.checkpoint.config_parts import quantisation
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Folder, open_folder
from tiewise.checkpoint.rewrite.engine import Receipt
from tiewise.checkpoint.rewrite.registry import LOGITS_DIFFER, Verb, registered
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.untrusted import require_memory, short
from tiewise.core.errors import CheckpointError
from tiewise.core.files import format_bytes
from tiewise.core.json_child import ChildLimits, NoReply, ask_child

MOST_BYTES = 2_000_000_000  # of tensors, of the source and of the result
MOST_SECONDS = 180
LIBRARY_BYTES = 2**31  # memory of torch and transformers before a model is loaded
ROUNDING = 1e-4  # relative to the largest logit; more than fp32 rounding between tables of other shapes


@dataclass(frozen=True)
class LoadCheck:
    """Outcome of loading the source and the result with transformers."""

    outcome: Literal["verified", "not verified", "failed"]
    sentence: str

    def record(self) -> dict[str, str]:
        """Return it as JSON."""
        return asdict(self)


def verify_load(receipt: Receipt) -> LoadCheck:
    """Load a receipt's source and result in a child process and compare the two."""
    verb = registered(receipt.verb)
    try:
        folders = [open_folder(receipt.source), open_folder(receipt.to)]
        reason = _reason_against(verb, folders)
    except CheckpointError as error:
        reason = str(error)
    if reason is not None:
        return LoadCheck("not verified", reason)
    changes_function = receipt.logit_change > 0 or receipt.input_change > 0
    rows = None
    if verb is not None and not changes_function:
        rows = verb.keeps_logits
    reply = _load_in_child([folder.path for folder in folders], rows, max(map(_fp32_bytes, folders)))
    if isinstance(reply, str):
        return LoadCheck("not verified", reply)
    return _judge(reply, verb, rows)


def _reason_against(verb: Verb | None, folders: list[Folder]) -> str | None:
    """Return why source and result cannot be loaded for a comparison; None if they can."""
    lacking = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if verb is not None and verb.of_adapter:
        return "an adapter has no logits without its base"
    for folder in folders:
        reason = _reason_against_folder(folder)
        if reason is not None:
            return reason
        require_memory(LIBRARY_BYTES + 2 * _fp32_bytes(folder), "loading it")
    return None


def _reason_against_folder(folder: Folder) -> str | None:
    """Return why one folder is not loaded; None if it can be."""
    config = folder.config
    if folder.single or config is None:
        return "there is no config.json"
    if needs_tiewise(config):
        return "a model of tiewise's own type is not a class of transformers"
    if "auto_map" in config:
        return "its classes come as custom code, which is not run"
    if folder.has(ADAPTER_CONFIG):
        return f"{ADAPTER_CONFIG} is in the folder too, and transformers would load the adapter"
    if architecture(config) is None:
        return "its config.json names no class"
    if quantisation(config):
        return "it is quantised"
    nbytes = sum(tensor.nbytes for tensor in folder.tensors.values())
    if nbytes > MOST_BYTES:
        return f"it has {format_bytes(nbytes)} of tensors, and up to {format_bytes(MOST_BYTES)} are loaded"
    return None


def _fp32_bytes(folder: Folder) -> int:
    """Return the bytes of all tensors in fp32, the type in which the models are run."""
    return sum(4 * math.prod(tensor.shape) for tensor in folder.tensors.values())


def _load_in_child(paths: list[Path], rows: str | None, model_bytes: int) -> dict[str, Any] | str:
    """Return what the child process reports of the two folders, or why it reports nothing."""
    request = {
        "paths": [os.path.abspath(path) for path in paths],
        "rows": rows,
        "memory": LIBRARY_BYTES + 2 * model_bytes + 2**30,
        "seconds": MOST_SECONDS,
    }
    reply = ask_child("tiewise.cli.load_child", request, ChildLimits(MOST_SECONDS))
    if isinstance(reply, NoReply):
        return f"loading {reply.reason}"
    return reply


def _judge(reply: dict[str, Any], verb: Verb | None, rows: str | None) -> LoadCheck:
    """Return the outcome of loading both: errors first, then missing tensors, then logits."""
    if "not_loaded" in reply:  # the source: nothing is known of what the result should be
        return LoadCheck("not verified", f"transformers does not load the source: {short(reply['not_loaded'], 160)}")
    version = f"transformers {short(reply['version'])}"
    if "result_error" in reply:
        return LoadCheck("failed", f"{version} does not load the result: {short(reply['result_error'], 160)}")
    missing_in_source, missing_in_result = reply["missing"]
    missing = [name for name in missing_in_result if name not in missing_in_source]
    if missing:
        count = f"{len(missing):,} tensor{'s' if len(missing) > 1 else ''}"
        what = f"{version} draws {count} of the result at random that the source has: {names(missing)}"
        return LoadCheck("failed", what)
    if missing_in_source:
        why = f"the source itself lacks {names(missing_in_source)}, so its logits are random"
        return LoadCheck("verified", f"{version} misses no tensor of the result that the source has; {why}")
    loaded = f"{version} loads the result without a missing tensor"
    if rows is None:
        reason = LOGITS_DIFFER if verb is None else verb.logits_differ
        return LoadCheck("verified", f"{loaded}; logits were not compared: {reason}")
    if "not_run" in reply:
        return LoadCheck("verified", f"{loaded}; logits were not compared: {short(reply['not_run'], 160)}")
    return _judge_logits(reply, version, loaded, rows)


def _judge_logits(reply: dict[str, Any], version: str, loaded: str, rows: str) -> LoadCheck:
    """Return what the compared logits of source and result show; `rows` names those that were compared."""
    largest, change, tokens = reply["largest"], reply["change"], reply["tokens"]
    if change is None:
        what = f"{version}: logits of source and result are not finite at the same places, at {tokens} tokens"
        return LoadCheck("failed", what)
    if change > ROUNDING * largest:
        difference = f"differ by up to {change:.3g} of {largest:.3g}"
        return LoadCheck("failed", f"{version}: logits of source and result {difference}, at {tokens} tokens")
    same_rows = {"all": "the same logits", "first": "the same logits of the rows that both have"}
    what = same_rows.get(rows, "the same logits of the tokens that stay")
    return LoadCheck("verified", f"{loaded}, and gives {what} at {tokens} tokens (largest change {change:.3g})")
