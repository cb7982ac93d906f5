"""Test tools/fuzz.py: its seeds, its mutators, files in memory, its command line, and a short run of every reader."""

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

import onnx
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import fuzz  # noqa: E402
from fuzzing import gguf_files, memory, protocol_buffers  # noqa: E402
from fuzzing.readers import READERS, outcome, require_plain  # noqa: E402

from tiewise.checkpoint.audit import check, check_opened  # noqa: E402
from tiewise.checkpoint.hf_folder import CONFIG, SINGLE  # noqa: E402
from tiewise.core.errors import CheckpointError  # noqa: E402

MUTATIONS = 150
# seeds that the reader refuses on purpose: WordPiece has no bytes, heads that do not divide, no vocabulary, no list
REFUSED = ("marks words", "cannot be grouped", "has no vocab_size", "has no layer_types")
# inputs that failed once, by reader
FOUND = {
    "config": [
        b'{"model_type": "siglip", "vision_config": null, "text_config": {"model_type": "siglip_text_model"}}',
        b'{"model_type": "siglip", "vision_config": {"patch_size": [0, 0]}, "text_config": {"vocab_size": 9}}',
        b'{"model_type": "a\\nb\\u001b[31m", "hidden_size": "\\u0000"}',
        b'{"model_type": "gpt2", "architectures": ["\\ud800"]}',
        b'{"model_type": "deepseek_v32", "num_hidden_layers": 7168}',
    ]
}


@pytest.mark.parametrize("name", READERS)
def test_reader_accepts_its_seeds(name):
    for data in READERS[name].seeds():
        error = outcome(READERS[name], data)
        assert error is None or any(words in str(error) for words in REFUSED)
        assert len(data) <= READERS[name].most_bytes


@pytest.mark.parametrize("name", READERS)
def test_reader_reads_or_refuses_mutated_files(name):
    reader, rng = READERS[name], Random(5)
    seeds, counts = reader.seeds(), {True: 0, False: 0}
    for _ in range(MUTATIONS):
        data = reader.mutate(rng.choice(seeds), rng, reader.words)
        if data is not None:
            counts[outcome(reader, data) is None] += 1
    assert min(counts.values()) > MUTATIONS // 100
    assert sum(counts.values()) > 0.9 * MUTATIONS


@pytest.mark.parametrize("name", FOUND)
def test_reader_reads_or_refuses_inputs_that_failed_once(name):
    for data in FOUND[name]:
        outcome(READERS[name], data)


def test_outcome_fails_for_errors_that_are_not_plain():
    def raising(error):
        def read(data):
            raise error

        return fuzz.FuzzedReader("x", read, list, None, (), 1, ())

    assert outcome(raising(CheckpointError("a", "b")), b"").remedy == "b"
    for error in (CheckpointError("no remedy"), ValueError("of Python"), RecursionError()):
        with pytest.raises((AssertionError, ValueError, RecursionError)):
            outcome(raising(error), b"")


def test_mutated_json_and_headers_parse():
    rng, reader = Random(1), READERS["safetensors"]
    for seed in READERS["safetensors"].seeds() * 30:
        data = reader.mutate(seed, rng, reader.words)
        if data is not None:
            length = struct.unpack("<Q", data[:8])[0]
            assert data[8 : 8 + length].strip()[-1:] in b'}]"0123456789elyN'


def test_protocol_buffers_are_encoded_as_they_were():
    for seed in READERS["onnx"].seeds():
        fields = protocol_buffers.fields_of(seed)
        assert b"".join(field.encode() for field in fields) == seed
    assert protocol_buffers.fields_of(b"\x0a\x05ab") is None
    rng, valid = Random(2), 0
    for seed in READERS["onnx"].seeds() * 20:
        data = protocol_buffers.mutate_message(seed, rng, READERS["onnx"].words)
        try:
            onnx.load_model_from_string(data)  # the library's own parser
            valid += 1
        except Exception:
            continue
    assert valid > 60


def test_gguf_parts_are_encoded_as_they_were():
    for seed in READERS["gguf"].seeds()[:5]:  # the last one has another alignment
        parts = gguf_files._Parser(seed).parts()
        assert parts.encode(Random(3)) == seed  # the seed draws the right counts


def test_folder_in_memory_is_checked_like_one_on_disk(tmp_path):
    files = {CONFIG: READERS["config"].seeds()[1], SINGLE: READERS["safetensors"].seeds()[0]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = [
        [(finding.rule, finding.evidence) for finding in audit.findings]
        for audit in (check_opened(memory.folder_of(files)), check(tmp_path, build=False))
    ]
    assert found[0] == found[1] != []
    require_plain(check_opened(memory.folder_of(files)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a reader: safetensors, gguf"),
        (["gguf"], "give --minutes or --inputs"),
        (["gguf", "--minutes", "0"], "above 0"),
        (["pickle", "--minutes", "1"], "invalid choice: 'pickle'"),
        (["all", "--repeat", "x"], "the name of one reader"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        fuzz.main()
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_repeat_prints_outcome_of_saved_input(monkeypatch, capsys, tmp_path):
    (tmp_path / "x").write_bytes(b"GGUF")
    for path, code, said in (("x", 0, "refused: /memory/m.gguf"), ("y", 2, "No such file")):
        monkeypatch.setattr(sys, "argv", ["fuzz.py", "gguf", "--repeat", str(tmp_path / path)])
        assert fuzz.main() == code
        assert said in "".join(capsys.readouterr())


def test_noted_runs_have_no_failure():
    runs = fuzz.recorded()
    assert all(run.failures == 0 and run.peak_mb <= fuzz.MOST_MB for run in runs)
    assert all(run.slowest_ms <= 1000 * fuzz.MOST_SECONDS for run in runs)
    assert len(fuzz.summary(runs).splitlines()) == 2 + len(READERS)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed (Linux on x86_64)")
def test_fuzzing_every_reader_with_1000_inputs_finds_no_failure(tmp_path):
    """A count of inputs is the same work on every machine, and a time is not."""
    command = [sys.executable, ROOT / "tools/fuzz.py", "all", "--inputs", "1000", "--corpus", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(READERS)
    for line in lines:
        assert ", 0 failed;" in line
        assert int(line.split()[1].replace(",", "")) >= 1000, line


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed (Linux on x86_64)")
def test_failing_reader_is_reported_with_its_input(tmp_path):
    """The child gets a reader that fails for every input with a byte 0x07."""
    child = (ROOT / "tools/fuzzing/child.py").read_text()
    program = f"import sys; __file__ = {str(ROOT / 'tools/fuzzing/child.py')!r}\n"
    program += f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
    program += "from fuzzing import readers; from dataclasses import replace\n"
    program += "readers.READERS['gguf'] = replace(readers.READERS['gguf'], read=lambda data: 1 / (7 not in data))\n"
    (tmp_path / "state").write_bytes(bytes(32))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "failures").mkdir()
    options = ["-runs=3000", "-mutate_depth=2"]
    command = [
        sys.executable,
        "-c",
        f"{program}exec({child!r})",
        "gguf",
        tmp_path / "state",
        tmp_path / "failures",
        *options,
    ]
    subprocess.run([*command, tmp_path / "corpus"], check=True, capture_output=True)
    from fuzzing.child import Counts

    counts = Counts.of((tmp_path / "state").read_bytes())
    saved, text = sorted((tmp_path / "failures").iterdir())
    assert counts.failures > 0
    assert 7 in saved.read_bytes()
    assert "ZeroDivisionError" in text.read_text()
