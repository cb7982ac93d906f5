"""Models of a run before their first step.

They have seeded weights, the arm's boundary and its tables, and may be divided among processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from tiewise.boundary.installation import Installed, install
from tiewise.boundary.parallel_plans import AXIS, keep_tables, spread_over
from tiewise.boundary.sharded_tables import shard
from tiewise.boundary.undisturbed import seed_generators
from tiewise.boundary.vectors import load_vectors, row_tokens, start_from_rows
from tiewise.core import ranks
from tiewise.core.errors import RunError, one_line_message
from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.architecture import budget
from tiewise.planning.costs import FSDP, FSDP_SHARDED, Setting, sharded_sends_less
from tiewise.planning.costs import ranks as costs_of_ranks
from tiewise.planning.read_config import Sizes, from_sizes
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job

TABLES = 1_000_003  # added to a body's seed for that of its tables


def causal_model(settings: Settings, config: Any) -> Any:
    """Build a causal model in its family's class."""
    try:
        # always fp32: in bf16 most updates would round to zero
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = f"{settings.model}: no causal language model can be built ({one_line_message(error)})"
        raise RunError(problem, "choose another") from None


def build_with_random_tables(job: Job, make: Callable[[], Any], std: float, reach: float | None = None) -> Installed:
    """Build a model with seeded weights, install the job's boundary, and draw its tables.

    Tables are N(0, std²); if `reach` is given, tables and maps are uniform within ± `reach`. Arms of one seed have the
    same body, bit for bit: it is drawn first, as a plain tied model, and then the boundary is installed. Tables are
    drawn last, from a separate seed, so the arms' input tables agree if their shapes do. The caller follows the
    boundary's schedule. The training text's counts choose the tokens of `+free=K`.
    """
    seed_generators(job.seed)
    start = replace(job.spec.plainly(), vectors=None, freeze=False, init=None)
    installed = install(make(), start, counts=job.text.counts)
    seed_generators(job.seed + TABLES)
    _draw_tables(installed, std, reach)
    if job.spec.pad is not None:
        with torch.no_grad():
            for table in installed.tables():
                table[job.spec.pad].zero_()
    if job.spec.vectors is not None:
        rows = load_vectors(job.spec.vectors, row_tokens(job.text.tokenizer, job.text.vocab))
        start_from_rows(installed.tables()[0], rows, job.spec.freeze, job.spec)
    return installed


@torch.no_grad()
def _draw_tables(installed: Installed, std: float, reach: float | None) -> None:
    """Draw tables N(0, std²), or tables and maps uniform within ± `reach`.

    A shared table is drawn once.
    """
    table_in, table_out = installed.tables()
    if reach is None:
        for table in dict.fromkeys((table_in, table_out)):
            table.normal_(0, std)
        return
    named = installed.model.named_parameters()
    maps = [parameter for name, parameter in named if "_map." in name and parameter.dim() > 1]
    # fixed order: each draw advances the generator
    for matrix in dict.fromkeys((table_in, *maps, table_out)):
        matrix.uniform_(-reach, reach)


def shard_model(job: Job, model: torch.nn.Module, sizes: tuple[int, int, int]) -> None:
    """Divide a model among (replicas, fsdp, tp) processes.

    Rows and heads are divided over tp, the remaining parameters over fsdp, also if fsdp is 1: its units average the
    gradients of replicas, and DDP cannot do so for divided tensors. Tables stay in rows over fsdp or are gathered, as
    --tables says, or whichever sends less.
    """
    replicas, _, tensor_parallel = sizes
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "fsdp", AXIS))
    if tensor_parallel > 1:
        spread_over(model, mesh[AXIS])
    over = mesh["fsdp"] if replicas == 1 else mesh["replicas", "fsdp"]
    row_plan = None
    if _should_keep_rows(job, model, sizes):
        row_plan = keep_tables(model, over)
    shard(model, over, row_plan)


def _should_keep_rows(job: Job, model: Any, sizes: tuple[int, int, int]) -> bool:
    """Return whether tables stay in rows over fsdp.

    --tables decides; with "auto", the way that sends less.
    """
    if ranks.tables() == ranks.AUTO:
        return _keeping_sends_less(job, model, sizes)
    return ranks.tables() == ranks.KEEP


def _keeping_sends_less(job: Job, model: Any, sizes: tuple[int, int, int]) -> bool:
    """Return whether `plan` finds lower costs for tables that stay in rows."""
    _, fsdp, tensor_parallel = sizes
    if fsdp == 1 or tensor_parallel > 1:
        return False
    s, vocab = job.settings, job.text.vocab
    width = int(model.config.get_text_config().hidden_size)
    tables = budget(from_sizes(Sizes(vocab, width, 1)), job.spec.plainly(), SharingSpec())
    setting = Setting(ranks.rows_per_rank(s.batch), s.length, world=math.prod(sizes), fsdp=fsdp)
    by_layout = {costs["layout"]: costs for costs in costs_of_ranks(tables, setting, vocab)}
    return sharded_sends_less(by_layout[FSDP_SHARDED], by_layout[FSDP], s.accumulate)
