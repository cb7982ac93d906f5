"""Files that are larger than any published one: a check stays below 512 MB, and says how many findings there were."""

import json
import resource
import struct
import subprocess
import sys

import pytest
from tiny_checkpoints import llama, llama_config, write_checkpoint

MOST = 512 * 2**20
SECONDS = 60  # of CPU, on a machine as busy as it may be: none of these hangs
CHILD = """
import json, sys
from tiewise.checkpoint.audit import check
from tiewise.core.errors import CheckpointError
try:
    said = [(f["rule"], f["evidence"], f["count"]) for f in check(sys.argv[1]).record()["findings"]]
except CheckpointError as error:
    said = str(error)
# its own peak: what getrusage tells is the parent's too, whose memory it had for a moment before it became this program
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([said, int(peak.split()[1]) * 1024]))
"""


def checked(path):
    """Check a folder in a process of its own: its findings, once it has stayed within its memory."""
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))}
    made = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, **limits)
    assert made.returncode == 0, made.stderr[-2000:]
    said, peak = json.loads(made.stdout)
    assert peak < MOST, f"{peak / 2**20:.0f} MB: {said}"
    return said


def vocabulary(tokens):
    return '{"model":{"vocab":{' + ",".join(f'"token {i}":{i}' for i in range(tokens)) + "}}}"


def header(tensors):
    entry = '"model.layers.{}.w":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    text = ("{" + ",".join(entry.format(i) for i in range(tensors)) + "}").encode()
    return struct.pack("<Q", len(text)) + text


EMOJI = "\U0001f600"
MANY = "more than 1,500,000 tokens"
# file, what it holds, what is said of it: nothing where it is as large as may be, and read
QUICK = {
    "pieces": ("tokenizer.model", lambda: b"\n\0" * 5_000_000, MANY),
    "other fields": ("spiece.model", lambda: b"\x10\0" * 5_000_000, MANY),
    "lines": ("vocab.txt", lambda: b"\n" * 20_000_000, MANY),
    "one wide character": ("vocab.txt", lambda: b"x" * 60_000_000 + EMOJI.encode(), "more than 420 MB of memory"),
}
SLOW = {
    "200 MB of pieces": ("tokenizer.model", lambda: b"\n\0" * 100_000_000, MANY),
    "200 MB of lines": ("vocab.txt", lambda: b"\n" * 200_000_000, MANY),
    "5 M tokens": ("tokenizer.json", lambda: vocabulary(5_000_000).encode(), "more than 6,000,000 values"),
    "2 M tokens": ("tokenizer.json", lambda: vocabulary(2_000_000).encode(), None),
    "a long config": ("config.json", lambda: b'{"a":[' + b"[]," * 3_000_000 + b"0]}", " bytes"),
}
CASES = [pytest.param(*case, id=name) for name, case in QUICK.items()]
CASES += [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()]


@pytest.mark.parametrize(("file", "content", "says"), CASES)
def test_a_file_beyond_all_bounds_is_a_finding(tmp_path, file, content, says):
    path = llama(tmp_path / "a")
    (path / file).write_bytes(content())
    faults = [evidence for rule, evidence, _ in checked(path) if rule == "B001"]
    assert len(faults) == (says is not None)
    assert all(evidence.startswith(f"{file}: ") and says in evidence for evidence in faults)


def index(path, shards):
    weight_map = {f"t{i}": f"model-{i:06d}.safetensors" for i in range(shards)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("shards", [10, 11, 12, pytest.param(20_000, id="many")])
def test_findings_of_one_kind_are_counted_after_the_tenth(tmp_path, shards):
    path = write_checkpoint(tmp_path / "a", llama_config())
    (path / "model.safetensors").unlink()
    index(path, shards)
    found = [(evidence, count) for rule, evidence, count in checked(path) if rule == "B002"]
    assert sum(count for _, count in found) == shards
    assert len(found) == min(shards, 11)
    assert found[0][0] == "the index maps 1 tensor to it (t0), and it is not there"
    if shards > 11:
        last = (
            f"{shards - 10:,} more of {shards:,} findings of this kind, the last at model-{shards - 1:06d}.safetensors"
        )
        assert found[-1] == (last, shards - 10)


def test_the_terminal_counts_them_all(tmp_path):
    path = write_checkpoint(tmp_path / "a", llama_config())
    (path / "model.safetensors").unlink()
    index(path, 3000)
    said = subprocess.run([sys.executable, "-m", "tiewise", "check", path], capture_output=True, text=True)
    assert said.returncode == 1
    assert "2,990 more of 3,000 findings of this kind" in " ".join(said.stdout.split())
    assert "3,000 fatal" in said.stdout
    assert len(said.stdout) < 10_000


def test_more_shards_than_any_checkpoint_has(tmp_path):
    path = write_checkpoint(tmp_path / "a", llama_config())
    index(path, 40_000)
    assert any("40,000 tensors in 40,000 files are no checkpoint" in evidence for _, evidence, _ in checked(path))


@pytest.mark.slow
def test_many_empty_shards(tmp_path):
    path = write_checkpoint(tmp_path / "a", llama_config())
    for i in range(20_000):
        (path / f"model-{i}.safetensors").touch()
    (path / "model.safetensors").unlink()
    assert sum(count for rule, _, count in checked(path) if rule == "B001") == 20_000


@pytest.mark.slow
def test_more_tensors_than_any_checkpoint_has(tmp_path):
    path = write_checkpoint(tmp_path / "a", llama_config())
    (path / "model.safetensors").write_bytes(header(170_000))
    assert "more than 160,000 tensors are no checkpoint" in checked(path)
