"""Collectives of a GPU at world size 1: a phase of `benchmarks.gpu`.

The process group has one rank, on NCCL or, on a CPU, on Gloo. So every collective runs, and its result is that without
ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tiewise
from benchmarks.gpu_checks import (
    TOLERANCES,
    Figure,
    Setup,
    compare_results,
    differentiate,
    draw_problem,
    make_batch,
    relative_distance,
    run_checks,
)
from benchmarks.gpu_install import LIMIT, Run, build_model, train
from benchmarks.gpu_record import PhaseResult
from tiewise.boundary.installation import Installed
from tiewise.boundary.ops import path_gradient
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.sharded.save_load import load_sharded, save_sharded
from tiewise.core.backends import PathNorms

FAMILY = "llama"
SECONDS = 60  # after which a collective that hangs is an error


@contextmanager
def one_rank(setup: Setup) -> Iterator[None]:
    """Provide a process group of one rank."""
    backend = "nccl" if setup.on_gpu else "gloo"
    device = {"device_id": torch.device("cuda", 0)} if setup.on_gpu else {}
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit, **device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def full(parameter: Tensor) -> Tensor:
    """Return all values of a parameter that ranks may hold in parts."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().double().reshape(-1)


def compare_with_plain(setup: Setup, wrap: Callable[[Any], Any]) -> list[Figure]:
    """Return the distances of an installed model that `wrap` gives to the ranks from a plain one."""
    plain = train(build_model(FAMILY).to(setup.device), setup.device)
    without_ranks = build_model(FAMILY).to(setup.device)
    expected = measure_norms(without_ranks, tiewise.install(without_ranks), setup)
    model = build_model(FAMILY).to(setup.device)
    handle = tiewise.install(model)
    wrapped = wrap(model)
    norms = measure_norms(wrapped, handle, setup)
    losses = train(wrapped, setup.device).losses
    weights = torch.cat([full(parameter) for parameter in model.parameters()])
    return [
        Figure("losses with all logits", handle.counts.materialised, 0),
        Figure("norm of the lookup path", abs(norms.a / expected.a - 1), LIMIT),
        Figure("norm of the head path", abs(norms.b / expected.b - 1), LIMIT),
        *compare_runs(Run(losses, weights), plain),
    ]


def measure_norms(model: Any, handle: Installed, setup: Setup) -> PathNorms:
    """Return the norms of both paths in the gradient of one batch."""
    handle.track()
    model(**make_batch(setup.device)).loss.backward()
    norms = handle.path_norms()
    handle.track(False)
    model.zero_grad()
    return norms


def compare_runs(found: Run, plain: Run) -> list[Figure]:
    """Return the distances of the losses and the weights of two runs."""
    by_step = (found.losses / plain.losses - 1).abs().max().item()
    return [
        Figure("loss of a step", by_step, LIMIT),
        Figure("weights", relative_distance(found.weights, plain.weights), LIMIT),
    ]


def data_parallel(setup: Setup) -> list[Figure]:
    """Check an installed model under DDP."""
    return compare_with_plain(setup, DistributedDataParallel)


def fully_sharded(setup: Setup) -> list[Figure]:
    """Check an installed model under `fully_shard`."""
    mesh = init_device_mesh(setup.device, (1,))

    def shard(model: Any) -> Any:
        """Shard the layers, then the model."""
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return compare_with_plain(setup, shard)


def vocabulary_shards(setup: Setup) -> list[Figure]:
    """Check the loss, the lookup and the path norms of a table that ranks divide by rows."""
    figures = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        (h, w, _), t = draw_problem(setup, dtype)
        truth = differentiate(lambda h, w, t=t: oracle(h, w, t), [h.double(), w.double()], None)
        shard, targets = VocabularyShard(setup.v), t.to(setup.device)
        found = differentiate(
            lambda h, w, targets=targets, shard=shard: linear_cross_entropy(h, w, targets, shard=shard),
            [h.to(setup.device), w.to(setup.device)],
            None,
        )
        figures += compare_results(str(dtype)[6:], found, truth, TOLERANCES[dtype])
        table, record = w.to(setup.device).requires_grad_(), PathRecord()
        rows, handed = tied_lookup(table, targets.clamp(min=0), LookupOptions(record=record), shard=shard)
        (rows.double().square().sum() / 2 + 0 * handed.sum()).backward()
        expected = torch.zeros(setup.v, setup.e, dtype=torch.float64)
        expected.index_add_(0, t.clamp(min=0), w.double()[t.clamp(min=0)])
        norms = path_norms(table.grad, record, shard)
        distance = abs(norms.a / expected.norm().item() - 1)
        figures.append(Figure(f"{str(dtype)[6:]}: lookup path", distance, TOLERANCES[dtype]))
    return figures


def exchanged_rows(setup: Setup) -> list[Figure]:
    """Check the exchange of a record's rows, also of an empty record."""
    ids, rows = torch.tensor([3, 5], device=setup.device), torch.randn(2, setup.e, device=setup.device)
    sent = path_gradient._PathRows(ids, rows)
    (piece,) = path_gradient._exchange_rows(sent, [sent.summary()], None)
    nothing = path_gradient._exchange_rows(None, [sent.summary()], None)  # as if another rank had recorded these rows
    return [
        Figure("tokens", float((piece.ids != ids).sum()), 0),
        Figure("rows", relative_distance(piece.rows, rows), 0),
        Figure("rows on another device", float(piece.rows.device != rows.device), 0),
        Figure("rows of an empty record on another device", float(nothing[0].rows.device != rows.device), 0),
        Figure("pieces of records that are all empty", float(len(path_gradient._exchange_rows(None, [None], None))), 0),
    ]


def sharded_save(setup: Setup) -> list[Figure]:
    """Check that a sharded save returns the weights."""
    saved, loaded = build_model(FAMILY).to(setup.device), build_model(FAMILY).to(setup.device)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    with tempfile.TemporaryDirectory() as folder:
        save_sharded(folder, saved, notes={"step": 7})
        notes = load_sharded(folder, loaded)
    pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
    differing = sum(int((one != other).sum()) for one, other in pairs)
    return [
        Figure("weights that differ", float(differing), 0),
        Figure("notes that differ", float(notes != {"step": 7}), 0),
    ]


def with_one_rank(check: Callable[[Setup], list[Figure]]) -> Callable[[Setup], list[Figure]]:
    """Return the check with a process group of one rank around it."""

    def run(setup: Setup) -> list[Figure]:
        """Run the check in the group."""
        with one_rank(setup):
            return check(setup)

    return run


CHECKS = (data_parallel, fully_sharded, vocabulary_shards, exchanged_rows, sharded_save)


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the checks that the file does not have as right, until the deadline."""
    return run_checks({check.__name__: with_one_rank(check) for check in CHECKS}, setup, path, deadline)
