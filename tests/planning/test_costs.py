"""Predicted bytes are the measured ones: of a real step, of a real loss at its peak, of ranks by sums done by hand."""

import pytest
import torch
import transformers as tr
from published_configs import bart, sized

from tiewise.core.errors import PlanError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import budget
from tiewise.planning.costs import Setting, all_costs, logits_bytes, ranks, training_bytes
from tiewise.planning.read_config import Sizes, from_sizes, read

MODELS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 5000, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "llama": sized("llama", 128, 3, 4, 320, 5000, num_key_value_heads=2),
    "pegasus": bart("pegasus", 64, 2, 128, 4, 3000),  # has parameters that are never trained
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def held(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_holds_what_was_predicted(name, optimizer, dtype):
    sizes = dict(MODELS[name])
    config = tr.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    auto = tr.AutoModelForSeq2SeqLM if name == "pegasus" else tr.AutoModelForCausalLM
    model = auto.from_config(config).to(getattr(torch, dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    step = OPTIMIZERS[optimizer](trained)
    ids = torch.randint(3, 2000, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    step.step()
    architecture = read(MODELS[name])
    predicted = training_bytes(architecture.total, architecture.total - architecture.frozen, dtype)[optimizer]
    assert held(model.parameters()) == predicted["weights"]
    assert held(p.grad for p in trained) == predicted["gradients"]
    state = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert held(state) == predicted["state"]
    everything = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    measured = held([*model.parameters(), *everything]) + held(p.grad for p in trained)
    assert predicted["total"] == pytest.approx(measured, rel=0.02)


def test_the_master_copy_is_sixteen_bytes_a_parameter():
    assert training_bytes(10, 10, "float32")["adamw-bf16-master"]["total"] == 160
    assert training_bytes(10, 0, "bfloat16")["adamw"]["total"] == 20


def peak(work) -> int:
    """Most bytes that torch held at once for `work`, beside what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        kept = work()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_loss_peaks_where_predicted(dtype):
    n, v, kind = 200, 20_000, getattr(torch, dtype)
    h, w = torch.randn(n, 8, dtype=kind, requires_grad=True), torch.randn(v, 8, dtype=kind, requires_grad=True)
    targets = torch.randint(0, v, (n,))

    def work():
        logits = h @ w.T
        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
        return logits

    assert logits_bytes(n, v, 8, dtype)["plain"] == pytest.approx(peak(work), rel=0.03)


def test_the_fused_loss_holds_one_chunk():
    found = logits_bytes(8192, 50_304, 768, "float32")
    rows = -(-8192 // -(-8192 // (26_000_000 // 50_304)))
    assert found["fused_cpu"] == rows * 50_304 * 4 + 8192 * 768 * 4
    assert found["plain"] == 8192 * 50_304 * 16
    assert found["fused_cpu"] < found["plain"] / 40


REFUSED = [{"batch": 0}, {"length": 0}, {"dtype": "float33"}, {"world": 0}, {"world": 8, "tp": 0}, {"std": -1.0}]


@pytest.mark.parametrize("asked", [*REFUSED, {"world": 8, "tp": 3}, {"world": 4, "tp": 8}, {"std": float("nan")}])
def test_what_cannot_be_is_refused(asked):
    with pytest.raises(PlanError) as caught:
        Setting(**asked)
    assert caught.value.fix


V, D, L = 1001, 64, 2
BODY = 12 * L * D**2


def counted(kind):
    architecture = from_sizes(Sizes(V, D, L))
    return architecture, budget(architecture, BoundarySpec.parse(kind), SharingSpec())


def pictures(kind, world, tp=1, dtype="float32"):
    return {rank["layout"]: rank for rank in ranks(counted(kind)[1], Setting(2, 8, dtype, world, tp), V)}


@pytest.mark.parametrize(("kind", "tables"), [("tied", 1), ("untied", 2)])
def test_ranks(kind, tables):
    found, whole = pictures(kind, 8), tables * V * D + BODY
    assert set(found) == {"data parallel", "fsdp"}
    assert found["data parallel"]["memory"] == 16 * whole
    assert found["data parallel"]["sent"] == 2 * 7 * 4 * whole // 8
    assert found["data parallel"]["sent_for_tables"] == 2 * 7 * 4 * tables * V * D // 8
    assert found["fsdp"]["memory"] == 16 * -(-whole // 8)
    assert found["fsdp"]["sent"] == 3 * 7 * 4 * whole // 8
    split = pictures(kind, 8, 4, "bfloat16")["vocabulary parallel"]
    rows = 251  # 1001 rows over four ranks: three of padding
    assert split["tables"] == tables * rows * D * 2
    assert split["memory"] == 16 * (BODY + tables * rows * D)
    n = 16
    looked_up = 2 * 3 * (n * D * 2) // 4
    statistics = 2 * 3 * (3 * n * 4) // 4
    gradients = 2 * 1 * (tables * rows * D * 2) // 2
    assert split["sent_for_tables"] == 2 * looked_up + statistics + gradients
    assert split["sent"] == split["sent_for_tables"] + BODY * 2
    assert all(rank["sent"] == 0 for rank in pictures(kind, 1).values())


def test_a_frozen_table_sends_no_gradient():
    found = pictures("tied+vectors=rows.txt+freeze", 4, 2)
    assert found["data parallel"]["sent_for_tables"] == 0
    assert found["data parallel"]["memory"] == 4 * V * D + 16 * BODY
    assert found["vocabulary parallel"]["memory"] == 4 * 501 * D + 16 * BODY


@pytest.mark.parametrize(("kind", "sent"), [("tied", V * D * 2), ("untied", 0)])
def test_tied_ends_of_a_pipeline_exchange_the_table(kind, sent):
    assert all_costs(*counted(kind), Setting(dtype="bfloat16"))["pipeline_tie_bytes"] == sent
