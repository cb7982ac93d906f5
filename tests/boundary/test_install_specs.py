"""Models with installed specs, compared in loss and gradients with the formulas of the specs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fingerprint import left_alone
from tiny_models import V, assert_same_gradients, batch, build, pair, step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.func import functional_call
from transformers import PreTrainedTokenizerFast

from tiewise import load
from tiewise.boundary.installation import install
from tiewise.core.errors import DataError, InstallError, SpecError, UnsupportedError

D, K = 16, 6


def _formula(model, inputs):
    """Return (loss, {name: gradient}) by plain autograd on the original class with dense tables computed from maps."""
    plain, names = build("llama", tied=False), dict(model.named_parameters())
    spec = install(model).spec
    leaves = {name: p.detach().clone().requires_grad_() for name, p in names.items()}
    table_in = leaves["model.embed_tokens.weight"]
    table_out = leaves.get("lm_head.weight", table_in)
    if "model.embed_tokens.in_map.weight" in leaves:
        table_in = table_in @ leaves["model.embed_tokens.in_map.weight"].T
    if "lm_head.out_map.weight" in leaves:
        table_out = table_out @ leaves["lm_head.out_map.weight"]
    if "lm_head.out_map.p" in leaves:
        correction = leaves["lm_head.out_map.p"] @ leaves["lm_head.out_map.q"]
        table_out = table_out @ (torch.eye(D) + spec.strength * correction)
    if "lm_head.out_map.factor" in leaves:
        factor = leaves["lm_head.out_map.factor"]
        triangle = factor.tril(-1) + torch.diag(factor.diagonal().exp())
        definite = triangle @ triangle.T
        table_in, table_out = table_in @ torch.linalg.inv(definite), table_out @ definite
    scale_in, scale_out = spec.scales(D)
    dense = {name: leaf for name, leaf in leaves.items() if "embed_tokens" not in name and "lm_head" not in name}
    dense |= {"model.embed_tokens.weight": table_in * scale_in, "lm_head.weight": table_out * scale_out}
    plain.train()
    torch.manual_seed(5)
    logits = functional_call(plain, dense, kwargs={"input_ids": inputs["input_ids"]}).logits
    logits = logits + leaves.get("lm_head.bias", torch.zeros(V))
    logits = logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), inputs["labels"][:, 1:].reshape(-1))
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


SPECS = ["tied", "untied", "factored:6", "factored-untied:in=6,out=10", "residual:3,s=0.5", "spd"]
SPECS += ["projected", "projected:20", "projected:12,in=linear,out=linear,untied", "projected:7,untied,out=none"]
SPECS += ["tied+bias", "untied+softcap=0.4", "tied+input_scale=sqrt_d+output_scale=1/sqrt_d"]
SPECS += ["factored:6+bias+softcap=2+input_scale=3+output_scale=0.5"]


@pytest.mark.parametrize("spec", SPECS)
def test_loss_and_gradients_follow_the_formula(spec):
    model = build("llama")
    installed = install(model, spec)
    with torch.no_grad():  # move biases from zero and maps from the identity
        for name, parameter in model.named_parameters():
            if "out_map" in name or "lm_head.bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    inputs = batch(model)
    loss, got = step(model, inputs)
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    wanted_loss, wanted = _formula(model, inputs)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, wanted, 2e-5)


def test_tying_takes_the_input_table_and_untying_copies_it():
    model = build("llama", tied=False)
    table = model.model.embed_tokens.weight
    installed = install(model, "tied")
    assert model.lm_head.weight is table is model.model.embed_tokens.weight
    assert installed.tables()[0] is installed.tables()[1] is table
    installed.uninstall()
    install(model, "untied")
    assert model.model.embed_tokens.weight is table
    assert model.lm_head.weight is not table
    assert torch.equal(model.lm_head.weight, table)
    model.tie_weights()
    assert model.lm_head.weight is not table


@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
@pytest.mark.parametrize("built_tied", [True, False])
def test_tie_weights_keeps_the_installed_tables(name, built_tied):
    for spec in ("tied", "untied"):
        model = build(name, built_tied)
        install(model, spec)
        kept = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
        model.tie_weights()
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == kept
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert (embedding.weight is head.weight) == (spec == "tied")


def test_install_does_not_change_other_models_of_the_same_config():
    first = build("llama", tied=True)
    second = type(first)(first.config)
    install(second, "untied")
    assert first.config.tie_word_embeddings
    assert not second.config.tie_word_embeddings
    assert second.model.config is second.config
    install(second).uninstall()
    install(second, "factored:4")
    assert first.config.model_type == "llama"


def test_alpha_scales_only_the_lookup_path():
    model = build("llama")
    both, inputs = copy.deepcopy(model), batch(model)
    path_b = copy.deepcopy(model)
    _, total = step(both, inputs)
    path_b.model.embed_tokens.forward = lambda ids: F.embedding(ids, path_b.lm_head.weight.detach())
    _, only_b = step(path_b, inputs)
    install(model, "tied+alpha=0.25")
    _, got = step(model, inputs)
    name = "model.embed_tokens.weight"
    assert_same_gradients(got, total | {name: only_b[name] + 0.25 * (total[name] - only_b[name])}, 1e-5)


@pytest.mark.parametrize("kind", ["tied", "untied", "factored:6"])
@pytest.mark.parametrize("looked_up", [True, False])
def test_a_padding_row_is_zero_and_stays_zero(kind, looked_up):
    model = build("llama")
    install(model, f"{kind}+pad=7")
    inputs = batch(model)
    inputs["input_ids"][0, :4] = 7
    inputs["labels"][1, :4] = 7
    if not looked_up:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    _, gradients = step(model, inputs)
    optimizer.step()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in gradients:
            assert not gradients[name][7].any()
            assert gradients[name].any()
    for table in (model.model.embed_tokens.weight, model.lm_head.weight):
        assert not table[7].any()


def test_init_draws_both_tables_and_keeps_the_body():
    model, other = build("llama", tied=False), build("llama", tied=False)
    torch.manual_seed(3)
    install(model, "untied+init=0.5+pad=2")
    for name, parameter in model.named_parameters():
        drawn = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert torch.equal(parameter, dict(other.named_parameters())[name]) != drawn
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    for table in (embedding, head):
        assert abs(table[3:].std() - 0.5) < 0.05
        assert not table[2].any()
    assert not torch.equal(embedding, head)


def test_uninstall_restores_the_original_classes_or_refuses():
    model, plain, installed = pair("gemma2")
    installed.uninstall()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in plain.modules()]
    assert not model._forward_hooks
    installed = install(model, "factored:6")
    with pytest.raises(UnsupportedError, match="plain_copy"):
        installed.uninstall()


def test_refused_install_keeps_the_previous_boundary():
    model = build("gemma2")
    record = install(model, "tied+alpha=0.5").track()
    with pytest.raises(InstallError, match="softcap"):
        install(model, "tied+softcap=2")
    installed = install(model)
    assert str(installed.spec) == "tied+alpha=0.5"
    assert installed.record is record
    step(model, batch(model))
    assert installed.counts.fused == 1


def test_install_finds_a_replaced_head():
    model = build("llama", tied=False)
    install(model)
    model.resize_token_embeddings(70)
    installed = install(model)
    inputs = batch(model)
    plain = copy.deepcopy(model)
    install(plain).uninstall()
    torch.testing.assert_close(step(model, inputs)[0], step(plain, inputs)[0], rtol=1e-6, atol=0)
    assert installed.counts.fused == 1
    assert installed.tables()[1].shape == (70, D)


# --- pretrained vectors


WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(50))]  # fewer than the table's 61 rows


@pytest.fixture
def tokenizer():
    words = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


@pytest.fixture
def vectors(tmp_path):
    """Return a function that writes vectors for w0 to w39, `<pad>` and an unknown word."""

    def write_vectors(width):
        path = tmp_path / "glove.txt"
        words = [*(f"w{i}" for i in range(40)), "<pad>", "strange"]
        path.write_text("".join(f"{word} {' '.join([str(i + 1)] * width)}\n" for i, word in enumerate(words)))
        return path

    return write_vectors


def test_vectors_initialise_the_rows_of_their_words(tokenizer, vectors, tmp_path):
    model = build("llama")
    before = model.lm_head.weight.detach().clone()
    installed = install(model, f"tied+pad=0+vectors={vectors(D)}", tokenizer=tokenizer)
    table, head = installed.tables()
    assert table is head is model.lm_head.weight
    assert table.requires_grad
    assert torch.equal(table[3:43].detach(), torch.arange(1.0, 41)[:, None].expand(-1, D))
    assert torch.equal(table[43:], before[43:])
    assert torch.equal(table[1:3], before[1:3])
    assert not table[0].any()  # the padding row stays zero although the file has a vector for it
    assert installed.missing_vectors == ("<s>", "</s>", *(f"w{i}" for i in range(40, 50)))
    assert install(model).missing_vectors == ()
    assert step(model, batch(model))[0].isfinite()
    model.save_pretrained(tmp_path / "saved")
    assert "glove" not in (tmp_path / "saved" / "config.json").read_text()
    assert torch.equal(load(tmp_path / "saved").lm_head.weight, table)


def test_vectors_of_another_width_fill_a_projected_table_and_freeze_it(tokenizer, vectors):
    model = build("llama")
    installed = install(model, f"projected:20,untied+vectors={vectors(20)}+freeze", tokenizer=tokenizer)
    table, head = installed.tables()
    assert torch.equal(table[10], torch.full((20,), 8.0))
    assert (table.requires_grad, head.requires_grad) == (False, True)
    assert "model.embed_tokens.weight" not in step(model, batch(model))[1]
    assert installed.counts.materialised == 0


@pytest.mark.parametrize(
    ("spec", "given", "says"),
    [
        ("tied+vectors=FILE", False, "names words, and a model has only rows; give install the model's tokenizer too"),
        ("tied+vectors=FILE", True, r"\(61, 20\) do not fit the table \(61, 16\); use factored:20 or, .* projected:20"),
        ("factored:8+vectors=FILE", True, r"do not fit the table \(61, 8\); use factored:20"),
        ("factored:6+vectors=none.txt", True, "no such file"),
    ],
)
def test_install_refuses_vectors_that_do_not_fit_or_are_missing(tokenizer, vectors, spec, given, says):
    model = build("llama", tied=False)
    with left_alone(model), pytest.raises((SpecError, DataError), match=says):
        install(model, spec.replace("FILE", str(vectors(20))), tokenizer=tokenizer if given else None)


def test_penalty_is_that_of_the_output_projection():
    assert install(build("llama")).penalty() is None
    model = build("llama")
    penalty = install(model, "projected:12,penalty=0.15").penalty()
    torch.testing.assert_close(penalty, 0.15 * model.lm_head.out_map.weight.square().sum().sqrt())
    assert penalty.requires_grad


def test_notebook_view_of_a_handle_names_shared_parameters_with_shapes():
    model = build("llama")
    handle = install(model, "tied")
    rows, width = model.get_input_embeddings().weight.shape
    names = "model.embed_tokens.weight = lm_head.weight"
    assert repr(handle) == f"Installed(tied on {type(model).__name__}: {names} [{rows}, {width}])"
    page = handle._repr_html_()
    assert "input embedding and output head share one table" in page
    assert f"<td>{names}</td><td>[{rows}, {width}]</td>" in page
    handle.untie()
    assert "have two tables" in handle._repr_html_()
