"""Gloo ranks train models whose tables are sharded; run by `test_sharded_training`.

    table_ranks.py FOLDER WORLD CASE…        a case: the name of a function below and its arguments, by commas

Each case compares a model on one rank with the same model on many ranks, from one checkpoint. The ways to shard:

    stock    transformers' tensor parallelism; the model on one rank has no boundary
    ends     `parallel_plan` for torch; every rank holds the full body
    kept     each rank keeps its rows under FSDP2
    both     four ranks, a mesh of 2 × 2: the ends by `parallel_plan`, and `fully_shard` over the other axis
"""

import copy
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers as tr
from tiny_models import FAMILIES, Allocations, build, without_dropout
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

import tiewise.hf  # noqa: F401, registers the type
from tiewise.boundary.installation import install, installed
from tiewise.boundary.parallel_plans import keep_tables, parallel_plan
from tiewise.boundary.sharded.export import export_sharded
from tiewise.boundary.sharded.save_load import load_sharded, save_sharded
from tiewise.boundary.sharded_tables import shard
from tiewise.checkpoint.audit import check
from tiewise.core.errors import InstallError, UnsupportedError

WIDTH = 32
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4}  # divisible by four ranks
BODY = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
BODY |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())


# models and batches


def save_checkpoint(folder, kind, v, tied, **sizes):
    """Save a checkpoint of a tiny model on the first rank and return its path."""
    where = Path(folder) / f"{kind}-{v}-{tied}{len(sizes)}"
    if dist.get_rank() == 0:
        build(kind, tied == "tied", vocab_size=v, **(SIZES | sizes)).save_pretrained(where)
    dist.barrier()
    return where


def load_model(kind, where, **spread):
    """Load a model in training mode; transformers spreads it over ranks by a `DistributedConfig` of `spread`."""
    how = {"distributed_config": DistributedConfig(**spread)} if spread else {}
    model = FAMILIES[kind][0].from_pretrained(where, attn_implementation="eager", dtype=torch.float32, **how)
    return without_dropout(model).train()


def spread_ends(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, parallel_plan(model, mesh))


def keep(model, replicas=1):
    sizes = (dist.get_world_size(),) if replicas == 1 else (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    shard(model, mesh, keep_tables(model, mesh))


def shard_both_axes(model, axes=2):
    """Spread the ends and Llama's body over one axis, then shard all over the other axis."""
    sizes, names = ((2, 2), ("dp", "tp")) if axes == 2 else ((2, 1, 2), ("replicas", "dp", "tp"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    body = {name: BODY[last] for name in linear if (last := name.rpartition(".")[2]) in BODY}
    parallelize_module(model, mesh["tp"], parallel_plan(model, mesh) | body)
    shard(model, mesh["dp" if axes == 2 else ("replicas", "dp")])


WAYS = {"kept": keep, "both": shard_both_axes}


def models(folder, way, kind, v, tied, spec=None, *more):
    """Return (the model on one rank, the same over all ranks with its boundary installed, its handle)."""
    where = save_checkpoint(folder, kind, v, tied)
    one = load_model(kind, where)
    if way == "stock":
        many = load_model(kind, where, tp_size=dist.get_world_size())
        return one, many, install(many)
    torch.manual_seed(3)
    if spec:
        install(one, spec)
    many = copy.deepcopy(one)
    WAYS[way](many, *more)
    folds = spec and any(sign in spec for sign in (":", "scale"))  # these specs are verified only on full tables
    return one, many, installed(many) if folds else install(many)


def batch(v, seed=5):
    """Return ids that contain the padding token, and labels of which some are ignored."""
    ids = torch.randint(3, v, (2, 12), generator=torch.Generator().manual_seed(seed))
    ids[:, -2:] = v - 1
    ids[0, :2] = 0
    labels = ids.clone()
    labels[:, 3] = -100
    return {"input_ids": ids, "labels": labels}


def rows_of(way, v, step):
    """Return the batch of a step for one rank, and the part of this rank. Some ways give ranks equal parts."""
    alike = {"kept": 1, "both": 2}.get(way, dist.get_world_size())
    parts = dist.get_world_size() // alike
    batches = [batch(v, step * parts + part) for part in range(parts)]
    return {name: torch.cat([one[name] for one in batches]) for name in batches[0]}, batches[dist.get_rank() // alike]


# comparisons


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_near(what, got, wanted, tolerance, least=1e-12):
    """Check an error of at most `tolerance` of the largest value, or of `least`. Some gradients are only rounding."""
    got, wanted = full(got).detach(), full(wanted).detach()
    distance = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(least))
    assert distance <= tolerance, f"{what}: off by {distance:.1e}"


def assert_near_gradients(what, one, many, tolerance, least=1e-12):
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)  # T5 does not use its third table
        if a.grad is not None:
            assert_near(f"{what}: gradient of {name}", b.grad, a.grad, tolerance, least)


def refused(error, says, call, *arguments):
    """Check that the call raises this error with these words in one line."""
    with pytest.raises(error, match=says) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def follow(what, way, v, one, many, handle, make=torch.optim.SGD, rate=0.1, bar=1e-5):
    """Compare losses of 20 steps, first gradients and, for SGD, last parameters of both models.

    Other optimizers divide by gradients that are only rounding, so their parameters are not compared.
    """
    optimizers = [make(model.parameters(), lr=rate) for model in (one, many)]
    for step in range(20):
        losses = [model(**inputs).loss for model, inputs in zip((one, many), rows_of(way, v, step), strict=True)]
        shown = losses[1].detach().clone()
        if way in ("kept", "both"):  # each rank has different tokens
            dist.all_reduce(shown)
            shown /= dist.get_world_size()
        assert_near(f"{what}: loss at step {step}", shown, losses[0], bar)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
            assert_near_gradients(what, one, many, 1e-5, largest / 100)
        for optimizer in optimizers:
            optimizer.step()
    if make is torch.optim.SGD:
        for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
            assert_near(f"{what}: {name} after 20 steps", b, a, bar, 0.01)
    assert (handle.counts.fused, handle.counts.materialised) == (20, 0)


# cases of several ways


def steps(folder, way, kind, v, tied, *more, **how):
    one, many, handle = models(folder, way, kind, v, tied, *more)
    if not more:
        assert handle.spec.kind == tied
        assert (handle.tables()[0] is handle.tables()[1]) == (tied == "tied")
    follow(f"{way} {kind} {v} {tied} {more} {how}", way, v, one, many, handle, **how)


adamw = partial(steps, make=torch.optim.AdamW, rate=1e-3, bar=1e-4)


def both_paths(folder, way, kind, v, *more):
    """Compare the norms of both paths with those of two tables on one rank. `kept` uses two micro-batches."""
    for tied in ("tied", "untied"):
        one, many, handle = models(folder, way, kind, v, tied, None, *more)
        micro = [rows_of(way, v, seed) for seed in ((3, 4) if way == "kept" else (3,))]
        handle.track(tied == "tied")
        for i, (_, own) in enumerate(micro):
            if len(micro) > 1:
                many.set_requires_gradient_sync(i == len(micro) - 1)
            (many(**own).loss / len(micro)).backward()
        norms = handle.path_norms()
        one.lm_head.weight = nn.Parameter(one.lm_head.weight.detach().clone())
        for whole, _ in micro:
            (one(**whole).loss / len(micro)).backward()
        a, b = one.get_input_embeddings().weight.grad, one.lm_head.weight.grad
        wanted = torch.stack([a.norm(), b.norm(), *([] if tied == "untied" else [(a + b).norm()])])
        assert_near(f"{tied} norms", torch.tensor([norms.a, norms.b, norms.total][: len(wanted)]), wanted, 1e-5)
        if tied == "tied":
            assert_near("cosine", torch.tensor(norms.cosine), (a * b).sum() / a.norm() / b.norm(), 1e-5)
        assert_near("gradient", many.lm_head.weight.grad, (a + b) if tied == "tied" else b, 1e-5)


def logits_are_real(folder, way, kind, v):
    """Compare logits that are read, gradients of a loss of them, and generated tokens with one rank.

    Ranks with different tokens have batches of different lengths.
    """
    one, many, handle = models(folder, way, kind, v, "tied")
    apart = way == "kept"
    ids = [batch(v, seed)["input_ids"][:, : 12 - seed] for seed in range(dist.get_world_size() if apart else 1)]

    def score(model, ids):
        logits = model(input_ids=ids).logits
        assert logits.shape[-1] == v
        p = torch.softmax(logits[..., 2:].float(), -1)  # probabilities of some tokens, which no fused loss computes
        return (p.square().sum(-1) * torch.linspace(0.5, 1, p.shape[1])).mean()

    scores, here = [score(one, each) for each in ids], dist.get_rank() if apart else 0
    torch.stack(scores).mean().backward()
    got = score(many, ids[here])
    assert_near("score", got, scores[here], 1e-5)
    got.backward()
    assert_near_gradients(f"{kind}, by its logits", one, many, 2e-5)
    assert handle.counts.materialised == 1
    with torch.no_grad():
        inputs = batch(v, here)
        assert_near("logits", many.eval()(**inputs).logits + 0, one.eval()(**inputs).logits, 1e-5)
    if not apart:
        told = [model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False) for model in (one, many)]
        assert torch.equal(*told)


def nothing_is_whole(folder, way, kind, v):
    """A step allocates neither a full table nor all logits, while transformers computes all logits."""
    _, many, handle = models(folder, way, kind, v, "tied")
    inputs, ranks = rows_of(way, v, 0)[1], dist.get_world_size()
    many(**inputs).loss.backward()
    with Allocations() as ours:
        many(**inputs).loss.backward()
    rows, n = -(-v // (2 if way == "both" else ranks)), inputs["input_ids"].numel()
    wanted = max(rows * WIDTH, rows * n * (ranks if way == "kept" else 1))
    assert wanted <= ours.largest <= (1.1 if way == "both" else 1) * wanted  # `fully_shard` also gathers norms
    assert ours.largest < v * (WIDTH if way == "kept" else min(WIDTH, n))
    if way == "stock":
        handle.uninstall()
        with Allocations() as theirs:
            many(**inputs).loss.backward()
        assert theirs.largest >= n * v


def refusals(folder, way, kind, v):
    """Operations that change or read a full table are refused, and the model still trains as before."""
    one, many, handle = models(folder, way, kind, v, "tied")
    refused(InstallError, "tied tables that are sharded, and factored:8 would change them", install, many, "factored:8")
    refused(InstallError, "and untied would change them; install it before", install, many, "untied")
    refused(UnsupportedError, "tied to untied: the tables of .* are sharded; do it before", handle.untie)
    refused(UnsupportedError, "exact_decoding: the tables", handle.exact_decoding)
    assert install(many).tables()[0] is handle.tables()[0]
    if way == "stock":
        installed(many).uninstall()
        assert "Tiewise" not in type(many.lm_head).__name__
        assert_near("uninstalled", many(**batch(v)).loss, one(**batch(v)).loss, 1e-5)
        install(many)
    follow("after refusals", way, v, one, many, installed(many))


# tensor parallelism


def columns(folder, kind, v):
    """Install refuses a table that is sharded by columns."""
    plan, where = {"model.embed_tokens": "embedding_colwise"}, save_checkpoint(folder, kind, v, "untied")
    across = load_model(kind, where, tp_size=dist.get_world_size(), tp_plan=plan)
    refused(InstallError, "embed_tokens is sharded", install, across)


def heads_that_do_not_divide(folder, kind, v):
    """Install refuses a number of heads that the ranks do not divide. transformers fails only in the first step."""
    where = save_checkpoint(folder, kind, v, "tied", num_attention_heads=2, num_key_value_heads=2)
    many = load_model(kind, where, tp_size=4)
    refused(InstallError, r"4 ranks .* do not divide num_attention_heads=2; choose", install, many)


def log_probabilities(folder, kind, v):
    """Log-probabilities and entropies, as policy losses use them, have the gradients of one rank without logits."""
    one, many, handle = models(folder, "stock", kind, v, "tied")
    ids, found = batch(v)["input_ids"], []
    for model in (one, many):
        log_p = torch.log_softmax(model(input_ids=ids).logits / 0.8, -1)
        chosen = log_p.gather(-1, ids[..., None]).sum()
        entropy = -(log_p.exp() * log_p).sum(-1).sum()
        (chosen + 0.3 * entropy).backward()
        found.append((chosen, entropy))
    for what, a, b in zip(("chosen", "entropy"), *found, strict=True):
        assert_near(what, b, a, 2e-5)
    assert_near_gradients(kind, one, many, 2e-5)
    assert handle.counts.materialised == 0


def adamw_and_class_weights(folder, kind, v):
    """AdamW has the curve of one rank for class weights, smoothing and a bias after the head."""
    one, many, handle = models(folder, "stock", kind, v, "tied")
    g = torch.Generator().manual_seed(1)
    weight, shift = torch.rand(v, generator=g) + 0.2, torch.randn(v, generator=g)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (one, many)]
    for step in range(20):
        losses, inputs = [], batch(v, step)
        for model, optimizer in zip((one, many), optimizers, strict=True):
            logits = (model(input_ids=inputs["input_ids"]).logits + shift).view(-1, v)
            loss = F.cross_entropy(logits, inputs["labels"].view(-1), weight, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert_near(f"{kind}: loss at step {step}", losses[1], losses[0], 1e-4)
    assert (handle.counts.fused, handle.counts.materialised) == (20, 0)


def saved_with_a_boundary(folder, kind, v):
    """A checkpoint with a spec gets its boundary while it loads, before its weights are spread."""
    one = load_model(kind, save_checkpoint(folder, kind, v, "tied"))
    where, alone = Path(folder) / "entry", install(one, "tied")
    if dist.get_rank() == 0:
        one.save_pretrained(where)
    dist.barrier()
    alone.uninstall()
    many = load_model(kind, where, tp_size=dist.get_world_size())
    follow("saved", "stock", v, one, many, install(many))


def ends_alone(folder, kind, v, tied):
    """A family without a plan keeps the full body on every rank. `parallel_plan` spreads its ends by torch."""
    one, many = (load_model(kind, save_checkpoint(folder, kind, v, tied)) for _ in range(2))
    names = {name for name, _ in many.named_parameters()}
    spread_ends(many)
    assert {name for name, _ in many.named_parameters()} == names  # a tied Parameter stays one Parameter
    assert_near("before install", many(**batch(v)).loss, one(**batch(v)).loss, 1e-5)
    follow(f"{kind} {v} {tied}", "ends", v, one, many, install(many))


def installed_before(folder, kind, v, *specs):
    """Boundaries with maps are installed on full tables, whose rows are spread afterwards."""
    for spec in specs:
        one = load_model(kind, save_checkpoint(folder, kind, v, "tied"))
        torch.manual_seed(3)
        install(one, spec)
        many, ids = copy.deepcopy(one), batch(v)["input_ids"]
        wanted = one.eval()(input_ids=ids).logits
        spread_ends(many)
        assert_near(f"{spec}: logits", many.eval()(input_ids=ids).logits, wanted, 1e-5)
        follow(f"{kind} {spec}", "ends", v, one.train(), many.train(), installed(many))
        assert type(many.lm_head.weight).__name__ == "DTensor"
        if hasattr(one.lm_head, "out_map"):
            where = Path(folder) / spec
            if dist.get_rank() == 0:
                one.save_pretrained(where)
            dist.barrier()
            load = partial(tr.AutoModelForCausalLM.from_pretrained, where)
            config = DistributedConfig(tp_size=dist.get_world_size())
            refused(
                InstallError, "no plan of transformers knows; load it whole", partial(load, distributed_config=config)
            )
            refused(InstallError, "verified on whole tables only; take its handle", install, many)


def two_groups(folder, kind, v):
    """Two ranks hold the table together; two others hold a replica of it and have other tokens."""
    one, many = (load_model(kind, save_checkpoint(folder, kind, v, "tied")) for _ in range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    parallelize_module(many, mesh["tp"], parallel_plan(many, mesh))
    handle = install(many)
    handle.track()
    losses = [model(**batch(v, seed=mesh.get_local_rank("data"))).loss for model in (one, many)]
    assert_near("loss", losses[1], losses[0], 1e-5)
    for loss in losses:
        loss.backward()
    assert_near("gradient", many.lm_head.weight.grad, one.lm_head.weight.grad, 1e-5)
    refused(UnsupportedError, "others hold the same rows", handle.path_norms)


def meshes(folder, kind, v):
    """`parallel_plan` refuses unsuitable meshes and models, and changes nothing."""
    model, size = load_model(kind, save_checkpoint(folder, kind, v, "tied")), dist.get_world_size()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    other = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "model"))
    refused(InstallError, r"named 'tp' \(data, model\); name the one", parallel_plan, model, other)
    unnamed = init_device_mesh("cpu", (1, size))
    refused(InstallError, "none of the mesh's 2 dimensions is named 'tp'", parallel_plan, model, unnamed)
    refused(InstallError, "a int in place of a mesh", parallel_plan, model, size)
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tp"))
    plan = parallel_plan(model, named)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert set(plan) == {"transformer.wte", "lm_head"}
    parallelize_module(model, named["tp"], plan)
    refused(InstallError, "spread over ranks already", parallel_plan, model, init_device_mesh("cpu", (size,)))


# tables whose rows are kept under FSDP2


def bf16(folder, kind, v):
    """A policy that computes in bf16 also applies to kept tables, which train as gathered ones do."""
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(torch.bfloat16)
    curves = []
    for kept in (False, True):
        model = load_model(kind, save_checkpoint(folder, kind, v, "tied"))
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=keep_tables(model, mesh) if kept else None)
        install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(**rows_of("kept", v, step)[1]).loss
            loss.backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            optimizer.step()
            optimizer.zero_grad()
        curves.append(loss.detach())
    assert_near("bf16", curves[1], curves[0], 1e-2)


def told_apart(folder, kind, v):
    """`keep_tables` refuses unsuitable meshes and models."""
    where, size = save_checkpoint(folder, kind, v, "tied"), dist.get_world_size()
    mesh, deep = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, 1, size))
    model, plain = load_model(kind, where), load_model(kind, where)
    refused(InstallError, "keep_tables of a int in place of a mesh", keep_tables, model, 2)
    refused(InstallError, "over a mesh of 3 dimensions; give that of", keep_tables, model, deep)
    keep_tables(model, mesh)
    refused(InstallError, "spread over ranks already; call tiewise.install", keep_tables, model, mesh)
    refused(UnsupportedError, "without a boundary; call tiewise.install", lambda: model(**batch(v)))
    shard(plain, mesh)
    refused(InstallError, "sharded by fully_shard already; call keep_tables on", keep_tables, plain, mesh)


def still(folder, kind, v):
    """The watch of the first steps reports a kept table whose rows never change on one rank."""
    _, many, _ = models(folder, "kept", kind, v, "tied")
    optimizer = torch.optim.SGD(many.parameters(), lr=0.1)

    def train():
        for step in range(5):
            many(**rows_of("kept", v, step)[1]).loss.backward()
            if dist.get_rank() == 1:
                many.lm_head.weight.grad.to_local().zero_()
            optimizer.step()
            optimizer.zero_grad()

    refused(UnsupportedError, "after 4 steps all rows of process 1 stand still", train)


def kept_on_disk(folder, kind, v):
    """A save by all ranks loads into a gathered model and exports, bit for bit and tied."""
    _, many, _ = models(folder, "kept", kind, v, "tied")
    optimizer = torch.optim.AdamW(many.parameters(), lr=1e-3)
    many(**rows_of("kept", v, 0)[1]).loss.backward()
    optimizer.step()
    place = f"{folder}/{kind}-{v}-saved"
    save_sharded(place, many, optimizer)
    other = load_model(kind, save_checkpoint(folder, kind, v, "tied"))
    shard(other)
    again = torch.optim.AdamW(other.parameters())
    load_sharded(place, other, again)
    for a, b in zip(many.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
        assert all(torch.equal(full(optimizer.state[a][key]), full(again.state[b][key])) for key in again.state[b])
    table = full(many.lm_head.weight)
    if dist.get_rank() == 0:
        export_sharded(place, f"{place}-whole")
        assert not [finding for finding in check(f"{place}-whole").findings if finding.rule == "B013"]
        whole = FAMILIES[kind][0].from_pretrained(f"{place}-whole")
        assert whole.lm_head.weight is whole.get_input_embeddings().weight
        assert torch.equal(whole.lm_head.weight, table)


# tensor parallelism and FSDP2


def stock(folder, kind, v):
    """transformers' layout is exact for untied tables; tied ones are refused, as two units hold one Parameter."""
    where = save_checkpoint(folder, kind, v, "untied")
    many = load_model(kind, where, tp_size=2, fsdp_size=2)
    follow(f"stock {kind} {v}", "both", v, load_model(kind, where), many, install(many))
    tied = load_model(kind, save_checkpoint(folder, kind, v, "tied"), tp_size=2, fsdp_size=2)
    refused(InstallError, "are one Parameter that two units of fully_shard keep", install, tied)


def on_rank(rank, folder, size, cases):
    """Join the process group and run the cases."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    tr.logging.set_verbosity_error()
    tr.utils.logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    patience, store = timedelta(seconds=60), f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
    for case in cases:
        name, *of = case.split(",")
        globals()[name](folder, *(int(word) if word.isdigit() else word for word in of))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, size, *cases = sys.argv[1:]
    mp.start_processes(on_rank, args=(folder, int(size), cases), nprocs=int(size), start_method="fork")  # imports once
