"""Separate output rows of frequent tokens: `+free=K`, compared with autograd on real logits."""

import json

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from safetensors.torch import load_file, save_file, save_model
from tests.boundary.ops.test_cross_entropy import OPTIONS, error, options_of
from tests.boundary.ops.test_divergence import plain as plain_divergence
from tests.boundary.ops.test_log_prob import plain as plain_statistics
from tiny_models import assert_identical_steps, batch, build
from transformers import LlamaForCausalLM

import tiewise.hf
from tiewise.boundary.boundary import Boundary
from tiewise.boundary.flax import parameter_files
from tiewise.boundary.flax.boundary import LinenBoundary, NNXBoundary, PureBoundary
from tiewise.boundary.free_rows import FreeRows
from tiewise.boundary.installation import install
from tiewise.boundary.ops.cross_entropy import oracle
from tiewise.boundary.ops.log_prob import vocabulary_statistics
from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.core.errors import CheckpointError, SpecError, TiewiseError
from tiewise.core.frequent_tokens import most_frequent
from tiewise.core.spec import BoundarySpec, Vocabularies

V, D, N, K = 57, 12, 23, 5
COUNTS = np.random.default_rng(0).permutation(V)
IDS = sorted(np.argsort(-COUNTS)[:K].tolist())
CAST = {"float64": 1e-12, "float32": 1e-6}


def boundary_of(text="", dtype=torch.float64, vocab=V, counts=COUNTS):
    torch.manual_seed(0)
    boundary = Boundary(f"tied+free={K}{text}", vocab, D, counts=counts).double()
    with torch.no_grad():
        for parameter in boundary.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if boundary.spec.pad is not None:
            boundary.table_in[boundary.spec.pad] = 0
    return boundary.to(dtype)


def inputs_of(dtype=torch.float64, vocab=V):
    g = torch.Generator().manual_seed(1)
    targets = torch.randint(0, vocab, (N,), generator=g)
    targets[:3] = torch.tensor(IDS[:3])
    targets[::5] = -100
    return torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype), targets


def untied_rows(table, delta, ids=IDS):
    """Return the head's rows [V, D] by indexing with a matrix of ones and zeros."""
    return table + F.one_hot(torch.tensor(ids), len(table)).to(table.dtype).T @ delta


def gradients(function, *tensors):
    """Return results and the gradients of each tensor, summed with upstream gradients of both signs."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    results = function(*leaves)
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
    return [x.detach() for x in results], torch.autograd.grad(total, leaves)


def compare(boundary, hidden, ours, theirs, tolerance):
    """Compare `ours(hidden)` and its gradients with `theirs(hidden, rows of the head)` in fp64."""
    hidden = hidden.detach().requires_grad_()
    leaves = [hidden, boundary.table_in, boundary.free.rows]
    results = ours(hidden)
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
    found = torch.autograd.grad(total, leaves)
    expected, true = gradients(lambda h, table, delta: theirs(h, untied_rows(table, delta)), *leaves)
    for one, other in zip((*results, *found), (*expected, *true), strict=True):
        assert error(one, other) < tolerance


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dtype", CAST)
def test_loss_and_gradients_equal_autograd_on_real_logits(dtype, chosen, reduction):
    boundary = boundary_of(dtype=getattr(torch, dtype))
    hidden, targets = inputs_of(getattr(torch, dtype))
    chosen = options_of(chosen, V) | {"reduction": reduction}
    compare(
        boundary,
        hidden,
        lambda h: [boundary.loss(h, targets, chunk=7, **chosen)],
        lambda h, rows: [oracle(h, rows, targets, **chosen)],
        CAST[dtype],
    )


@pytest.mark.parametrize("dtype", CAST)
@pytest.mark.parametrize("chosen", [{}, {"softcap": 2.0, "temperature": 0.7}], ids=["plain", "softcap"])
def test_log_probabilities_and_entropies_equal_autograd_on_real_logits(chosen, dtype):
    boundary = boundary_of(dtype=getattr(torch, dtype))
    hidden, targets = inputs_of(getattr(torch, dtype))
    compare(
        boundary,
        hidden,
        lambda h: vocabulary_statistics(
            h, boundary.free.table(boundary.table_in), targets, entropy=True, chunk=7, **chosen
        ),
        lambda h, rows: plain_statistics(h, rows, targets, **chosen),
        CAST[dtype],
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_equals_autograd_on_real_logits(beta):
    boundary = boundary_of()
    hidden, targets = inputs_of()
    g = torch.Generator().manual_seed(2)
    teacher = [torch.randn(rows, 4, generator=g, dtype=torch.float64) for rows in (N, V)]
    compare(
        boundary,
        hidden,
        lambda h: [linear_divergence(h, boundary.free.table(boundary.table_in), *teacher, targets, beta=beta, chunk=7)],
        lambda h, rows: [plain_divergence((h, rows, None), (*teacher, None), targets, beta)],
        1e-12,
    )


@pytest.mark.parametrize(
    "option", ["", "+bias", "+output_scale=1/sqrt_d+input_scale=sqrt_d", "+softcap=3+bias", "+alpha=0.3", "+pad=2"]
)
def test_whole_step_equals_autograd_with_every_option_of_the_spec(option):
    boundary = boundary_of(option)
    ids, targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(4)), inputs_of()[1]
    spec, (input_scale, output_scale) = boundary.spec, boundary.spec.scales(D)
    ids[:2] = torch.tensor([2, IDS[0]])
    leaves = {name: p.detach().clone().requires_grad_() for name, p in boundary.named_parameters()}
    table = leaves["table_in"]
    lookup = table * spec.alpha + table.detach() * (1 - spec.alpha)
    kept = torch.ones(V, 1, dtype=torch.float64)
    if spec.pad is not None:
        kept[spec.pad] = 0
    rows, lookup = (x * kept + (x * (1 - kept)).detach() for x in (table, lookup))
    hidden = torch.tanh(lookup[ids] * input_scale)
    logits = hidden @ untied_rows(rows, leaves["free.rows"]).T * output_scale + leaves.get("bias", 0)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    expected = F.cross_entropy(logits, targets)
    expected.backward()

    torch.testing.assert_close(boundary.logits(torch.tanh(boundary.embed(ids))), logits)
    loss = boundary(ids, torch.tanh, targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in boundary.named_parameters():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, msg=name)


def test_bf16_error_is_at_most_that_of_plain_torch():
    boundary = boundary_of(dtype=torch.bfloat16)
    hidden, targets = inputs_of(torch.bfloat16)
    tensors = (hidden, boundary.table_in, boundary.free.rows)
    _, truth = gradients(lambda h, e, d: [F.cross_entropy(h @ untied_rows(e, d).T, targets)], *tensors)
    errors = []
    for loss_of in (
        lambda h, e, d: boundary.loss(h, targets),
        lambda h, e, d: F.cross_entropy(h @ untied_rows(e, d).T, targets),
    ):
        leaves = [hidden.detach().requires_grad_(), boundary.table_in, boundary.free.rows]
        found = torch.autograd.grad(loss_of(*leaves), leaves)
        errors.append([error(one, other) for one, other in zip(found, truth, strict=True)])
    assert all(ours <= 1.05 * plain for ours, plain in zip(*errors, strict=True)), errors


def test_one_buffer_holds_both_gradients_of_the_tied_table():
    """Δ's gradient is the head path's alone: a buffer shared with the lookup would add its rows."""
    boundary = boundary_of()
    ids = torch.tensor(IDS)
    boundary(ids, torch.tanh, ids).backward()
    lookup = boundary.table_in.grad[IDS] - boundary.free.rows.grad
    hidden = torch.tanh(boundary.embed(ids)).detach()
    boundary.zero_grad()
    boundary.loss(hidden, ids).backward()
    torch.testing.assert_close(boundary.table_in.grad[IDS], boundary.free.rows.grad)
    assert lookup.norm() > 0


def test_start_is_exactly_tied_and_dense_tables_compute_the_same():
    start = Boundary(f"tied+free={K}", V, D, counts=COUNTS)
    assert not start.free.rows.any()
    assert torch.equal(start.dense()[1], start.table_in)
    boundary = boundary_of("+output_scale=1/d+input_scale=2")
    hidden, _ = inputs_of()
    dense_in, dense_out = boundary.dense()
    torch.testing.assert_close(hidden @ dense_out.T, boundary.logits(hidden))
    torch.testing.assert_close(dense_out, untied_rows(boundary.table_in, boundary.free.rows) / D)
    torch.testing.assert_close(dense_in, boundary.table_in * 2)
    other = Boundary(f"tied+free={K}", V, D, counts=torch.zeros(V)).double()
    other.load_state_dict(boundary.state_dict())
    assert other.free.ids.tolist() == IDS


def test_vocabularies_of_another_order_count_output_tokens():
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:15].tolist()
    vocab = Vocabularies(20, 17, (*mixed, -1, -1))
    counts = np.arange(17)
    boundary = boundary_of(f"+pad={mixed[14]}", vocab=vocab, counts=counts)
    ids = [11, 12, 13, 15, 16]  # output token 14 has the padding row
    assert boundary.free.ids.tolist() == ids
    hidden, _ = inputs_of()
    rows = boundary.table_in[[*mixed, 20, 21]]
    torch.testing.assert_close(boundary.logits(hidden), hidden @ untied_rows(rows, boundary.free.rows, ids).T)


def test_most_frequent_tokens_are_sorted_and_ties_take_the_lower_id():
    spec = BoundarySpec.parse("tied+free=3")
    assert most_frequent(spec, [1, 7, 7, 0, 7, 7], Vocabularies.same(6)) == (1, 2, 4)
    assert most_frequent(BoundarySpec.parse("tied+free=3+pad=2"), [0, 0, 9, 0], Vocabularies.same(4)) == (0, 1, 3)


REFUSED = [
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=0")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=-3")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=2.5")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=many")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free")),
    ("free = 0 in tied", lambda: BoundarySpec("tied", free=0)),
    ("free = 2.0 in tied", lambda: BoundarySpec("tied", free=2.0)),
    ("free = True in tied", lambda: BoundarySpec("tied", free=True)),
    ("free on untied: only a tied table", lambda: BoundarySpec.parse("untied+free=2")),
    ("free on factored: only a tied table", lambda: BoundarySpec.parse("factored:2+free=2")),
    ("untie_at, which frees all rows", lambda: BoundarySpec.parse("tied+free=2+untie_at=5")),
    ("the vocabulary has 57 tokens; choose K ≤ 57", lambda: Boundary("tied+free=58", V, D, counts=COUNTS)),
    ("the vocabulary has 56 tokens", lambda: Boundary("tied+free=57+pad=1", V, D, counts=COUNTS)),
    ("is not known; give the tokens' counts", lambda: Boundary("tied+free=2", V, D)),
    (r"counts of shape \[3\] for 57 tokens", lambda: Boundary("tied+free=2", V, D, counts=[1, 2, 3])),
    ("counts of type str", lambda: Boundary("tied+free=2", V, D, counts="many")),
    ("negative or not finite", lambda: Boundary("tied+free=2", V, D, counts=[-1.0, *[0.0] * 56])),
    ("not 2 ascending tokens below 57", lambda: FreeRows([3, 3], D).check_ids(V)),
    ("not 2 ascending tokens below 57", lambda: FreeRows([3, 57], D).check_ids(V)),
    ("into with free=5", lambda: boundary_of()(inputs_of()[1].relu(), torch.tanh, inputs_of()[1], into=rows())),
    ("into with free=5", lambda: boundary_of().loss(*inputs_of(), into=rows())),
]


def rows():
    return torch.zeros(V, D, dtype=torch.float64)


@pytest.mark.parametrize(("says", "call"), REFUSED)
def test_wrong_counts_and_numbers_are_refused_in_one_line(says, call):
    with pytest.raises(SpecError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


# in a model of transformers


def trained_model(spec=f"tied+free={K}", name="llama"):
    """Return a model with a boundary after one step, and its batch."""
    model = build(name, tied=True)
    install(model, spec, counts=MODEL_COUNTS)
    inputs = batch(model)
    model.train()(**inputs).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    return model, inputs


MODEL_COUNTS = np.random.default_rng(1).permutation(61)
MODEL_IDS = sorted(np.argsort(-MODEL_COUNTS)[:K].tolist())


def logits_of(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits + 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5", "opt_350m"])
def test_installed_step_equals_autograd_on_the_logits_of_an_untied_head(name):
    model, inputs = trained_model(name=name)
    head = model.get_output_embeddings()
    assert head.free.ids.tolist() == MODEL_IDS
    assert head.free.rows.abs().sum() > 0
    plain = tiewise.hf.plain_copy(model)
    assert plain.get_output_embeddings().weight is not plain.get_input_embeddings().weight
    torch.testing.assert_close(
        plain.get_output_embeddings().weight, untied_rows(head.weight, head.free.rows, MODEL_IDS), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(logits_of(plain, inputs), logits_of(model, inputs))
    for one in (model, plain):  # in evaluation, without dropout
        one(**inputs).loss.backward()
    by_head, by_lookup = (end.weight.grad for end in (plain.get_output_embeddings(), plain.get_input_embeddings()))
    torch.testing.assert_close(head.free.rows.grad, by_head[MODEL_IDS])
    if name != "bert":  # its lookups of positions and types are frozen by neither copy, and its bias is shared
        torch.testing.assert_close(head.weight.grad, by_head + by_lookup)


@pytest.mark.parametrize("spec", [f"tied+free={K}", "tied+free=61+output_scale=0.5", "tied+free=3+pad=0+alpha=0.5"])
def test_saved_model_loads_with_the_same_ids_rows_and_steps(spec, tmp_path):
    model, inputs = trained_model(spec)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["lm_head.free.ids"].tolist() == model.get_output_embeddings().free.ids.tolist()
    loaded = tiewise.hf.load(tmp_path)
    assert tiewise.installed(loaded).spec == BoundarySpec.parse(spec)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert torch.equal(logits_of(loaded, inputs), logits_of(model, inputs))
    assert_identical_steps(loaded, model, inputs)
    narrow = tiewise.hf.load(tmp_path, dtype=torch.bfloat16).get_output_embeddings().free
    assert (narrow.rows.dtype, narrow.ids.dtype) == (torch.bfloat16, torch.int32)


@pytest.mark.parametrize("way", ["plain_copy", "factor --undo"])
def test_dense_export_is_an_untied_head_that_plain_transformers_load(way, tmp_path):
    model, inputs = trained_model()
    if way == "plain_copy":
        tiewise.hf.plain_copy(model).save_pretrained(tmp_path / "dense")
    else:
        model.save_pretrained(tmp_path / "saved")
        tiewise.factor(tmp_path / "saved", tmp_path / "dense", undo=True)
    plain, info = LlamaForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.tie_word_embeddings is False
    torch.testing.assert_close(logits_of(plain, inputs), logits_of(model, inputs))
    assert rules_of(tmp_path / "dense") == []
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    for wrong in ("tied+free=4", "tied+free=x", 5):  # a claim that the rows contradict, and damaged ones
        (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"exported_boundary": wrong}))
        assert rules_of(tmp_path / "dense") == ["B015"]


def rules_of(folder):
    """Return the rules of all findings above a note."""
    return [finding.rule for finding in tiewise.check(folder).findings if finding.severity != "info"]


def test_checkpoint_with_free_rows_has_the_finding_of_every_boundary_alone(tmp_path):
    trained_model()[0].save_pretrained(tmp_path)
    assert rules_of(tmp_path) == ["B080"]  # only transformers loads the type `tiewise`


@pytest.mark.parametrize("damage", ["ids repeat", "ids leave the table", "rows are short", "rows are missing"])
def test_damaged_free_rows_are_refused_when_they_are_read(damage, tmp_path):
    trained_model()[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids, rows = tensors["lm_head.free.ids"], tensors["lm_head.free.rows"]
    ids[-1] = {"ids repeat": ids[-2], "ids leave the table": 61}.get(damage, ids[-1])
    tensors["lm_head.free.rows"] = rows[:-1].clone() if damage == "rows are short" else rows
    if damage == "rows are missing":
        del tensors["lm_head.free.rows"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TiewiseError, match=r"its boundary tied\+free=5"):
        tiewise.factor(tmp_path, tmp_path / "dense", undo=True)
    if damage.startswith("ids"):
        with pytest.raises(TiewiseError, match="not 5 ascending tokens below 61"):
            tiewise.hf.load(tmp_path)


def test_what_a_head_with_free_rows_cannot_do_is_refused():
    model, _ = trained_model()
    handle = tiewise.installed(model)
    for call, says in (
        (handle.untie, r"tied\+free=5 cannot be untied"),
        (lambda: handle.exact_decoding(), "exact_decoding"),
        (handle.uninstall, "more than the model's own classes can hold"),
        (lambda: model.resize_token_embeddings(MODEL_IDS[-1]), "not 5 ascending tokens"),
        (lambda: install(build("llama", tied=True), "tied+free=5"), "is not known; give the tokens' counts"),
        (lambda: install(build("llama", tied=True), "tied+free=62", counts=MODEL_COUNTS), "choose K ≤ 61"),
    ):
        with pytest.raises(TiewiseError, match=says):
            call()
    model.resize_token_embeddings(70)
    assert model.get_output_embeddings().free.ids.tolist() == MODEL_IDS
    assert logits_of(model, {"input_ids": torch.tensor([[1, 2]])}).shape == (1, 2, 70)


def test_generation_and_parameter_groups_know_the_free_rows():
    model, _ = trained_model()
    prompt = torch.tensor([[3, 4, 5]])
    model.eval()
    tokens = [one.generate(prompt, max_new_tokens=5) for one in (model, tiewise.hf.plain_copy(model))]
    assert torch.equal(*tokens)
    groups = {group["name"]: group["params"] for group in tiewise.param_groups(model)}
    assert [id(p) for p in groups["head"]] == [id(model.get_output_embeddings().free.rows)]
    boundary = boundary_of()
    groups = {group["name"]: group["params"] for group in tiewise.param_groups(boundary)}
    assert [id(p) for p in groups["head"]] == [id(boundary.free.rows)]


def test_flax_reads_the_file_of_pytorch_and_computes_the_same(tmp_path):
    boundary = boundary_of(dtype=torch.float32)
    save_model(boundary, tmp_path / "torch.safetensors")
    pure = PureBoundary.of(boundary.spec, V, D, COUNTS)
    assert pure.free_ids == tuple(IDS)
    params = parameter_files.load(tmp_path / "torch.safetensors", pure)
    parameter_files.save(tmp_path / "flax.safetensors", pure, params)
    assert (tmp_path / "flax.safetensors").read_bytes() == (tmp_path / "torch.safetensors").read_bytes()
    hidden, targets = inputs_of(torch.float32)
    loss, found = jax.value_and_grad(lambda p: pure.loss(p, hidden.numpy(), targets.numpy()))(params)
    expected = boundary.loss(hidden, targets)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in boundary.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pure.dense(params)[1], boundary.dense()[1].numpy(), rtol=1e-6)
    with pytest.raises(CheckpointError, match="free rows of other tokens"):
        parameter_files.load(tmp_path / "torch.safetensors", PureBoundary.of(boundary.spec, V, D, np.arange(V)))
    linen = LinenBoundary(f"tied+free={K}", V, D, tuple(COUNTS.tolist()))
    assert linen.pure.free_ids == NNXBoundary(boundary.spec, V, D, rngs=nnx.Rngs(0), counts=COUNTS).pure.free_ids


# plans and runs


def test_plan_counts_the_rows_their_optimizer_state_and_the_copied_table():
    config = build("llama", tied=True).config.to_dict()
    tied, free = (tiewise.plan(config, [spec]).record()["choices"][0] for spec in ("tied", f"tied+free={K}"))
    added = K * config["hidden_size"]
    assert free["parameters"]["total"] - tied["parameters"]["total"] == added
    assert free["training_bytes"]["adamw"]["state"] - tied["training_bytes"]["adamw"]["state"] == 2 * 4 * added
    assert free["checkpoint_bytes"]["float32"] - tied["checkpoint_bytes"]["float32"] == 4 * added
