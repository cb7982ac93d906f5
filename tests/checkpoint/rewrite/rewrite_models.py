"""Helpers for tests of verbs: tiny saved models, verbs in a child process, and hashes of folders."""

import json
import subprocess
import sys

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from tests.boundary.tiny_models import FAMILIES, V, build
from tests.checkpoint.rewrite.rewrite_hashes import hash_files, hash_without_times

from tiewise.checkpoint.stored import read_header

SHARING = ("t5", "t5_v11", "bart", "marian", "bert", "roberta")

__all__ = ["FAMILIES", "V", "build", "ends", "hash_files", "hash_without_times", "logits", "same_table", "saved"]
__all__ += ["tensors"]


def saved(path, name, tied=True, dtype=torch.float32, shard="1GB", **settings):
    """Save a tiny model of a family under `path`, and return it in evaluation mode.

    If the flag also shares the stacks' input tables or the bias, only the head is untied.
    """
    model = build(name, tied or name in SHARING, **settings).to(dtype).eval()
    model.requires_grad_(False)
    if not tied and name in SHARING:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.flip(0).clone(), requires_grad=False)
    model.save_pretrained(path, max_shard_size=shard)
    return model


def ends(model):
    """Return the modules of the input embedding and of the head."""
    return model.get_input_embeddings(), model.get_output_embeddings()


def same_table(model):
    """Return whether both ends use one table."""
    lookup, head = ends(model)
    return lookup.weight is head.weight


def logits(model, ids=None):
    """Return the logits of fixed token ids, which an encoder-decoder reads in both stacks."""
    ids = torch.arange(3, 43).reshape(2, 20) % 61 if ids is None else ids
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **extra).logits


def tensors(path):
    """Return every tensor of a folder, read by the safetensors library."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def truncated(matrix, rank):
    """Return the best approximation of a rank in fp64, computed by numpy."""
    u, s, vt = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def config_of(path):
    """Return the config of a folder."""
    return json.loads((path / "config.json").read_text())


def store(folder, **arrays):
    """Write arrays to a file and return its tensors as tiewise reads them."""
    save_file(arrays, folder / "t.safetensors")
    return read_header(folder / "t.safetensors").tensors


# Prints "ready", waits for a line, runs the verb, and prints the files with the peak of private memory, or the error.
CHILD = """
import json, re, resource, signal, sys
from tiewise.checkpoint import rewrite
from tiewise.core.errors import CheckpointError
verb, source, to, options = *sys.argv[1:4], json.loads(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
if limit := options.pop("limit", None):  # bytes of the largest file that may be written
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    receipt = getattr(rewrite, verb)(source, to, **options)
    peak, file = (int(kb) for kb in re.findall(r"(?:VmHWM|RssFile):\\s+(\\d+)", open("/proc/self/status").read()))
    made = {"peak": 1024 * (peak - file), "linked": receipt.linked, "rewritten": receipt.rewritten}
except CheckpointError as error:
    made = {"error": str(error)}
print(json.dumps(made))
"""


def start_child(verb, source, to, **options):
    """Start a child process that runs a verb after `release_child`, and wait until it is ready."""
    command = [sys.executable, "-c", CHILD, verb, str(source), str(to), json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def release_child(process):
    """Let a child process run its verb."""
    process.stdin.write("go\n")
    process.stdin.flush()


def run_child(verb, source, to, **options):
    """Run a verb in a child process and return its printed record."""
    process = start_child(verb, source, to, **options)
    out, _ = process.communicate("go\n")
    assert process.returncode == 0
    return json.loads(out)
