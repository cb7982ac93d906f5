"""Tying and untying during training, compared with a run built by hand in plain transformers and torch.

The hand-built run never calls the code under test. It assigns the tables of a new model and fills the state of a new
optimizer by the formulas that `Installed.tie` and `untie` document.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from fingerprint import left_alone
from tiny_models import sizes, trainer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tiewise import install
from tiewise.boundary import tie_at, untie_at
from tiewise.core.errors import SpecError, UnsupportedError

BEFORE, AFTER = 3, 2
IDS = torch.randint(2, 29, (4, 9), generator=torch.Generator().manual_seed(5))
# Adam's eps is large, because a small one would turn rounding of zero gradients into full steps
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-3),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
}
FIRST, SECOND = ("momentum_buffer", "exp_avg"), ("exp_avg_sq", "max_exp_avg_sq")


def model(tied):
    torch.manual_seed(3)
    given = sizes("vocab_size=29 hidden_size=16 intermediate_size=24 num_hidden_layers=1 num_attention_heads=2")
    return LlamaForCausalLM(LlamaConfig(**given, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None))


def groups(m):
    """Return two groups as the Trainer makes them: weight decay for matrices, none for vectors."""
    parameters = list(m.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def plain_steps(m, optimizer, count):
    for _ in range(count):
        logits = m(input_ids=IDS).logits[:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        F.cross_entropy(logits, IDS[:, 1:].flatten()).backward()
        optimizer.step()


def train(m, optimizer, callback):
    """Train `m` by the Trainer; every batch has all rows."""
    rows = [{"input_ids": row, "labels": row.clone()} for row in IDS]
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    settings = {"max_steps": BEFORE + AFTER, "per_device_train_batch_size": len(rows), "logging_strategy": "no"}
    trainer(m, "unused", rows, [callback], (optimizer, constant), **settings, log_level="error").train()


def by_hand(before, optimizer, make, tables, states):
    """Return a new model and optimizer with the body of `before`, these tables and their states."""
    table_in, table_out = tables
    m = model(tied=table_out is None)
    body = {k: v for k, v in before.state_dict().items() if k != "lm_head.weight"}
    m.load_state_dict({**body, "model.embed_tokens.weight": table_in}, strict=False)
    if table_out is not None:
        m.lm_head.weight = nn.Parameter(table_out.clone())
    fresh = make(groups(m))
    kept = {name: optimizer.state[p] for name, p in before.named_parameters()}
    kept |= {"model.embed_tokens.weight": states[0], "lm_head.weight": states[1]}
    for name, p in m.named_parameters():
        if kept[name]:
            fresh.state[p] = {k: v.clone() if torch.is_tensor(v) else v for k, v in kept[name].items()}
    return m, fresh


def assert_same(one, other):
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=1e-6)


CHOICES = [(tie_at, keep) for keep in ("input", "output", "mean")]
CHOICES += [(untie_at, state) for state in ("copy", "split", "reset")]


@pytest.mark.parametrize(("change", "choice"), CHOICES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_schedule_continues_as_a_hand_built_run_with_the_documented_state(kind, change, choice):
    make, tied = OPTIMIZERS[kind], change is untie_at
    before = model(tied)
    optimizer = make(groups(before))
    plain_steps(before, optimizer, BEFORE)
    ends = before.model.embed_tokens.weight, before.lm_head.weight
    (w_in, w_out), (one, two) = [end.detach() for end in ends], [optimizer.state[end] for end in ends]
    if tied:
        factor = {"copy": 1.0, "split": 0.5}.get(choice)
        own = {k: v * factor if k in FIRST else v for k, v in one.items()} if factor else {}
        tables, states = (w_in, w_in), (own, own)
    else:
        merged = {k: v + two[k] if k in FIRST + SECOND else v for k, v in one.items()}
        tables = {"input": w_in, "output": w_out, "mean": (w_in + w_out) / 2}[choice], None
        states = merged, None
    hand, fresh = by_hand(before, optimizer, make, tables, states)
    plain_steps(hand, fresh, AFTER)
    m = model(tied)
    install(m)
    train(m, make(groups(m)), change(BEFORE, choice))
    assert_same(m, hand)
    assert torch.equal(m.lm_head.weight, m.model.embed_tokens.weight) != tied
    assert (m.lm_head.weight is m.model.embed_tokens.weight) != tied


@pytest.mark.parametrize("tied", [True, False])
def test_optimizer_lists_parameters_as_a_new_one_would_after_a_change(tied):
    m = model(tied)
    installed = install(m)
    optimizer = OPTIMIZERS["adamw"](groups(m))
    (installed.untie if tied else installed.tie)(optimizer)
    got = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert got == [[id(p) for p in group["params"]] for group in groups(m)]


def test_tie_removes_the_second_table_from_every_group():
    m = model(tied=False)
    rest = [p for p in m.parameters() if p is not m.lm_head.weight]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [m.lm_head.weight], "lr": 1e-4}])
    gone = m.lm_head.weight
    install(m).tie(optimizer)
    assert all(p is not gone for group in optimizer.param_groups for p in group["params"])
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in m.parameters()}


def test_tie_keeps_the_larger_step_counter():
    m = model(tied=False)
    optimizer = torch.optim.AdamW(m.parameters())
    plain_steps(m, optimizer, 1)
    optimizer.state[m.lm_head.weight]["step"] = torch.tensor(7.0)
    install(m).tie(optimizer)
    assert optimizer.state[m.lm_head.weight]["step"] == 7


def test_untie_refuses_unknown_optimizer_state_unless_it_is_reset():
    m = model(tied=True)
    optimizer = torch.optim.RMSprop(m.parameters())
    plain_steps(m, optimizer, 1)
    handle = install(m)
    with left_alone(m), pytest.raises(UnsupportedError, match="RMSprop keeps square_avg"):
        handle.untie(optimizer)
    assert len(optimizer.param_groups[0]["params"]) == len(list(m.parameters()))
    handle.untie(optimizer, "reset")
    assert m.lm_head.weight not in optimizer.state
    assert m.model.embed_tokens.weight not in optimizer.state


@pytest.mark.parametrize(
    ("change", "spec", "choice", "says"),
    [
        ("untie", "tied", "halve", "unknown optimizer state 'halve'"),
        ("tie", "untied", "both", "unknown keep 'both'"),
        ("untie", "untied", "copy", "untied cannot be untied"),
        ("tie", "tied", "mean", "tied cannot be tied"),
        ("untie", "factored:4", "copy", "factored:4 cannot be untied"),
    ],
)
def test_tie_and_untie_refuse_invalid_choices_and_specs(change, spec, choice, says):
    with pytest.raises(SpecError, match=says):
        getattr(install(model(True), spec), change)(None, choice)


@pytest.mark.parametrize("options", ["bias+alpha=0.5", "softcap=30", "output_scale=0.25"])
def test_tie_and_untie_keep_the_options_of_the_boundary(options):
    m = model(tied=True)
    installed = install(m, f"tied+{options}")
    logits = m.eval()(input_ids=IDS).logits + 0
    installed.untie()
    assert str(installed.spec) == f"untied+{options}"
    assert m.lm_head.weight is not m.model.embed_tokens.weight
    torch.testing.assert_close(m(input_ids=IDS).logits + 0, logits)
    installed.tie()
    assert str(installed.spec) == f"tied+{options}"
    torch.testing.assert_close(m(input_ids=IDS).logits + 0, logits)


def test_model_is_saved_untied_after_untie_and_tied_after_tie(tmp_path):
    m = model(tied=True)
    installed = install(m)
    installed.untie()
    with torch.no_grad():
        m.lm_head.weight += 1
    m.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, m.eval()(input_ids=IDS).logits + 0)
    assert not loaded.config.tie_word_embeddings
    installed.tie(keep="output")
    m.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded.lm_head.weight, m.lm_head.weight)


def test_callback_leaves_an_already_changed_model_unchanged():
    """A run that resumes after the change starts from the changed model."""
    m = model(tied=False)
    install(m)
    twin = copy.deepcopy(m)
    train(m, OPTIMIZERS["sgd"](groups(m)), untie_at(BEFORE))
    plain_steps(twin, OPTIMIZERS["sgd"](groups(twin)), BEFORE + AFTER)
    assert_same(m, twin)
