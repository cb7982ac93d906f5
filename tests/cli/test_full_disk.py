"""A disk that takes no more: one line, exit 2, and `--resume` ends as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tiny import TINY
from launched import ended, launch
from tests.answers import inputs

pytestmark = pytest.mark.slow
FULL = "/dev/full"  # whatever is written there, the disk is full
LINES = ["--help", "--version", "plan --like gpt2", "plan --like gpt2 --json", "models", "exercise", "exercise 1"]
LINES += ["exercise --json", "check --explain all", "check model", "check model --json", "kernels", "diff model model"]
LINES += ["inspect model --only alignment", "compare --help", "tie model --to new --dry-run --keep input"]
RUN = ["--steps=40", "--set=width=64", "--json"]


@pytest.fixture
def undisturbed(tmp_path, text):
    (_, out, _), *_ = ended(launch(tmp_path, 1, "train", "-t", text, *TINY, *RUN, "--out=whole"))
    return json.loads(out)


# A checkpoint takes 600 kB: too little for the text, then for events, a first checkpoint, a second, an optimizer.
@pytest.mark.parametrize(("count", "size"), [(1, 20), (1, 60), (1, 150), (1, 400), (1, 1200), (1, 1800), (2, 400)])
def test_train_on_full_disk_exits_2_and_resumes_when_there_is_room(tmp_path, text, disk, undisturbed, count, size):
    out = disk(size) / "run"
    (code, said, err), *others = ended(launch(tmp_path, count, "train", "-t", text, *TINY, *RUN, f"--out={out}"))
    assert (code, said, others) == (2, "", [(2, "", "")] * (count - 1))
    begun = (out / "run.yaml").exists()
    assert begun == (size > 20)
    fix = f"make room there, then tiewise train --out {out} --resume" if begun else "choose another"
    assert fix in err.splitlines()[-1]
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out.exists() == begun
    again = ["--resume", "--json"] if begun else ["-t", text, *TINY, *RUN]
    disk(60_000)
    (code, said, err), *others = ended(launch(tmp_path, count, "train", *again, f"--out={out}"))
    assert (code, others) == (0, [(0, "", "")] * (count - 1)), err
    for name in ("heldout_nll", "train_nll"):
        assert json.loads(said)[name] == pytest.approx(undisturbed[name], abs=1e-6)


@pytest.fixture
def model(tmp_path):
    inputs.word_llama(tied=False).save_pretrained(tmp_path / "model")
    inputs.word_tokenizer().save_pretrained(tmp_path / "model")
    return "model"


@pytest.mark.skipif(not Path(FULL).exists(), reason="no such device here")
@pytest.mark.parametrize("line", LINES)
def test_command_with_full_stdout_prints_one_line_and_exits_2(model, tmp_path, line):
    command = [sys.executable, "-m", "tiewise", *line.split()]
    with open(FULL, "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "cannot write to stdout: No space left on device; make room there, or send the output elsewhere"
    assert done.stderr == f"tiewise: {said}\n"


@pytest.mark.parametrize("out", ["run", "some/where/run"])
def test_inspect_on_full_disk_exits_2_and_leaves_nothing(model, tmp_path, disk, out):
    place = disk(100)  # the page takes megabytes
    ((code, said, err),) = ended(launch(tmp_path, 1, "inspect", model, "--only=alignment", "--out", place / out))
    assert (code, said) == (2, "")
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert list(place.iterdir()) == []
