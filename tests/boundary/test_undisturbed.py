"""Every function that runs a user's model leaves the model and the random generators unchanged."""

import copy
import random
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tr
from fingerprint import Fingerprint, left_alone
from shrink import shrink
from tiny_models import _BERT, _LLAMA, V, batch, build, sizes
from torch import nn

import tiewise
from tiewise.boundary.locate import locate
from tiewise.boundary.sharing.share import share_layers
from tiewise.boundary.sharing.stacks import find_stacks
from tiewise.boundary.undisturbed import preserve_generators, undisturbed
from tiewise.core.errors import InstallError, SpecError, TiewiseError
from tiewise.inspection.running.loaded import open_model
from tiewise.inspection.sections.bottleneck import bottleneck_of
from tiewise.inspection.sections.gradients import gradients_of
from tiewise.inspection.sections.lens import lens_of
from tiewise.inspection.sections.precision import precision_of
from tiewise.inspection.sections.refinement import refinement_of

_WHISPER = sizes(f"vocab_size={V} d_model=16 encoder_layers=1 decoder_layers=2 num_mel_bins=8 max_source_positions=10")
_WHISPER |= sizes("encoder_attention_heads=2 decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24")
_WHISPER |= sizes("max_target_positions=40 pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=1")
_MAMBA = sizes(f"vocab_size={V} hidden_size=16 num_hidden_layers=2 state_size=4 pad_token_id=0 eos_token_id=2")
_ALBERT = _BERT | {"embedding_size": 8}


def _build(model_class, config):
    torch.manual_seed(0)
    return model_class(config)


MODELS = {
    **{name: lambda name=name: build(name) for name in ("llama", "gpt2", "gemma2", "gemma3", "qwen2", "bert", "t5")},
    "bart": lambda: build("bart", decoder_layers=2),
    "albert": lambda: _build(tr.AlbertForMaskedLM, tr.AlbertConfig(**_ALBERT)),
    "mamba": lambda: _build(tr.MambaForCausalLM, tr.MambaConfig(**_MAMBA)),
    "whisper": lambda: _build(tr.WhisperForConditionalGeneration, tr.WhisperConfig(**_WHISPER)),
}
TEXT = [name for name in MODELS if name != "whisper"]


def _in_mid_training(model):
    """Give a model the modes, gradients and flags of a model in the middle of training."""
    model.set_attn_implementation("eager")  # which can return attentions
    model.config.output_hidden_states = model.config.output_attentions = True
    model.train()
    next(model.children()).eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number) if number % 2 else None
        parameter.requires_grad_(number != 3)
    return model


def _inputs(model):
    inputs = {key: value for key, value in batch(model).items() if key != "labels"}
    if not model.config.is_encoder_decoder:
        return inputs
    if model.config.model_type == "whisper":
        features = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
        return {"input_features": features, "decoder_input_ids": inputs["input_ids"]}
    return {**inputs, "decoder_input_ids": inputs["input_ids"]}


@torch.no_grad()
def _count_states(model):
    """Return how many hidden states and attentions a model returns by its config alone."""
    output = copy.deepcopy(model).eval()(**_inputs(model))
    return {k: len(v) for k, v in output.items() if ("hidden_states" in k or "attentions" in k) and v is not None}


@contextmanager
def unchanged(model):
    """Check that the block changes neither the model nor the generators."""
    torch.manual_seed(42)  # a user may have done this before CUDA was initialised
    torch.rand(3), random.random(), np.random.rand()
    with left_alone(model):
        yield


# install


@pytest.mark.parametrize("name", MODELS)
def test_a_refused_install_leaves_the_model_as_it_was(name):
    model = _in_mid_training(MODELS[name]())
    wanted = _count_states(model)
    with unchanged(model), pytest.raises((SpecError, InstallError)):
        tiewise.install(model, "factored:4+bias", batch={"input_ids": torch.tensor([[1]]), "labels": 7})
    assert _count_states(model) == wanted


@pytest.mark.parametrize("name", TEXT)
def test_installed_model_returns_as_many_hidden_states_as_the_plain_one(name):
    model = MODELS[name]()
    model.config.output_hidden_states = True
    wanted = _count_states(model)
    installed = tiewise.install(model)
    assert _count_states(model) == wanted
    installed.uninstall()
    assert _count_states(model) == wanted
    assert not any(module._forward_hooks for module in model.modules())


def test_installed_llama_of_two_layers_returns_three_hidden_states():
    model = build("llama")
    model.config.output_hidden_states = True
    installed = tiewise.install(model)
    assert len(model(input_ids=torch.tensor([[3, 4]])).hidden_states) == 3
    installed.uninstall()
    assert len(model(input_ids=torch.tensor([[3, 4]])).hidden_states) == 3
    with pytest.raises(InstallError):
        tiewise.install(model, batch={"input_ids": torch.tensor([[V]])})
    assert len(model(input_ids=torch.tensor([[3, 4]])).hidden_states) == 3


@pytest.mark.parametrize("name", TEXT)
def test_install_and_uninstall_change_no_generator_mode_or_gradient(name):
    model = _in_mid_training(MODELS[name]())
    torch.manual_seed(42)
    before = Fingerprint(model).found
    tiewise.install(model).uninstall()
    after = Fingerprint(model).found
    for kind in ("parameters", "generators", "queued for CUDA", "modes"):
        assert after[kind] == before[kind]
    assert [m["training"] for k, m in after.items() if "training" in m] == [
        m["training"] for k, m in before.items() if "training" in m
    ]


def test_install_keeps_the_tie_flag_of_a_class_that_ties_nothing():
    torch.manual_seed(0)
    config = shrink(tr.BigBirdPegasusForCausalLM)
    assert config.tie_word_embeddings
    model = tr.BigBirdPegasusForCausalLM(config)
    installed = tiewise.install(model)
    assert str(installed.spec) == "untied"
    assert model.config.to_dict() == config.to_dict()
    installed.uninstall()
    assert model.config.tie_word_embeddings


def test_a_refused_second_install_leaves_handles_valid():
    model = build("llama")
    installed = tiewise.install(model, "tied")
    link = vars(model)["_tiewise"]
    with pytest.raises(InstallError):
        tiewise.install(model, "untied", batch={"input_ids": torch.tensor([[V]])})
    assert vars(model)["_tiewise"] is link
    model.train()
    model(**batch(model)).loss.backward()
    assert installed.counts.fused == 1
    assert str(installed.spec) == "tied"


def test_a_second_install_keeps_the_counts_of_the_first():
    model = build("llama").train()
    installed = tiewise.install(model)
    counts = installed.counts
    model(**batch(model)).loss.backward()
    with unchanged(model):
        tiewise.install(model)
    model(**batch(model)).loss.backward()
    assert installed.counts is counts
    assert counts.fused == 2


def test_an_error_after_verification_leaves_the_installed_model_as_it_was(monkeypatch):
    """An installed BERT returns its share of the loss of the step, not the mean over its batch."""
    model = build("bert").eval()
    installed = tiewise.install(model)
    inputs = batch(model)
    share = model(**inputs, num_items_in_batch=1000).loss
    assert share < 0.1 * model(**inputs).loss
    monkeypatch.setattr("tiewise.boundary.label_accounting.shifts_labels", lambda *_: 1 / 0)
    with unchanged(model), pytest.raises(ZeroDivisionError):
        tiewise.install(model)
    assert torch.equal(model(**inputs, num_items_in_batch=1000).loss, share)
    assert installed.counts.fused == 3


def test_install_accepts_a_batch_with_flat_labels():
    model = build("bert")
    inputs = batch(model)
    installed = tiewise.install(model, batch={**inputs, "labels": inputs["labels"].flatten()})
    assert not installed.label_smoother(0.1).shifts_labels


def test_refused_install_restores_the_random_generators():
    """Install draws new tables before it refuses."""
    model = build("llama")
    with unchanged(model), pytest.raises(InstallError):
        tiewise.install(model, "factored:4", batch={"input_ids": torch.tensor([[V]])})


# other functions that run or read a model


@pytest.mark.parametrize("name", MODELS)
def test_locate_and_probe_leave_the_model_unchanged(name, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    _in_mid_training(model)
    with unchanged(model):
        locate(model)
        tiewise.probe(model, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_find_stacks_leaves_the_model_unchanged(name):
    model = _in_mid_training(MODELS[name]())
    with unchanged(model):
        try:
            find_stacks(model)
        except TiewiseError:
            assert name == "whisper"


def test_refused_share_layers_leaves_the_model_unchanged():
    model = _in_mid_training(build("llama"))
    with unchanged(model), pytest.raises(TiewiseError):
        share_layers(model, "all:groups=7")


MEASURES = {
    "refinement": lambda opened, windows: refinement_of(opened, windows, further=2),
    "lens": lambda opened, windows: lens_of(opened, windows, windows, steps=20),
    "gradients": lambda opened, windows: gradients_of(opened, windows),
    "precision": precision_of,
    "bottleneck": bottleneck_of,
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_inspect_sections_leave_the_model_unchanged(name, measure, tmp_path):
    build(name).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    opened.model.config.output_hidden_states = True
    windows = np.random.default_rng(0).integers(3, V, (10, 8))
    with unchanged(opened.model):
        MEASURES[measure](opened, windows)


# the context manager


class SelfChangingModule(nn.Module):
    """A module whose forward changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("grown", torch.zeros(2))
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.table = nn.Embedding(4, 2, max_norm=0.1)
        self.cache, self.seen, self.plain = {"a": [1]}, [], torch.zeros(3)
        self.shelf = [nn.UninitializedParameter()]  # none of the model's parameters, and it has no values
        self.config = tr.LlamaConfig(**_LLAMA)

    def train(self, mode=True):
        self.layer.weight.data += 1  # as adapters that merge their weights do
        return super().train(mode)

    def forward(self, x):
        self.count += 1
        self.grown = torch.zeros(5)
        self.plain.add_(1)
        self.cache["a"].append(2)
        self.cache["b"] = self.seen
        self.seen.append(x)
        self.config.use_cache = not self.config.use_cache
        self.late = True
        self.layer.register_forward_hook(lambda *_: None)
        self.layer.register_full_backward_hook(lambda *_: None)
        self.register_buffer("new", torch.zeros(1))
        self.norm.requires_grad_(False)
        self.layer.weight.grad = torch.ones(2, 2)
        self.training = not self.training
        self.norm, self.other = nn.Identity(), nn.BatchNorm1d(2)
        torch.rand(1), random.random(), np.random.rand()
        return self.other(self.layer(self.table(x)))


@pytest.mark.parametrize("training", [True, False, None])
def test_undisturbed_restores_a_module_that_changes_itself(training):
    model = SelfChangingModule()
    with unchanged(model), undisturbed(model, training=training):
        if training is not None:
            assert {module.training for module in model.modules()} == {training}
        model(torch.tensor([1, 2]))


def test_undisturbed_restores_a_module_whose_forward_raises():
    model = SelfChangingModule()
    with unchanged(model), pytest.raises(IndexError), undisturbed(model):
        model(torch.tensor([1, 9]))


def test_preserve_generators_gives_seeded_numbers_and_queues_nothing():
    def draw(seed):
        with preserve_generators(seed):
            return torch.rand(2).tolist(), random.random(), float(np.random.rand())

    with unchanged(nn.Linear(1, 1)):
        assert draw(1) == draw(1) != draw(2)
    torch.manual_seed(1)
    assert torch.rand(2).tolist() == draw(1)[0]


SEEDS = re.compile(
    r"torch\.(cuda\.)?manual_seed|\btorch\.seed\(|(?<!np\.)\brandom\.seed\(|np\.random\.seed\(|\bset_seed\("
)


def test_only_undisturbed_and_load_child_seed_global_generators():
    sources = Path(tiewise.__file__).parent.rglob("*.py")
    seeding = {path.name for path in sources if SEEDS.search(path.read_text(encoding="utf-8"))}
    assert seeding == {"undisturbed.py", "load_child.py"}  # load_child.py runs in a process that the command starts
