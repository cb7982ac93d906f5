"""Detection of label shifts and of counted items, which must not depend on random initial weights."""

import pytest
import torch
import transformers as tr
from tiny_models import FAMILIES, batch, variant

from tiewise.boundary.label_accounting import counts_items, shifts_labels
from tiewise.boundary.random_batch import run

MOE = {"num_local_experts": 4, "output_router_logits": True}  # its loss is not 0 if all labels are ignored
# its decoder starts with the last label, which fails if every label is ignored
MBART = (tr.MBartForConditionalGeneration, tr.MBartConfig, FAMILIES["bart"][2])


@pytest.mark.parametrize(
    ("name", "seeds", "shifts"),
    [
        pytest.param("bert", 100, False, marks=pytest.mark.slow),
        pytest.param("bart", 60, False, marks=pytest.mark.slow),
        pytest.param("t5", 60, False, marks=pytest.mark.slow),
        ("bert", 10, False),
        ("mbart", 10, False),
        ("gpt2", 20, True),
        ("llama", 20, True),
    ],
)
def test_shifts_labels_does_not_depend_on_the_seed(name, seeds, shifts):
    model_class, config_class, settings = FAMILIES.get(name, MBART)
    layers = "num_layers" if name == "t5" else "num_hidden_layers"
    config = config_class(**(settings | {layers: 1}))
    wrong = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = model_class(config)
        inputs = batch(model)
        for ignored in (0, 1):  # the number of first labels that are ignored
            inputs["labels"][:, :ignored] = -100
            if shifts_labels(model, inputs) != shifts:
                wrong.append((seed, ignored))
    assert not wrong


def test_shifts_labels_is_right_despite_an_auxiliary_loss():
    config = tr.MixtralConfig(**(FAMILIES["llama"][2] | MOE))
    model = tr.MixtralForCausalLM(config)
    inputs = batch(model)
    assert run(model, inputs | {"labels": torch.full_like(inputs["labels"], -100)})[1] is not None
    assert shifts_labels(model, inputs)


@pytest.mark.parametrize(("name", "counts"), [("llama", True), ("bert", False)])
def test_counts_items_is_right_for_a_large_batch(name, counts):
    model = variant(name, FAMILIES[name][0], max_position_embeddings=600)
    ids = torch.randint(3, 61, (2, 501), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}  # a loss that shifts has 1,000 labels
    assert counts_items(model, inputs, run(model, inputs)[0]) == counts
