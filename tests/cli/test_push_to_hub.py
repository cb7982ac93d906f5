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
from tests.hub_child import HubChild
from tests.hub_server import TOKEN, HubServer

from tiewise.core.errors import RunError
from tiewise.report.hub import best_run, require_repo_id
from tiewise.report.model_card import comparison_card
from tiewise.training.results import Comparison

COMPARE = ["compare", "--arms=tied,factored:4", "--seeds=2", "--jobs=1"]
SLOW = pytest.mark.slow


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
    check_no_token(done, folder)
    return done


def check_no_token(done, folder):
    """Check that neither the output of a command nor a file of its folder has the token."""
    assert TOKEN not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


def push_words(out):
    """Return the words that upload a finished comparison."""
    return ["compare", f"--out={out}", "--resume", "--push-to-hub=me/model"]


def later_upload(out, name="compare", repo_id="me/model"):
    """Return the command that a failed upload prints."""
    return f"tiewise {name} --out {out} --resume --push-to-hub {repo_id}"


@dataclass
class Client:
    """A child process that runs one command line after the other; the token is in a file, as after `hf auth login`."""

    hub: HubServer
    child: HubChild
    token_file: Path

    def log_in(self, token=TOKEN):
        self.token_file.parent.mkdir(exist_ok=True)
        self.token_file.write_text(token)

    def log_out(self):
        self.token_file.unlink(missing_ok=True)

    def run(self, words, folder):
        """Run a command line whose files are in a folder; check that nothing has the token."""
        ended = self.child(*words)
        done = subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)
        check_no_token(done, folder)
        return done

    def push(self, folder):
        """Upload the finished comparison of a folder."""
        return self.run(push_words(folder / "run"), folder)


@pytest.fixture(scope="module")
def started_client(tmp_path_factory):
    """Start the child, which imports everything once, and its Hub."""
    home = tmp_path_factory.mktemp("home")
    with HubServer() as server, HubChild(server, home, TIEWISE_KERNELS="off") as child:
        yield Client(server, child, home / "hf" / "token")


@pytest.fixture
def client(started_client):
    """Return the client, logged in, with an empty Hub that refuses nothing."""
    hub = started_client.hub
    for state in (hub.repos, hub.large, hub.commits, hub.requests, hub.fail):
        state.clear()
    started_client.log_in()
    return started_client


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
        both = command(push_words("run"), folder, program=("-c", TWICE), **server.environment(folder))
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


def check_failure(done, problem, later):
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
def test_second_upload_removes_weights_that_it_does_not_have(copied, client):
    client.hub.repos["me/model"] = {
        "dense/model.safetensors": b"old",
        "model-00001-of-00002.safetensors": b"old",
        "mine.txt": b"!",
    }
    done = client.push(copied)
    assert done.returncode == 0, done.stderr
    files = client.hub.repos["me/model"]
    assert files["mine.txt"] == b"!"
    assert "model-00001-of-00002.safetensors" not in files
    assert files.get("dense/model.safetensors") != b"old"


def test_refused_commit_is_one_line_and_keeps_the_run_for_the_next_upload(pushed):
    check_failure(pushed.refused, "the token cannot write to me/model", later_upload("run"))
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
def test_refusal_of_the_hub_is_one_line_and_keeps_the_run(copied, client, answer, status, problem):
    before = contents(copied / "run")
    client.hub.fail[answer] = status
    check_failure(client.push(copied), problem, later_upload(copied / "run"))
    assert contents(copied / "run") == before
    assert not client.hub.commits


@SLOW
def test_missing_or_wrong_token_is_one_line(copied, client):
    client.log_out()
    check_failure(client.push(copied), "no token of the Hub is stored here", later_upload(copied / "run"))
    assert not client.hub.requests
    client.log_in("hf_other")
    check_failure(client.push(copied), "the Hub does not accept the token", later_upload(copied / "run"))


@SLOW
def test_offline_mode_is_one_line_and_sends_nothing(copied, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    ended = running.run(push_words("run"), copied)  # this process is offline
    done = subprocess.CompletedProcess([], ended.code, ended.out, ended.err)
    check_failure(done, "unset HF_HUB_OFFLINE", later_upload("run"))
    assert not hub.requests


@SLOW
def test_missing_network_is_one_line_without_the_password_of_the_address(copied, hub):
    secret = hub.environment(copied) | {"HF_ENDPOINT": "http://user:password@127.0.0.1:1"}
    done = command(push_words("run"), copied, **secret)
    check_failure(done, "cannot reach http://127.0.0.1:1; check the network", later_upload("run"))
    assert "password" not in done.stderr


@SLOW
def test_training_goes_on_without_token_and_uploads_when_it_is_complete(tmp_path, client):
    out = tmp_path / "run"
    text = tmp_path / write_text(tmp_path)
    client.log_out()
    words = ["train", "-t", text, *TINY, "--boundary=factored:4", f"--out={out}", "--push-to-hub=model"]
    done = client.run(words, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(
        "tiewise: --push-to-hub will fail: no token of the Hub is stored here; log in with `hf auth login` before"
    )
    later = later_upload(out, "train", "model")
    assert done.stderr.splitlines()[-1].endswith(later)
    assert (out / "factored-4/seed-1/result.json").is_file()
    client.log_in()
    done = client.run([*later.split()[1:], "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["arm"] == "factored:4"
    assert f"on the Hub: {client.hub.url}/me/model" in done.stderr
    files = client.hub.repos["me/model"]
    assert files["dense/model.safetensors"] == (out / "factored-4/seed-1/dense/model.safetensors").read_bytes()
    metadata, card = front_matter(files["README.md"])
    assert metadata["library_name"] == "tiewise"
    assert "factored" in metadata["tags"]
    assert "push-to-hub=model" in card
    assert "push_to_hub" not in (out / "run.yaml").read_text()


@SLOW
def test_healed_model_is_uploaded_with_verdict_table_and_command(copied, client):
    teacher, healed = copied / "run/tied/seed-1/final", copied / "healed"
    assert client.run(["untie", teacher, f"--to={copied / 'model'}"], copied).returncode == 0
    words = ["heal", copied / "model", "--teacher", teacher, "-t", "synthetic:words=20000", "--steps=2"]
    words += ["--set=length=8", f"--out={healed}", "--push-to-hub=me/model", "--json"]
    done = client.run(words, copied)
    assert done.returncode == 0, done.stderr
    assert f"on the Hub: {client.hub.url}/me/model" in done.stderr
    record, files = json.loads(done.stdout), client.hub.repos["me/model"]
    assert files["model.safetensors"] == Path(record["model"], "model.safetensors").read_bytes()
    metadata, card = front_matter(files["README.md"])
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["value"] == round(record["left"]["after"], 4)
    assert "untied" in metadata["tags"]
    assert "held-out passages)" in card
    assert f"| healed | {record['left']['after']:.4f} |" in card
    assert "--push-to-hub=me/model" in card
    later = later_upload(healed, "heal")
    client.log_out()
    done = client.run(later.split()[1:], copied)
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
