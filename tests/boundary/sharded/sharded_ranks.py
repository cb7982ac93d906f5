"""Several gloo processes that save and load sharded models; `test_sharded_state` runs this file: FOLDER STAGE,STAGE.

Each case trains three steps of AdamW on two processes and saves. Four processes load the save into a model with another
layout and save again. The expected full tensors come from torch's gathering or from the folder of the first model.
"""

import errno
import os
import resource
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import tiewise
from tiewise.boundary.sharded import save_load
from tiewise.checkpoint.stored import Reader
from tiewise.core.errors import CheckpointError, RunError, TiewiseError, UnsupportedError
from tiewise.core.files import write_atomically

# name → (vocabulary, tied, layout on two processes, layout on four processes)
CASES = {
    "fsdp": (97, True, "fsdp", "fsdp"),
    "fsdp_untied": (97, False, "fsdp", "fsdp"),
    "fsdp_empty": (3, True, "fsdp", "fsdp"),
    "ddp": (97, True, "ddp", "fsdp"),
    "tp": (97, True, "tp", "tp"),
    "tp_to_fsdp": (97, False, "tp", "fsdp"),
    "fsdp_to_both": (97, False, "fsdp", "both"),
    "fsdp_to_replicas": (97, True, "fsdp", "replicas"),
    "both_tied": (96, True, "tp", "both"),
}


def build_model(start, layout):
    """Load a model with this layout over the processes of the group."""
    world = dist.get_world_size()
    if layout in ("tp", "both"):
        sizes = {"tp_size": world} if layout == "tp" else {"tp_size": 2, "fsdp_size": world // 2}
        return AutoModelForCausalLM.from_pretrained(start, distributed_config=DistributedConfig(**sizes))
    model = AutoModelForCausalLM.from_pretrained(start)
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if layout == "replicas":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "fsdp"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model):
    """Return AdamW with the usual two groups and options that differ from the defaults."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": others, "lr": 3e-3}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.85, 0.97))


def step(model, optimizer, vocab):
    ids = torch.randint(0, vocab, (2, 12), generator=torch.Generator().manual_seed(5))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gather_state(model, optimizer):
    """Gather all tensors of the model and its optimizer by torch's `full_tensor`."""
    model = getattr(model, "module", model)
    named = dict(model.named_parameters())
    found = {f"{name} {key}": v for name, p in named.items() for key, v in optimizer.state[p].items()} | named
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}
    return {k: v.detach().clone() for k, v in full.items()}


@contextmanager
def record_reads():
    """Record how many bytes of tensors this process reads."""
    read, into = [], Reader.read_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Reader, "read_into", lambda self, buffer, *at: read.append(len(buffer)) or into(self, buffer, *at)
        )
        yield read


def local_tensors(model, optimizer):
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


def local_bytes(tensor):
    return getattr(tensor, "_local_tensor", tensor).nbytes


def save(folder):
    """On two processes, save the loaded model, train it, save it again and keep its full tensors."""
    tiewise.boundary.save_sharded(folder / "experts" / "fresh", build_model(folder / "experts" / "start", "tp"))
    for name, (vocab, _, layout, _) in CASES.items():
        model = build_model(folder / name / "start", layout)
        tiewise.boundary.save_sharded(folder / name / "fresh", model)
        optimizer = adamw(model)
        for _ in range(3):
            step(model, optimizer, vocab)
        tiewise.boundary.save_sharded(folder / name / "two", model, optimizer, notes={"step": 3})
        if name == "tp":  # the save of transformers, for comparison
            model.save_pretrained(folder / name / "stock")
        if name == "fsdp":
            with pytest.raises(RuntimeError, match="Cannot flatten unevenly sharded tensor"):
                model.save_pretrained(folder / name / "stock")
        whole = gather_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, folder / name / "whole.pt")


def resume(folder):
    """On four processes, load the save of two, compare it with the kept tensors and save again."""
    for name, (vocab, tied, _, layout) in CASES.items():
        model = build_model(folder / name / "start", layout)
        tiewise.boundary.save_sharded(folder / name / "fresh4", model)
        optimizer = adamw(model)
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 1.0, (0.1, 0.1)
        if name == "fsdp":
            step(model, optimizer, vocab)  # load into existing optimizer states of other values
        with CommDebugMode() as wire, record_reads() as read:
            assert tiewise.boundary.load_sharded(folder / name / "two", model, optimizer) == {"step": 3}
            tiewise.boundary.save_sharded(folder / name / "four", model, optimizer, notes={"step": 3})
        # processes exchange only Python objects; gathering shards would use other operators
        assert {str(op) for op in wire.get_comm_counts()} == {"c10d.allgather_"}
        if layout == "fsdp":  # rows are contiguous, so a process reads only the bytes that it keeps
            assert sum(read) == sum(local_bytes(tensor) for tensor in local_tensors(model, optimizer))
        wanted = torch.load(folder / name / "whole.pt")
        found = gather_state(model, optimizer)
        assert found.keys() == wanted.keys(), (name, found.keys() ^ wanted.keys())
        for key, value in wanted.items():
            assert torch.equal(found[key], value), (name, key)
        assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
            (3e-3, (0.85, 0.97), 1e-2),
            (1e-3, (0.85, 0.97), 0.0),
        ]
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        step(model, optimizer, vocab)


@contextmanager
def assert_raises_on(kind, said, on=0):
    """Expect process `on` to raise the error. The others report in one line that it ended, with its reason."""
    here = dist.get_rank() == on
    with pytest.raises(kind if here else TiewiseError, match=said if here else rf"^process {on} ended .*{said}") as e:
        yield
    assert "\n" not in str(e.value)
    dist.barrier()


@contextmanager
def limit_file_size(count):
    """Let no file of this process exceed `count` bytes, which acts like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if count is None else count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuse(folder):
    """Any error of one process ends both with one line and keeps the previous save."""
    rank, place, start = dist.get_rank(), folder / "run", folder / "fsdp" / "start"
    model = build_model(start, "fsdp")
    optimizer = adamw(model)
    step(model, optimizer, 97)
    tiewise.boundary.save_sharded(place, model, optimizer, notes={"step": 1})
    files = sorted(os.listdir(place))
    step(model, optimizer, 97)

    for on in (0, 1):
        with (
            assert_raises_on(CheckpointError, "a file became too large", on),
            limit_file_size(20_000 if rank == on else None),
        ):
            tiewise.boundary.save_sharded(place, model, optimizer, notes={"step": 2})
        assert sorted(os.listdir(place)) == files
    with assert_raises_on(CheckpointError, "no space left while writing"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_load, "write_atomically", raise_disk_full)  # of the index
        tiewise.boundary.save_sharded(place, model, optimizer, notes={"step": 2})
    assert sorted(os.listdir(place)) == files
    with assert_raises_on(CheckpointError, "cannot be written .No such file"):
        tiewise.boundary.save_sharded(folder / "no" / "such", model, optimizer)

    untied = build_model(start, "ddp").module
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    with assert_raises_on(
        CheckpointError, "the config ties lm_head.weight to model.embed_tokens.weight, and they are two"
    ):
        tiewise.boundary.save_sharded(folder / "never", untied)
    untied.config.tie_word_embeddings = False
    with assert_raises_on(CheckpointError, "were saved as one parameter, and are two"):
        tiewise.boundary.load_sharded(place, untied)
    untied.lm_head.weight = untied.model.embed_tokens.weight
    with assert_raises_on(CheckpointError, "says that the head is a table of its own, and it is the input table"):
        tiewise.boundary.save_sharded(folder / "never", untied)
    plain = AutoModelForCausalLM.from_pretrained(start)
    early = adamw(plain)
    fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
    with assert_raises_on(RunError, "holds a parameter that the model does not have; build it after fully_shard"):
        tiewise.boundary.save_sharded(folder / "never", plain, early)
    stage = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2)})
    with assert_raises_on(UnsupportedError, "processes 0 and 1 do not hold the same tensors.*pipeline"):
        tiewise.boundary.save_sharded(folder / "never", stage)
    assert not (folder / "never").exists()

    before = gather_state(model, optimizer)
    for number, damage in enumerate((alter_byte, truncate_file, os.unlink)):
        copied = folder / f"damaged{number}"
        if rank == 0:
            shutil.copytree(place, copied)
            damage(next(copied.glob(f"sharded-*-0000{number % 2}.safetensors")))
        dist.barrier()
        with assert_raises_on(CheckpointError, "it is not what was written|it is gone", on=number % 2):
            tiewise.boundary.load_sharded(copied, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in gather_state(model, optimizer).items())
    assert tiewise.boundary.load_sharded(place, model, optimizer) == {"step": 1}

    tiewise.boundary.save_sharded(place, model, notes={"step": 3})
    assert len(os.listdir(place)) == 3
    assert {*os.listdir(place)} & {*files} == {"sharded.json"}
    dist.barrier()
    with assert_raises_on(RunError, "has no optimizer state"):
        tiewise.boundary.load_sharded(place, model, optimizer)
    assert tiewise.boundary.load_sharded(place, model) == {"step": 3}


def raise_disk_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def alter_byte(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def truncate_file(path):
    os.truncate(path, path.stat().st_size - 8)


KILLED = {"stands": 1, "new": 1, "unnamed": 0, "named": 0}  # folder → the process that is killed during its save


def killed(folder):
    """Kill a process while it writes its file or the index, or just after the index."""
    model = build_model(folder / "fsdp" / "start", "fsdp")
    into = os.environ["INTO"]
    if into != "new":
        tiewise.boundary.save_sharded(folder / into, model, notes={"step": 1})
    if dist.get_rank() == KILLED[into]:

        def dies(path, *given):
            if into == "named":
                write_atomically(path, *given)
            else:  # a file has another name until it is complete
                half = path if into != "unnamed" else path.with_name(f".{path.name}.1.partial")
                half.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(save_load, "write_atomically" if KILLED[into] == 0 else "write_tensors", dies)
    try:
        tiewise.boundary.save_sharded(folder / into, model, notes={"step": 2})
    except RunError as error:
        (folder / f"{into}.said").write_text(str(error))
        sys.exit(3)


STAGES = {"save": (save, 2), "resume": (resume, 4), "refuse": (refuse, 2), "killed": (killed, 2)}


def run_process(rank, stage, folder, store):
    work, world = STAGES[stage]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    work(folder)
    dist.destroy_process_group()


def run(stage, folder):
    """Run a stage in forked processes, so that modules are imported once.

    Each process ends as an interpreter does. If a worker thread of gloo outlives it, the abort shows in its exit code.
    """
    store, codes = folder / f"store-{stage}-{os.environ['INTO']}", {}
    started = {}
    for rank in range(STAGES[stage][1]):
        pid = os.fork()
        if pid == 0:
            run_process(rank, stage, folder, store)  # an error prints its traceback and gives exit code 1
            sys.exit(0)
        started[pid] = rank
    while codes.keys() != started.keys():
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] and stage != "killed":  # the others might wait for the failed process
            for other in started.keys() - codes.keys():
                os.kill(other, signal.SIGKILL)
    wanted = dict.fromkeys(started.values(), 3 if stage == "killed" else 0)
    if stage == "killed":
        wanted[KILLED[os.environ["INTO"]]] = -signal.SIGKILL
    assert {started[pid]: code for pid, code in codes.items()} == wanted, codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for stage in sys.argv[2].split(","):
        for os.environ["INTO"] in KILLED if stage == "killed" else [""]:
            run(stage, Path(sys.argv[1]))
