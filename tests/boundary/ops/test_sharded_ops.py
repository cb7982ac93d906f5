"""Losses and lookups of a table sharded over ranks, compared with fp64 formulas on one rank.

Each case is a function of this module. It runs on Gloo ranks that each hold some rows of the table. The tests run this
file as a program with the arguments STORE WORLD CASE….
"""

import itertools
import math
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from tests.boundary.ops.test_cross_entropy import gradients
from tests.boundary.ops.test_log_prob import PARTS, ours, plain, run

from tiewise.boundary.ops import chunked, statistics_operators
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.log_prob import linear_log_prob, vocabulary_statistics
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, gather, path_norms, tied_lookup
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, sum_outputs
from tiewise.core.errors import UnsupportedError

N, E, CHUNK = 26, 8, 7
SIZES = (1000, 97, 7, 3)  # 7 rows leave a rank of four with one, 3 leave it with none
CHOICES = list(itertools.product((None, 4.0), (0.0, 0.1), (0.0, 0.01), (False, True), (False, True)))


def gather_rows(x):
    """Return the rows of all ranks in order, also of uneven shards."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)


def problem(v, dtype=torch.float64):
    """Return table, body matrix, bias, class weights, ids and targets, equal on every rank."""
    g = torch.Generator().manual_seed(v)
    table, body, bias = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((v, E), (E, E), (v,)))
    weight = torch.rand(v, generator=g, dtype=torch.float64) + 0.2
    ids, targets = (torch.randint(0, v, (N,), generator=g) for _ in range(2))
    ids[:3] = v - 1  # the last row, which is the padding row
    targets[::5] = -100
    return (table.to(dtype), (body / E**0.5).to(dtype), bias.to(dtype), weight.to(dtype)), ids, targets


def leaves(*tensors):
    return [None if x is None else x.clone().requires_grad_() for x in tensors]


def assert_near(what, got, wanted, tolerance):
    distance = (got.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
    size = max(wanted.double().abs().max().item(), 1e-12) if wanted.numel() else 1.0
    assert distance <= tolerance * max(size, 1e-3), f"{what}: off by {distance / size:.1e} of its size"


def on_one_rank(v, dtype, bias, pad, options, upstream):
    """Return the loss and the gradients of table, body and bias by autograd in fp64."""
    (table, body, b, _), ids, t = problem(v, dtype)
    table, body, b = leaves(table.double(), body.double(), b.double() if bias else None)
    hidden = torch.tanh(F.embedding(ids, table, padding_idx=pad) @ body)
    loss = oracle(hidden, table, t, b, **options)
    loss.backward(upstream.double())
    return loss.detach(), table.grad, body.grad, None if b is None else b.grad


def on_many_ranks(v, dtype, bias, pad, options, upstream, record=None):
    (table, body, b, _), ids, t = problem(v, dtype)
    shard = VocabularyShard(v)
    rows = slice(shard.start, shard.stop)
    table, body, b = leaves(table[rows], body, b[rows] if bias else None)
    found, handed = tied_lookup(table, ids, LookupOptions(stop_lookup=pad, record=record), shard=shard)
    hidden = torch.tanh(found @ body)
    loss = linear_cross_entropy(hidden, handed, t, b, chunk=CHUNK, shard=shard, **options)
    loss.backward(upstream)
    return loss.detach(), table.grad, body.grad, None if b is None else b.grad


def compare(v, dtype, bias, options, tolerance):
    options = {**options, "class_weight": problem(v, dtype)[0][3] if options.get("class_weight") else None}
    upstream = torch.linspace(-1, 2, N) if options["reduction"] == "none" else torch.tensor(0.7)
    asked = (v, dtype, bias, v - 1, options, upstream.to(dtype))
    wanted, got = on_one_rank(*asked), on_many_ranks(*asked)
    for name, one, other in zip(("loss", "table", "body", "bias"), wanted, got, strict=True):
        if one is not None:
            other = gather_rows(other) if name in ("table", "bias") else other
            assert_near(f"V={v} {dtype} bias={bias} {options}: {name}", other, one, tolerance)


def every_option(sizes=SIZES, dtypes=((torch.float64, 1e-12), (torch.float32, 1e-5)), choices=CHOICES):
    """Compare every combination of options and bias for every size, with reductions in turn."""
    turn = itertools.cycle(("mean", "sum", "none"))
    for v, (softcap, smoothing, z_loss, weighted, bias) in itertools.product(sizes, choices):
        options = {"softcap": softcap, "label_smoothing": smoothing, "z_loss": z_loss, "class_weight": weighted}
        for dtype, tolerance in dtypes:
            compare(v, dtype, bias, {**options, "scale": 0.7, "reduction": next(turn)}, tolerance)


def a_few_options():
    every_option((97, 3), ((torch.float64, 1e-12),))


def row_kernels(sizes=(97,)):
    """Compare losses and log-probabilities by Triton's kernels, which its interpreter runs, with one rank."""
    os.environ["TIEWISE_LOSS"] = "triton"
    with gpu_branch(), patch.object(chunked, "loss_pass", None):
        every_option(sizes, ((torch.float32, 1e-5),), (*CHOICES[::5], CHOICES[-1]))  # the interpreter is slow
    with gpu_branch(), patch.object(statistics_operators, "_Head", None):
        for v in sizes:
            (table, _, bias, _), ids, t = problem(v, torch.float32)
            shard = VocabularyShard(v)
            rows = slice(shard.start, shard.stop)
            (wanted, wanted_grads), (got, grads) = (
                run(function, (table[ids].to(w.dtype), w, b), t.clamp(min=0), **kw)
                for function, w, b, kw in (
                    (plain, table.double(), bias.double(), {}),
                    (ours, table[rows], bias[rows], {"shard": shard, "chunk": CHUNK}),
                )
            )
            for one, other in zip((*wanted, wanted_grads[0]), (*got, grads[0]), strict=True):
                assert_near(f"V={v}: statistics", other, one, 1e-5)


def row_kernels_of_few_words():
    row_kernels((7, 3))


def large_vocabulary():
    everything = {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.01, "class_weight": True}
    for options, (dtype, tolerance) in itertools.product(
        ({}, everything), ((torch.float64, 1e-12), (torch.float32, 1e-5))
    ):
        compare(50_257, dtype, bool(options), {**options, "reduction": "mean"}, tolerance)


def narrow_types():
    """The error in bf16 is near that of one rank. Products are in bf16 and sums in fp32."""
    for v in (97, 1000):
        (table, _, bias, _), _, t = problem(v, torch.bfloat16)
        hidden = torch.randn(N, E, generator=torch.Generator().manual_seed(1)).bfloat16()
        shard = VocabularyShard(v)
        mine = (hidden, *(x[shard.start : shard.stop] for x in (table, bias)))
        truth = gradients(oracle, [x.double() for x in (hidden, table, bias)], t)
        one = gradients(linear_cross_entropy, (hidden, table, bias), t)
        loss, found = gradients(linear_cross_entropy, mine, t, shard=shard, chunk=CHUNK)
        assert loss.dtype == torch.float32
        assert {x.dtype for x in found} == {torch.bfloat16}
        triples = zip((truth[0], *truth[1]), (one[0], *one[1]), (loss, *found), strict=True)
        for name, (a, b, c) in zip(("loss", "hidden", "table", "bias"), triples, strict=True):
            c = gather_rows(c) if name in ("table", "bias") else c
            allowed = 2 * (b.double() - a).norm() + 4e-3 * a.norm()
            assert (c.double() - a).norm() <= allowed, name


def log_probabilities():
    for v, temperature, softcap, weighted in itertools.product(SIZES, (1.0, 0.7), (None, 4.0), (False, True)):
        (table, _, bias, _), _, t = problem(v)
        hidden = torch.randn(N, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        shard = VocabularyShard(v)
        rows, asked = slice(shard.start, shard.stop), {"softcap": softcap, "temperature": temperature}
        bias, mine = (bias, bias[rows]) if weighted else (None, None)
        truth, wanted = run(plain, (hidden, table, bias), t, **asked)
        got, found = run(ours, (hidden, table[rows], mine), t, shard=shard, **asked)
        for name, a, c in zip(PARTS, truth, got, strict=True):
            assert_near(f"V={v} {asked}: {name}", c, a, 1e-12)
        assert_near(f"V={v} {asked}: hidden", found[0], wanted[0], 1e-11)
        for a, c in zip(wanted[1:] if v > 3 else wanted[1:2], found[1:], strict=False):
            assert_near(f"V={v} {asked}: table and bias", gather_rows(c), a, 1e-11)
        alone = linear_log_prob(hidden, table[rows], t.clamp(min=0), shard=shard, ignore_index=0)
        assert_near("an ignored word of the vocabulary", alone, plain(hidden, table, t)[0].where(t != 0, 0), 1e-12)


def own_tokens():
    """Ranks with different tokens, also of different number and upstream gradient, give the sum of all losses."""
    turn = itertools.cycle(itertools.product(("mean", "sum", "none"), (False, True), ((0, 5), (4, 0))))
    for v, (softcap, smoothing, z_loss, weighted, bias) in itertools.product((97, 3), CHOICES):
        reduction, alike, (first, more) = next(turn)
        counts = [first + more * rank for rank in range(dist.get_world_size())]  # the first rank may have no tokens
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        options = {"softcap": softcap, "label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
        (table, body, b, w), ids, t = problem(v)
        options["class_weight"] = w if weighted else None
        ids, t = ids.repeat(2), t.repeat(2)
        parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        ups = [
            torch.linspace(-1, 2, count).double() if reduction == "none" else 0.7 + rank * (not alike)
            for rank, count in enumerate(counts)
        ]
        what = f"V={v} {alike} {counts} bias={bias} {options}"

        one = leaves(table, body, b if bias else None)
        hiddens = [torch.tanh(F.embedding(ids[part], one[0], padding_idx=v - 1) @ one[1]) for part in parts]
        losses = [oracle(h, one[0], t[part], one[2], **options) for h, part in zip(hiddens, parts, strict=True)]
        sum((loss * up).sum() for loss, up in zip(losses, ups, strict=True)).backward()

        shard, here = VocabularyShard(v, own_tokens=True), dist.get_rank()
        rows = slice(shard.start, shard.stop)
        many = leaves(table[rows], body, b[rows] if bias else None)
        found, handed = tied_lookup(many[0], ids[parts[here]], LookupOptions(stop_lookup=v - 1), shard=shard)
        options |= {"shard": shard, "chunk": CHUNK}
        loss = linear_cross_entropy(torch.tanh(found @ many[1]), handed, t[parts[here]], many[2], **options)
        assert_near(f"{what}: loss", loss.detach(), losses[here].detach(), 1e-12)
        (loss * ups[here]).sum().backward()
        dist.all_reduce(many[1].grad)
        assert_near(f"{what}: table", gather_rows(many[0].grad), one[0].grad, 1e-12)
        assert_near(f"{what}: body", many[1].grad, one[1].grad, 1e-12)
        if bias:
            assert_near(f"{what}: bias", gather_rows(many[2].grad), one[2].grad, 1e-12)


def own_tokens_told():
    """Ranks with different tokens get their statistics, and all ranks refuse an invalid token of one rank."""
    v, here = 97, dist.get_rank()
    (table, _, _, _), _, t = problem(v)
    hidden = torch.randn(N, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    up = torch.randn(3, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    part = slice(0, 9) if here == 0 else slice(4 + 5 * here, 9 + 5 * here)  # 9, 5, 5 … tokens
    seen = slice(0, 4 + 5 * dist.get_world_size())
    h, w = leaves(hidden, table)
    truth = vocabulary_statistics(h, w, t, entropy=True)
    sum((x[seen] * u[seen]).sum() for x, u in zip(truth, up, strict=True)).backward()
    shard = VocabularyShard(v, own_tokens=True)
    hs, ws = leaves(hidden[part], table[shard.start : shard.stop])
    got = vocabulary_statistics(hs, ws, t[part], entropy=True, shard=shard)
    for name, a, c in zip(got._fields, truth, got, strict=True):
        assert_near(name, c.detach(), a[part].detach(), 1e-12)
    sum((x * u[part]).sum() for x, u in zip(got, up, strict=True)).backward()
    assert_near("hidden", hs.grad, h.grad[part], 1e-11)
    assert_near("table", gather_rows(ws.grad), w.grad, 1e-11)
    wrong = torch.full((3,), v if here == 0 else 1)
    for ask in (
        lambda: tied_lookup(ws, wrong, shard=shard),
        lambda: linear_log_prob(hs[:3], ws, wrong, shard=shard),
        lambda: linear_cross_entropy(hs[:3], ws, wrong, shard=shard),
    ):
        with pytest.raises(IndexError, match="outside the vocabulary of 97"):
            ask()
    with pytest.raises(UnsupportedError, match="in fp16; compute in bfloat16"):
        linear_cross_entropy(hs.half(), ws.half(), t[part], shard=shard)


def path_norms_of_all():
    """The norms of both paths equal those of the gradients of two separate tables."""
    for v in SIZES:
        (table, body, _, _), ids, t = problem(v)
        first, second = leaves(table, table)
        oracle(torch.tanh(F.embedding(ids, first, padding_idx=v - 1) @ body), second, t).backward()
        a, b = first.grad, second.grad
        record, shard = PathRecord(), VocabularyShard(v)
        options = {"reduction": "mean"}
        _, gradient, _, _ = on_many_ranks(v, torch.float64, False, v - 1, options, torch.tensor(1.0).double(), record)
        norms = path_norms(gradient, record, shard)
        got = torch.tensor([norms.a, norms.b, norms.total, norms.cosine], dtype=torch.float64)
        cosine = (a * b).sum() / a.norm() / b.norm()
        torch.testing.assert_close(got, torch.stack([a.norm(), b.norm(), (a + b).norm(), cosine]), rtol=1e-10, atol=0)
        norms = path_norms(gradient, PathRecord(), shard)
        assert (norms.a, math.isnan(norms.cosine)) == (0.0, True)


def gathered_records():
    """`gather` averages records of different lengths, one of them empty; if all are empty, it sends nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert gather(PathRecord()).pieces == []
    for kind in (torch.float32, torch.float64):
        record, wanted = PathRecord(), torch.zeros(9, E, dtype=kind)
        for one in range(1, size):  # rank 0 records nothing, rank r records r tokens
            rows = torch.arange(one * E, dtype=kind).view(one, E) + one
            wanted[:one] += rows / size
            if one == rank:
                record.add(torch.arange(one), rows)
        ids, rows = gather(record).merged()
        assert (rows.dtype, rows.device.type) == (kind, "cpu")
        torch.testing.assert_close(torch.zeros(9, E, dtype=kind).index_add_(0, ids, rows), wanted)
        shard = VocabularyShard(9)
        local = gather(record, shard)
        here = torch.zeros(shard.stop - shard.start, E, dtype=kind)
        for at, part in local.pieces:
            here.index_add_(0, at, part)
        torch.testing.assert_close(here, wanted[shard.start : shard.stop])


def differentiated_again():
    """Backward repeats bit for bit from a kept graph; it refuses a freed graph and second derivatives."""
    (table, _, _, _), _, t = problem(97, torch.float32)
    shard = VocabularyShard(97)
    hidden = torch.randn(N, E, generator=torch.Generator().manual_seed(1))
    again = []
    for reduction in ("mean", "none", "mean"):
        h, w = leaves(hidden, table[shard.start : shard.stop])
        loss = linear_cross_entropy(h, w, t, shard=shard, reduction=reduction, chunk=CHUNK).sum()
        first = torch.autograd.grad(loss, (h, w), retain_graph=True)
        second = torch.autograd.grad(loss, (h, w))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        again.append(first)
        with pytest.raises(RuntimeError):  # raised by tiewise or by torch
            torch.autograd.grad(loss, h)
        loss = linear_cross_entropy(h, w, t, shard=shard)
        with pytest.raises(UnsupportedError):
            torch.autograd.grad(loss, h, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(again[0], again[2], strict=True))
    into = torch.zeros(shard.stop - shard.start, E)
    h, w = leaves(hidden, table[shard.start : shard.stop])
    linear_cross_entropy(h, w, t, shard=shard, chunk=CHUNK, into=into).backward()
    assert_near("into", into, again[0][1], 1e-6)
    assert w.grad is None


def one_buffer():
    """The gradient of a shard is the buffer of the loss. The lookup adds to it, so only one [V_r, E] exists."""
    shard = VocabularyShard(97)
    (table, _, _, _), ids, t = problem(97, torch.float32)
    (w,) = leaves(table[shard.start : shard.stop])
    rows, handed = tied_lookup(w, ids, shard=shard)
    seen = []
    handed.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    linear_cross_entropy(rows, handed, t, shard=shard).backward()
    assert w.grad.data_ptr() == seen[0]


def rows_of_minus_infinity():
    """If all logits of a rank are −inf, its targets have infinite loss but finite gradients."""
    v = 97
    (table, _, bias, _), _, t = problem(v)
    shard = VocabularyShard(v)
    bias[-shard.rows :] = -math.inf
    hidden = torch.randn(N, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masked = t >= v - shard.rows
    assert masked.any()
    h, w, b = leaves(hidden, table, bias)
    oracle(h, w, t.where(~masked, -100), b, reduction="sum").backward()
    hs, ws, bs = leaves(hidden, *(x[shard.start : shard.stop] for x in (table, bias)))
    each = linear_cross_entropy(hs, ws, t, bs, shard=shard, reduction="none")
    assert torch.equal(each.isinf(), masked)
    each[~masked].sum().backward()
    assert_near("hidden", hs.grad, h.grad, 1e-12)
    assert_near("table", gather_rows(ws.grad), w.grad, 1e-12)
    got, wanted = ours(hs, ws, t, bs, shard=shard), plain(hidden, table, t, bias)
    assert torch.equal(got.log_prob.isneginf(), masked)
    assert_near("log-probabilities", got.log_prob.detach()[~masked], wanted[0][~masked], 1e-12)
    assert_near("entropies", got.entropy.detach(), wanted[2], 1e-12)
    assert torch.autograd.grad(got.entropy.sum(), hs)[0].isfinite().all()


def refusals():
    shard = VocabularyShard(97)
    (table, _, bias, w), ids, t = problem(97)
    hidden, mine = table[ids], table[shard.start : shard.stop]
    more = torch.cat([mine, table[:1]])
    loss = partial(linear_cross_entropy, hidden, shard=shard)
    for kind, says, call in (
        (ValueError, f"{shard.start}:{shard.stop} of 97", lambda: loss(more, t)),
        (ValueError, "rows", lambda: tied_lookup(more, ids, shard=shard)),
        (ValueError, "need .V. = .97.", lambda: loss(mine, t, class_weight=w[:5])),
        (ValueError, "bias has shape", lambda: loss(mine, t, bias)),
        (IndexError, "vocabulary of 97", lambda: loss(mine, t + 97)),
        (IndexError, "vocabulary of 97", lambda: tied_lookup(mine, ids + 97, shard=shard)),
        (UnsupportedError, "several ranks by backend", lambda: loss(mine, t, backend="liger")),
    ):
        with pytest.raises(kind, match=says):
            call()


# known bugs of other projects: each naive computation fails the comparison that tiewise passes


def smoothing_over_all_rows():
    """Megatron-LM#7452: label smoothing averages log-probabilities over the local rows only."""
    (table, _, _, _), ids, _ = problem(97)
    t, shard = ids.flip(0), VocabularyShard(97)
    hidden, mine = table[ids] * 0.3, table[shard.start : shard.stop]
    wanted = F.cross_entropy(hidden @ table.T, t, label_smoothing=0.1)
    assert_near("ours", linear_cross_entropy(hidden, mine, t, shard=shard, label_smoothing=0.1), wanted, 1e-12)
    z = hidden @ mine.T
    lse = sum_outputs(z.exp().sum(1), shard).log()
    at, row = shard.local_rows(t)
    nll = lse - sum_outputs(z.new_zeros(len(t)).index_put((at,), z[at, row]), shard)
    assert_near("naive without smoothing", nll.mean(), F.cross_entropy(hidden @ table.T, t), 1e-12)
    naive = (0.9 * nll - 0.1 * (z - lse[:, None]).mean(1)).mean()
    off = shard.gather((naive - wanted).abs())  # one number per rank
    assert off.max() > 1e-4 * wanted


def gathered_logits_count_once():
    """Megatron-LM#737: W ranks sum full logits W times as if they were shards. The loss is off by log W."""
    (table, _, _, _), ids, _ = problem(97)
    t, shard = ids.flip(0), VocabularyShard(97)
    hidden = table[ids] * 0.3
    z = hidden @ table.T
    wanted = F.cross_entropy(z, t)
    naive = (sum_outputs(z.exp().sum(1), shard).log() - z.gather(1, t[:, None])[:, 0]).mean()
    assert math.isclose(naive - wanted, math.log(shard.size), rel_tol=1e-9)
    ours = linear_cross_entropy(hidden, table[shard.start : shard.stop], t, shard=shard)
    assert_near("ours", ours, wanted, 1e-12)
    with pytest.raises(ValueError, match="rows"):
        linear_cross_entropy(hidden, table, t, shard=shard)


def padding_is_a_row_of_all():
    """torchtitan#4637: if each shard takes the global `padding_idx` for a local row, it stops other tokens."""
    pad = 1
    (table, body, _, _), ids, t = problem(97)
    shard = VocabularyShard(97)
    ids[:4], ids[4:8] = pad, shard.rows + pad  # the token with the same local row on the second rank
    (one,) = leaves(table)
    oracle(torch.tanh(F.embedding(ids, one, padding_idx=pad) @ body), one, t).backward()

    def gradient(look_up):
        (mine,) = leaves(table[shard.start : shard.stop])
        rows, handed = look_up(mine)
        linear_cross_entropy(torch.tanh(rows @ body), handed, t, shard=shard).backward()
        return gather_rows(mine.grad)

    def naive(mine):
        at, here = shard.local_rows(ids)
        rows, handed = tied_lookup(mine, here, LookupOptions(stop_lookup=pad))
        return sum_outputs(rows.new_zeros(len(ids), E).index_copy(0, at, rows), shard), handed

    options = LookupOptions(stop_lookup=pad)
    assert_near("ours", gradient(lambda mine: tied_lookup(mine, ids, options, shard=shard)), one.grad, 1e-12)
    with pytest.raises(AssertionError, match="naive"):
        assert_near("naive", gradient(naive), one.grad, 1e-3)
    (one,) = leaves(table)
    both = LookupOptions(stop_both=pad)
    oracle(torch.tanh(F.embedding(ids, one) @ body), one, t).backward()
    one.grad[pad] = 0
    got = gradient(lambda mine: tied_lookup(mine, ids, both, shard=shard))
    assert_near("stopped on both paths", got, one.grad, 1e-12)


def uneven_rows_all_move():
    """NeMo-RL#403: with V // W rows per rank, the last rows of the table get no gradient."""
    v, size = 97, dist.get_world_size()
    (table, _, _, _), _, _ = problem(v)
    ids = torch.arange(v)
    hidden = table[ids.flip(0)] * 0.3

    def moved(start, stop, loss):
        (mine,) = leaves(table[start:stop])
        loss(mine).backward()
        return gather_rows((mine.grad.abs().sum(1) > 0).nonzero()[:, 0] + start)

    equal = v // size
    first = equal * dist.get_rank()

    def naive(mine):  # equal shards, as a view of [W, V // W, E] gives them
        z = hidden @ mine.T
        total, here = z.exp().sum(1), (ids >= first) & (ids < first + equal)
        target = z.gather(1, (ids - first).where(here, 0)[:, None])[:, 0].where(here, 0)
        shard = VocabularyShard(v)
        return (sum_outputs(total, shard).log() - sum_outputs(target, shard)).mean()

    shard = VocabularyShard(v)
    ours = moved(shard.start, shard.stop, lambda mine: linear_cross_entropy(hidden, mine, ids, shard=shard))
    assert ours.tolist() == list(range(v))
    assert v - 1 not in moved(first, first + equal, naive).tolist()


def run_rank(rank, store, size, cases):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    for case in cases:
        globals()[case]()
    dist.barrier()
    dist.destroy_process_group()


TRAPS = ["smoothing_over_all_rows", "gathered_logits_count_once", "padding_is_a_row_of_all", "uneven_rows_all_move"]
EXACT = ["differentiated_again", "one_buffer", "rows_of_minus_infinity", "path_norms_of_all", "refusals"]
EXACT += ["own_tokens", "own_tokens_told", "gathered_records"]
LONG = ["every_option", "large_vocabulary", "narrow_types", "log_probabilities"]


def run_ranks(tmp_path, size, cases):
    command = [sys.executable, "-m", "tests.boundary.ops.test_sharded_ops", str(tmp_path / "store"), str(size), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr


def test_two_ranks_agree_with_one(tmp_path):
    run_ranks(tmp_path, 2, ["a_few_options", *EXACT, *TRAPS])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_option_agrees_with_one_rank(tmp_path, size):
    run_ranks(tmp_path, size, LONG)


@pytest.mark.slow
def test_four_ranks_agree_with_one_if_a_rank_has_no_rows(tmp_path):
    run_ranks(tmp_path, 4, [*EXACT, *TRAPS])


def test_vocabulary_shard_refuses_a_missing_process_group():
    with pytest.raises(UnsupportedError, match="init_process_group"):
        VocabularyShard(97)


if __name__ == "__main__":
    store, size, *cases = sys.argv[1:]
    mp.start_processes(run_rank, args=(store, int(size), cases), nprocs=int(size), start_method="fork")  # imports once
