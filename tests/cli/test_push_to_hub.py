"""Test `--push-to-hub` with the real client, in child processes, against a local server of the Hub's API."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from cli_tiny import TINY, assert_refused, write_text
from tests.answers import running
from tests.hub_server import TOKEN, HubServer

from tiewise.core.errors import RunError
from tiewise.report.hub import best_run, require_repo_id
from tiewise.report.model_card import comparison_card
from tiewise.training.results import Comparison

COMPARE = ["compare", "--arms=tied,factored:4", "--seeds=2", "--jobs=1"]
SLOW = pytest.mark.slow
LATER = "tiewise compare --out run --resume --push-to-hub me/model"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder with a finished comparison in `run`, trained in this process without a network."""
    folder = tmp_path_factory.mktemp("finished") / "here"
    folder.mkdir()
    ended = running.run([*COMPARE, "-t", write_text(folder), *TINY, "--out=run"], folder)
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    """Return a copy of the finished comparison's folder."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


def command(words, folder, program=("-m", "tiewise"), **environment):
    """Run tiewise in a child process in a folder; return it, and check that nothing has the token."""
    clean = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    clean |= {"OMP_NUM_THREADS": "1", "TIEWISE_KERNELS": "off", **environment}  # as of the comparison that is copied
    done = subprocess.run(
        [sys.executable, *program, *map(str, words)], cwd=folder, env=clean, capture_output=True, text=True
    )
    assert TOKEN not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    return done


PUSH = ["compare", "--out=run", "--resume", "--push-to-hub=me/model"]


def push(folder, **environment):
    """Upload the finished comparison of a folder."""
    return command(PUSH, folder, **environment)


# runs the same command line twice in one process; CUT ends the output of the first
TWICE = """
import sys
from tiewise.cli.main import main
try:
    main()
except SystemExit as end:
    print("CUT", end.code, flush=True)
    print("CUT", file=sys.stderr, flush=True)
main()
"""


@dataclass
class Pushed:
    """An upload that the Hub refuses and a second one that it accepts, with the files of the run before and after."""

    folder: Path
    hub: HubServer
    before: dict[Path, bytes]
    refused: subprocess.CompletedProcess[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def pushed(finished, tmp_path_factory):
    """Upload the finished comparison twice in one child process: the Hub refuses the first commit."""
    folder = tmp_path_factory.mktemp("pushed") / "copy"
    shutil.copytree(finished, folder)
    before = contents(folder / "run")
    with HubServer() as server:
        server.fail_once["commit"] = 403
        both = command(PUSH, folder, program=("-c", TWICE), **server.environment(folder))
    first_out, code, second_out = re.split(r"^CUT (\d+)\n", both.stdout, flags=re.MULTILINE)
    first_err, second_err = both.stderr.split("CUT\n")
    refused = subprocess.CompletedProcess(both.args, int(code), first_out, first_err)
    done = subprocess.CompletedProcess(both.args, both.returncode, second_out, second_err)
    return Pushed(folder, server, before, refused, done)


def contents(folder):
    """Return the bytes of all files of a run."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def front_matter(card):
    """Return the metadata of a model card, and the text below it."""
    _, block, text = re.split(r"^---\n", card.decode(), maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(block), text


def check_failure(done, problem, later=LATER):
    """Check that a command printed its answer, and then one line with the problem and the command for later."""
    assert done.returncode == 2, done.stderr
    assert "arm" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tiewise: not uploaded to me/model: ")
    assert problem in last
    assert last.endswith(later)
    assert "Traceback" not in done.stderr


def test_comparison_is_uploaded_in_one_commit_with_card_report_and_best_model(pushed):
    copied, hub, done = pushed.folder, pushed.hub, pushed.done
    assert done.returncode == 0, done.stderr
    assert f"on the Hub: {hub.url}/me/model" in done.stdout
    assert len(hub.commits) == 1
    files = hub.repos["me/model"]
    comparison = Comparison.from_dict(json.loads(files["results.json"]))
    chosen = best_run(comparison)
    run = copied / "run" / chosen.arm.replace(":", "-") / f"seed-{chosen.seed}"
    for path in (run / "final").iterdir():
        assert files[path.name] == path.read_bytes()
    assert files["report.html"] == (copied / "run/report.html").read_bytes()
    metadata, card = front_matter(files["README.md"])
    assert "tiewise" in metadata["tags"]
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == round(chosen.heldout_nll, 4)
    assert comparison.finding in card
    assert f"```sh\n{comparison.command}\n```" in card
    for arm in comparison.arms:
        assert f"| {arm} | {comparison.of(arm)[0].total_parameters:,} |" in card
    assert contents(copied / "run") == pushed.before


@SLOW
def test_second_upload_removes_weights_that_it_does_not_have(copied, hub):
    hub.repos["me/model"] = {
        "dense/model.safetensors": b"old",
        "model-00001-of-00002.safetensors": b"old",
        "mine.txt": b"!",
    }
    done = push(copied, **hub.environment(copied))
    assert done.returncode == 0, done.stderr
    files = hub.repos["me/model"]
    assert files["mine.txt"] == b"!"
    assert "model-00001-of-00002.safetensors" not in files
    assert files.get("dense/model.safetensors") != b"old"


def test_refused_commit_is_one_line_and_keeps_the_run_for_the_next_upload(pushed):
    check_failure(pushed.refused, "the token cannot write to me/model")
    assert contents(pushed.folder / "run") == pushed.before
    assert len(pushed.hub.commits) == 1  # of the second upload


@SLOW
@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [
        ("commit", 403, "the token cannot write to me/model"),
        ("create", 401, "the Hub does not accept the token; log in with `hf auth login`"),
        ("create", 403, "the token cannot write to me/model"),
        ("create", 404, "the Hub has no repository me/model that this token can see"),
        ("create", 429, "the Hub accepts no more requests for now"),
        ("commit", 500, "the Hub answered with status 500"),
        ("put_large", 503, "the Hub answered with status 503"),
    ],
)
def test_refusal_of_the_hub_is_one_line_and_keeps_the_run(copied, hub, answer, status, problem):
    before = contents(copied / "run")
    hub.fail[answer] = status
    check_failure(push(copied, **hub.environment(copied)), problem)
    assert contents(copied / "run") == before
    assert not hub.commits


@SLOW
def test_missing_token_offline_mode_and_network_are_one_line_and_send_nothing(copied, hub):
    check_failure(push(copied, **hub.environment(copied, token=None)), "no token of the Hub is stored here")
    check_failure(push(copied, **hub.environment(copied) | {"HF_HUB_OFFLINE": "1"}), "unset HF_HUB_OFFLINE")
    assert not hub.requests
    secret = hub.environment(copied) | {"HF_ENDPOINT": "http://user:password@127.0.0.1:1"}
    done = push(copied, **secret)
    check_failure(done, "cannot reach http://127.0.0.1:1; check the network")
    assert "password" not in done.stderr


@SLOW
def test_wrong_token_is_one_line(copied, hub):
    check_failure(push(copied, **hub.environment(copied, token="hf_other")), "the Hub does not accept the token")


@pytest.mark.slow
def test_training_goes_on_without_token_and_uploads_when_it_is_complete(tmp_path, hub):
    words = ["train", "-t", write_text(tmp_path), *TINY, "--boundary=factored:4", "--out=run", "--push-to-hub=model"]
    done = command(words, tmp_path, **hub.environment(tmp_path, token=None))
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(
        "tiewise: --push-to-hub will fail: no token of the Hub is stored here; log in with `hf auth login` before"
    )
    later = "tiewise train --out run --resume --push-to-hub model"
    assert done.stderr.splitlines()[-1].endswith(later)
    assert (tmp_path / "run/factored-4/seed-1/result.json").is_file()
    done = command([*later.split()[1:], "--json"], tmp_path, **hub.environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["arm"] == "factored:4"
    assert f"on the Hub: {hub.url}/me/model" in done.stderr
    files = hub.repos["me/model"]
    assert files["dense/model.safetensors"] == (tmp_path / "run/factored-4/seed-1/dense/model.safetensors").read_bytes()
    metadata, card = front_matter(files["README.md"])
    assert metadata["library_name"] == "tiewise"
    assert "factored" in metadata["tags"]
    assert "push-to-hub=model" in card
    assert "push_to_hub" not in (tmp_path / "run/run.yaml").read_text()


@pytest.mark.slow
def test_healed_model_is_uploaded_with_verdict_table_and_command(finished, tmp_path, hub):
    shutil.copytree(finished, tmp_path / "copy")
    folder = tmp_path / "copy"
    teacher = folder / "run/tied/seed-1/final"
    command(["untie", teacher, "--to=model"], folder)
    words = ["heal", "model", "--teacher", teacher, "-t", "synthetic:words=20000", "--steps=2", "--set=length=8"]
    done = command([*words, "--out=healed", "--push-to-hub=me/model", "--json"], folder, **hub.environment(folder))
    assert done.returncode == 0, done.stderr
    assert f"on the Hub: {hub.url}/me/model" in done.stderr
    record, files = json.loads(done.stdout), hub.repos["me/model"]
    assert files["model.safetensors"] == (folder / record["model"] / "model.safetensors").read_bytes()
    metadata, card = front_matter(files["README.md"])
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == round(record["left"]["after"], 4)
    assert "untied" in metadata["tags"]
    assert "held-out passages)" in card
    assert f"| healed | {record['left']['after']:.4f} |" in card
    assert "--push-to-hub=me/model" in card
    later = "tiewise heal --out healed --resume --push-to-hub me/model"
    done = command(later.split()[1:], folder, **hub.environment(folder, token=None))
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("Next: tiewise check ")
    assert done.stderr.splitlines()[-1].endswith(later)


def test_training_without_network_names_the_command_that_uploads_later(tiewise, text):
    result = tiewise("train", "-t", text, *TINY, "--out=my run", "--push-to-hub=me/model")
    later = "unset HF_HUB_OFFLINE, then tiewise train --out 'my run' --resume --push-to-hub me/model"
    lines = result.err.splitlines()
    assert result.code == 2
    assert lines[0] == f"tiewise: the upload will be left out: HF_HUB_OFFLINE keeps this process off the Hub; {later}"
    assert lines[-1].endswith(later)


def test_card_of_an_unusual_command_and_text_is_valid(finished, hub):
    record = json.loads((finished / "run/results.json").read_text())
    comparison = Comparison.from_dict(record)
    command = "tiewise compare --text '```'"
    comparison = replace(comparison, command=command, data={**comparison.data, "texts": ["a: [b\n---\n{|"]})
    card = comparison_card(comparison, best_run(comparison), finished / "run/tied/seed-1", "me/a.b-c")
    metadata, text = front_matter(card.encode())
    assert metadata["model-index"][0]["results"][0]["dataset"]["name"] == "a: [b\n---\n{|"
    assert f"````sh\n{command}\n````" in text


@pytest.mark.parametrize("repo_id", ["a/b/c", "-x", "a--b", "me/x.git", "me/with space", ""])
def test_name_that_is_no_repository_is_refused_before_training(tiewise, text, tree, repo_id):
    before = tree()
    line = assert_refused(tiewise("compare", "-t", text, *TINY, f"--push-to-hub={repo_id}"))
    assert "write USER/NAME" in line
    assert tree() == before
    with pytest.raises(RunError):
        require_repo_id(repo_id)


def test_element_does_not_upload(tiewise, text):
    result = tiewise("compare", "-t", text, *TINY, "--element=0", "--push-to-hub=me/model", "--out=a run")
    later = "tiewise compare --out 'a run' --resume --push-to-hub me/model"
    assert_refused(result, "--element 0 trains no whole comparison to upload; after all elements, " + later)
