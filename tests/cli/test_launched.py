"""Test `train` and `compare` in several processes against the figures of one process."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cli_tiny import TINY, write_text
from launched import PATIENCE, launch, training_advances, wait_for_exit, wait_until
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tiewise.boundary.installation import install
from tiewise.training.data.corpus import load_prepared
from tiewise.training.kinds.decoder import measure

pytestmark = pytest.mark.slow
# At the default rate of this width, 0.032, rounding grows to thousandths of a nat between one and two processes.
LONG = ["--steps=160", "--arms=tied", "--seeds=1", "--set=learning_rate=0.004"]
HALF = [*LONG, "--steps=80"]  # takes as long with divided tables, whose steps are slower
SHORT = ["--steps=6", "--seeds=1", "--out=run", "--json"]
LLAMA = ["--set=accumulate=2"]
GPT2 = ["--model=gpt2", "--match=parameters"]
SEQ2SEQ = ["--set=kind=seq2seq", "--set=accumulate=2"]
PENALISED = "projected:24,penalty=0.3"
# one process trains all arms of a family in one comparison; several processes train some of them
ARMS = {
    tuple(LLAMA): ["tied", "untied", "residual:4", PENALISED],
    tuple(GPT2): ["tied", "factored:8"],
    ("--tune",): ["tied"],
    tuple(SEQ2SEQ): ["tied", "untied+encoder=apart"],
}


@dataclass
class Trained:
    """Folder of a comparison and its results: the whole record, and each run by its arm."""

    folder: Path
    record: dict
    runs: dict


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that compares arms in some processes, once for the same arguments."""
    done = {}

    def train_once(count, arms, *arguments):
        key = (count, *arms, *arguments)
        if key not in done:
            folder = tmp_path_factory.mktemp("trained")
            write_text(folder)
            done[key] = compare_in(folder, count, arms, arguments)
        return done[key]

    return train_once


def compare_in(folder, count, arms, arguments):
    """Compare arms in `count` processes; only the first one prints."""
    words = ["compare", "-t", "text.txt", *TINY, f"--arms={','.join(arms)}", *arguments, *SHORT]
    (code, out, err), *others = wait_for_exit(launch(folder, count, *words))
    assert (code, others) == (0, [(0, "", "")] * (count - 1)), err
    record = json.loads(out)
    assert [(run["arm"], run["seed"]) for run in record["runs"]] == [(arm, 1) for arm in arms]
    assert err.count("validation loss") == len(arms)
    assert record["env"]["processes"] == count
    return Trained(folder / "run", record, {run["arm"]: run for run in record["runs"]})


def assert_alike(one, several, bound):
    """Check that the figures and curves of each arm differ by at most `bound`."""
    for arm, there in several.runs.items():
        here = one.runs[arm]
        for name in ("initial_nll", "heldout_nll", "train_nll", "bits_per_byte"):
            assert here[name] == pytest.approx(there[name], abs=bound), name
        for left, right in zip(here["curve"], there["curve"], strict=True):
            assert (left["step"], left["tokens"]) == (right["step"], right["tokens"])
            for name in ("train_nll", "heldout_nll", "path_a", "path_b", "cosine"):
                assert left[name] == pytest.approx(right[name], abs=bound), name


REPLICATED = {  # arms that two processes train with the options of one family
    tuple(LLAMA): ["tied", "untied", PENALISED],
    tuple(GPT2): ["tied", "factored:8"],
    ("--tune",): ["tied"],
    tuple(SEQ2SEQ): ["tied", "untied+encoder=apart"],
}


@pytest.mark.parametrize("arguments", REPLICATED, ids=lambda arguments: arguments[0])
def test_two_processes_train_to_figures_of_one_process(train, arguments):
    """The global batch is the same. Only the order of sums differs: about 1e-7 a step in fp32."""
    one = train(1, ARMS[arguments], *arguments)
    assert_alike(one, train(2, REPLICATED[arguments], *arguments), 2e-5)


@pytest.mark.parametrize(
    ("count", "sharding", "arms", "arguments"),
    [
        (2, ["--fsdp=2", "--tables=keep"], ["tied", "untied", "residual:4"], LLAMA),
        (2, ["--fsdp=2", "--tables=gather"], ["tied", "factored:8"], GPT2),
        (2, ["--tp=2"], ["tied", "untied", "residual:4"], LLAMA),
        (2, ["--tp=2"], ["tied", "factored:8"], GPT2),
        (4, ["--tp=2"], ["tied", PENALISED], LLAMA),
        (4, ["--tp=2", "--fsdp=2"], ["tied", "untied"], LLAMA),
        (4, ["--fsdp=2"], ["tied"], LLAMA),
    ],
    ids=lambda value: value if isinstance(value, int) else value[-1],
)
def test_sharded_training_gives_figures_of_one_process(train, count, sharding, arms, arguments):
    one = train(1, ARMS[tuple(arguments)], *arguments)
    several = train(count, arms, *arguments, *sharding)
    assert_alike(one, several, 2e-5)
    for arm in arms:
        for name in ("parameters", "total_parameters", "bytes", "trainable_parameters"):
            assert one.runs[arm][name] == several.runs[arm][name]
    for arm in {"tied", "untied"} & {*arms} if arguments != GPT2 else ():  # key biases of GPT-2 are noise of Adam
        finals = [trained.folder / arm / "seed-1" / "final" / "model.safetensors" for trained in (one, several)]
        left, right = map(load_file, finals)
        assert left.keys() == right.keys()
        assert all(np.allclose(left[name], right[name], atol=2e-4) for name in left)


def test_two_processes_measure_each_heldout_token_exactly_once(train):
    trained = train(2, REPLICATED[tuple(LLAMA)], *LLAMA)
    run = trained.runs["tied"]
    data = load_prepared(trained.folder / "data")
    model = AutoModelForCausalLM.from_pretrained(trained.folder / "tied" / "seed-1" / "final")
    alone = measure(install(model), data.split("heldout"), 16, data.counts)
    assert run["heldout_nll"] == pytest.approx(alone.nll, abs=1e-6)
    assert sum(item["tokens"] for item in run["frequency"]) == alone.tokens
    assert np.isfinite(alone.nll)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that trains the only run of a long comparison by two processes, once for the same options."""

    @cache
    def train_undisturbed(*options):
        folder = tmp_path_factory.mktemp("whole")
        words = ["compare", "-t", write_text(folder), *TINY, *options, "--out=run", "--json"]
        everyone = wait_for_exit(launch(folder, 2, *words))
        assert [code for code, *_ in everyone] == [0, 0], everyone
        return json.loads(everyone[0][1])["runs"][0]

    return train_undisturbed


def kill_and_check_the_other(processes, rank):
    """Kill a rank once it trains; check that the other one exits with code 2 and prints the command that resumes."""
    processes[rank].kill()
    code, out, err = wait_for_exit(processes)[1 - rank]
    assert (code, out) == (2, "")
    line = "another process of this run has ended; resume from the last checkpoint with: tiewise compare --out run"
    assert err.splitlines()[-1] == f"tiewise: {line} --resume"


def assert_same_figures(printed, run, bound):
    """Check that the only run of a printed comparison has the figures of another run."""
    for name in ("heldout_nll", "train_nll"):
        assert json.loads(printed)["runs"][0][name] == pytest.approx(run[name], abs=bound)


@pytest.mark.parametrize(("killed", "told"), [(0, (1,)), (1, (0, 1))])
def test_killed_rank_or_ctrl_c_to_any_rank_stops_all_and_resumed_run_gives_same_figures(
    tmp_path, text, undisturbed, killed, told
):
    processes = launch(tmp_path, 2, "compare", "-t", text, *TINY, *LONG, "--out=run")
    wait_until(training_advances(tmp_path), *processes)
    kill_and_check_the_other(processes, killed)
    processes = launch(tmp_path, 2, "compare", "--out=run", "--resume")
    wait_until(training_advances(tmp_path), *processes)
    for rank in told:
        processes[rank].send_signal(signal.SIGINT)
    (code, out, err), other = wait_for_exit(processes)
    assert (code, out) == (130, "")
    line = "tiewise: interrupted, a checkpoint is written; resume with: tiewise compare --out run --resume"
    assert err.splitlines()[-1] == line
    assert other == (130, "", "")
    assert list((tmp_path / "run" / "tied" / "seed-1").glob("checkpoint-*/trainer_state.json"))
    (code, out, err), other = wait_for_exit(launch(tmp_path, 2, "compare", "--out=run", "--resume", "--json"))
    assert (code, other) == (0, (0, "", "")), err
    assert_same_figures(out, undisturbed(*LONG), 1e-6)


@pytest.mark.parametrize(
    ("held", "killed", "others"),
    [
        ("--fsdp=2", 1, [(2, "--fsdp=2"), (2, "--tp=2"), (2,), (1,)]),
        ("--tp=2", 0, [(4, "--tp=2", "--fsdp=2"), (1,)]),
    ],
)
def test_sharded_run_resumes_after_a_kill_and_with_any_number_of_processes(
    tmp_path, text, undisturbed, held, killed, others
):
    processes = launch(tmp_path, 2, "compare", "-t", text, *TINY, *HALF, "--out=run", held)
    wait_until(training_advances(tmp_path), *processes)
    kill_and_check_the_other(processes, killed)
    processes = launch(tmp_path, 2, "compare", "--out=run", "--resume", held)
    wait_until(training_advances(tmp_path), *processes)
    processes[1].send_signal(signal.SIGINT)
    assert [code for code, *_ in wait_for_exit(processes)] == [130, 130]
    checkpoints = list((tmp_path / "run" / "tied" / "seed-1").glob("checkpoint-*"))
    assert checkpoints
    assert all((checkpoint / "sharded").is_dir() for checkpoint in checkpoints)
    for count, *sharding in others:
        folder = tmp_path / f"{count}{sharding}"
        shutil.copytree(tmp_path / "run", folder / "run")
        everyone = wait_for_exit(launch(folder, count, "compare", "--out=run", "--resume", "--json", *sharding))
        assert [code for code, *_ in everyone] == [0] * count, everyone
        assert_same_figures(everyone[0][1], undisturbed(*HALF), 2e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_during_text_preparation_leaves_no_files(tmp_path, text, count):
    paragraphs = (f"{i} {line}" for i in range(400) for line in (tmp_path / text).read_text().split("\n\n"))
    (tmp_path / "long.txt").write_text("\n\n".join(paragraphs))  # takes seconds to prepare, and no paragraph repeats
    before = sorted(tmp_path.rglob("*"))
    processes = launch(tmp_path, count, "compare", "-t", "long.txt", *TINY, *LONG, "--tokenizer=bpe:2000", "--out=run")
    wait_until((tmp_path / "run" / ".starting").exists, *processes)
    for process in processes:
        process.send_signal(signal.SIGINT)
    assert wait_for_exit(processes) == [(130, "", "")] * count
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["-t", "none.txt"], "no file or folder 'none.txt'"),
        (["--set=batch=3"], "a batch of 3 cannot be divided between 2 processes; use --set batch=4"),
        (["-b", "untied+tie_at=3"], "the boundary cannot change while several processes train"),
        (["--set=breadth=3"], "unknown setting 'breadth'"),
        (["--fsdp=3"], "--fsdp 3 and 2 processes; start 3, or a multiple: torchrun --nproc_per_node 3 -m tiewise"),
        (["--tp=2", "--fsdp=2"], "--tp 2 --fsdp 2 and 2 processes; start 4, or a multiple: torchrun"),
        (["--fsdp=2", "--tables=some"], "--tables some; choose one of auto, keep, gather"),
        (["--tables=keep"], "--tables keep without --fsdp; leave it out"),
        (["--tp=2", "--tables=gather"], "--tables gather with --tp, which spreads them; leave it out"),
        (["--tp=0"], "--tp 0; give numbers of processes, from 1"),
        (["--tp=2", "--set=heads=1"], "2 ranks of tensor parallelism do not divide num_attention_heads=1; choose"),
        (["--tp=2", "--recipe=albert-small"], "--tp in an ALBERT run; leave it out"),
        (["--fsdp=2", "--recipe=albert-small"], "--fsdp in an ALBERT run; leave it out"),
    ],
)
def test_refused_run_exits_2_in_all_ranks_and_prints_one_line(tmp_path, text, more, says):
    arguments = more if "-t" in more else ["-t", text, *more]
    (code, out, err), other = wait_for_exit(launch(tmp_path, 2, "train", *TINY, "--out=run", *arguments))
    assert (code, out, other) == (2, "", (2, "", ""))
    assert says in err
    assert err.startswith("tiewise: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [text]


ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"]


# Two processes suffice: what a launcher sets does not depend on their number, and four are forked above.
@pytest.mark.parametrize(
    ("launcher", "sharding"),
    [
        (["torchrun", "--nproc_per_node=2"], []),
        # --multi_gpu works without GPUs, while --cpu would start one process
        ([*ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no"], ["--tp=2"]),
    ],
    ids=["torchrun", "accelerate"],
)
def test_torchrun_and_accelerate_launch_train(tmp_path, text, launcher, sharding):
    command = [Path(sys.executable).with_name(launcher[0]), *launcher[1:], "-m", "tiewise", "train", "-t", text]
    command += [*TINY, *sharding, "--out=run", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 12
