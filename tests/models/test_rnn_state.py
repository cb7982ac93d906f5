"""The hidden state: a text in pieces is the text in one, and what is refused."""

import pytest
import torch
from rnn_tools import tiny, words

from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.models import RNNLM, RNNConfig, detached

ALL = [
    {"cell": "tanh"},
    {"cell": "relu"},
    {"cell": "gru"},
    {"cell": "lstm"},
    {"embedding_size": 4, "last_hidden_size": 3, "num_hidden_layers": 3},
]


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_a_text_in_pieces_is_the_text_in_one(settings):
    model, ids = tiny(**settings).eval(), words(length=9)
    whole = model(ids)
    state, pieces = None, []
    for piece in ids.split([4, 1, 4], 1):
        found = model(piece, state=state)
        state = found.state
        pieces.append(found.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits)
    torch.testing.assert_close(state, whole.state)
    assert [[tuple(part.shape) for part in layer] for layer in state] == [
        [(3, width)] * (2 if model.config.cell == "lstm" else 1) for width in model.config.widths[1:]
    ]


def test_gradients_pass_through_a_state_until_it_is_detached():
    model, ids = tiny(), words(length=2)
    first = model(ids)
    rows = lambda loss: torch.autograd.grad(loss, model.embed.weight, retain_graph=True)[0]  # noqa: E731
    late = torch.full((3, 1), 22)
    for state, reaches in ((first.state, True), (detached(first.state), False)):
        assert all(not part.requires_grad for layer in state for part in layer) != reaches
        grad = rows(model(late, state=state).logits.sum())
        assert bool(grad[ids.unique()].abs().sum() > 0) == reaches
        torch.testing.assert_close(state, first.state)


def test_shifted_targets_lose_none():
    model, ids, targets = tiny().eval(), words(), words(seed=8)
    found = model(ids, shift_labels=targets).loss
    logits = model(ids).logits
    wanted = (logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0]).mean()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    kept = model(ids, labels=ids).loss
    wanted = (logits.logsumexp(-1)[:, :-1] - logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]).mean()
    torch.testing.assert_close(kept.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(model(ids, labels=targets, shift_labels=targets).loss, found)


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_generation_reads_every_token_once(settings):
    model, prompt = tiny(**settings).eval(), words(2, 4)
    wanted = prompt
    for _ in range(6):
        wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    lengths = []
    model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert lengths == [4, 1, 1, 1, 1, 1]


def test_beam_search_is_refused():
    with pytest.raises(UnsupportedError, match="use num_beams=1"):
        tiny().eval().generate(words(2, 4), max_new_tokens=3, num_beams=2)


def test_tuples_and_the_last_logits():
    model, ids = tiny().eval(), words()
    whole = model(ids)
    loss, logits, state = model(ids, labels=ids, return_dict=False)
    assert loss == model(ids, labels=ids).loss
    assert torch.equal(logits, whole.logits)
    torch.testing.assert_close(state, whole.state)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole.logits[:, -2:])


def test_padding_on_the_right_changes_nothing_and_on_the_left_is_refused():
    model, ids = tiny().eval(), words()
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    padded = ids.clone()
    padded[1, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    assert model(padded, attention_mask=mask, labels=labels).loss == model(ids, labels=labels).loss
    with pytest.raises(SpecError, match="pad on the right"):
        model(ids, attention_mask=mask.flip(1))


def test_a_state_of_other_sequences_is_refused():
    model, other = tiny(), tiny(cell="gru")
    state = model(words()).state
    for ids, given in ((words(2), state), (words(), other(words()).state), (words(), state[:1])):
        with pytest.raises(SpecError, match="the state has the shapes"):
            model(ids, state=given)


REFUSED = {
    "unknown cell 'elman'": {"cell": "elman"},
    "choose one or two": {"lstm_bias": "three"},
    "one bias is another function": {"cell": "gru"},
    "which of its gates would read the word": {"input_matrix": False},
    "must be H = 200 in every layer": {"cell": "tanh", "input_matrix": False, "embedding_size": 300},
    "sizes are whole numbers": {"hidden_size": 0},
    "give the share that is dropped": {"layer_dropout": 1.0},
    "give a number, 0 or more": {"tar": -1.0},
}


@pytest.mark.parametrize(("message", "settings"), REFUSED.items(), ids=list(REFUSED))
def test_what_cannot_be_built_is_refused_in_one_line(message, settings):
    with pytest.raises(SpecError, match=message) as raised:
        RNNConfig(**settings)
    assert "\n" not in str(raised.value)


def test_one_table_that_cannot_serve_both_ends_is_refused_with_the_way_out():
    with pytest.raises(SpecError, match="leave E and H equal and install projected:300"):
        RNNLM(RNNConfig(vocab_size=9, embedding_size=300, tie_word_embeddings=True))
    with pytest.raises(SpecError, match="set one_table"):
        RNNLM(RNNConfig(vocab_size=9, output_vocab_size=7, tie_word_embeddings=True))
