"""Models on the CPU in a process with another default device, as after `torch.set_default_device("cuda")`.

The other device is `meta`, whose tensors have no values, so a step fails if it creates a tensor there.
"""

import pytest
import torch
from tiny_models import batch, build, step

import tiewise
from tiewise.boundary.ops import chunked, exact_top, exactness, fast_products
from tiewise.boundary.sharing.share import share_layers
from tiewise.core.backends import LossOptions

SPECS = (None, "untied", "factored:4", "projected:4", "residual:3", "spd", "tied+bias", "tied+pad=0", "tied+init=0.1")


@pytest.fixture(autouse=True)
def meta_by_default():
    with torch.device("meta"):
        yield


def _on_the_cpu(name):
    with torch.device("cpu"):
        return build(name), batch(build(name))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_installed_model_trains_under_another_default_device(name, spec):
    model, inputs = _on_the_cpu(name)
    if not (name == "bert" and spec == "tied+bias"):  # BERT's head has a bias
        tiewise.install(model, spec)
    loss, gradients = step(model, inputs)
    assert torch.isfinite(loss)
    assert {gradient.device.type for gradient in gradients.values()} == {"cpu"}


def test_random_maps_do_not_depend_on_the_default_device():
    tables = []
    for device in ("meta", "cpu"):
        model, _ = _on_the_cpu("llama")
        with torch.device(device):
            torch.manual_seed(3)
            tiewise.install(model, "factored:4")
        tables.append(dict(model.state_dict()))
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=0)


def test_model_with_shared_layers_trains_under_another_default_device():
    model, inputs = _on_the_cpu("llama")
    share_layers(model, "ffn+rank=2")
    assert torch.isfinite(step(model, inputs)[0])


def test_exact_decoding_works_under_another_default_device():
    model, inputs = _on_the_cpu("llama")
    installed = tiewise.install(model.eval())
    ids = inputs["input_ids"][:, :4]
    asked = {"attention_mask": ids.new_ones(ids.shape), "max_new_tokens": 3, "do_sample": False}
    wanted = model.generate(ids, **asked)
    with installed.exact_decoding():
        assert torch.equal(model.generate(ids, **asked), wanted)


def test_kernel_trials_run_under_another_default_device():
    with torch.device("cpu"):
        x, table, targets = torch.randn(9, 8), torch.randn(11, 8), torch.arange(9)
    problem = (x, table, None, targets)
    for reduction in ("none", "mean"):
        options = LossOptions(reduction=reduction)
        assert exactness.measure_excess(chunked.loss_pass, options, problem, torch.float32) <= 2
    assert set(fast_products.run_trial(1, 0.0)) >= {"default_ms", "onednn_ms"}
    assert exact_top.has_exact_int8() in (True, False)
