"""Gloo ranks train models that transformers has made tensor parallel; run by `test_sharded_training`.

    tensor_parallel_ranks.py FOLDER WORLD CASE…

Each case is a model of one rank beside the same of many, from one checkpoint; the one rank has nothing installed.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.distributed import DistributedConfig

import tiewise.hf  # noqa: F401, registers the type
from tiewise.boundary.install import install, installed
from tiewise.boundary.parallel_plan import parallel_plan
from tiewise.core.errors import InstallError, UnsupportedError

_BERT = {"max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_T5 |= {"dropout_rate": 0.0}
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32, "dropout": 0.0}
_BART |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_start_token_id"), 2)
_BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.1, "forced_eos_token_id": None}
KINDS = {
    "gpt2": (tr.GPT2LMHeadModel, tr.GPT2Config, _GPT2),
    "bert": (tr.BertForMaskedLM, tr.BertConfig, _BERT),
    "t5": (tr.T5ForConditionalGeneration, tr.T5Config, _T5),
    "bart": (tr.BartForConditionalGeneration, tr.BartConfig, _BART),
    "llama": (tr.LlamaForCausalLM, tr.LlamaConfig, {}),
    "phi": (tr.PhiForCausalLM, tr.PhiConfig, {"initializer_range": 0.05}),  # whose head has a bias
    "gemma2": (tr.Gemma2ForCausalLM, tr.Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 0.7}),
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
SIZES |= {"initializer_range": 0.15}
HOW = {"attn_implementation": "eager", "dtype": torch.float32}


def saved(folder, kind, v, tied, **sizes):
    """A checkpoint of a tiny model, made by the first rank."""
    where = Path(folder) / f"{kind}-{v}-{tied}{len(sizes)}"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        made, config, more = KINDS[kind]
        made(config(vocab_size=v, tie_word_embeddings=tied == "tied", **(SIZES | more | sizes))).save_pretrained(where)
    dist.barrier()
    return where


def pair(folder, kind, v, tied):
    """(the model of one rank, the same over all ranks with its boundary installed, its handle)."""
    where = saved(folder, kind, v, tied)
    one = KINDS[kind][0].from_pretrained(where, **HOW)
    many = KINDS[kind][0].from_pretrained(
        where, **HOW, distributed_config=DistributedConfig(tp_size=dist.get_world_size())
    )
    handle = install(many)
    return one.train(), many.train(), handle


def batch(v, seed=5):
    """Ids with the padding token among them, and labels of which some are ignored."""
    ids = torch.randint(3, v, (2, 12), generator=torch.Generator().manual_seed(seed))
    ids[:, -2:] = v - 1
    ids[0, :2] = 0
    labels = ids.clone()
    labels[:, 3] = -100
    return {"input_ids": ids, "labels": labels}


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def near(what, got, wanted, tolerance, least=1e-12):
    """Within a tolerance of the largest value, or of `least`: a key's bias has no gradient but rounding."""
    got, wanted = full(got).detach(), full(wanted).detach()
    distance = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(least))
    assert distance <= tolerance, f"{what}: off by {distance:.1e}"


def twenty_steps(folder, kind, v, tied):
    one, many, handle = pair(folder, kind, v, tied)
    assert handle.spec.kind == tied
    assert (many.lm_head.weight is many.get_input_embeddings().weight) == (tied == "tied")
    twenty_steps_of(f"{kind} {v} {tied}", v, one, many, handle)


def twenty_steps_of(what, v, one, many, handle):
    follow(what, lambda step: [batch(v, step)] * 2, one, many, handle)


def mean_over_ranks(loss):
    """Of ranks that see tokens of their own."""
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    return shown / dist.get_world_size()


def follow(what, rows_of, one, many, handle, *, shown=torch.Tensor.detach, make=torch.optim.SGD, rate=0.1, bar=1e-5):
    """20 steps of both models, each on its inputs of `rows_of(step)`; what is `shown` of many's loss is one's.

    Of SGD their parameters too, as others divide by gradients that are rounding alone.
    """
    optimizers = [make(model.parameters(), lr=rate) for model in (one, many)]
    for step in range(20):
        losses = [model(**inputs).loss for model, inputs in zip((one, many), rows_of(step), strict=True)]
        near(f"{what}: loss at step {step}", shown(losses[1]), losses[0], bar)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            least = max(float(p.grad.abs().max()) for p in one.parameters()) / 100
            for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
                near(f"{what}: gradient of {name}", b.grad, a.grad, 1e-5, least)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        if make is torch.optim.SGD:
            near(f"{what}: {name} after 20 steps", b, a, bar, 0.01)
    assert (handle.counts.fused, handle.counts.materialised) == (20, 0)


def rows_of(v, step, alike=1):
    """The batch of a step for one rank, and this rank's part, which so many have `alike`; parts have unlike labels."""
    parts = dist.get_world_size() // alike
    batches = [batch(v, step * parts + part) for part in range(parts)]
    return {name: torch.cat([one[name] for one in batches]) for name in batches[0]}, batches[dist.get_rank() // alike]


def beside(rows_of, what, v, *of, **how):
    """`follow` where ranks see tokens of their own."""
    follow(what, partial(rows_of, v), *of, shown=mean_over_ranks, **how)


def steps(models, rows_of, folder, kind, v, tied, *more, **how):
    """Loss, gradients and parameters over 20 steps of SGD, or another's curve."""
    beside(rows_of, f"{kind} {v} {tied} {more} {how}", v, *models(folder, kind, v, tied, *more), **how)


def placed(folder, kind, v, tied, spec, place):
    """(the model of one rank, the same over all that `place` spreads, with its boundary installed, its handle)."""
    one = KINDS[kind][0].from_pretrained(saved(folder, kind, v, tied), **HOW)
    torch.manual_seed(3)
    if spec:
        install(one, spec)
    many = copy.deepcopy(one)
    place(many)
    folds = spec and any(sign in spec for sign in (":", "scale"))  # which is verified on whole tables alone
    handle = installed(many) if folds else install(many)
    return one.train(), many.train(), handle


def paths_near(tied, one, many, handle, micro):
    """The norms of both paths over micro-batches (one's, many's), against two separate tables of one rank."""
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
    near(f"{tied} norms", torch.tensor([norms.a, norms.b, norms.total][: len(wanted)]), wanted, 1e-5)
    if tied == "tied":
        near("cosine", torch.tensor(norms.cosine), (a * b).sum() / a.norm() / b.norm(), 1e-5)
    near("gradient", many.lm_head.weight.grad, (a + b) if tied == "tied" else b, 1e-5)


def ends_alone(folder, kind, v, tied):
    """A family without a plan: the body whole on every rank, and the ends by `parallel_plan` for torch."""
    where = saved(folder, kind, v, tied)
    one, many = (KINDS[kind][0].from_pretrained(where, **HOW) for _ in range(2))
    for model in (one, many):
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.linspace(-1, 1, v))
    names = {name for name, _ in many.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(many, mesh, parallel_plan(many, mesh))
    assert {name for name, _ in many.named_parameters()} == names  # what was one Parameter is one
    near("before install", many.train()(**batch(v)).loss, one.train()(**batch(v)).loss, 1e-5)
    twenty_steps_of(f"{kind} {v} {tied}", v, one, many, install(many))


def installed_before(folder, kind, v, *specs):
    """Boundaries that are more than tables are installed whole; then their tables' rows are spread."""
    for spec in specs:
        one = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **HOW)
        torch.manual_seed(3)
        install(one, spec)
        many = copy.deepcopy(one)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ids = batch(v)["input_ids"]
        wanted = one.eval()(input_ids=ids).logits
        parallelize_module(many, mesh, parallel_plan(many, mesh))
        near(f"{spec}: logits", many.eval()(input_ids=ids).logits, wanted, 1e-5)
        twenty_steps_of(f"{kind} {spec}", v, one.train(), many.train(), installed(many))
        assert type(many.lm_head.weight).__name__ == "DTensor"
        if hasattr(one.lm_head, "out_map"):
            where = Path(folder) / spec
            if dist.get_rank() == 0:
                one.save_pretrained(where)
            dist.barrier()
            how = DistributedConfig(tp_size=dist.get_world_size())
            with pytest.raises(InstallError, match="no plan of transformers knows; load it whole"):
                tr.AutoModelForCausalLM.from_pretrained(where, distributed_config=how)
            with pytest.raises(InstallError, match="verified on whole tables only; take its handle"):
                install(many)


def two_groups(folder, kind, v):
    """Two ranks hold the table between them, and two others hold it again and see other tokens."""
    one, many = (KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **HOW) for _ in range(2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    parallelize_module(many, mesh["tp"], parallel_plan(many, mesh))
    handle = install(many)
    handle.track()
    inputs = batch(v, seed=mesh.get_local_rank("data"))
    losses = [model.train()(**inputs).loss for model in (one, many)]
    near("loss", losses[1], losses[0], 1e-5)
    for loss in losses:
        loss.backward()
    near("gradient", many.lm_head.weight.grad, one.lm_head.weight.grad, 1e-5)
    with pytest.raises(UnsupportedError, match="others hold the same rows"):
        handle.path_norms()


def heads_that_do_not_divide(folder, kind, v):
    """transformers loads it, and fails at the first step; install says so before, in one line."""
    where = saved(folder, kind, v, "tied", num_attention_heads=2, num_key_value_heads=2)
    many = KINDS[kind][0].from_pretrained(where, **HOW, distributed_config=DistributedConfig(tp_size=4))
    with pytest.raises(InstallError, match=r"4 ranks .* do not divide num_attention_heads=2; choose") as caught:
        install(many)
    assert "\n" not in str(caught.value)


def meshes(folder, kind, v):
    """What `parallel_plan` cannot mean is refused in one line, and changes nothing."""
    model = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **HOW)
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for says, mesh in (
        (
            r"named 'tp' \(data, model\); name the one",
            init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "model")),
        ),
        ("none of the mesh's 2 dimensions is named 'tp'", init_device_mesh("cpu", (1, size))),
        ("a int in place of a mesh", size),
    ):
        with pytest.raises(InstallError, match=says) as caught:
            parallel_plan(model, mesh)
        assert "\n" not in str(caught.value)
    named = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "tp"))
    plan = parallel_plan(model, named)
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert set(plan) == {"transformer.wte", "lm_head"}
    parallelize_module(model, named["tp"], plan)
    with pytest.raises(InstallError, match="spread over ranks already"):
        parallel_plan(model, flat)


def both_paths(folder, kind, v):
    """The norms of both paths against those of two separate tables of the same values on one rank."""
    one, _, _ = pair(folder, kind, v, "tied")
    _, many, handle = pair(folder, kind, v, "tied")
    handle.track()
    loss = many(**batch(v)).loss
    loss.backward()
    norms = handle.path_norms()
    one.lm_head.weight = torch.nn.Parameter(one.lm_head.weight.detach().clone())
    one(**batch(v)).loss.backward()
    a, b = one.get_input_embeddings().weight.grad, one.lm_head.weight.grad
    cosine = (a * b).sum() / a.norm() / b.norm()
    wanted = torch.stack([a.norm(), b.norm(), (a + b).norm(), cosine])
    near("path norms", torch.tensor([norms.a, norms.b, norms.total, norms.cosine]), wanted, 1e-5)
    near("gradient", many.lm_head.weight.grad, a + b, 1e-5)
    _, many, handle = pair(folder, kind, v, "untied")
    many(**batch(v)).loss.backward()
    norms, grads = handle.path_norms(), [full(x.grad).norm() for x in handle.tables()]
    near("norms of two tables", torch.tensor([norms.a, norms.b]), torch.stack(grads), 1e-5)


def logits_are_real(folder, kind, v):
    """Logits that are read are those of one rank, and so is what a loss of them differentiates; `generate` too."""
    one, many, handle = pair(folder, kind, v, "tied")
    inputs, grads = batch(v), []
    for model in (one, many):
        logits = model(input_ids=inputs["input_ids"]).logits
        assert logits.shape[-1] == v
        p = torch.softmax(logits[..., 2:].float(), -1)  # of words, which no fused loss has
        (p.square().sum(-1) * torch.linspace(-1, 1, p.shape[1])).sum().backward()
        grads.append([full(x.grad) for x in model.parameters()])
    assert handle.counts.materialised == 1
    for (name, _), a, b in zip(one.named_parameters(), *grads, strict=True):
        near(f"{kind}: gradient of {name} by its logits", b, a, 2e-5)
    with torch.no_grad():
        near("logits", many.eval()(**inputs).logits + 0, one.eval()(**inputs).logits, 1e-5)
    told = [model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False) for model in (one, many)]
    assert torch.equal(*told)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation made on this rank."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Look at what comes out; of a DTensor its part here."""
        out = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(out)):
            self.numbers = max(self.numbers, getattr(x, "_local_tensor", x).numel())
        return out


def nothing_is_whole(folder, kind, v):
    """No rank makes a [V, D] or [N, V] tensor in a step; transformers' own step makes all logits."""
    _, many, handle = pair(folder, kind, v, "tied")
    inputs, size = batch(v), dist.get_world_size()
    tokens = inputs["input_ids"].numel()
    with Largest() as ours:
        many(**inputs).loss.backward()
    handle.uninstall()
    with Largest() as stock:
        many(**inputs).loss.backward()
    rows = -(-v // size)
    assert ours.numbers == max(rows * SIZES["hidden_size"], rows * tokens)
    assert stock.numbers >= tokens * v > ours.numbers


def log_probabilities(folder, kind, v):
    """What policy losses ask, a log-probability and an entropy, with gradients and no logits."""
    one, many, handle = pair(folder, kind, v, "tied")
    inputs, found = batch(v), []
    for model in (one, many):
        logits = model(input_ids=inputs["input_ids"]).logits / 0.8
        log_p = torch.log_softmax(logits, -1)
        chosen = log_p.gather(-1, inputs["input_ids"][..., None]).sum()
        entropy = -(log_p.exp() * log_p).sum(-1).sum()
        (chosen + 0.3 * entropy).backward()
        found.append([chosen, entropy, *(full(x.grad) for x in model.parameters())])
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        near(f"{kind}: {i}", b, a, 2e-5)
    assert handle.counts.materialised == 0


def adamw_and_class_weights(folder, kind, v):
    """AdamW's curve, over a loss with class weights, smoothing and a bias of steps behind the head."""
    one, many, handle = pair(folder, kind, v, "tied")
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
        near(f"{kind}: loss at step {step}", losses[1], losses[0], 1e-4)
    assert (handle.counts.fused, handle.counts.materialised) == (20, 0)


def refused(*cases):
    """Each call raises its error, with its words, in one line."""
    for error, says, call in cases:
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)


def refusals(folder, kind, v):
    """What would change or read a whole table is refused, and the model is as it was."""
    one, many, handle = pair(folder, kind, v, "tied")
    inputs = batch(v)
    wanted = one(**inputs).loss
    refused(
        (
            InstallError,
            "tied tables that are sharded, and factored:8 would change them; install it",
            lambda: install(many, "factored:8"),
        ),
        (InstallError, "untied would change them", lambda: install(many, "untied")),
        (UnsupportedError, "tied to untied: the tables of .* are sharded; do it before", handle.untie),
        (UnsupportedError, "exact_decoding", handle.exact_decoding),
    )
    near("after refusals", many(**inputs).loss, wanted, 1e-5)
    installed(many).uninstall()
    assert "Tiewise" not in type(many.lm_head).__name__
    near("uninstalled", many(**inputs).loss, wanted, 1e-5)
    near("installed again", install(many).model.train()(**inputs).loss, wanted, 1e-5)
    plan = {"model.embed_tokens": "embedding_colwise"}
    columns = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    across = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "untied"), **HOW, distributed_config=columns)
    with pytest.raises(InstallError, match="embed_tokens is sharded"):
        install(across)


def saved_with_a_boundary(folder, kind, v):
    """A checkpoint that carries its spec is attached while it loads, before its weights are spread."""
    one, _, _ = pair(folder, kind, v, "tied")
    where, alone = Path(folder) / "entry", install(one, "tied")
    if dist.get_rank() == 0:
        one.save_pretrained(where)
    dist.barrier()
    alone.uninstall()
    how = DistributedConfig(tp_size=dist.get_world_size())
    many = KINDS[kind][0].from_pretrained(where, **HOW, distributed_config=how).train()
    handle = install(many)
    losses = [model(**batch(v)).loss for model in (one.train(), many)]
    near("loss", losses[1], losses[0], 1e-5)
    for loss in losses:
        loss.backward()
    near("gradient", many.lm_head.weight.grad, one.lm_head.weight.grad, 1e-5)
    assert (handle.counts.fused, handle.counts.materialised) == (1, 0)


def on_rank(rank, known, folder, size, cases):
    """Meet the other ranks and go through the cases, each named by a function of `known`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    tr.logging.set_verbosity_error()
    tr.utils.logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    patience, store = timedelta(seconds=60), f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
    for case in cases:
        name, *of = case.split(",")
        known[name](folder, *(int(word) if word.isdigit() else word for word in of))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, size, *cases = sys.argv[1:]
    how = {"nprocs": int(size), "start_method": "fork"}  # imports once
    mp.start_processes(on_rank, args=(globals(), folder, int(size), cases), **how)
