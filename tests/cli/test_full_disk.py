"""Test commands on a full disk: one line, exit code 2, and `--resume` gives the figures of an undisturbed run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_tiny import TINY, write_text
from launched import PATIENCE, launch, wait_for_exit
from tests.answers import inputs
from tests.fork_server import ForkedCommand

pytestmark = pytest.mark.slow
FULL = "/dev/full"  # every write to it fails with "No space left on device"
LINES = ["--help", "--version", "plan --like gpt2", "plan --like gpt2 --json", "plan --list", "exercise", "exercise 1"]
LINES += ["exercise --json", "check --explain all", "check model", "check model --json", "kernels", "diff model model"]
LINES += ["inspect model --only alignment", "compare --help", "tie model --to new --dry-run --keep input"]
RUN = ["--steps=40", "--set=width=64", "--json"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the result of a run of the same text with room on the disk."""
    folder = tmp_path_factory.mktemp("whole")
    text = write_text(folder)
    (_, out, _), *_ = wait_for_exit(launch(folder, 1, "train", "-t", text, *TINY, *RUN, "--out=whole"))
    return json.loads(out)


# A checkpoint takes 600 kB. The sizes stop at the text, the events, the first and second checkpoint, the optimizer.
@pytest.mark.parametrize(("count", "size"), [(1, 20), (1, 60), (1, 150), (1, 400), (1, 1200), (1, 1800), (2, 400)])
def test_train_on_full_disk_exits_2_and_resumes_when_there_is_room(tmp_path, text, disk, undisturbed, count, size):
    out = disk(size) / "run"
    (code, printed, err), *others = wait_for_exit(
        launch(tmp_path, count, "train", "-t", text, *TINY, *RUN, f"--out={out}")
    )
    assert (code, printed, others) == (2, "", [(2, "", "")] * (count - 1))
    has_started = (out / "run.yaml").exists()
    assert has_started == (size > 20)
    fix = f"make room there, then tiewise train --out {out} --resume" if has_started else "choose another"
    assert fix in err.splitlines()[-1]
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out.exists() == has_started
    options = ["--resume", "--json"] if has_started else ["-t", text, *TINY, *RUN]
    disk(60_000)
    (code, printed, err), *others = wait_for_exit(launch(tmp_path, count, "train", *options, f"--out={out}"))
    assert (code, others) == (0, [(0, "", "")] * (count - 1)), err
    for name in ("heldout_nll", "train_nll"):
        assert json.loads(printed)[name] == pytest.approx(undisturbed[name], abs=1e-6)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with a model in `model`."""
    folder = tmp_path_factory.mktemp("models")
    inputs.word_llama(tied=False).save_pretrained(folder / "model")
    inputs.word_tokenizer().save_pretrained(folder / "model")
    return folder


def check_full_stdout(code, err):
    """Check how a command ends whose stdout is full."""
    assert code == 2
    message = "cannot write to stdout: No space left on device; make room there, or send the output elsewhere"
    *stages, last = err.splitlines()  # a command prints its stages after some seconds
    assert last == f"tiewise: {message}"
    assert all(line.endswith(" %)") for line in stages)


@pytest.mark.skipif(not Path(FULL).exists(), reason="no such device here")
@pytest.mark.parametrize("line", LINES)
def test_command_with_full_stdout_prints_one_line_and_exits_2(models, line):
    process = ForkedCommand(line.split(), models, dict(os.environ), stdout=FULL)
    _, err = process.communicate(PATIENCE)
    check_full_stdout(process.returncode, err)


@pytest.mark.skipif(not Path(FULL).exists(), reason="no such device here")
@pytest.mark.parametrize("line", ["--help", "check model"])
def test_process_with_full_stdout_prints_one_line_and_exits_2(models, line):
    """A process, unlike a fork, also ends as Python ends it."""
    command = [sys.executable, "-m", "tiewise", *line.split()]
    with open(FULL, "w") as full:
        done = subprocess.run(command, cwd=models, stdout=full, stderr=subprocess.PIPE, text=True)
    check_full_stdout(done.returncode, done.stderr)


@pytest.mark.parametrize("out", ["run", "some/where/run"])
def test_inspect_on_full_disk_exits_2_and_leaves_nothing(models, tmp_path, disk, out):
    place = disk(100)  # the page takes megabytes
    ((code, printed, err),) = wait_for_exit(
        launch(tmp_path, 1, "inspect", models / "model", "--only=alignment", "--out", place / out)
    )
    assert (code, printed) == (2, "")
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert list(place.iterdir()) == []
