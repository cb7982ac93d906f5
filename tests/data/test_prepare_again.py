import io
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tiewise.core.errors import DataError
from tiewise.core.progress import heard
from tiewise.data import corpus
from tiewise.data.corpus import prepare
from tiewise.data.prepared import load_prepared

SCRIPT = """
import os, signal, sys
from pathlib import Path
from tiewise.core.progress import heard
from tiewise.data.corpus import prepare
def progress(stage, done, total):
    if stage == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
with heard(progress):
    prepare([sys.argv[1]], "bpe:400", Path(sys.argv[2]), length=8, seed=5)
"""


def run(source, out, kill, hash_seed="0"):
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", SCRIPT, source, out, kill], env=environment).returncode


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_killed_leaves_nothing_that_looks_prepared_and_the_next_run_is_the_same(source, out, tmp_path):
    assert run(source, out, "tokens", "1") == -signal.SIGKILL
    assert not (out / "data.json").exists()
    with pytest.raises(DataError, match="no prepared text"):
        load_prepared(out)
    prepare([str(source)], "bpe:400", out, length=8, seed=5)
    assert run(source, tmp_path / "other", "never", "2") == 0  # another process, another hash seed
    assert contents(out) == contents(tmp_path / "other")


@pytest.mark.parametrize("stage", ["reading", "tokenizer", "tokens"])
def test_interrupted_keeps_what_was_there(source, out, stage):
    def interrupt(at, done, total):
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), heard(interrupt):
        prepare([str(source)], "bytes", out, length=8)
    assert list(out.iterdir()) == []
    prepare([str(source)], "bytes", out, length=8)
    before = contents(out)
    with pytest.raises(KeyboardInterrupt), heard(interrupt):
        prepare([str(source)], "bytes", out, length=8, seed=1)
    assert contents(out) == before


def test_interrupted_while_moving_is_not_prepared(source, out, monkeypatch):
    prepare([str(source)], "bytes", out, length=8)
    monkeypatch.setattr("tiewise.data.prepared.sync", lambda folder: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], "bytes", out, length=8, seed=1)
    with pytest.raises(DataError, match="no prepared text"):
        load_prepared(out)


def never(stage, done, total):
    raise AssertionError("there is nothing to do")


def test_equal_request_is_reused(source, out):
    prepared = prepare([str(source)], "bpe:400", out, length=8)
    with heard(never):
        assert prepare([str(source)], "bpe:400", out, length=16) == prepared
    with pytest.raises(DataError, match="needs at least"), heard(never):
        prepare([str(source)], "bpe:400", out, length=1_000_000)
    assert load_prepared(out) == prepared


def changed(source, out):
    stages = set()
    with heard(lambda stage, done, total: stages.add(stage)):
        prepared = prepare([str(source)], "bytes", out, length=8)
    return stages == {"reading", "tokenizer", "tokens"}, prepared


def test_other_requests_and_changed_files_are_prepared_again(source, out):
    assert changed(source, out)[0]
    assert not changed(source, out)[0]
    os.utime(source, ns=(0, 0))
    assert changed(source, out)[0]
    prepare([str(source)], "bytes", out, length=8, seed=1)
    assert changed(source, out)[0]
    prepare([str(source)], "bytes", out, length=8, fractions=(0.8, 0.1, 0.1))
    assert changed(source, out)[0]
    prepare([str(source)], "bpe:400", out, length=8)
    assert changed(source, out)[0]
    (out / "tune.bin").write_bytes(b"short")
    assert changed(source, out)[0]
    (out / "data.json").write_text("{")
    renewed, prepared = changed(source, out)
    assert renewed
    assert load_prepared(out) == prepared


def test_changed_tokenizer_file_is_noticed(source, out, tmp_path):
    prepare([str(source)], "bpe:400", tmp_path / "a", length=8)
    prepare([str(source)], "bpe:500", tmp_path / "b", length=8)
    mine = tmp_path / "mine"
    shutil.copytree(tmp_path / "a" / "tokenizer", mine)
    assert prepare([str(source)], str(mine), out, length=8).vocab == 400
    shutil.copy(tmp_path / "b" / "tokenizer" / "tokenizer.json", mine / "tokenizer.json")
    assert prepare([str(source)], str(mine), out, length=8).vocab == 500


def stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


PIPED = "\n\n".join(f"Paragraph {i} of the piped text, which is not long." for i in range(200))


def test_standard_input_is_kept(out, monkeypatch):
    stdin(monkeypatch, PIPED.encode())
    prepared = prepare(["-"], "bytes", out, length=8)
    assert prepared.facts["texts"] == ["-"]
    assert prepared.facts["characters"] > 0.9 * len(PIPED)
    stdin(monkeypatch, b"")
    with heard(never):
        assert prepare(["-"], "bytes", out, length=8) == prepared
    (out / "data.json").unlink()  # killed before the end
    again = prepare(["-"], "bytes", out, length=8)
    assert again.facts == prepared.facts


def test_version_of_python_decides_about_builtin_only(source, out, monkeypatch):
    prepare([str(source)], "bytes", out, length=8)
    monkeypatch.setattr(corpus.platform, "python_version", lambda: "9.9.9")
    with heard(never):
        prepare([str(source)], "bytes", out, length=8)
