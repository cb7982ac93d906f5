"""Several gloo processes train installed models under DDP and FSDP2 beside one; run by `test_parallel`.

    python parallel_ranks.py FILE WORLD quick|parity|traps       exits 0 where all agree

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

from tiewise.boundary.install import install, installed
from tiewise.boundary.ops.path_gradient import gather
from tiewise.core.errors import InstallError, UnsupportedError

FAMILIES = ("llama", "gpt2", "gemma2", "bert", "t5")
SPECS = ("tied", "untied", "factored:6", "residual:2")
# every family with every spec; of the others, every value with every value of each
CASES = [
    (family, spec, (97, 1000)[(f + s) % 2], ("fsdp", "ddp")[(f + s // 2) % 2], (2, 4)[(f // 2 + s) % 2])
    for (f, family), (s, spec) in product(enumerate(FAMILIES), enumerate(SPECS))
]
STEPS = 20


# what is trained, and on what


def make_batches(rows, vocab, steps=STEPS):
    """Batches of `rows` rows whose labels are the ids, as many of them ignored in every row."""
    for step in range(steps):
        ids = torch.randint(3, vocab, (rows, 9), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        labels[:, -2:] = -100
        yield {"input_ids": ids, "labels": labels}


def own_rows(batch):
    """This process's rows."""
    return {name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()}


def shard(model, mesh, ends=None, policy=None, **root):
    """`fully_shard` as its documentation has it: the outermost blocks, then the model; before it `ends` as one unit."""
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
    """Losses [steps], averaged over the processes that train."""
    optimizer, losses = kind(model.parameters(), lr=lr), []
    for inputs in batches:
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def average(losses):
    """Of all processes."""
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def assert_near(got, wanted, tolerance, what):
    """Within `tolerance` of the largest; only the first process knows what is wanted."""
    if dist.get_rank() == 0:
        distance = float((got - wanted).abs().max() / wanted.abs().max())
        assert distance <= tolerance, f"{what}: {distance:.2e}"


# one case against one process


def paths(model, handle, inputs):
    """{name: gradient}, and those of the lookup and of the head apart, by the record."""
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


def parity(family, spec, vocab, parallel, mesh):
    """Loss, both gradient paths, 20 SGD steps and an AdamW curve."""
    what, rows = f"{family} {spec} V={vocab} {parallel}", 2 * dist.get_world_size()
    plain = without_dropout(build(family, tied=spec != "untied", vocab_size=vocab)).train()
    batches = list(make_batches(rows, vocab))
    for kind, lr, bar in ((torch.optim.SGD, 0.1, 1e-5), (torch.optim.AdamW, 1e-3, 1e-4)):
        torch.manual_seed(1)  # of new tables
        model = copy.deepcopy(plain)
        first = parallel == "ddp" or spec[:3] in ("fac", "res")  # these are installed before the model is sharded
        handle = install(model, spec) if first else None
        one = copy.deepcopy(model) if first else plain
        if parallel == "ddp":
            # untied, BERT's head has a bias of its own and leaves another one without a gradient
            model = DistributedDataParallel(model, find_unused_parameters=(family, spec) == ("bert", "untied"))
        else:
            shard(model, mesh)
            handle = handle or install(model)
        if kind is torch.optim.SGD:
            got = paths(model, handle, own_rows(batches[0]))
            if dist.get_rank() == 0:
                # of the family's own classes where these have the boundary
                wanted = alone(plain if spec in ("tied", "untied") else one, batches[0])
                assert wanted.keys() == got.keys(), what
                zero = 1e-6 * max(gradient.abs().max() for gradient in wanted.values())
                for name, gradient in wanted.items():
                    if gradient.abs().max() > zero:  # softmax ignores what a bias adds to all its keys
                        assert_near(got[name], gradient, 1e-5, f"{what}: {name}")
        curve = average(train(model, map(own_rows, batches), kind, lr))
        assert handle.counts.materialised == 0
        end = {name: full(p.detach()) for name, p in handle.model.named_parameters()}
        if dist.get_rank() == 0:
            one = copy.deepcopy(one)
            assert_near(curve, train(one, batches, kind, lr), bar, f"{what}: {kind.__name__} curve")
            if kind is torch.optim.SGD:
                for name, parameter in one.named_parameters():
                    assert_near(end[name], parameter.detach(), bar, f"{what}: {name} after {STEPS} steps")


def alone(model, inputs):
    """What `paths` finds, of one process: a shared table's paths by two, of which the head has one."""
    model = copy.deepcopy(model)
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    if tied := head.weight is lookup.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    elif hasattr(model, "decoder"):  # of T5's three tables the one of the stack before the head
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
    """Of two micro-batches, each process with its own, the first of them without exchange where `mode` is none."""
    wrapped = DistributedDataParallel(model.train(), **mode)
    torch.manual_seed(dist.get_rank())  # of dropout
    for seed in (0, 1):
        with wrapped.no_sync() if seed == 0 and not mode else torch.enable_grad():
            wrapped(**batch(model, rows=2, seed=10 * seed + dist.get_rank())).loss.backward()
    return gradients(model)


def ddp_modes():
    """Whatever DDP does with gradients, they are those without us."""
    modes = [{}, *({mode: True} for mode in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"))]
    for name, mode in [*(("llama", mode) for mode in modes), ("bart", {})]:
        plain = build(name)
        handle = install(model := copy.deepcopy(plain))
        assert_same_gradients(ddp_gradients(model, mode), ddp_gradients(plain, mode), 1e-5)
        assert handle.counts.materialised == 0


def accumulated(store):
    """The Trainer of two processes, four micro-batches each: the gradient is that of all sixteen rows at once."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # asked for, and not used: the group stands
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


# what else is asked of a sharded model


def llama(vocab=97, **settings):
    """A tied one, where nothing else is said."""
    return build("llama", vocab_size=vocab, **settings).train()


def sgd_curve(model, vocab=97):
    """Losses of this process's share, averaged."""
    return average(train(model, map(own_rows, make_batches(4, vocab)), torch.optim.SGD, 0.1))


def holds_sharded(mesh):
    """Verification leaves the Parameters that it found, sharded: an optimizer that is built next holds those."""
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
        assert install(model).tables()[0] is handle.tables()[0]  # a second time


def unit_of_ends(mesh, one):
    """Ends as a unit of their own are freed behind the head: refused, until they are told to stay."""
    freed = "freed the table before these deferred logits were read; call set_reshard_after_forward"
    for first in (True, False):
        model = llama()
        if first:
            install(model)
        shard(model, mesh, ends={})
        if first:
            refused(UnsupportedError, freed, lambda model=model: model(**own_rows(next(make_batches(4, 97)))))
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


def stock(mesh, one, folder):
    """transformers' own FSDP shards embedding and head before it ties them: two units keep one Parameter.

    With V that two processes do not divide the head reads stale rows from the second step on, without us.
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


def pipeline(folder):
    """transformers' own pipeline: the last stage has both ends, and the first a table that nothing adds up with it."""
    model = AutoModelForCausalLM.from_pretrained(f"{folder}-97", distributed_config=DistributedConfig(pp_size=2))
    refused(InstallError, "one stage of a pipeline, and its ends are on different ranks", install, model)


def half_sharded(mesh):
    """A forward would make each layer a root of its own, and the model could not be sharded afterwards."""
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    refused(InstallError, r"itself is not; call fully_shard\(model\) as well", install, model)
    install(fully_shard(model, mesh=mesh))


def hybrid():
    """Parts of the rows in two processes, and twice that: a mesh of two dimensions."""
    model = shard(llama(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts")))
    install(model)
    assert_near(
        sgd_curve(model), train(llama(), make_batches(4, 97), torch.optim.SGD, 0.1), 1e-5, "a mesh of two dimensions"
    )


def outside_the_forward(mesh, one):
    """Losses of logits that left the model, as a Trainer's label smoothing takes them."""
    model = shard(llama(), mesh)
    handle = install(model)
    smoother = handle.label_smoother(0.0)

    def smoothed(model, inputs):
        return smoother(model(input_ids=inputs["input_ids"]), inputs["labels"])

    with handle.deferred():
        curve = average(train(model, map(own_rows, make_batches(4, 97)), torch.optim.SGD, 0.1, smoothed))
    assert_near(curve, one, 1e-5, "loss outside the forward")


def narrow(mesh):
    """A policy that computes in bf16 is verified, and trains, as exactly as that."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = (shard(llama(), mesh, policy=policy) for _ in range(2))
    install(model)
    assert_near(sgd_curve(model), sgd_curve(plain), 5e-3, "bf16 policy")


class Collectives(TorchDispatchMode):
    """How often each was called; torch's own counter hooks every module, for which logits are computed."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, and do it."""
        if func.namespace == "c10d":
            self.calls[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def cost(mesh):
    """No [N, V] logits on a process, and one reduce-scatter a unit however many chunks the loss has."""
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


def assertions(mesh):
    """Each of the first steps' assertions fires in every process, in one line; a sound run leaves nothing behind."""
    batches = [own_rows(inputs) for inputs in make_batches(9, 97)]

    def steps(model, optimizer, cut=None):
        for inputs in batches:
            model(**inputs).loss.backward()
            if cut is not None and dist.get_rank() == 1:  # its rows off from their gradient
                cut.grad.to_local().zero_()
            optimizer.step()
            optimizer.zero_grad()

    def sharded():
        model = shard(llama(), mesh)
        install(model)
        return model

    gc.collect()  # models that were never trained are watched as long as they live
    assert not _global_optimizer_post_hooks

    # a sound run, and one that learns at a rate of 0 first
    for rate, left in ((0.1, 0), (0.0, 1)):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        steps(model, optimizer)
        assert len(_global_optimizer_post_hooks) == len(_global_optimizer_pre_hooks) == left
    installed(model).unwatch()
    assert not _global_optimizer_post_hooks

    # a shard that no gradient reaches, with weight decay that moves it and without
    for decay in (0.0, 0.1):
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        wrong = "after 4 steps all rows of process 1 stand still"
        refused(UnsupportedError, wrong, steps, model, optimizer, model.lm_head.weight)
        steps(model, optimizer)  # said once
        assert not _global_optimizer_post_hooks

    # an optimizer of gathered Parameters
    model = sharded()
    loss = model(**batches[0]).loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    refused(UnsupportedError, "SGD holds 2 gathered Parameters", optimizer.step)
    installed(model).unwatch()

    # replicas: a table that DDP does not know, and ends that are no longer one
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


def process(rank, store, world, some):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    if some != "parity":
        one = train(llama(), make_batches(4, 97), torch.optim.SGD, 0.1)
        holds_sharded(mesh)
        half_sharded(mesh)
    if some == "quick":
        ddp_modes()
        accumulated(store)
    if some == "traps":
        unit_of_ends(mesh, one)
        stock(mesh, one, store)
        pipeline(store)
        outside_the_forward(mesh, one)
        narrow(mesh)
        cost(mesh)
        assertions(mesh)
    if world == 4:
        hybrid()
    for case in CASES[:1] if some == "quick" else CASES:
        if case[-1] == world and some != "traps":
            parity(*case[:-1], mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    mp.start_processes(process, args=given, nprocs=given[1], start_method="fork")
