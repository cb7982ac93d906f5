"""Small recurrent models, and torch modules with the weights of an `RNNLM`."""

import torch
from torch import nn

from tiewise.training.models import RNNLM, RNNConfig
from tiewise.training.models.rnn import CELLS

KINDS = [(cell, bias) for cell in CELLS for bias in ("one", "two") if (cell, bias) != ("gru", "one")]
MODULES = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


def tiny(seed=0, **settings):
    """Return an `RNNLM` with 23 words and widths below ten, in double precision."""
    sizes = {"vocab_size": 23, "hidden_size": 5, "num_hidden_layers": 2, "lstm_bias": "two", "body_range": 0.5}
    torch.manual_seed(seed)
    return RNNLM(RNNConfig(**{**sizes, **settings})).double()


def torch_modules(model):
    """Return one torch module per layer with copies of its weights. A missing second bias becomes zeros."""
    made = []
    for layer in model.rnn.layers:
        kind = {"nonlinearity": model.config.cell} if model.config.cell in ("tanh", "relu") else {}
        width, width_from = layer.weight_hh.shape[1], layer.weight_ih.shape[1]
        module = MODULES[model.config.cell](width_from, width, batch_first=True, **kind).double()
        module.weight_ih_l0.data.copy_(layer.weight_ih.data)
        module.weight_hh_l0.data.copy_(layer.weight_hh.data)
        module.bias_ih_l0.data.copy_(layer.bias_ih.data)
        module.bias_hh_l0.data.copy_(layer.bias_hh.data if layer.bias_hh is not None else 0 * layer.bias_ih.data)
        made.append(module)
    return made


def words(rows=3, length=6, vocab=23, seed=2):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
