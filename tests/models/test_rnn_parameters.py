"""What a recurrent model holds: the published counts, to the parameter, and what does not change with the vectors."""

import pytest
import torch

from tiewise.boundary.install import install
from tiewise.models import RNNLM, RNNConfig

# Press & Wolf 2017, V = 10,000, two layers, one bias per gate and one at the output; the counts behind their 4.65M,
# 2.65M, 4.69M, 2.69M, 66M and 51M
PUBLISHED = {
    (200, "untied"): 4_651_600,
    (200, "tied"): 2_651_600,
    (200, "projected:200,untied"): 4_691_600,
    (200, "projected:200"): 2_691_600,
    (1500, "untied"): 66_022_000,
    (1500, "tied"): 51_022_000,
}
# the published 4,691,600 and 2,691,600 are without the bias that the authors' code gives the projection
WITH_THEIR_BIAS = {"projected:200,untied,out_bias": 4_691_800, "projected:200,out_bias": 2_691_800}
SECOND_BIASES = {200: 1_600, 1500: 12_000}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("bias", ["one", "two"])
@pytest.mark.parametrize(("width", "spec"), [key for key in PUBLISHED if key[0] == 200])
def test_published_counts(width, spec, bias):
    model = RNNLM(RNNConfig(vocab_size=10_000, hidden_size=width, lstm_bias=bias))
    install(model, spec)
    assert count(model) == PUBLISHED[width, spec] + (SECOND_BIASES[width] if bias == "two" else 0)


@pytest.mark.parametrize("spec", WITH_THEIR_BIAS)
def test_the_bias_of_the_projection_is_counted_beside_the_published_count(spec):
    model = RNNLM(RNNConfig(vocab_size=10_000, hidden_size=200))
    install(model, spec)
    assert count(model) == WITH_THEIR_BIAS[spec]
    assert model.head.out_map.bias.shape == (200,)


@pytest.mark.parametrize("bias", ["one", "two"])
@pytest.mark.parametrize("spec", ["tied", "untied"])
def test_published_counts_of_the_large_model(spec, bias):
    with torch.device("meta"):
        model = RNNLM(RNNConfig(hidden_size=1500, lstm_bias=bias, tie_word_embeddings=spec == "tied"))
    assert count(model) == PUBLISHED[1500, spec] + (SECOND_BIASES[1500] if bias == "two" else 0)


GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}


@pytest.mark.parametrize(
    ("cell", "bias"), [(cell, bias) for cell in GATES for bias in ("one", "two") if (cell, bias) != ("gru", "one")]
)
def test_counts_by_formula(cell, bias):
    v, e, h, last = 31, 7, 11, 5
    sizes = {"vocab_size": v, "embedding_size": e, "hidden_size": h, "last_hidden_size": last}
    model = RNNLM(RNNConfig(num_hidden_layers=3, cell=cell, lstm_bias=bias, **sizes))
    vectors = 1 if bias == "one" else 2
    layers = sum(GATES[cell] * to * (start + to + vectors) for start, to in ((e, h), (h, h), (h, last)))
    assert count(model) == v * e + layers + v * last + v


def test_the_founding_post_s_cell_has_no_input_matrix():
    model = RNNLM(RNNConfig(vocab_size=31, hidden_size=11, num_hidden_layers=1, cell="tanh", input_matrix=False))
    install(model, "tied")
    assert count(model) == 31 * 11 + 11 * 11 + 11 + 31  # U, W, b1, b2


def test_other_vectors_change_the_two_maps_alone():
    made = {}
    for width in (300, 50):
        model = RNNLM(RNNConfig(vocab_size=40, hidden_size=64, cell="tanh", input_matrix=False, num_hidden_layers=1))
        install(model, f"projected:{width}")
        made[width] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = {name for name in made[300] if made[300][name] != made[50][name]}
    assert made[300].keys() == made[50].keys()
    assert differing == {"embed.weight", "embed.in_map.weight", "head.out_map.weight"}
    assert made[300]["embed.in_map.weight"] == (64, 300)  # P_in (H, E)
    assert made[300]["head.out_map.weight"] == (300, 64)  # P_out (E, H)
