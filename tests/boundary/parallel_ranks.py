"""Several gloo processes train installed models under DDP and FSDP2 as one process does; run by `test_parallel`.

    python parallel_ranks.py FILE WORLD quick|parity|traps       exits 0 if all agree

Processes are forked, so that torch and transformers are imported once.
"""

import copy
import gc
import os
import sys
from collections import Counter
from itertools import product

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from table_ranks import full, refused
from tiny_models import Allocations, Gradients, assert_same_gradients, batch, build, gradients, trainer, without_dropout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tiewise.boundary.installation import install, installed
from tiewise.boundary.ops.path_gradient import gather
from tiewise.core.errors import InstallError, UnsupportedError

FAMILIES = ("llama", "gpt2", "gemma2", "bert", "t5")
SPECS = ("tied", "untied", "factored:6", "residual:2")
# every family with every spec, and every pair of values of the other settings
CASES = [
    (family, spec, (97, 1000)[(f + s) % 2], ("fsdp", "ddp")[(f + s // 2) % 2], (2, 4)[(f // 2 + s) % 2])
    for (f, family), (s, spec) in product(enumerate(FAMILIES), enumerate(SPECS))
]
STEPS = 20


# models and batches


def make_batches(rows, vocab, steps=STEPS):
    """Yield batches whose labels are the ids, with as many ignored labels in every row."""
    for step in range(steps):
        ids = torch.randint(3, vocab, (rows, 9), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        labels[:, -2:] = -100
        yield {"input_ids": ids, "labels": labels}


def local_rows(batch):
    """Return the rows of this process."""
    return {name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()}


def shard(model, mesh, ends=None, policy=None, **root):
    """Shard the outermost blocks, then the model, as the docs of `fully_shard` do. `ends` shards both ends first."""
    if ends is not None:
        fully_shard([model.get_input_embeddings(), model.get_output_embeddings()], mesh=mesh, **ends)
    policy = policy or MixedPrecisionPolicy()
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name, blocks in lists.items():
        if not any(name.startswith(f"{other}.") for other in lists):
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **root)


def train(model, batches, kind, lr, loss_of=lambda model, inputs: model(**inputs).loss):
    """Train on each batch and return the losses [steps] of this process."""
    optimizer, losses = kind(model.parameters(), lr=lr), []
    for inputs in batches:
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def average_over_processes(losses):
    """Return the losses averaged over all processes."""
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def assert_near(got, wanted, tolerance, what):
    """Check that errors are at most `tolerance` of the largest value, on the process that has expected values."""
    if dist.get_rank() == 0:
        distance = float((got - wanted).abs().max() / wanted.abs().max())
        assert distance <= tolerance, f"{what}: {distance:.2e}"


# each case compared with one process


def path_gradients(model, handle, inputs):
    """Return {name: gradient} with those of the lookup path and of the head path, from the record."""
    record = handle.track()
    model(**inputs).loss.backward()
    table_in, table_out = handle.tables()
    found = {name: full(p.grad) for name, p in handle.model.named_parameters() if p.grad is not None}
    if table_in is table_out:
        both = full(table_in.grad)
        lookup = torch.zeros_like(both).index_add_(0, *gather(record).merged())
        found |= {"lookup path": lookup, "head path": both - lookup}
    norms = handle.path_norms()
    found["norms"] = torch.tensor([norms.a, norms.b])
    handle.track(False)
    model.zero_grad()
    return found


def check_parity(family, spec, vocab, parallel, mesh):
    """Compare the loss, both gradient paths, 20 SGD steps and an AdamW curve with one process."""
    what, rows = f"{family} {spec} V={vocab} {parallel}", 2 * dist.get_world_size()
    plain = without_dropout(build(family, tied=spec != "untied", vocab_size=vocab)).train()
    batches = list(make_batches(rows, vocab))
    for kind, lr, bar in ((torch.optim.SGD, 0.1, 1e-5), (torch.optim.AdamW, 1e-3, 1e-4)):
        torch.manual_seed(1)  # the seed of new tables
        model = copy.deepcopy(plain)
        first = parallel == "ddp" or spec[:3] in ("fac", "res")  # these specs must be installed before sharding
        handle = install(model, spec) if first else None
        one = copy.deepcopy(model) if first else plain
        if parallel == "ddp":
            # the untied head of BERT has a new bias, so the original bias gets no gradient
            model = DistributedDataParallel(model, find_unused_parameters=(family, spec) == ("bert", "untied"))
        else:
            shard(model, mesh)
            handle = handle or install(model)
        if kind is torch.optim.SGD:
            got = path_gradients(model, handle, local_rows(batches[0]))
            if dist.get_rank() == 0:
                # the plain model is the reference if its family has this boundary
                wanted = paths_on_one_process(plain if spec in ("tied", "untied") else one, batches[0])
                assert wanted.keys() == got.keys(), what
                zero = 1e-6 * max(gradient.abs().max() for gradient in wanted.values())
                for name, gradient in wanted.items():
                    if gradient.abs().max() > zero:  # softmax ignores what a bias adds to all its keys
                        assert_near(got[name], gradient, 1e-5, f"{what}: {name}")
        curve = average_over_processes(train(model, map(local_rows, batches), kind, lr))
        assert handle.counts.materialised == 0
        end = {name: full(p.detach()) for name, p in handle.model.named_parameters()}
        if dist.get_rank() == 0:
            one = copy.deepcopy(one)
            assert_near(curve, train(one, batches, kind, lr), bar, f"{what}: {kind.__name__} curve")
            if kind is torch.optim.SGD:
                for name, parameter in one.named_parameters():
                    assert_near(end[name], parameter.detach(), bar, f"{what}: {name} after {STEPS} steps")


def paths_on_one_process(model, inputs):
    """Return what `path_gradients` returns, on one process. The head of a tied model gets a copy of the table."""
    model = copy.deepcopy(model)
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied := head.weight is lookup.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    elif hasattr(model, "decoder"):  # T5 has three tables; this one belongs to the stack before the head
        lookup = model.decoder.embed_tokens
    model(**inputs).loss.backward()
    found, names = gradients(model), {id(parameter): name for name, parameter in model.named_parameters()}
    a, b = lookup.weight.grad, head.weight.grad
    if tied:
        del found[names[id(head.weight)]]
        found |= {names[id(lookup.weight)]: a + b, "lookup path": a, "head path": b}
    return found | {"norms": torch.stack([a.norm(), b.norm()])}


# replicas


def ddp_gradients(model, mode):
    """Return gradients of two micro-batches per process; without a `mode`, the first is not synchronised."""
    wrapped = DistributedDataParallel(model.train(), **mode)
    torch.manual_seed(dist.get_rank())  # the seed of dropout
    for seed in (0, 1):
        with wrapped.no_sync() if seed == 0 and not mode else torch.enable_grad():
            wrapped(**batch(model, rows=2, seed=10 * seed + dist.get_rank())).loss.backward()
    return gradients(model)


def check_ddp_modes():
    """In every mode of DDP the gradients equal those of the plain model."""
    modes = [{}, *({mode: True} for mode in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"))]
    for name, mode in [*(("llama", mode) for mode in modes), ("bart", {})]:
        plain = build(name)
        handle = install(model := copy.deepcopy(plain))
        assert_same_gradients(ddp_gradients(model, mode), ddp_gradients(plain, mode), 1e-5)
        assert handle.counts.materialised == 0


def check_accumulation(store):
    """The Trainer on two processes with four micro-batches each gets the gradient of all sixteen rows."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }  # required but unused, because the process group exists
    plain = build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    handle, rows = install(model := copy.deepcopy(plain)), batch(plain, rows=16)
    rows["labels"][torch.rand(rows["labels"].shape, generator=torch.Generator().manual_seed(0)) > 0.3] = -100
    plain.train()(**rows).loss.backward()
    each = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    seen, sizes = Gradients(), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    made = trainer(model, f"{store}-{dist.get_rank()}", each, [seen], **sizes)
    assert made.args.world_size == 2
    made.train()
    assert_same_gradients(seen.of, gradients(plain), 1e-5)
    assert handle.counts.fused == 4


# other requirements on a sharded model


def llama(vocab=97, **settings):
    """Return a Llama in training mode, tied by default."""
    return build("llama", vocab_size=vocab, **settings).train()


def sgd_curve(model, vocab=97):
    """Return the losses of four SGD steps, averaged over the processes."""
    return average_over_processes(train(model, map(local_rows, make_batches(4, vocab)), torch.optim.SGD, 0.1))


def check_install_keeps_parameters(mesh):
    """Install keeps the sharded Parameters, so that an optimizer built afterwards holds them."""
    for sizes in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
        model = shard(llama(), mesh, **sizes)
        before = [id(p) for p in model.parameters()]
        values = [p.to_local().clone() for p in model.parameters()]
        handle = install(model)
        assert [id(p) for p in model.parameters()] == before
        assert all(torch.equal(p.to_local(), value) for p, value in zip(model.parameters(), values, strict=True))
        assert handle.tables()[0] is handle.tables()[1]
        refused(InstallError, "has tied tables that are sharded, and untied would", install, model, "untied")
        refused(UnsupportedError, "do it before fully_shard", handle.untie)
        refused(UnsupportedError, "do it before fully_shard", handle.exact_decoding)
        assert install(model).tables()[0] is handle.tables()[0]  # a second install


def check_unit_of_both_ends(mesh, one):
    """If both ends are one unit, FSDP frees them after the head. Install refuses this until resharding is off."""
    freed = "freed the table before these deferred logits were read; call set_reshard_after_forward"
    for first in (True, False):
        model = llama()
        if first:
            install(model)
        shard(model, mesh, ends={})
        if first:
            refused(UnsupportedError, freed, lambda model=model: model(**local_rows(next(make_batches(4, 97)))))
            install(model := llama())
            shard(model, mesh, ends={})
        else:
            refused(InstallError, freed, install, model)
            assert_near(sgd_curve(model), one, 1e-5, "refused, and trained without a boundary")
            shard(model := llama(), mesh, ends={})
            refused(InstallError, freed, install, model)
        model.lm_head.set_reshard_after_forward(False, recurse=False)
        if not first:
            install(model)
        assert_near(sgd_curve(model), one, 1e-5, "ends as one unit")


def check_transformers_fsdp(mesh, one, folder):
    """transformers' FSDP shards embedding and head before it ties them, so two units hold one Parameter.

    If V is odd on two processes, the head reads stale rows from the second step on, also without tiewise.
    """
    for vocab, right in ((97, False), (96, True)):
        path = f"{folder}-{vocab}"
        if dist.get_rank() == 0:
            llama(vocab).save_pretrained(path)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2)).train()
        wanted = one if vocab == 97 else train(llama(vocab), make_batches(4, vocab), torch.optim.SGD, 0.1)
        distance = (sgd_curve(model, vocab) - wanted).abs()
        assert distance[0] < 1e-5
        assert distance.max() < 1e-5 if right else distance[2] > 1e-3
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))
        refused(InstallError, "are one Parameter that two units of fully_shard keep", install, model)
        own = shard(AutoModelForCausalLM.from_pretrained(path), mesh).train()
        install(own)
        assert_near(sgd_curve(own, vocab), wanted, 1e-5, "own fully_shard")


def check_pipeline(folder):
    """In transformers' pipeline the first and the last stage hold the table, and nothing sums their gradients."""
    model = AutoModelForCausalLM.from_pretrained(f"{folder}-97", distributed_config=DistributedConfig(pp_size=2))
    refused(InstallError, "one stage of a pipeline, and its ends are on different ranks", install, model)


def check_half_sharded_model(mesh):
    """Install refuses sharded layers in an unsharded model. A forward would make each layer a root of FSDP."""
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    refused(InstallError, r"itself is not; call fully_shard\(model\) as well", install, model)
    install(fully_shard(model, mesh=mesh))


def check_mesh_of_two_dimensions():
    """A mesh of two dimensions shards the rows over two processes and replicates the shards twice."""
    model = shard(llama(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts")))
    install(model)
    assert_near(
        sgd_curve(model), train(llama(), make_batches(4, 97), torch.optim.SGD, 0.1), 1e-5, "a mesh of two dimensions"
    )


def check_loss_outside_the_forward(mesh, one):
    """A loss outside the forward, as in label smoothing, trains as the loss of the model."""
    model = shard(llama(), mesh)
    handle = install(model)
    smoother = handle.label_smoother(0.0)

    def smoothed(model, inputs):
        return smoother(model(input_ids=inputs["input_ids"]), inputs["labels"])

    with handle.deferred():
        curve = average_over_processes(
            train(model, map(local_rows, make_batches(4, 97)), torch.optim.SGD, 0.1, smoothed)
        )
    assert_near(curve, one, 1e-5, "loss outside the forward")


def check_bf16_policy(mesh):
    """A policy that computes in bf16 trains as the plain model with this policy does."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = (shard(llama(), mesh, policy=policy) for _ in range(2))
    install(model)
    assert_near(sgd_curve(model), sgd_curve(plain), 5e-3, "bf16 policy")


class Collectives(TorchDispatchMode):
    """Counts of collectives; torch's counter is not used, because its hooks on every module compute the logits."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the operation and run it."""
        if func.namespace == "c10d":
            self.calls[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def check_memory_and_collectives(mesh):
    """A process computes no [N, V] logits. Each unit has one reduce-scatter for any number of chunks."""
    vocab = 30011
    model = shard(llama(vocab, max_position_embeddings=512), mesh)
    handle = install(model)
    ids = torch.randint(3, vocab, (4, 512), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=ids[:, :2], labels=ids[:, :2]).loss.backward()
    with Collectives() as few:
        model(input_ids=ids[:, :2], labels=ids[:, :2]).loss.backward()
    with Collectives() as many, Allocations() as memory:
        model(input_ids=ids, labels=ids).loss.backward()
    assert memory.largest < ids.numel() * vocab / 2
    assert many.calls == few.calls
    assert sum(n for name, n in many.calls.items() if "reduce_scatter" in name) == 1 + len(model.model.layers)
    assert handle.counts.fused == 3
    assert handle.counts.materialised == 0


def check_first_steps(mesh):
    """Each check of the first steps raises in every process, in one line. A correct run leaves no hook."""
    batches = [local_rows(inputs) for inputs in make_batches(9, 97)]

    def steps(model, optimizer, cut=None):
        for inputs in batches:
            model(**inputs).loss.backward()
            if cut is not None and dist.get_rank() == 1:  # no gradient reaches the rows of this process
                cut.grad.to_local().zero_()
            optimizer.step()
            optimizer.zero_grad()

    def sharded():
        model = shard(llama(), mesh)
        install(model)
        return model

    gc.collect()  # models that were never trained are watched until they are collected
    assert not _global_optimizer_post_hooks

    # a correct run, and one with a learning rate of 0
    for rate, left in ((0.1, 0), (0.0, 1)):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        steps(model, optimizer)
        assert len(_global_optimizer_post_hooks) == len(_global_optimizer_pre_hooks) == left
    installed(model).unwatch()
    assert not _global_optimizer_post_hooks

    # a shard without gradient, with and without weight decay that changes it
    for decay in (0.0, 0.1):
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        wrong = "after 4 steps all rows of process 1 stand still"
        refused(UnsupportedError, wrong, steps, model, optimizer, model.lm_head.weight)
        steps(model, optimizer)  # reported once
        assert not _global_optimizer_post_hooks

    # an optimizer of gathered Parameters
    model = sharded()
    loss = model(**batches[0]).loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    refused(UnsupportedError, "SGD holds 2 gathered Parameters", optimizer.step)
    installed(model).unwatch()

    # replicas: a table that DDP does not know, and ends that are no longer tied
    model = llama()
    install(model)
    wrapped = DistributedDataParallel(model)
    install(model, "untied")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(UnsupportedError, "the table of process 1 is not that of process 0", steps, wrapped, optimizer)
    model = llama()
    install(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    wrapped = DistributedDataParallel(model)
    refused(UnsupportedError, "whose ends hold two Parameters; load and tie", steps, wrapped, optimizer)
    assert not _global_optimizer_post_hooks


def run_process(rank, store, world, some):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    if some != "parity":
        one = train(llama(), make_batches(4, 97), torch.optim.SGD, 0.1)
        check_install_keeps_parameters(mesh)
        check_half_sharded_model(mesh)
    if some == "quick":
        check_ddp_modes()
        check_accumulation(store)
    if some == "traps":
        check_unit_of_both_ends(mesh, one)
        check_transformers_fsdp(mesh, one, store)
        check_pipeline(store)
        check_loss_outside_the_forward(mesh, one)
        check_bf16_policy(mesh)
        check_memory_and_collectives(mesh)
        check_first_steps(mesh)
    if world == 4:
        check_mesh_of_two_dimensions()
    for case in CASES[:1] if some == "quick" else CASES:
        if case[-1] == world and some != "traps":
            check_parity(*case[:-1], mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    mp.start_processes(run_process, args=given, nprocs=given[1], start_method="fork")
