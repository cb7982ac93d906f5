"""Tests of boundaries on recurrent models against the dense formula and a plain LSTM."""

import copy

import pytest
import torch
import torch.nn.functional as F
from rnn_tools import words
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import tiewise.hf
from tiewise.boundary.installation import install
from tiewise.boundary.plain_classes import in_plain_classes
from tiewise.boundary.saved import link_of
from tiewise.checkpoint.rewrite import factor
from tiewise.core.errors import TiewiseError
from tiewise.training.models import RNNLM, RNNConfig, detached
from tiewise.training.models.rnn import CELLS

SPECS = [
    *("tied", "untied", "factored:3", "factored-untied:in=3,out=4", "projected:9", "projected:8,untied"),
    *("projected:9,untied,out=none", "projected:8,penalty=0.15", "projected:9,out_bias", "residual:2", "spd"),
    *("tied+softcap=5+output_scale=1/sqrt_d", "untied+input_scale=sqrt_d+alpha=0.5+pad=2"),
]
SMALL = {"vocab_size": 23, "hidden_size": 8}


def small_model(**settings):
    torch.manual_seed(0)
    return RNNLM(RNNConfig(**{**SMALL, **settings}))


def table_leaves(installed):
    """Return both tables in double precision as autograd leaves; tied tables are one tensor."""
    table_in, table_out = installed.tables()
    made = table_in.detach().double().requires_grad_()
    return made, made if table_out is table_in else table_out.detach().double().requires_grad_()


def dense_logits(model, installed, ids, tables=None):
    """Return the logits of the formula in docs/boundary.md from dense tables and the model's layers."""
    spec = installed.spec
    table_in, table_out = tables or (table.detach() for table in table_leaves(installed))
    scale_in, scale_out = spec.scales(8)
    in_map, out_map = getattr(model.embed, "in_map", None), getattr(model.head, "out_map", None)
    rows = table_in[ids] if in_map is None else copy.deepcopy(in_map).double()(table_in[ids])
    hidden = copy.deepcopy(model.rnn).double().eval()(rows * scale_in, None)[0]
    hidden = hidden if out_map is None else copy.deepcopy(out_map).double()(hidden)
    logits = hidden @ table_out.T * scale_out
    logits = logits if model.head.bias is None else logits + model.head.bias.double()
    return logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)


@pytest.mark.parametrize("cell", ["tanh", pytest.param("gru", marks=pytest.mark.slow), "lstm"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_boundary_matches_dense_formula_fuses_loss_and_reloads(spec, cell, tmp_path):
    model = small_model(cell=cell, lstm_bias="two", output_bias="softcap" not in spec)
    installed = install(model, spec)
    ids = words()
    if "out_bias" in spec:
        torch.nn.init.normal_(model.head.out_map.bias)
    logits = dense_logits(model, installed, ids)
    wanted = F.cross_entropy(logits[:, :-1].reshape(-1, 23), ids[:, 1:].reshape(-1))
    loss = model.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    loss.backward()
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(model.eval()(ids).logits.double() + 0, logits, rtol=1e-4, atol=1e-5)
    if "out_bias" in spec:
        with in_plain_classes(link_of(model)):
            torch.testing.assert_close(model(ids).logits.double(), logits, rtol=1e-4, atol=1e-5)

    model.save_pretrained(tmp_path)
    wanted = model(ids).logits + 0
    for load in (AutoModelForCausalLM.from_pretrained, tiewise.hf.load):
        again = load(tmp_path).eval()
        assert torch.equal(again(ids).logits + 0, wanted)
        assert (again.embed.weight is again.head.weight) == (installed.spec.tables == 1)
    assert str(install(again).spec) == str(installed.spec)
    if "out_bias" in spec:
        for export in (lambda: tiewise.hf.plain_copy(model), lambda: factor(tmp_path, tmp_path / "plain", undo=True)):
            with pytest.raises(TiewiseError, match="bias is no table"):
                export()


@pytest.mark.parametrize("cell", CELLS)
def test_auto_classes_build_save_and_load_every_cell(cell, tmp_path):
    config = RNNConfig(**SMALL, cell=cell, lstm_bias="two", last_hidden_size=5, variational=True, layer_dropout=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is RNNConfig
    assert (read.cell, read.layer_dropout, read.widths) == (cell, 0.3, [8, 8, 5])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is RNNLM
    assert torch.equal(again.eval()(words()).logits, model(words()).logits)


def test_initial_weights_stay_within_ranges_of_config():
    model = small_model(hidden_size=64, table_range=0.05, body_range=0.3, output_bias=True)
    for tensors, reach in (((model.embed.weight, model.head.weight), 0.05), (model.rnn.parameters(), 0.3)):
        for tensor in tensors:
            assert 0.9 * reach < tensor.abs().max() <= reach
            assert abs(tensor.mean()) < 5 * reach / (3 * tensor.numel()) ** 0.5
    assert not model.head.bias.any()
    usual = small_model(hidden_size=64).rnn.layers[0].weight_hh
    assert 0.12 < usual.abs().max() <= 0.125


@pytest.mark.parametrize(("inputs", "outputs"), [(23, 15), (15, 23)])
@pytest.mark.parametrize("spec", ["tied", "untied", "factored:3", "projected:9", "residual:2", "spd"])
def test_boundary_matches_dense_formula_with_different_vocabularies(spec, inputs, outputs, tmp_path):
    model = small_model(vocab_size=inputs, output_vocab_size=outputs, one_table=True)
    installed = install(model, spec)
    assert [len(table) for table in installed.tables()] == [23, 23]
    ids, targets = words(vocab=inputs), words(vocab=outputs, seed=9)
    dense = table_leaves(installed)
    logits = dense_logits(model, installed, ids, dense)[..., :outputs]
    torch.testing.assert_close(model.eval()(ids).logits.double() + 0, logits.detach(), rtol=1e-4, atol=1e-5)
    loss = model.train()(ids, shift_labels=targets).loss
    wanted = F.cross_entropy(logits.reshape(-1, outputs), targets.reshape(-1))
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=0)
    loss.backward()
    assert installed.counts.fused == 1
    wanted.backward()
    for table, leaf in zip(installed.tables(), dense, strict=True):
        torch.testing.assert_close(table.grad.double(), leaf.grad, rtol=1e-4, atol=1e-6)
    if installed.spec.tables == 2:
        assert not installed.tables()[1].grad[outputs:].any()
    model.save_pretrained(tmp_path)
    again = tiewise.hf.load(tmp_path).eval()
    assert again(ids).logits.shape == (3, 6, outputs)
    assert torch.equal(again(ids).logits + 0, model.eval()(ids).logits + 0)


ONE, READS = {"output_vocab_size": None}, "reads vectors of 8, and is given 6 columns"
MISMATCHES = [
    *(({"one_table": True}, f"tied+{option}", "else to its logits") for option in ("softcap=5", "output_scale=0.5")),
    ({}, "tied", "needs one vocabulary"),
    ({**ONE, "embedding_size": 5}, "tied", "choose factored:k or projected:k, whose maps meet"),
    # torch's LSTM kernel would read past the rows without an error
    *(({**ONE, "cell": cell}, "projected:6,in=none", READS) for cell in ("tanh", "lstm")),
]


@pytest.mark.parametrize(("sizes", "spec", "says"), MISMATCHES, ids=str)
def test_install_refuses_boundary_with_mismatched_sizes(sizes, spec, says):
    model = small_model(**{"output_vocab_size": 15, "lstm_bias": "two", **sizes})
    with pytest.raises(TiewiseError, match=says):
        install(model, spec)
    assert model.embed.weight.shape == (23, sizes.get("embedding_size", 8))


@pytest.mark.parametrize("spec", ["untied", "tied+softcap=5", "tied+output_scale=0.5"])
def test_tables_of_two_vocabularies_have_minimal_rows_without_bias(spec):
    model = small_model(output_vocab_size=15, one_table=spec != "untied", output_bias=False)
    installed = install(model, spec)
    assert [len(table) for table in installed.tables()] == ([23, 15] if spec == "untied" else [23, 23])
    assert installed.counts.materialised == 0


MAPS = [("projected:4", 4, [(5, 4), (4, 8)]), ("projected:5,in=none", 5, [(5, 8)])]


@pytest.mark.parametrize(("spec", "width", "maps"), MAPS)
def test_projected_boundary_ties_embedding_and_hidden_state_of_different_widths(spec, width, maps):
    model = small_model(embedding_size=5)
    installed = install(model, spec)
    assert installed.tables()[0] is installed.tables()[1]
    assert installed.tables()[0].shape == (23, width)
    assert [tuple(p.shape) for name, p in model.named_parameters() if "_map." in name] == maps
    assert installed.counts.materialised == 0


class PlainLSTM(nn.Module):
    """Plain LSTM language model of torch modules that ties its tables by assignment."""

    def __init__(self, model):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8), nn.Linear(8, 23)
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True)
        with torch.no_grad():
            self.embed.weight.copy_(model.embed.weight)
            self.head.bias.copy_(model.head.bias)
            for number, layer in enumerate(model.rnn.layers):
                for name, parameter in layer.named_parameters():
                    getattr(self.rnn, f"{name}_l{number}").copy_(parameter)
        self.head.weight = self.embed.weight

    def forward(self, ids, state):
        hidden, state = self.rnn(self.embed(ids), state)
        return self.head(hidden), state


@pytest.mark.parametrize(("optimizer", "bar"), [("SGD", 1e-5), ("AdamW", 1e-4)])
def test_twenty_stateful_steps_match_plain_lstm(optimizer, bar):
    model = small_model(lstm_bias="two")
    installed = install(model, "tied")
    plain = PlainLSTM(model)
    rate = {"SGD": 1.0, "AdamW": 1e-2}[optimizer]
    steps = [getattr(torch.optim, optimizer)(each.parameters(), lr=rate) for each in (model, plain)]
    text = words(4, 20 * 5 + 1, seed=11)
    state, other = None, None
    for start in range(0, 100, 5):
        ids, targets = text[:, start : start + 5], text[:, start + 1 : start + 6]
        found = model.train()(ids, shift_labels=targets, state=state)
        state = detached(found.state)
        logits, other = plain(ids, other)
        other = tuple(part.detach() for part in other)
        wanted = F.cross_entropy(logits.reshape(-1, 23), targets.reshape(-1))
        torch.testing.assert_close(found.loss, wanted, rtol=0, atol=bar)
        for step, loss, each in zip(steps, (found.loss, wanted), (model, plain), strict=True):
            step.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 5.0)
            step.step()
    assert installed.counts.fused == 20
    if optimizer == "SGD":
        torch.testing.assert_close(model.embed.weight, plain.embed.weight, rtol=0, atol=bar)
        for number, layer in enumerate(model.rnn.layers):
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(parameter, getattr(plain.rnn, f"{name}_l{number}"), rtol=0, atol=bar)
