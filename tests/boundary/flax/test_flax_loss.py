"""The fused loss in JAX and its gradients, compared with torch in fp64."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp64_truth import error, problem, truth
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tiewise.boundary.flax.loss import linear_cross_entropy
from tiewise.core import backends
from tiewise.core.errors import UnsupportedError


def value_and_grads(given, upstream=None, dtype=None, **options):
    """Return (loss, gradients of features, weight, bias) by JAX."""
    leaves = [jnp.asarray(given[n], dtype) for n in ("features", "weight", "bias") if given[n] is not None]

    @jax.jit
    def run(leaves):
        loss = lambda h, w, *bias: linear_cross_entropy(h, w, given["targets"], *bias, **options)  # noqa: E731
        value, pull = jax.vjp(loss, *leaves)
        return value, pull(jnp.ones_like(value) if upstream is None else jnp.asarray(upstream, value.dtype))

    return run(leaves)


OPTIONS = [
    {},
    {"bias": True, "scale": 0.4},
    {"softcap": 2.0},
    {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 1e-2, "scale": 1.7, "bias": True},
    {"label_smoothing": 0.3, "bias": True},
    {"z_loss": 0.05, "scale": 0.5},
    {"label_smoothing": 1.0},
    {"class_weight": True},
    {"class_weight": True, "label_smoothing": 0.2, "bias": True, "softcap": 2.0, "z_loss": 0.05},
    {"class_weight": True, "label_smoothing": 0.3, "ignore_index": 4},  # the ignored class has a weight
]
CLASS_WEIGHT = np.random.default_rng(7).uniform(0, 3, 13)
CASES = list(itertools.product(OPTIONS, ("mean", "sum", "none")))
QUICK = [CASES[0], CASES[2], CASES[4], CASES[9], CASES[12], CASES[24], CASES[27]]


@pytest.mark.parametrize(
    ("options", "reduction"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
    ids=str,
)
def test_loss_matches_the_fp64_oracle_for_every_option_across_ragged_chunks(options, reduction):
    given = problem(11, 13, 5, bias=options.get("bias", False))
    chosen = {k: v for k, v in options.items() if k != "bias"} | {"reduction": reduction}
    chosen |= {"class_weight": CLASS_WEIGHT} if "class_weight" in chosen else {}
    given["targets"][given["targets"] == -100] = chosen.get("ignore_index", -100)
    upstream = np.random.default_rng(3).normal(size=11) if reduction == "none" else None
    loss, grads = truth(given, upstream, **chosen)
    with jax.enable_x64(True):
        value, found = value_and_grads(given, upstream, chunk=4, **chosen)
        assert error(value, loss) < 1e-13
        for name, a, b in zip(("features", "weight", "bias"), found, grads, strict=False):
            assert error(a, b) < 1e-12, name


def test_class_weights_get_no_gradient_and_may_all_be_zero():
    given = problem(5, 7, 3)
    h, w = jnp.asarray(given["features"], jnp.float32), jnp.asarray(given["weight"], jnp.float32)
    loss = lambda h, c: linear_cross_entropy(h, w, given["targets"], class_weight=c)  # noqa: E731
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    for weights in (jnp.arange(7.0), jnp.zeros(7)):
        value, (dh, dc) = run(h, weights)
        assert not np.any(dc)
        assert bool(np.any(dh)) == bool(value > 0) == bool(weights.any())


@pytest.mark.parametrize(
    "v", [1, 2, 3_000, 50_257, *(pytest.param(v, marks=pytest.mark.slow) for v in (7, 3_001, 4_099))]
)
def test_fp32_loss_matches_the_oracle_for_awkward_vocabulary_sizes(v):
    given = problem(37, v, 24)
    given = {k: x.astype(np.float32) if k in ("features", "weight") else x for k, x in given.items()}
    loss, grads = truth(given)
    value, found = value_and_grads(given, chunk=16)
    assert error(value, loss) < 1e-6
    for a, b in zip(found, grads, strict=True):
        assert error(a, b) < 1e-6


def test_loss_stays_accurate_for_large_logits():
    given = problem(6, 9, 4)
    given["features"] *= 300
    loss, grads = truth(given)
    value, found = value_and_grads(given, dtype=jnp.float32)
    assert error(value, loss) < 1e-6
    assert error(found[1], grads[1]) < 1e-4  # two logits near 300 are almost equal


@pytest.mark.parametrize("weights", [None, np.arange(7.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_zero_if_all_targets_are_ignored(reduction, weights):
    given = problem(5, 7, 3, bias=True, ignored=5)
    value, found = value_and_grads(given, reduction=reduction, class_weight=weights)
    assert not np.any(value)
    assert all(not np.any(g) for g in found)


@pytest.mark.slow
def test_bf16_loss_is_closer_to_fp64_than_the_plain_bf16_loss():
    given = problem(64, 500, 32)
    small = {k: np.asarray(jnp.asarray(given[k], jnp.bfloat16), np.float64) for k in ("features", "weight")}
    loss, grads = truth(given | small)
    value, found = value_and_grads(given, dtype=jnp.bfloat16)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in found] == [jnp.bfloat16] * 2
    count = given["targets"] != -100
    at = np.where(count, given["targets"], 0)

    def plain(leaves):
        z = leaves[0] @ leaves[1].T
        nll = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, at[:, None], 1)[:, 0]
        return jnp.where(count, nll, 0).sum() / count.sum()

    leaves = tuple(jnp.asarray(given[k], jnp.bfloat16) for k in ("features", "weight"))
    value_plain, plainly = jax.value_and_grad(plain)(leaves)
    assert error(value, loss) < 1e-4 < error(value_plain, loss)
    for a, b, c in zip(found, plainly, grads, strict=True):
        assert error(a, c) < 1e-2
        assert error(a, c) <= error(b, c)


def test_each_gradient_has_the_dtype_of_its_input():
    given = problem(6, 7, 3)
    h, w = jnp.asarray(given["features"], jnp.bfloat16), jnp.asarray(given["weight"], jnp.float32)
    dh, dw = jax.eval_shape(jax.grad(lambda h, w: linear_cross_entropy(h, w, given["targets"]), (0, 1)), h, w)
    assert (dh.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


def test_vmap_over_the_batch_equals_a_loop():
    given = problem(12, 7, 3)
    h, w = jnp.asarray(given["features"], jnp.float32).reshape(3, 4, 3), jnp.asarray(given["weight"], jnp.float32)
    t = jnp.asarray(given["targets"]).reshape(3, 4)

    def loss_and_gradients(h, t):
        options = {"chunk": 3, "class_weight": jnp.arange(1.0, 8.0)}
        return jax.value_and_grad(lambda h, w: linear_cross_entropy(h, w, t, **options), (0, 1))(h, w)

    together = jax.jit(jax.vmap(loss_and_gradients))(h, t)
    alone = jax.jit(loss_and_gradients)
    apart = [alone(h[i], t[i]) for i in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *apart)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_loss_keeps_leading_dimensions():
    given = problem(12, 7, 3)
    h, t = given["features"].reshape(3, 4, 3), given["targets"].reshape(3, 4)
    each = linear_cross_entropy(jnp.asarray(h), jnp.asarray(given["weight"]), t, reduction="none")
    assert each.shape == (3, 4)
    wanted, _ = truth(given, np.ones(12), reduction="none")
    np.testing.assert_allclose(np.asarray(each).ravel(), wanted, rtol=1e-5)


def test_loss_ignores_table_rows_beyond_the_vocabulary():
    given = problem(9, 10, 4, bias=True)
    options = {"label_smoothing": 0.1, "softcap": 3.0}
    loss, grads = truth(given, class_weight=CLASS_WEIGHT[:10], **options)
    wider = given | {"weight": np.pad(given["weight"], ((0, 6), (0, 0))), "bias": np.pad(given["bias"], (0, 6))}
    options["class_weight"] = np.pad(CLASS_WEIGHT[:10], (0, 6), constant_values=np.nan)
    value, found = value_and_grads(wider, dtype=jnp.float32, vocab=10, **options)
    assert error(value, loss) < 1e-6
    for a, b in zip(found[1:], grads[1:], strict=True):
        assert error(a[:10], b) < 1e-6
        assert not np.any(a[10:])


def test_loss_allocates_no_tensor_of_tokens_times_vocabulary():
    n, v, e, chunk = 96, 1_000, 8, 16
    given = problem(n, v, e)
    leaves = [jnp.asarray(given[k], jnp.float32) for k in ("features", "weight")]
    step = jax.jit(jax.value_and_grad(lambda h, w: linear_cross_entropy(h, w, given["targets"], chunk=chunk), (0, 1)))
    memory = step.lower(*leaves).compile().memory_analysis()
    whole = 4 * n * v
    assert memory.temp_size_in_bytes < whole + 4 * v * e * 3
    assert memory.temp_size_in_bytes < 4 * (3 * chunk * v + 3 * v * e + 3 * n * e) + 100_000


def test_target_outside_the_vocabulary_raises_or_gives_nan_under_jit():
    given = problem(5, 7, 3, ignored=0)
    h, w = jnp.asarray(given["features"], jnp.float32), jnp.asarray(given["weight"], jnp.float32)
    for bad in (7, -1):
        targets = given["targets"].copy()
        targets[2] = bad
        with pytest.raises(IndexError, match=f"target {bad} is outside the vocabulary of 7"):
            linear_cross_entropy(h, w, targets)
        each = jax.jit(lambda t: linear_cross_entropy(h, w, t, reduction="none"))(targets)
        assert np.isnan(each).tolist() == [False, False, True, False, False]
        assert np.isnan(jax.jit(lambda t: jax.grad(lambda h: linear_cross_entropy(h, w, t))(h))(targets)[2]).all()


WHOLE = np.ones((7, 3), np.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": np.zeros((5, 4))}, ValueError, r"shapes do not meet: features \(5, 4\), weight \(7, 3\)"),
        ({"class_weight": np.zeros(3)}, ValueError, r"class_weight has shape \(3,\); need \[V\] = \[7\]"),
        ({"backend": "auto"}, ValueError, "backend is PyTorch's"),
        ({"vocab": 8}, ValueError, "vocab = 8 of a table of 7 rows"),
        ({"weight": WHOLE}, UnsupportedError, "a weight of type int32"),
        ({"features": WHOLE[:5]}, UnsupportedError, "features of type int32"),
        ({"targets": np.zeros(5)}, UnsupportedError, "no probability targets"),
        ({"targets": np.zeros(5, bool)}, UnsupportedError, "targets of type bool; pass class indices"),
        ({"targets": np.zeros(5, complex)}, UnsupportedError, "targets of type complex"),
        ({"weight": np.zeros((0, 3)), "bias": None}, ValueError, "has no rows; a vocabulary needs V ≥ 1 words"),
        ({"scale": np.nan}, ValueError, "scale must be finite, not nan"),
        ({"z_loss": np.nan}, ValueError, "z_loss must be at least 0 and finite, not nan"),
        ({"label_smoothing": np.nan}, ValueError, "label_smoothing must be in"),
        ({"softcap": np.nan}, ValueError, "softcap must be positive and finite, not nan"),
    ],
)
def test_loss_refuses_invalid_inputs_and_options(change, error, message):
    given = problem(5, 7, 3) | change
    with pytest.raises(error, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("n", [0, 5])
def test_table_without_columns_has_the_loss_of_equal_logits(n):
    h, w, t = np.zeros((n, 0)), np.zeros((7, 0)), np.zeros(n, np.int32)
    loss, grads = jax.value_and_grad(linear_cross_entropy, (0, 1))(h, w, t)
    assert loss == pytest.approx(np.log(7) if n else 0.0)
    assert [x.shape for x in grads] == [h.shape, w.shape]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_target_logit_of_minus_infinity_gives_infinite_loss_and_finite_gradients(smoothing):
    given = problem(11, 13, 5, bias=True)
    given["targets"][:2], given["bias"][3] = (3, -100), -np.inf
    wanted, true_grads = truth(given, label_smoothing=smoothing)
    loss, grads = value_and_grads(given, label_smoothing=smoothing, chunk=4)
    assert float(loss) == wanted == np.inf
    for got, true in zip(grads, true_grads, strict=True):
        assert error(got, true) < 1e-5


# The table is split over four simulated devices. JAX can create them only at its start, so a new process runs this file
# as a program, which prints {case: {array: error}}.

SPLIT = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.7}
ROWS = 16  # 13 rows do not split evenly over devices: three are padding, all on the last


def loss_by_shard_map(leaves, targets, options, mesh, data):
    """Split the table over the axis `vocab`; replicate the tokens, or split them over the axis `data`."""

    def loss(leaves, targets, weights):
        chosen = {"axis": "vocab", "vocab": 13, "chunk": 4, **options, "class_weight": weights}
        value = linear_cross_entropy(*leaves[:2], targets, leaves[2], **chosen)
        return jax.lax.psum(value, data) if data else value

    split = (P(data), P("vocab"), P("vocab"))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(split, P(data), P("vocab")), out_specs=P())
    return jax.jit(jax.value_and_grad(sharded))(leaves, targets, options.get("class_weight"))


def loss_by_compiler(leaves, targets, options, mesh):
    """Place the same arrays on the mesh and let the compiler partition the loss."""
    axes = ((), ("vocab",), ("vocab",))
    placed = tuple(jax.device_put(x, NamedSharding(mesh, P(*on))) for x, on in zip(leaves, axes, strict=True))

    def loss(leaves, targets):
        return linear_cross_entropy(*leaves[:2], targets, leaves[2], vocab=13, chunk=4, **options)

    return jax.jit(jax.value_and_grad(loss))(placed, targets)


def measure_split_errors():
    assert len(jax.devices()) == 4, jax.devices()
    given = problem(10, 13, 4, bias=True)
    padded = [given["features"], np.pad(given["weight"], ((0, 3), (0, 0))), np.pad(given["bias"], (0, 3))]
    leaves, targets = tuple(jnp.asarray(x, jnp.float32) for x in padded), jnp.asarray(given["targets"])
    auto = jax.sharding.AxisType.Auto
    line = jax.make_mesh((4,), ("vocab",), axis_types=(auto,))
    square = jax.make_mesh((2, 2), ("data", "vocab"), axis_types=(auto,) * 2)
    weights, found = np.linspace(0.2, 2, 13), {}

    def check(name, options, run, *where):
        loss, grads = truth(given, **options)
        if "class_weight" in options:
            options = {**options, "class_weight": jnp.pad(options["class_weight"], (0, ROWS - 13))}
        value, mine = run(leaves, targets, options, *where)
        pairs = zip(("features", "weight", "bias"), mine, grads, strict=True)
        each = {what: error(np.asarray(a)[: len(b)], b) for what, a, b in pairs}
        padding = max(float(np.abs(np.asarray(a)[13:]).max()) for a in mine[1:])
        found[name] = {"loss": error(value, loss), "padding": padding, **each}

    for name, options in (("plain", {}), ("options", SPLIT), ("class weights", SPLIT | {"class_weight": weights})):
        options = options | {"reduction": "sum"}
        check(f"shard_map {name}", options, loss_by_shard_map, line, None)
        check(f"shard_map batch and vocabulary {name}", options, loss_by_shard_map, square, "data")
        check(f"compiler {name}", options, loss_by_compiler, line)
    check("shard_map weighted mean", {"class_weight": weights}, loss_by_shard_map, line, None)
    return found


@pytest.mark.slow
def test_table_split_over_devices_gives_the_oracle_loss_and_gradients():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 10
    for case, errors in found.items():
        assert errors.pop("padding") == 0, case
        assert max(errors.values()) < 1e-6, (case, errors)


if __name__ == "__main__":
    json.dump(measure_split_errors(), sys.stdout)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chosen", [{}, {"softcap": 3.0}, {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_gradient_memory_stays_within_the_chunk_budget(chosen, dtype, monkeypatch):
    """XLA's memory analysis of the compiled gradient measures the memory."""
    budget, n, v = 1_000_000, 2048, 1500
    monkeypatch.setattr(backends, "CHUNK_ELEMENTS", {"cpu": budget, "cuda": budget})
    t = jnp.zeros(n, jnp.int32)
    step = jax.jit(jax.grad(lambda h, w: linear_cross_entropy(h, w, t, **chosen), (0, 1)))
    compiled = step.lower(jnp.ones((n, 4), dtype), jnp.ones((v, 4), dtype)).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    assert 0.6 * 4 * budget < held < 1.1 * 4 * budget
