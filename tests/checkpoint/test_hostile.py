"""Test that damaged, oversized and oddly typed checkpoints give plain errors or findings in bounded memory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_child import memory_below
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_writer import piece
from test_header import entry, header
from tiny_checkpoints import bpe_tokenizer, llama, llama_config, write_checkpoint, write_index

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.rules.onnx_file import MOST_FIELDS
from tiewise.checkpoint.rules.rule import rules
from tiewise.checkpoint.untrusted import MOST_VALUES, first_fields, open_regular, parse_json
from tiewise.core.errors import CheckpointError

CHILD = Path(__file__).with_name("hostile_child.py")


@pytest.mark.parametrize(
    ("first", "count", "kinds"),
    [
        pytest.param(0, 180, [], id="few"),
        pytest.param(1000, 5000, [], id="many", marks=pytest.mark.slow),
        *(pytest.param(20_000, 1500, [kind], id=kind, marks=pytest.mark.slow) for kind in ("draft", "onnx")),
        *(pytest.param(30_000, 60, [verb], id=f"{verb}, a few") for verb in ("merge", "slim")),
        *(pytest.param(40_000, 1500, [verb], id=verb, marks=pytest.mark.slow) for verb in ("merge", "slim")),
    ],
)
def test_check_and_verbs_survive_damaged_checkpoints(tmp_path, first, count, kinds):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(tmp_path / "home"), str(first), str(count), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert not told["failed"], f"{len(told['failed'])} of {count}: " + "\n".join(told["failed"][:20])
    assert told["checked"] + told["refused"] == count
    assert told["refused"] > count // (200 if kinds == ["draft"] else 100)
    least = {"onnx": 4, "merge": 8, "slim": 8}.get(kinds[0] if kinds else "", 2)  # a graph has no JSON to mutate
    assert told["checked"] > count // least  # verbs refuse more cases than `check`
    assert told["grown"] < 200 * 2**20


@pytest.mark.parametrize("values", [b"[],", b"{},", b"0,"])
def test_parse_json_refuses_too_many_values_in_bounded_memory(values):
    text = b"[" + values * (MOST_VALUES // len(values) * 2) + b"0]"
    with memory_below(2**20), pytest.raises(CheckpointError, match="more than 6,000,000 values"):
        parse_json(text, "tokenizer.json")


MOST = 512 * 2**20
SECONDS = 60  # CPU time limit, ample on a busy machine, that detects a hang
CHECKING = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
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


def check_in_child(path):
    """Check a folder in a separate process, assert its peak memory, and return its findings."""
    made = subprocess.run([sys.executable, "-c", CHECKING, str(path)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    said, peak = json.loads(made.stdout)
    assert peak < MOST, f"{peak / 2**20:.0f} MB: {said}"
    return said


def vocabulary_json(tokens):
    return '{"model":{"vocab":{' + ",".join(f'"token {i}":{i}' for i in range(tokens)) + "}}}"


MANY = "more than 1,500,000 tokens"
# file, content, words of the finding; None for the largest content that is accepted
QUICK = {
    "pieces": ("tokenizer.model", lambda: b"\n\0" * 5_000_000, MANY),
    "other fields": ("spiece.model", lambda: b"\x10\0" * 5_000_000, MANY),
    "lines": ("vocab.txt", lambda: b"\n" * 20_000_000, MANY),
    "one emoji": ("vocab.txt", lambda: b"x" * 60_000_000 + "\U0001f600".encode(), "more than 420 MB of memory"),
}
SLOW = {
    "200 MB of pieces": ("tokenizer.model", lambda: b"\n\0" * 100_000_000, MANY),
    "200 MB of lines": ("vocab.txt", lambda: b"\n" * 200_000_000, MANY),
    "5 M tokens": ("tokenizer.json", lambda: vocabulary_json(5_000_000).encode(), "more than 6,000,000 values"),
    "2 M tokens": ("tokenizer.json", lambda: vocabulary_json(2_000_000).encode(), None),
    "a long config": ("config.json", lambda: b'{"a":[' + b"[]," * 3_000_000 + b"0]}", " bytes"),
}
CASES = [pytest.param(*case, id=name) for name, case in QUICK.items()]
CASES += [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()]


@pytest.mark.parametrize(("file", "content", "says"), CASES)
def test_b001_reports_files_beyond_size_limits(tmp_path, file, content, says):
    path = llama(tmp_path / "a")
    (path / file).write_bytes(content())
    faults = [evidence for rule, evidence, _ in check_in_child(path) if rule == "B001"]
    assert len(faults) == (says is not None)
    assert all(evidence.startswith(f"{file}: ") and says in evidence for evidence in faults)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [MOST_FIELDS + 1, MOST_FIELDS - 9])
def test_check_refuses_onnx_graph_above_field_limit(tmp_path, nodes):
    (tmp_path / "m.onnx").write_bytes(piece(7, piece(1, b"") * nodes))
    said = check_in_child(tmp_path / "m.onnx")
    assert (f"more than {MOST_FIELDS:,} fields" in said) == (nodes > MOST_FIELDS)


def write_index_without_shards(path, shards):
    """Write a folder whose index names missing shards."""
    write_checkpoint(path, llama_config())
    (path / "model.safetensors").unlink()
    return write_index(path, {f"t{i}": f"model-{i:06d}.safetensors" for i in range(shards)}, None)


@pytest.mark.parametrize("shards", [10, 11, 12, pytest.param(20_000, id="many")])
def test_check_counts_findings_of_one_kind_after_the_tenth(tmp_path, shards):
    found = [
        (said, count)
        for rule, said, count in check_in_child(write_index_without_shards(tmp_path / "a", shards))
        if rule == "B002"
    ]
    assert sum(count for _, count in found) == shards
    assert len(found) == min(shards, 11)
    assert found[0][0] == "the file model-000000.safetensors is missing; the index maps 1 tensor to it (t0)"
    if shards > 11:
        more = f"{shards - 10:,} more of {shards:,} findings of this kind"
        assert found[-1] == (f"{more}, the last at model-{shards - 1:06d}.safetensors", shards - 10)


def test_terminal_summarises_findings_of_one_kind_by_count(tmp_path):
    command = [sys.executable, "-m", "tiewise", "check", write_index_without_shards(tmp_path / "a", 3000)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1
    assert "2,990 more of 3,000 findings of this kind" in " ".join(said.stdout.split())
    assert "3,000 fatal" in said.stdout
    assert len(said.stdout) < 10_000


def test_check_refuses_index_with_too_many_shards(tmp_path):
    found = check_in_child(write_index_without_shards(tmp_path / "a", 40_000))
    assert any("40,000 tensors in 40,000 files are no checkpoint" in evidence for _, evidence, _ in found)


@pytest.mark.slow
def test_check_refuses_too_many_tensors_and_counts_empty_shards(tmp_path):
    path = write_checkpoint(tmp_path / "a", llama_config())
    (path / "model.safetensors").write_bytes(header(dict.fromkeys(map(str, range(170_000)), entry("F32", [0], [0, 0]))))
    assert "more than 160,000 tensors are no checkpoint" in check_in_child(path)
    (path / "model.safetensors").unlink()
    for i in range(20_000):
        (path / f"model-{i}.safetensors").touch()
    assert sum(count for rule, _, count in check_in_child(path) if rule == "B001") == 20_000


ODD = st.sampled_from([-1, 0, 1, 2**63, 10**400, 1e308, float("inf"), float("nan"), True, "", "32000", "\x1b[2J", None])
VALUES = st.recursive(
    ODD | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    *("model_type", "architectures", "vocab_size", "hidden_size", "tie_word_embeddings", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "text_config", "decoder", "generator", "quantization_config"),
    *("auto_map", "additional_vocab_size", "pad_vocab_size_multiple", "prompt_types", "prompt_length"),
    *("embedding_size", "logits_scaling", "tiewise_boundary", "base_model_type", "is_encoder_decoder"),
    "initializer_range",
]
LEVELS = ["", "text_config", "decoder", "\x1b[2J_config", "\x1b_config"]
TOKENIZERS = ["added_tokens", "model", "version"]


@st.composite
def configs(draw):
    """Draw a Llama's config in which some keys, at the root or below, have arbitrary values."""
    config = llama_config(draw(st.booleans()))
    config["model_type"] = draw(st.sampled_from(["llama", "t5", "granite", "mllama", "tiewise", "llava", "nobody's"]))
    for level in draw(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=2)):
        part = config if not level else config.setdefault(level, llama_config())
        if level.startswith("\x1b"):
            part["text_config"] = llama_config(draw(st.booleans()), logits_scaling=2.0)
        if isinstance(part, dict):
            part |= draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    return config


def assert_sane(audit):
    for finding in audit.findings:
        assert finding.rule in rules()
        assert len(finding.evidence) < 1500
        assert all(text.isprintable() for text in (finding.where, finding.evidence, finding.repair))
    json.dumps(audit.record(), allow_nan=False)


SLOW_DISK = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW_DISK
@given(config=configs(), generation=VALUES, stored_head=st.booleans())
def test_check_tolerates_arbitrary_configs(tmp_path, config, generation, stored_head):
    path = llama(tmp_path, not stored_head, files={"generation_config.json": generation})
    (path / "config.json").write_text(json.dumps(config))
    assert_sane(check(path, deep=True))


@SLOW_DISK
@given(whole=st.booleans(), entries=st.dictionaries(st.sampled_from(TOKENIZERS), VALUES), beside=VALUES)
def test_check_tolerates_arbitrary_tokenizers(tmp_path, whole, entries, beside):
    record = bpe_tokenizer() | entries if whole else entries
    files = {"added_tokens.json": beside, "tokenizer_config.json": {"added_tokens_decoder": beside}}
    assert_sane(check(llama(tmp_path, tokenizer=record, files=files), deep=True))


@SLOW_DISK
@given(weight_map=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | VALUES, max_size=4), metadata=VALUES)
def test_check_tolerates_arbitrary_indexes(tmp_path, weight_map, metadata):
    path = llama(tmp_path, shards=2)
    index = path / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    record["weight_map"] |= weight_map
    index.write_text(json.dumps(record | {"metadata": metadata}))
    assert_sane(check(path))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 256, 16_383, 16_384, 20_000])
def test_first_fields_returns_protocol_buffer_fields_of_any_length(length):
    data = piece(1, b"a" * length) + piece(2, b"passed over") + piece(1, b"b")
    spans = first_fields(data, 0, len(data), 10, "file")
    assert [data[start:end] for start, end in spans] == [b"a" * length, b"b"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "chmod u+r model.safetensors"),
        (errno.EPERM, "chmod u+r model.safetensors"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "close other programs"),
        (errno.EIO, "take it from its source again"),
        (errno.ELOOP, "symbolic links"),
        (errno.ENAMETOOLONG, "check the path"),
        (errno.ENOTDIR, "check the path"),
        (errno.ENOENT, "check the path"),
    ],
)
def test_file_that_cannot_be_opened_has_remedy_for_its_cause(monkeypatch, code, remedy):
    def refuse(path, flags):
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        open_regular("model.safetensors")
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_link_to_itself_and_folder_are_no_files(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match="symbolic links lead in a circle"):
        open_regular(loop)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_regular(tmp_path)
