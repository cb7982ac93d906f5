"""NNX and Linen boundaries, compared with PyTorch's boundary on the same safetensors file."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from fp64_truth import error
from safetensors.torch import save_model

from tiewise.boundary.boundary import Boundary as TorchBoundary
from tiewise.boundary.flax.boundary import LinenBoundary, NNXBoundary, PureBoundary
from tiewise.boundary.flax.find_tables import find_tables
from tiewise.boundary.flax.parameter_files import flat, load, nested, save
from tiewise.boundary.flax.paths import path_norms, probe
from tiewise.boundary.ops.path_gradient import PathRecord
from tiewise.boundary.ops.path_gradient import path_norms as torch_path_norms
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import Vocabularies

V, D = 9, 4
KINDS = [
    *("tied", "untied", "factored:3", "factored-untied:in=2,out=3", "projected", "projected:6,penalty=0.1,decay=0.2"),
    *("projected:6,in=none", "projected:6,out_bias", "projected:3,untied", "projected:3,untied,out=none"),
    *("residual:2,s=0.5", "spd"),
]
OPTIONS = ["bias", "input_scale=sqrt_d", "output_scale=1/sqrt_d", "softcap=1.5", "alpha=0.3", "pad=2"]
TOGETHER = "+bias+input_scale=sqrt_d+output_scale=1/d+softcap=1.5+alpha=0.3+pad=2"
DIFFERING = [Vocabularies(9, 6), Vocabularies(6, 9), Vocabularies(6, 4, (3, -1, 0, -1))]
IDS = np.array([[1, 2, 5, 1], [0, 2, 2, 4]])


def fitting_vocabulary(kind, vocab):
    """Return the vocabularies, without a token map if the kind has two tables, which accept none."""
    return Vocabularies(vocab.inputs, vocab.outputs) if "untied" in kind and vocab != V else vocab


def build_random_torch(spec, vocab):
    """Return PyTorch's boundary with random values in every parameter, also in those that start at zero."""
    torch.manual_seed(0)
    boundary = TorchBoundary(spec, vocab, D)
    with torch.no_grad():
        for parameter in boundary.parameters():
            parameter.normal_(std=0.5)
    return boundary


def build_both(spec, vocab, folder, kind=torch.float32):
    """Return (PyTorch's boundary with random parameters, the NNX boundary loaded from its file)."""
    theirs, ours = build_random_torch(spec, vocab).to(kind), NNXBoundary(spec, vocab, D, rngs=nnx.Rngs(0))
    save_model(theirs, folder / "theirs.safetensors")
    ours.load(load(folder / "theirs.safetensors", ours.pure))
    return theirs, ours


def torch_results(boundary, body, targets):
    """Return rows, logits, the penalised loss, its gradients by name, and path norms."""
    boundary.record = PathRecord()
    m = torch.tensor(body, dtype=torch.float32)
    ids, t = torch.tensor(IDS), torch.tensor(targets)
    loss = boundary(ids, lambda rows: torch.tanh(rows @ m), t, label_smoothing=0.1) + boundary.penalty()
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in boundary.named_parameters() if p.grad is not None}
    norms = torch_path_norms(boundary.table_in.grad, boundary.record)
    with torch.no_grad():
        rows = boundary.embed(ids)
        return rows.numpy(), boundary.logits(torch.tanh(rows @ m)).numpy(), loss.item(), grads, norms


QUICK_CASES = [(kind + TOGETHER, V) for kind in ("tied", "spd")]
QUICK_CASES += [("tied+bias", DIFFERING[2]), ("untied+bias", DIFFERING[1])]
CASES = [(kind + TOGETHER, V) for kind in KINDS]
CASES += [(kind + ending, V) for kind, ending in itertools.product(KINDS, ("", "+alpha=0"))]
# every kind has all options together above; alone, each option meets every third kind, as its code is that of all kinds
CASES += [(f"{kind}+{OPTIONS[j]}", V) for j in range(len(OPTIONS)) for kind in KINDS[j % 3 :: 3]]
CASES += [(kind + "+bias", fitting_vocabulary(kind, vocab)) for kind, vocab in itertools.product(KINDS, DIFFERING)]


@pytest.mark.parametrize(
    ("spec", "vocab"), [pytest.param(*c, marks=[] if c in QUICK_CASES else [pytest.mark.slow]) for c in CASES], ids=str
)
def test_nnx_boundary_equals_pytorch_for_every_spec_option_and_vocabulary(spec, vocab, tmp_path):
    theirs, ours = build_both(spec, vocab, tmp_path)
    g = np.random.default_rng(0)
    body = g.normal(size=(theirs.embed(torch.tensor(IDS)).shape[-1], D))
    targets = g.integers(0, ours.pure.vocab.outputs, IDS.shape)
    targets[0, 0] = -100
    rows, logits, loss, grads, norms = torch_results(theirs, body, targets)
    ends, m = ours.pure, jnp.asarray(body, jnp.float32)

    def penalised_loss(params, probe):
        value = ends.model_loss(params, IDS, lambda rows: jnp.tanh(rows @ m), targets, probe, label_smoothing=0.1)
        return value + ends.penalty(params)

    @jax.jit
    def compute_all(params):
        found = ends.embed(params, IDS)
        hidden = jnp.tanh(found @ m)
        apart = ends.loss(params, hidden, targets, label_smoothing=0.1)
        return found, ends.logits(params, hidden), apart, jax.value_and_grad(penalised_loss, (0, 1))(params, probe())

    params = ours.parameters()
    found, z, apart, (value, (gradients, seen)) = compute_all(params)
    assert error(found, rows) < 1e-5
    assert error(z, logits) < 1e-5
    assert abs(value - loss) < 1e-5 * abs(loss)
    assert abs(apart + float(ends.penalty(params)) - loss) < 1e-5 * abs(loss)
    assert gradients.keys() == params.keys()
    for name, gradient in gradients.items():
        wanted = grads.get(name, np.zeros(gradient.shape))
        assert np.linalg.norm(np.asarray(gradient) - wanted) < 1e-5 * np.linalg.norm(wanted) + 1e-7, name
    mine = path_norms(seen)
    assert mine.a == pytest.approx(norms.a, rel=1e-4, abs=1e-7)
    if ends.tied:
        assert (mine.b, mine.total) == pytest.approx((norms.b, norms.total), rel=1e-4)
        if norms.a:
            assert mine.cosine == pytest.approx(norms.cosine, abs=1e-4)


LINEAR = "+bias+input_scale=sqrt_d+output_scale=1/d+alpha=0.3+pad=2"
DENSE = list(itertools.product([kind for kind in KINDS if "out_bias" not in kind], [V, *DIFFERING]))
QUICK_DENSE = [("tied", V), ("factored:3", DIFFERING[2])]


@pytest.mark.parametrize(
    ("kind", "vocab"), [pytest.param(*c, marks=[] if c in QUICK_DENSE else [pytest.mark.slow]) for c in DENSE], ids=str
)
def test_dense_returns_pytorch_tables_that_compute_what_the_boundary_does(kind, vocab, tmp_path):
    spec, vocab = kind + LINEAR, fitting_vocabulary(kind, vocab)
    theirs, ours = build_both(spec, vocab, tmp_path)
    params = ours.parameters()
    linen_side = LinenBoundary(spec, vocab, D)

    @jax.jit
    def compute_all(params, ids, hidden):
        by_linen = linen_side.apply({"params": nested(params)}, method="dense")
        return ours.dense(), by_linen, ours.pure.embed(params, ids), ours.pure.logits(params, hidden)

    hidden = np.random.default_rng(0).normal(size=(3, D)).astype(np.float32)
    dense, by_linen, rows, logits = compute_all(params, IDS, hidden)
    for a, b, c in zip(dense, by_linen, theirs.dense(), strict=True):
        assert error(a, c) < 1e-5
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert error(np.asarray(dense[0])[IDS], rows) < 1e-6
    assert error(hidden @ np.asarray(dense[1]).T + np.asarray(params["bias"]), logits) < 1e-5


NOT_TABLES = {"tied+softcap=3": "has a soft-cap, which is not linear", "projected:6,out_bias": "bias is no table"}


@pytest.mark.parametrize("spec", NOT_TABLES)
def test_dense_refuses_softcap_and_output_bias_as_pytorch_does(spec):
    for boundary in (build_random_torch(spec, V), NNXBoundary(spec, V, D, rngs=nnx.Rngs(0))):
        with pytest.raises(SpecError, match=NOT_TABLES[spec]):
            boundary.dense()


FILES = [(spec, torch.float32) for spec in (*KINDS, "untied+bias")]
FILES += [("tied", torch.bfloat16), ("tied", torch.float16)]


@pytest.mark.parametrize(("spec", "dtype"), FILES, ids=str)
def test_save_writes_the_same_bytes_as_pytorch(spec, dtype, tmp_path):
    first, second = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    _, ours = build_both(spec, V, tmp_path, dtype)
    save(second, ours.pure, ours.parameters())
    assert first.read_bytes() == second.read_bytes()
    assert set(tmp_path.iterdir()) == {first, second}


@pytest.mark.parametrize("kind", ["factored:3", pytest.param("spd", marks=pytest.mark.slow)])
def test_linen_boundary_computes_what_nnx_boundary_does(kind):
    nnx_side, linen_side = NNXBoundary(kind + TOGETHER, V, D, rngs=nnx.Rngs(0)), LinenBoundary(kind + TOGETHER, V, D)
    variables, hidden = {"params": nested(nnx_side.parameters())}, jnp.ones((2, 4, D))
    calls = {"embed": (IDS,), "logits": (hidden,), "loss": (hidden, IDS)}
    by_linen = jax.jit(lambda held: [linen_side.apply(held, *given, method=verb) for verb, given in calls.items()])
    by_nnx = nnx.jit(lambda model: [getattr(model, verb)(*given) for verb, given in calls.items()])
    for a, b in zip(by_linen(variables), by_nnx(nnx_side), strict=True):
        np.testing.assert_array_equal(a, b)


QUICK_KINDS = KINDS[::3]
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in QUICK_KINDS]


@pytest.mark.parametrize("kind", QUICK_KINDS + SLOW_KINDS)
def test_tied_boundary_has_one_leaf_in_parameters_and_optimizer_state(kind):
    model = NNXBoundary(kind, V, D, rngs=nnx.Rngs(0))
    tables = 1 if model.pure.tied else 2
    state = nnx.state(model, nnx.Param)
    assert len(find_tables(state, V).leaves) == tables
    moments = nnx.state(nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
    assert len(find_tables(moments, V).leaves) == 2 * tables  # first and second moments
    body = lambda rows: jnp.ones((*rows.shape[:-1], D))  # noqa: E731
    variables = LinenBoundary(kind, V, D).init(jax.random.key(0), IDS, body, IDS)
    shapes = lambda params: {name: x.shape for name, x in params.items()}  # noqa: E731
    assert shapes(flat(variables["params"])) == shapes(model.parameters())
    assert len(find_tables(variables, V).leaves) == tables
    assert len(find_tables(optax.sgd(1e-3, momentum=0.9).init(variables), V).leaves) == tables


def test_predicted_nll_equals_pytorch_and_the_first_loss():
    for spec in ("factored:32+init=0.05+softcap=3", "spd+output_scale=1/d+init=2", "tied"):
        ends = PureBoundary.of(spec, 2_000, 64)
        assert ends.predicted_nll() == TorchBoundary(spec, 2_000, 64).predicted_nll()
        drawn = np.asarray(ends.draw("table_in", jax.random.key(0)))
        assert np.std(drawn) == pytest.approx(ends.spec.init or 64**-0.5, rel=0.02)
    model = NNXBoundary("tied", 2_000, 64, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (2_000, 64))
    hidden = hidden / jnp.linalg.norm(hidden, axis=1, keepdims=True) * 8
    loss = model.loss(hidden, np.arange(2_000))
    assert float(loss) == pytest.approx(model.predicted_nll(), abs=0.1)


def test_load_rows_sets_pretrained_rows_and_freeze_stops_their_gradient():
    spec = "tied+pad=1+vectors=x+freeze"
    model, theirs = NNXBoundary(spec, 4, 3, rngs=nnx.Rngs(0)), TorchBoundary(spec, 4, 3)
    drawn = np.asarray(model.table_in[...])
    with torch.no_grad():
        theirs.table_in.copy_(torch.tensor(drawn))
    rows = np.full((4, 3), 7.0)
    rows[2] = np.nan
    model.load_rows(rows)
    np.testing.assert_array_equal(model.table_in[...], [[7] * 3, [0] * 3, drawn[2], [7] * 3])
    theirs.load_rows(torch.tensor(rows), freeze=True)
    np.testing.assert_array_equal(model.table_in[...], theirs.table_in.detach())
    assert not theirs.table_in.requires_grad
    ids = np.array([0, 2])
    gradients = nnx.grad(lambda m: m(ids, jnp.tanh, ids))(model)
    assert not np.any(gradients["table_in"][...])
    with pytest.raises(SpecError, match=r"vectors \(4, 2\) do not fit the table \(4, 3\); use factored:2"):
        model.load_rows(rows[:, :2])


REFUSED = {"tide": "unknown boundary 'tide'", "factored:9": "exceeds the model width"}
REFUSED |= {"tied+pad=9": "pad=9 is outside", "tied+untie_at=3": "changes during training"}


@pytest.mark.parametrize("spec", REFUSED)
def test_flax_boundaries_refuse_invalid_specs(spec):
    with pytest.raises(SpecError, match=REFUSED[spec]):
        NNXBoundary(spec, V, D, rngs=nnx.Rngs(0))
    with pytest.raises(SpecError, match=REFUSED[spec]):
        LinenBoundary(spec, V, D).init(jax.random.key(0), IDS, method="embed")


def test_nnx_boundary_refuses_ids_states_and_targets_that_do_not_fit():
    model = NNXBoundary("tied", Vocabularies(5, 7), D, rngs=nnx.Rngs(0))
    cases = [
        (lambda: model.embed(np.zeros(3, np.float32)), SpecError, "token ids of type float32; cast them"),
        (lambda: model.embed(np.array([0, 5])), IndexError, "token 5 is outside the input vocabulary of 5"),
        (lambda: model.embed(np.array([0, -1])), IndexError, "token -1 is outside the input vocabulary of 5"),
        (lambda: model.logits(jnp.ones((2, 3))), SpecError, r"hidden states \(2, 3\) meet a boundary of width 4"),
        (lambda: model.loss(jnp.ones((2, D)), np.array([1, 7])), IndexError, "target 7 is outside the vocabulary of 7"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    for bad in (5, -1):  # a traced function cannot raise an error
        assert np.isnan(jax.jit(model.embed)(np.array([0, bad]))).all(axis=1).tolist() == [False, True]


FILES_REFUSED = [
    ("tied", None, "no such file"),
    ("tied", b"nothing of the kind", "not a safetensors file"),
    ("tied", ("untied", V), "two different tables"),
    ("tied", ("tied+bias", V), "has the unknown bias"),
    ("tied", ("factored:2", V), "has the unknown in_map.weight, out_map.weight"),
    ("tied", ("tied", V + 1), r"table_in has shape \(10, 4\), not \(9, 4\)"),
    ("tied+bias", ("tied", V), "lacks bias"),
]


@pytest.mark.parametrize(("spec", "file", "message"), FILES_REFUSED)
def test_load_refuses_files_that_do_not_fit_the_spec(tmp_path, spec, file, message):
    path = tmp_path / "x.safetensors"
    if isinstance(file, tuple):
        save_model(build_random_torch(*file), path)
    elif file is not None:
        path.write_bytes(file)
    with pytest.raises(CheckpointError, match=message):
        load(path, PureBoundary.of(spec, V, D))


def test_load_accepts_an_untied_file_with_equal_tables_and_refuses_float64(tmp_path):
    theirs, path, ends = build_random_torch("untied", V), tmp_path / "x.safetensors", PureBoundary.of("tied", V, D)
    with torch.no_grad():
        theirs.table_out.copy_(theirs.table_in)
    save_model(theirs, path)
    assert load(path, ends).keys() == {"table_in"}
    save_model(theirs.double(), path)
    with pytest.raises(CheckpointError, match="float64, which JAX would round"):
        load(path, ends)
