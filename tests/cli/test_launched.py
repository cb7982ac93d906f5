"""Test `train` and `compare` in several processes against the figures of one process."""

import json
import shutil
import signal
import subprocess
import sys
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


def results(folder, count, *arguments):
    """Return the results of a comparison by `count` processes; only the first one prints."""
    (code, out, err), *others = wait_for_exit(
        launch(folder, count, "compare", "-t", "text.txt", *TINY, *arguments, "--json")
    )
    assert (code, others) == (0, [(0, "", "")] * (count - 1)), err
    assert err.count("validation loss") == len(json.loads(out)["runs"])
    return json.loads(out)


def assert_alike(one, other, bound):
    """Check that the figures and curves of two comparisons differ by at most `bound`."""
    for left, right in zip(one["runs"], other["runs"], strict=True):
        assert (left["arm"], left["seed"]) == (right["arm"], right["seed"])
        for name in ("initial_nll", "heldout_nll", "train_nll", "bits_per_byte"):
            assert left[name] == pytest.approx(right[name], abs=bound), name
        for here, there in zip(left["curve"], right["curve"], strict=True):
            assert (here["step"], here["tokens"]) == (there["step"], there["tokens"])
            for name in ("train_nll", "heldout_nll", "path_a", "path_b", "cosine"):
                assert here[name] == pytest.approx(there[name], abs=bound), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arms=tied,untied,projected:24,penalty=0.3", "--set=accumulate=2"],
        ["--arms=tied,factored:8", "--model=gpt2", "--match=parameters"],
        ["--arms=tied", "--tune"],
        ["--arms=tied,untied+encoder=apart", "--set=accumulate=2", "--set=kind=seq2seq"],
    ],
    ids=lambda arguments: arguments[-1],
)
def test_two_processes_train_to_figures_of_one_process(tmp_path, text, arguments):
    """The global batch is the same. Only the order of sums differs: about 1e-7 a step in fp32."""
    one, two = (results(tmp_path, count, *arguments, "--seeds=1", f"--out=run{count}") for count in (1, 2))
    assert (one["env"]["processes"], two["env"]["processes"]) == (1, 2)
    assert_alike(one, two, 2e-5)


ARMS = ["--arms=tied,untied,residual:4", "--set=accumulate=2"]


@pytest.mark.parametrize(
    ("count", "sharding", "arguments"),
    [
        (2, ["--fsdp=2", "--tables=keep"], ARMS),
        (2, ["--fsdp=2", "--tables=gather"], ["--arms=tied,factored:8", "--model=gpt2"]),
        (2, ["--tp=2"], [*ARMS, "--match=parameters"]),
        (2, ["--tp=2"], ["--arms=tied,factored:8", "--model=gpt2"]),
        (4, ["--tp=2"], ["--arms=tied,projected:24,penalty=0.3", "--set=accumulate=2"]),
        (4, ["--tp=2", "--fsdp=2"], ["--arms=tied,untied"]),
        (4, ["--fsdp=2"], ["--arms=tied"]),
    ],
    ids=lambda value: value if isinstance(value, int) else value[-1],
)
def test_sharded_training_gives_figures_of_one_process(tmp_path, text, count, sharding, arguments):
    arguments = [*arguments, "--seeds=1"]
    one = results(tmp_path, 1, *arguments, "--out=run1")
    two = results(tmp_path, count, *arguments, "--out=run2", *sharding)
    assert_alike(one, two, 2e-5)
    for name in ("parameters", "total_parameters", "bytes", "trainable_parameters"):
        assert [run[name] for run in one["runs"]] == [run[name] for run in two["runs"]]
    plain = set() if "--model=gpt2" in arguments else {"tied", "untied"}  # key biases of GPT-2 are noise of Adam
    for arm in plain & {run["arm"] for run in one["runs"]}:
        finals = [tmp_path / run / arm / "seed-1" / "final" / "model.safetensors" for run in ("run1", "run2")]
        left, right = map(load_file, finals)
        assert left.keys() == right.keys()
        assert all(np.allclose(left[name], right[name], atol=2e-4) for name in left)


def test_two_processes_measure_each_heldout_token_exactly_once(tmp_path, text):
    run = results(tmp_path, 2, "--arms=tied", "--seeds=1", "--out=run")["runs"][0]
    data = load_prepared(tmp_path / "run" / "data")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "tied" / "seed-1" / "final")
    alone = measure(install(model), data.split("heldout"), 16, data.counts)
    assert run["heldout_nll"] == pytest.approx(alone.nll, abs=1e-6)
    assert sum(item["tokens"] for item in run["frequency"]) == alone.tokens
    assert np.isfinite(alone.nll)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the results of the long comparison by two processes."""
    folder = tmp_path_factory.mktemp("whole")
    write_text(folder)
    return results(folder, 2, *LONG, "--out=run")


@pytest.mark.parametrize("told", [(1,), (0, 1)])
def test_ctrl_c_to_any_rank_stops_all_and_resumed_run_gives_same_figures(tmp_path, text, undisturbed, told):
    processes = launch(tmp_path, 2, "compare", "-t", text, *TINY, *LONG, "--out=run")
    wait_until(training_advances(tmp_path), *processes)
    for rank in told:
        processes[rank].send_signal(signal.SIGINT)
    (code, out, err), other = wait_for_exit(processes)
    assert (code, out) == (130, "")
    line = "tiewise: interrupted, a checkpoint is written; resume with: tiewise compare --out run --resume"
    assert err.splitlines()[1:] == [line]
    assert other == (130, "", "")
    assert list((tmp_path / "run" / "tied" / "seed-1").glob("checkpoint-*/trainer_state.json"))
    (code, out, err), other = wait_for_exit(launch(tmp_path, 2, "compare", "--out=run", "--resume", "--json"))
    assert (code, other) == (0, (0, "", "")), err
    for name in ("heldout_nll", "train_nll"):
        assert json.loads(out)["runs"][0][name] == pytest.approx(undisturbed["runs"][0][name], abs=1e-6)


@pytest.mark.parametrize(
    ("held", "others"),
    [("--fsdp=2", [(2, "--fsdp=2"), (2, "--tp=2"), (2,), (1,)]), ("--tp=2", [(4, "--tp=2", "--fsdp=2"), (1,)])],
)
def test_sharded_run_resumes_with_any_number_of_processes(tmp_path, text, undisturbed, held, others):
    processes = launch(tmp_path, 2, "compare", "-t", text, *TINY, *LONG, "--out=run", held)
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
        out = everyone[0][1]
        for name in ("heldout_nll", "train_nll"):
            assert json.loads(out)["runs"][0][name] == pytest.approx(undisturbed["runs"][0][name], abs=2e-5)


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


@pytest.mark.parametrize(("rank", "sharding"), [(0, []), (1, []), (1, ["--fsdp=2"]), (0, ["--tp=2"])])
def test_rank_exits_2_if_the_other_is_killed_and_run_resumes(tmp_path, text, rank, sharding):
    processes = launch(tmp_path, 2, "compare", "-t", text, *TINY, *LONG, "--out=run", *sharding)
    wait_until(training_advances(tmp_path), *processes)
    processes[rank].kill()
    code, out, err = wait_for_exit(processes)[1 - rank]
    assert (code, out) == (2, "")
    line = "another process of this run has ended; resume from the last checkpoint with: tiewise compare --out run"
    assert err.splitlines()[-1] == f"tiewise: {line} --resume"
    resumed = wait_for_exit(launch(tmp_path, 2, "compare", "--out=run", "--resume", *sharding))
    assert [code for code, *_ in resumed] == [0, 0]


ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes=4", "--num_machines=1", "--main_process_port=0"]


@pytest.mark.parametrize(
    ("launcher", "sharding"),
    [
        (["torchrun", "--nproc_per_node=2"], []),
        # --multi_gpu works without GPUs, while --cpu would start one process
        ([*ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no"], ["--tp=2", "--fsdp=2"]),
    ],
    ids=["torchrun", "accelerate"],
)
def test_torchrun_and_accelerate_launch_train(tmp_path, text, launcher, sharding):
    command = [Path(sys.executable).with_name(launcher[0]), *launcher[1:], "-m", "tiewise", "train", "-t", text]
    command += [*TINY, *sharding, "--out=run", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 12
