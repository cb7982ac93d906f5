"""Predicted bytes are the measured ones: a real training step, and the peak of a real loss."""

import pytest
import torch
import transformers as tr

from tiewise.core.errors import PlanError
from tiewise.planning.memory import Tokens, checkpoint_bytes, logits_bytes, training_bytes
from tiewise.planning.read_config import read

MODELS = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 5000, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "llama": {
        "model_type": "llama",
        "vocab_size": 5000,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 320,
    },
    "pegasus": {  # has parameters that are never trained
        "model_type": "pegasus",
        "vocab_size": 3000,
        "d_model": 64,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
    },
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
    assert held(model.parameters()) == predicted.weights
    assert held(p.grad for p in trained) == predicted.gradients
    state = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert held(state) == predicted.state
    everything = [t for s in step.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    measured = held([*model.parameters(), *everything]) + held(p.grad for p in trained)
    assert predicted.total == pytest.approx(measured, rel=0.02)


def test_the_master_copy_is_sixteen_bytes_a_parameter():
    assert training_bytes(10, 10, "float32")["adamw-bf16-master"].total == 160
    assert training_bytes(10, 0, "bfloat16")["adamw"].total == 20
    assert checkpoint_bytes(10)["bfloat16"] == 20


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

    assert logits_bytes(n, v, 8, dtype).plain == pytest.approx(peak(work), rel=0.03)


def test_the_fused_loss_holds_one_chunk():
    found = logits_bytes(8192, 50_304, 768, "float32")
    rows = -(-8192 // -(-8192 // (26_000_000 // 50_304)))
    assert found.fused_cpu == rows * 50_304 * 4 + 8192 * 768 * 4
    assert found.plain == 8192 * 50_304 * 16
    assert found.fused_cpu < found.plain / 40


@pytest.mark.parametrize("call", [lambda: Tokens(0, 5), lambda: Tokens(5, 0), lambda: training_bytes(1, 1, "float33")])
def test_what_cannot_be_is_refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    assert caught.value.fix
