"""Tests of decoder arms: initial weights, parameter counts, and losses against cross-entropy in fp64."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.training.conftest import LENGTH, refusal
from transformers import BloomConfig, GPT2Config, Qwen2Config

from tiewise.boundary.boundary import Boundary
from tiewise.core import ranks
from tiewise.core.errors import RunError
from tiewise.planning.first_loss import sound_std
from tiewise.training.kinds.decoder import KIND, make_config, measure
from tiewise.training.run import train
from tiewise.training.settings import Settings, recipe

ARMS = ["tied", "untied", "factored:8", "factored-untied:in=4,out=8", "projected:24", "residual:4", "spd", "tied+bias"]
FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])


@pytest.fixture
def build_model(job):
    """Return a function that builds the model of an arm."""
    return lambda settings, arm="tied", **changes: KIND.build(job(settings, arm=arm, **changes))


def body_parameters(installed):
    """Return the parameters that belong to neither the input embedding nor the output head."""
    ends = (installed.model.get_input_embeddings(), installed.model.get_output_embeddings())
    theirs = {id(p) for end in ends for p in end.parameters()}
    return {name: p for name, p in installed.model.named_parameters() if id(p) not in theirs}


@FAMILIES
def test_arms_of_one_seed_start_from_equal_body_and_input_table(build_model, tiny_settings, family):
    settings = tiny_settings(model=family)
    models, again, another = (
        {arm: build_model(settings, arm) for arm in ARMS},
        build_model(settings),
        build_model(settings, seed=2),
    )
    first = body_parameters(models["tied"])
    assert len(first) > 5
    for other in map(body_parameters, (*models.values(), again)):
        assert set(other) == set(first)
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert any(not torch.equal(value, first[name]) for name, value in body_parameters(another).items())
    tables = {arm: installed.tables() for arm, installed in models.items()}
    for arm in ("untied", "residual:4", "spd", "tied+bias"):
        assert torch.equal(tables[arm][0], tables["tied"][0])
    table_in, table_out = tables["untied"]
    assert not torch.equal(table_in, table_out)
    assert table_in.std().item() == pytest.approx(table_out.std().item(), rel=0.05)


@FAMILIES
@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        ("tied", {"shared table": 300 * 16}),
        ("untied", {"input table": 300 * 16, "output table": 300 * 16}),
        ("factored:8", {"shared table": 300 * 8, "maps": 2 * 8 * 16}),
        ("factored-untied:in=4,out=8", {"input table": 300 * 4, "output table": 300 * 8, "maps": 4 * 16 + 8 * 16}),
        ("tied+bias", {"shared table": 300 * 16, "output bias": 300}),
        ("residual:4", {"shared table": 300 * 16, "maps": 2 * 4 * 16}),
        ("projected:24", None),
        ("spd", None),
    ],
)
def test_parameter_counts_by_component_sum_to_unique_model_parameters(
    build_model, tiny_settings, family, arm, expected
):
    installed = build_model(tiny_settings(model=family), arm)
    found = KIND.parameters(installed)
    storages = {p.untyped_storage().data_ptr(): p.numel() for p in installed.model.parameters()}
    assert sum(found.values()) == sum(storages.values())
    assert min(found.values()) > 0
    assert found.pop("body") == sum(p.numel() for p in body_parameters(installed).values())
    assert expected in (found, None)


@FAMILIES
def test_match_parameters_widens_body_to_equal_total_parameters(text, build_model, tiny_settings, family):
    arms = ("tied", "untied", "factored:8", "residual:4")
    settings = tiny_settings(model=family, arms=arms, match="parameters")
    wide = KIND.feed_forward(settings, text.vocab)
    found = {arm: KIND.parameters(build_model(settings, arm, feed_forward=wide[arm])) for arm in arms}
    totals = {arm: sum(count.values()) for arm, count in found.items()}
    assert all(abs(total / totals["untied"] - 1) < 0.005 for total in totals.values())
    assert found["untied"]["body"] < found["tied"]["body"] < found["factored:8"]["body"]
    assert KIND.feed_forward(tiny_settings(model=family, arms=arms), text.vocab) == dict.fromkeys(arms)


FIRST_LOSS_ARMS = ["tied", "untied", "residual:4", "spd", "factored:64", "projected:96", "projected:out=none"]
FIRST_LOSS_ARMS += ["tied+input_scale=sqrt_d+output_scale=1/sqrt_d", "tied+softcap=20", "tied+output_scale=0.5"]
FIRST_LOSS_ARMS += ["factored-untied:in=64,out=32", "untied+softcap=1"]


@pytest.mark.parametrize(
    "init", [None, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", FIRST_LOSS_ARMS)
def test_first_loss_matches_measured_initial_loss(job, tiny_settings, kind, init):
    """The reference is the mean loss over all possible targets, from the logits of a model."""
    own = job(tiny_settings(width=128, heads=4, layers=2, length=64, init=init), arm=kind)
    own = replace(own, text=SimpleNamespace(vocab=4096, counts=None))
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ids = torch.randint(0, 4096, (8, 64))
        with torch.no_grad():
            logits = KIND.build(replace(own, seed=seed)).model.eval()(ids).logits
        losses.append((logits.logsumexp(-1) - logits.mean(-1)).mean().item())
    found = sum(losses) / 2
    assert KIND.first_loss(own) == pytest.approx(found, rel=0.02)
    boundary = Boundary(own.spec if init is None else replace(own.spec, init=init), 4096, 128)
    assert boundary.predicted_nll() == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("arm", ["tied", "tied+init=1"])
def test_first_loss_is_equal_for_llama_name_and_its_config_file(job, tiny_settings, tmp_path, arm):
    """The prediction for any other family is read from its config."""
    sizes = {"heads": 4, "layers": 3, "width": 32}
    make_config(tiny_settings(**sizes), 300).save_pretrained(tmp_path)
    read, known = (
        KIND.first_loss(job(tiny_settings(**sizes, model=model), arm=arm)) for model in (str(tmp_path), "llama")
    )
    assert known == pytest.approx(read, abs=1e-12)


def test_table_std_prefers_init_of_arm_over_init_of_run(job, tiny_settings):
    assert KIND.table_std(job(tiny_settings(init=0.2), arm="tied+init=0.3")) == 0.3
    assert KIND.table_std(job(tiny_settings(init=0.2))) == 0.2
    assert KIND.table_std(job(tiny_settings())) == sound_std(16)


def test_model_setting_accepts_config_json_file_or_its_folder(text, build_model, tiny_settings, tmp_path):
    """The config comes from a checkpoint: it has another vocabulary, bf16, and special tokens beyond ours."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    others = {"vocab_size": 151_936, "bos_token_id": 151_643, "eos_token_id": 151_645, "dtype": "bfloat16"}
    Qwen2Config(**sizes, **heads, **others).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        installed = build_model(tiny_settings(model=str(path)))
        assert installed.model.config.model_type == "qwen2"
        assert installed.tables()[0].shape == (300, 32)
        # bf16 weights would round most updates away; the bf16 setting computes in bf16 with fp32 weights
        assert {p.dtype for p in installed.model.parameters()} == {torch.float32}
    settings = tiny_settings(model=str(tmp_path), match="parameters")
    wide = KIND.feed_forward(settings, text.vocab)
    tied, untied = (sum(KIND.parameters(build_model(settings, arm, feed_forward=wide[arm])).values()) for arm in wide)
    assert wide["untied"] == 48
    assert abs(tied / untied - 1) < 0.005


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no model configuration"),
        ('{"hidden_size": 4}', "no model_type"),
        ('{"model_type": "no-such"}', "is no model configuration"),
        ("[1]", "is no model configuration"),
        ('{"model_type": "qwen2", "max_position_embeddings": 4}', "has 4 positions, blocks are 16 long"),
        ('{"model_type": "vit"}', "no causal language model can be built"),
        ('{"model_type": "resnet"}', "no causal language model can be built (it has no hidden_size)"),
    ],
)
def test_build_refuses_unusable_config_json(build_model, tiny_settings, tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_text(content)
    with refusal(says):
        build_model(tiny_settings(model=str(path)))


def test_feed_forward_reads_null_width_as_four_widths_and_refuses_missing_width(text, tiny_settings, tmp_path):
    wide = {}
    for inner in (None, 64):
        GPT2Config(n_embd=16, n_layer=1, n_head=2, n_inner=inner).save_pretrained(tmp_path)
        wide[inner] = KIND.feed_forward(tiny_settings(model=str(tmp_path), match="parameters"), text.vocab)
    assert wide[None] == wide[64]
    assert wide[None]["untied"] == 64 < wide[None]["tied"]
    BloomConfig(hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(RunError, match="use --match width"):
        KIND.feed_forward(tiny_settings(model=str(tmp_path), match="parameters"), text.vocab)


def test_vectors_arm_initializes_tables_from_word_vectors(text, build_model, tiny_settings, tmp_path):
    words = text.tokenizer.convert_ids_to_tokens(list(range(10, 20)))
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{word}{f' {i}' * 16}\n" for i, word in enumerate(words)), encoding="utf-8")
    tied, drawn = (build_model(tiny_settings(), arm) for arm in (f"tied+vectors={path}", "tied"))
    table = tied.tables()[0]
    assert torch.equal(table[12], torch.full((16,), 2.0))
    assert torch.equal(table[20:], drawn.tables()[0][20:])
    assert tied.tables()[1] is table
    frozen = build_model(tiny_settings(), f"untied+vectors={path}+freeze")
    trained = [one.requires_grad for installed in (tied, frozen) for one in installed.tables()]
    assert trained == [True, True, False, True]


@pytest.fixture(params=["llama", "gpt2"])
def installed(request, build_model, tiny_settings):
    """Build a model with a large init, so losses differ strongly between tokens."""
    return build_model(tiny_settings(model=request.param), "untied+init=0.5")


def reference_losses(installed, rows):
    """Return (losses, targets) of rows [n, T] by plain classes and cross-entropy in fp64."""
    plain = copy.deepcopy(installed.model)
    type(installed)(plain, plain._tiewise).uninstall()
    ids = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        logits = plain.eval().double()(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"), ids[:, 1:].flatten()


@pytest.mark.parametrize("training", [True, False])
def test_measure_matches_fp64_mean_nll_and_nll_by_token_frequency(installed, text, training):
    tokens = text.split("heldout")
    losses, targets = reference_losses(installed, tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH))
    seen = torch.from_numpy(text.counts)[targets]
    installed.model.train(training)
    found = measure(installed, tokens, LENGTH, text.counts)
    assert found.tokens == losses.numel() == len(tokens) // LENGTH * (LENGTH - 1)
    assert found.nll == pytest.approx(losses.mean().item(), abs=1e-5)
    edges = [(0, 0), (1, 9), (10, 99), (100, 999), (1000, 9999), (10_000, math.inf)]
    for bin_, (low, high) in zip(found.bins, edges, strict=True):
        inside = losses[(seen >= low) & (seen <= high)]
        assert bin_.tokens == len(inside)
        assert bin_.nll is None if not len(inside) else bin_.nll == pytest.approx(inside.mean().item(), abs=1e-5)
    assert len([b for b in found.bins if b.tokens]) >= 2
    assert installed.model.training is training  # `measure` restores the mode
    assert all(p.grad is None for p in installed.model.parameters())


def test_measure_spreads_requested_blocks_evenly_over_split(installed, text):
    tokens = text.split("heldout")[: 10 * LENGTH + 5]
    losses, _ = reference_losses(installed, tokens[: 10 * LENGTH].reshape(10, LENGTH)[[0, 3, 6]])
    found, *whole = (measure(installed, tokens, LENGTH, text.counts, blocks) for blocks in (3, None, 10**6))
    assert found.tokens == 3 * (LENGTH - 1)
    assert found.nll == pytest.approx(losses.mean().item(), abs=1e-5)
    assert whole[0] == whole[1]
    assert math.isnan(measure(installed, tokens[:3], LENGTH, text.counts).nll)  # fewer tokens than one block


def test_measure_returns_same_nll_for_one_batch_and_many(installed, text):
    """`measure` evaluates 4,096 tokens at a time."""
    tokens = np.tile(np.asarray(text.split("heldout")[:512]), 20)
    once, many = (measure(installed, tokens[:count], LENGTH, text.counts) for count in (512, None))
    assert (many.tokens, many.nll) == (20 * once.tokens, pytest.approx(once.nll, abs=1e-6))


def trained_losses(job, folder, settings, arm):
    """Return training and held-out loss of a run."""
    result = train(job(settings, folder, arm)).result
    return result.train_nll, result.heldout_nll


@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8", "tied+untie_at=5", "untied+tie_at=5", "tied+free=30"])
def test_table_rate_equal_to_learning_rate_gives_same_run(job, tiny_settings, tmp_path, arm):
    rates = {"learning_rate": 0.02, "steps": 10}
    plain = trained_losses(job, tmp_path / "plain", tiny_settings(**rates), arm)
    apart = trained_losses(job, tmp_path / "apart", tiny_settings(**rates, table_rate=0.02), arm)
    assert apart == pytest.approx(plain, rel=1e-6)


def test_table_rate_is_that_of_tables_and_head_alone(job, tiny_settings, tmp_path):
    one = job(tiny_settings(table_rate=0.1), tmp_path, "untied")
    installed = KIND.build(one)
    trainer = KIND.trainer(one, installed)
    tables = {id(table) for table in installed.tables()}
    rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert set(rates) == {id(p) for p in installed.model.parameters()}
    assert {rate for key, rate in rates.items() if key in tables} == {0.1}
    assert {rate for key, rate in rates.items() if key not in tables} == {0.004}


@pytest.mark.parametrize(
    "other", [{"backend": "flax"}, {"kind": "seq2seq"}, {"recipe": "albert-small"}, {"recipe": "pytorch-200"}]
)
def test_table_rate_is_refused_for_other_kinds(other):
    record = {**(recipe(other["recipe"]) if "recipe" in other else {}), **other, "table_rate": 0.1}
    with pytest.raises(RunError, match=r"table_rate with .*; leave it out: only decoders in PyTorch have it"):
        Settings.of(record).checked()


def test_table_rate_is_refused_for_models_in_parts(monkeypatch):
    group = ranks._Group()
    group.size = 2
    monkeypatch.setattr(ranks, "_group", group)
    monkeypatch.setattr(ranks, "sharded", lambda: (1, 2, 1))
    with pytest.raises(RunError, match="table_rate with --fsdp or --tp"):
        KIND.check_processes(Settings(table_rate=0.064, arms=("tied",)).checked())
