"""Test predicted bytes against a real training step, the peak of a real loss, and sums done by hand for ranks."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tr
from published_configs import bart_config, standard_config

import tiewise
from tiewise.core.errors import PlanError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import budget
from tiewise.planning.costs import (
    DTYPES,
    Setting,
    activation_bytes,
    all_costs,
    logits_bytes,
    ranks,
    row_loss_bytes,
    sharded_sends_less,
    step_bytes,
    training_bytes,
)
from tiewise.planning.read_config import Sizes, from_sizes, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"
MODELS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 5000, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "llama": standard_config("llama", 128, 3, 4, 320, 5000, num_key_value_heads=2),
    "pegasus": bart_config("pegasus", 64, 2, 128, 4, 3000),  # has frozen parameters
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


V, D, L = 1001, 64, 2
BODY = 12 * L * D**2


def count_boundary(kind, vocab=V, width=D, layers=L):
    architecture = from_sizes(Sizes(vocab, width, layers))
    return architecture, budget(architecture, BoundarySpec.parse(kind), SharingSpec())


def storage_bytes(tensors) -> int:
    return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_step_allocates_the_predicted_bytes(name, optimizer, dtype):
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
    assert storage_bytes(model.parameters()) == predicted["weights"]
    assert storage_bytes(p.grad for p in trained) == predicted["gradients"]
    state = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert storage_bytes(state) == predicted["state"]
    everything = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    measured = storage_bytes([*model.parameters(), *everything]) + storage_bytes(p.grad for p in trained)
    assert predicted["total"] == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("width", [64, 80])
def test_table_bytes_equal_those_of_packed_tensors(width):
    rows, blocks = 500, {64: 2, 80: 3}[width]
    half = torch.zeros(rows, width, dtype=torch.float16).nbytes
    int8 = torch.zeros(rows, width, dtype=torch.int8).nbytes + torch.zeros(rows).nbytes
    # ggml's block_q4_0: one fp16 scale and 32 values, two per byte
    q4_0 = rows * blocks * (torch.zeros(1, dtype=torch.float16).nbytes + torch.zeros(16, dtype=torch.uint8).nbytes)

    def packed_bytes(kind):
        return list(all_costs(*count_boundary(kind, rows, width), Setting())["table_bytes"].values())

    assert packed_bytes("tied") == [half, int8, half + int8, q4_0, half + q4_0]
    assert packed_bytes("untied") == [2 * half, 2 * int8, half + int8, 2 * q4_0, half + q4_0]
    assert packed_bytes("factored:32")[::3] == [rows * 32 * 2, rows * 18]
    bert = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": rows}
    encoder = read({**bert, "hidden_size": 64, "num_attention_heads": 4})
    named = all_costs(encoder, budget(encoder, BoundarySpec("tied"), SharingSpec()), Setting())["table_bytes"]
    assert named == {"16 bits": rows * 128, "8 bits": rows * 68, "4 bits": rows * 36}


def peak_bytes(work) -> int:
    """Return the peak of the bytes that torch allocates during `work`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result
    return most


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_loss_peaks_at_the_predicted_bytes(dtype):
    n, v, kind = 200, 20_000, getattr(torch, dtype)
    h, w = torch.randn(n, 8, dtype=kind, requires_grad=True), torch.randn(v, 8, dtype=kind, requires_grad=True)
    targets = torch.randint(0, v, (n,))

    def work():
        logits = h @ w.T
        torch.nn.functional.cross_entropy(logits.float(), targets).backward()
        return logits

    assert logits_bytes(n, v, 8, dtype)["plain"] == pytest.approx(peak_bytes(work), rel=0.03)


def test_fused_loss_holds_one_chunk_of_logits():
    peaks = logits_bytes(8192, 50_304, 768, "float32")
    rows = -(-8192 // -(-8192 // (26_000_000 // 50_304)))
    assert peaks["fused_cpu"] == rows * 50_304 * 4 + 8192 * 768 * 4
    assert peaks["plain"] == 8192 * 50_304 * 16
    assert peaks["fused_cpu"] < peaks["plain"] / 40
    on_gpu = -(-8192 // -(-8192 // (67_000_000 // (2 * 50_304))))  # this pass stores the softmax next to the logits
    assert peaks["chunked_cuda"] == on_gpu * 2 * 50_304 * 4 + 8192 * 768 * 4
    narrow = logits_bytes(8192, 50_304, 768, "bfloat16")  # 6 bytes per logit, plus the fp32 gradient of the table
    assert narrow["fused_cpu"] < 26_000_000 * 4 + (8192 + 50_304) * 768 * 4


def test_default_loss_of_a_gpu_holds_the_bytes_that_a_card_measured():
    """The run took chunks of a 64th of the card's memory; today's chunks take a 32nd."""
    record = json.loads((RESULTS / "times-h100.json").read_text())
    assert len(record["measurements"]) == 5
    for measurement in record["measurements"]:
        (tokens, vocab, width), dtype = measurement["shape"], measurement["dtype"]
        (measured,) = [row["megabytes"] for row in measurement["rows"] if row["name"] == "tiewise, triton"]
        loss = row_loss_bytes(tokens, vocab, width, dtype, chunk_bytes=85_000_000_000 // 64)
        assert 1e6 * measured == pytest.approx(loss + DTYPES[dtype] * vocab * width, rel=1e-3)


STEPS = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 384, "hidden_size": 128},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 384, "hidden_size": 128, "head_dim": 32},
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
TOKENS = {"batch": 8, "length": 128}


def build_for_a_step(family, dtype):
    """Return the config and the model of a family, in training mode."""
    sizes = {"vocab_size": 2000, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    layers = {} if family == "gpt2" else {"num_hidden_layers": 4, "num_attention_heads": 4}
    config = tr.AutoConfig.for_model(family, **sizes, **layers, **STEPS[family])
    return config, tr.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).train()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(STEPS))
def test_activations_are_the_tensors_that_autograd_saves(family, dtype):
    config, model = build_for_a_step(family, dtype)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its memory from being reused
        return tensor

    ids = torch.randint(3, 2000, (TOKENS["batch"], TOKENS["length"]))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.base_model(input_ids=ids)
    counted = sum(nbytes for nbytes, _ in saved.values())
    del output
    predicted = activation_bytes(read(config.to_dict()), Setting(**TOKENS, dtype=dtype))
    assert predicted == pytest.approx(counted, rel=0.08)


@pytest.mark.parametrize("family", sorted(STEPS))
def test_training_step_peaks_at_the_predicted_bytes(family):
    config, model = build_for_a_step(family, "float32")
    tiewise.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(3, 2000, (TOKENS["batch"], TOKENS["length"]))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    choice = tiewise.plan(config.to_dict(), arms="tied", **TOKENS).choices[0]
    architecture = read(config.to_dict())
    training = {**choice["training_bytes"]["adamw"], "weights": 0, "state": 0}  # these exist before the step
    loss, table = choice["logits_bytes"]["fused_cpu"], 4 * 2000 * 128
    predicted = step_bytes(training, loss, table, activation_bytes(architecture, Setting(**TOKENS)))
    assert predicted == pytest.approx(peak_bytes(step), rel=0.1)


def test_peak_of_a_step_is_that_of_its_larger_moment():
    training = {"weights": 10, "gradients": 9, "state": 20, "total": 39}
    assert step_bytes(training, loss=3, table_gradient=2, activations=5) == 10 + 20 + 10  # at the loss
    assert step_bytes(training, loss=3, table_gradient=2, activations=3) == 10 + 20 + 9  # after the backward pass
    tied = tiewise.plan("gpt2", arms="tied", batch=1, length=8).choices[0]
    parts = tied["training_bytes"]["adamw"]
    assert tied["step_bytes"]["fused_cuda"] == pytest.approx(parts["total"], rel=5e-3)  # of so few tokens
    bert = tiewise.plan({"model_type": "bert", "architectures": ["BertModel"]}, arms="tied")
    assert bert.choices[0]["step_bytes"] is None  # it has no head


@pytest.mark.parametrize("asked", [{"length": 0}, {"world": 8, "tp": 0}, {"world": 8, "fsdp": 3}])
def test_setting_refuses_impossible_values(asked):
    with pytest.raises(PlanError) as caught:
        Setting(**asked)
    assert caught.value.remedy


def ranks_by_layout(kind, world, tp=1, dtype="float32", fsdp=None, tokens=(2, 8), head=True):
    setting = Setting(*tokens, dtype, world, tp, fsdp=fsdp)
    return {rank["layout"]: rank for rank in ranks(count_boundary(kind)[1], setting, V, head)}


@pytest.mark.parametrize(("kind", "tables"), [("tied", 1), ("untied", 2)])
def test_ranks_hold_and_send_the_bytes_summed_by_hand(kind, tables):
    layouts, total = ranks_by_layout(kind, 8), tables * V * D + BODY
    assert set(layouts) == {"data parallel", "fsdp", "fsdp, tables kept sharded"}
    assert layouts["data parallel"]["memory"] == 16 * total
    assert layouts["data parallel"]["sent"] == 2 * 7 * 4 * total // 8
    assert layouts["data parallel"]["sent_for_tables"] == 2 * 7 * 4 * tables * V * D // 8
    assert layouts["fsdp"]["memory"] == 16 * (tables * 126 * D + BODY // 8)  # 1001 rows on eight ranks: 126 each
    assert layouts["fsdp"]["sent_for_tables"] == 7 * 4 * tables * 126 * D * 2  # one gather, one reduce-scatter
    assert layouts["fsdp"]["sent"] == layouts["fsdp"]["sent_for_tables"] + 3 * 7 * 4 * BODY // 8
    assert layouts["fsdp"]["table_memory"]["gathered"] == 2 * tables * 4 * 8 * 126 * D
    split = ranks_by_layout(kind, 8, 4, "bfloat16")["vocabulary parallel"]
    rows = 251  # 1001 rows on four ranks, three of them padding
    assert split["tables"] == tables * rows * D * 2
    assert split["memory"] == 16 * (BODY + tables * rows * D)
    n = 16
    looked_up = 2 * 3 * (n * D * 2) // 4
    statistics = 3 * 2 * n * 4  # two fp32 numbers per token to each of three ranks
    gradients = 2 * 1 * (tables * rows * D * 2) // 2
    assert split["sent_for_tables"] == 2 * looked_up + statistics + gradients
    assert split["sent"] == split["sent_for_tables"] + BODY * 2
    stock = ranks_by_layout(kind, 8, 4, "bfloat16")["stock tensor parallel"]
    assert stock["sent_for_tables"] == 2 * looked_up + 3 * n * rows * 2 + gradients
    assert (stock["loss"], split["table_memory"]["gathered"]) == (n * V * 14, 0)
    assert all(rank["sent"] == 0 for rank in ranks_by_layout(kind, 1).values())


@pytest.mark.parametrize(
    ("world", "tp", "fsdp", "tokens", "taken"),
    [
        (4, 1, None, 16, "fsdp, tables kept sharded"),
        (4, 1, 4, 400, "fsdp"),
        (4, 1, 1, 16, "data parallel"),
        (4, 2, None, 16, "vocabulary parallel"),
        (4, 2, 2, 16, "fsdp × vocabulary parallel"),
        (1, 1, None, 16, "data parallel"),
    ],
)
def test_ranks_mark_exactly_one_layout_as_taken(world, tp, fsdp, tokens, taken):
    layouts = ranks_by_layout("tied", world, tp, fsdp=fsdp, tokens=(1, tokens))
    assert [name for name, rank in layouts.items() if rank["taken"]] == [taken]


@pytest.mark.parametrize(("micro_batches", "kept"), [(1, True), (2, True), (3, False)])
def test_micro_batches_decide_whether_sharded_tables_send_less(micro_batches, kept):
    """Compare K · 100 with K · 60 + 90: 100 < 150, 200 < 210, 300 > 270."""
    gathered = {"sent_for_tables": 150, "wire": {"table gather": 60, "gradient reduce-scatter": 90}}
    assert sharded_sends_less({"sent_for_tables": 100}, gathered, micro_batches) == kept


@pytest.mark.parametrize(("kind", "tables"), [("tied", 1), ("untied", 2)])
def test_sharded_tables_send_hidden_states(kind, tables):
    """Sum (W−1)/W · 4 N D b for states and gradients of both ends, two numbers per token, and ids and targets."""
    n, w = 16, 4
    kept = ranks_by_layout(kind, w)["fsdp, tables kept sharded"]
    of_all = 4 * (n * w) * D * 4 * (w - 1) // w
    assert kept["wire"]["lookup"] + kept["wire"]["hidden states"] == of_all
    assert kept["wire"]["loss"] == (w - 1) * (n * w) * 2 * 4
    assert kept["sent_for_tables"] == of_all + (w - 1) * (n * w) * 2 * 4 + (w - 1) * n * 2 * 8
    assert kept["table_memory"]["gathered"] == n * w * D * 4
    assert "lookup" in ranks_by_layout(kind, w, head=False)["fsdp, tables kept sharded"]["wire"]
    assert "hidden states" not in ranks_by_layout(kind, w, head=False)["fsdp, tables kept sharded"]["wire"]


def test_ranks_on_two_axes_send_the_bytes_summed_by_hand():
    """Eight ranks are 2 shards × tp 2 × 2 replicas; a shard has ⌈⌈1001/2⌉/2⌉ = 251 rows, which replicas average."""
    rank = ranks_by_layout("tied", 8, 2, fsdp=2)["fsdp × vocabulary parallel"]
    assert rank["axes"] == {"replicas": 2, "fsdp": 2, "tp": 2}
    shard, n = 251 * D * 4, 16
    assert rank["tables"] == shard
    assert rank["wire"] == {
        "table gather": shard,
        "gradient reduce-scatter": shard,
        "gradient all-reduce": shard,
        "lookup": n * D * 4,
        "hidden gradient": n * D * 4,
        "loss": n * 2 * 4,
    }
    assert rank["memory"] == 16 * (251 * D + BODY // 2)
    hybrid = ranks_by_layout("tied", 8, fsdp=2)["fsdp"]["wire"]
    assert hybrid["gradient all-reduce"] == 2 * 3 * (501 * D * 4) // 4


@pytest.mark.parametrize(("world", "tp", "fsdp"), [(8, 1, None), (8, 4, None), (8, 2, 2), (64, 8, 8)])
@pytest.mark.parametrize("kind", ["tied", "untied", "factored:16"])
def test_layout_sends_less_up_to_its_break_even_tokens(kind, world, tp, fsdp):
    for name, rank in ranks_by_layout(kind, world, tp, fsdp=fsdp).items():
        limit = rank["break_even_tokens"]
        assert (limit is None) == (name in ("data parallel", "fsdp"))
        if limit:
            plain = "fsdp" if rank["axes"]["fsdp"] > 1 else "data parallel"
            for tokens, fewer in ((limit, True), (limit + 1, False)):
                layouts = ranks_by_layout(kind, world, tp, fsdp=fsdp, tokens=(1, tokens))
                # rounding loses a byte or two, and sharding by both axes pads more than by one
                slack = world * D * 8
                difference = layouts[name]["sent_for_tables"] - layouts[plain]["sent_for_tables"]
                assert difference <= slack if fewer else difference >= -slack


def test_sharded_tables_send_less_while_twice_the_tokens_are_below_the_vocabulary():
    """Compare (W−1)/W · 4 N D b with (W−1)/W · 2 V D b; with a wide D, ids and loss statistics are negligible."""
    wide = count_boundary("tied", 128_000, 8192, 1)[1]
    for tokens, fewer in ((7900, True), (8000, False)):
        layouts = {rank["layout"]: rank for rank in ranks(wide, Setting(1, tokens, "bfloat16", 8), 128_000)}
        kept, gathered = (layouts[name]["sent_for_tables"] for name in ("fsdp, tables kept sharded", "fsdp"))
        assert (kept < gathered) == fewer == (2 * 8 * tokens < 128_000 * 0.995)


def test_frozen_table_sends_no_gradient():
    layouts = ranks_by_layout("tied+vectors=rows.txt+freeze", 4, 2)
    assert layouts["data parallel"]["sent_for_tables"] == 0
    assert layouts["data parallel"]["memory"] == 4 * V * D + 16 * BODY
    assert layouts["vocabulary parallel"]["memory"] == 4 * 501 * D + 16 * BODY
    assert "gradient reduce-scatter" not in layouts["fsdp"]["wire"]


@pytest.mark.parametrize(("kind", "sent"), [("tied", V * D * 2), ("untied", 0)])
def test_tied_ends_of_a_pipeline_exchange_the_table(kind, sent):
    assert all_costs(*count_boundary(kind), Setting(dtype="bfloat16"))["pipeline_tie_bytes"] == sent
