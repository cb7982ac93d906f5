"""The founding exercise by its definition, and the four classic mistakes, demonstrated and found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_side import error
from tiewise.core.errors import DataError
from tiewise.flax.boundary import Boundary
from tiewise.flax.exercise import TiedIO, tied_io_embed
from tiewise.flax.find_tied import check_ends, find_tied
from tiewise.flax.path_gradient import LookupOptions, enter, path_norms, probe

V, D = 11, 4
IDS = np.array([1, 4, 4, 2])


def by_definition(seed, token_ids, vocab_size, d_model):
    """The exercise's four sentences, once more."""

    class TwoWays(linen.Module):
        @linen.compact
        def __call__(self, ids):
            w = self.param("embedding", linen.initializers.normal(stddev=0.02), (int(vocab_size), int(d_model)))
            return jnp.einsum("tv,vd,wd->tw", jax.nn.one_hot(ids, int(vocab_size)), w, w)

    ids = jnp.array([int(i) for i in token_ids], jnp.int32)
    logits, _ = TwoWays().init_with_output(jax.random.PRNGKey(seed), ids)
    return np.asarray(logits).ravel()


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_the_exercise_returns_what_its_definition_says(seed):
    tokens = jnp.array([0.0, 2.0, 9.0, 2.0])
    logits = tied_io_embed(seed, tokens, 10.0, 3.0)
    assert logits.shape == (40,)
    np.testing.assert_allclose(logits, by_definition(seed, tokens, 10, 3), rtol=1e-5, atol=1e-9)


def test_the_exercise_has_one_matrix_of_the_stated_scale():
    params = TiedIO(2_000, 32).init(jax.random.PRNGKey(0), jnp.array([0]))
    assert jax.tree.map(lambda x: x.shape, params) == {"params": {"embedding": (2_000, 32)}}
    assert float(jnp.std(params["params"]["embedding"])) == pytest.approx(0.02, rel=0.02)
    assert find_tied(params).one


class OwnsItsOwn(linen.Module):
    """Mistake 1: `nn.Embed` and a head beside it."""

    @linen.compact
    def __call__(self, ids):
        return linen.Dense(V, use_bias=False)(linen.Embed(V, D)(ids))


class NotTransposed(linen.Module):
    """Mistake 2, where V ≠ D: the product has no meaning."""

    size: int = D

    @linen.compact
    def __call__(self, ids):
        table = self.param("embedding", linen.initializers.normal(0.02), (V, self.size))
        return table[ids] @ table


class TwoCalls(linen.Module):
    """Mistake 4: two `self.param`."""

    @linen.compact
    def __call__(self, ids):
        one = self.param("embedding", linen.initializers.normal(0.02), (V, D))
        two = self.param("unembedding", linen.initializers.normal(0.02), (V, D))
        return one[ids] @ two.T


def started(module, ids=IDS):
    return module.init(jax.random.PRNGKey(0), ids)


def test_embed_owns_its_own():
    params = started(OwnsItsOwn())
    tables = find_tied(params)
    assert str(tables) == (
        "2 tables of 11 tokens, not equal: params/Dense_0/kernel [4, V] (transposed), params/Embed_0/embedding [V, 4]"
    )
    assert len(check_ends(OwnsItsOwn().apply, params, IDS)) == 1


def test_equal_numbers_in_two_leaves_are_not_tied():
    params = started(OwnsItsOwn())
    params["params"]["Dense_0"]["kernel"] = params["params"]["Embed_0"]["embedding"].T
    tables = find_tied(params)
    assert tables.equal == (("params/Dense_0/kernel", "params/Embed_0/embedding"),)
    assert not tables.one
    assert "equal now, but free to move apart" in str(tables)
    grads = jax.grad(lambda p: OwnsItsOwn().apply(p, IDS).var())(params)
    moved = optax.apply_updates(params, jax.tree.map(lambda g: -g, grads))
    assert not find_tied(moved).equal


def test_the_same_array_at_two_places_of_a_tree_is_two_matrices():
    table = jnp.ones((V, D))
    params = {"in": table, "out": table}
    assert len(find_tied(params, V).leaves) == 2
    stepped = optax.apply_updates(params, {"in": table, "out": 2 * table})
    assert not find_tied(stepped, V).equal


def test_not_transposed():
    with pytest.raises(TypeError, match="dot_general"):
        started(NotTransposed())
    params = {"params": {"embedding": jnp.ones((V, D))}}
    assert check_ends(NotTransposed().apply, params, IDS)[0].endswith("is the head table.T?")
    square = started(NotTransposed(V))  # D = V: nothing complains, and no tree could show it
    assert find_tied(square).one
    assert "moves other tokens' logits" in check_ends(NotTransposed(V).apply, square, IDS)[0]


def test_float_ids():
    params = started(TiedIO(V, D))
    with pytest.raises(TypeError, match="integer"):
        TiedIO(V, D).apply(params, jnp.array([1.0, 2.0]))
    assert jnp.array(257, jnp.bfloat16) == jnp.array(256, jnp.bfloat16)  # what a cast comes too late for
    found = check_ends(TiedIO(V, D).apply, params, jnp.array([1.0, 2.0], jnp.bfloat16))
    assert found == [
        "token ids are bfloat16: indexing refuses them, and beyond 256 two tokens are one number; "
        "keep ids in an integer type"
    ]


def test_two_calls_of_param():
    params = started(TwoCalls())
    assert [leaf.path for leaf in find_tied(params).leaves] == ["params/embedding", "params/unembedding"]
    assert "declare one and use it at both ends" in check_ends(TwoCalls().apply, params, IDS)[0]


def test_a_sound_model_has_no_finding():
    assert check_ends(TiedIO(V, D).apply, started(TiedIO(V, D)), IDS) == []
    with pytest.raises(DataError, match="every one of 11 tokens"):
        check_ends(TiedIO(V, D).apply, started(TiedIO(V, D)), np.arange(V))
    with pytest.raises(DataError, match="no matrix"):
        find_tied({"scale": jnp.ones(3)})


def test_tables_in_an_nnx_state_have_readable_paths():
    state = nnx.state(Boundary("factored-untied:3", V, D, rngs=nnx.Rngs(0)))
    assert [str(leaf) for leaf in find_tied(state, V).leaves] == ["table_in [V, 3]", "table_out [V, 3]"]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=5, max_size=5), st.sampled_from([None, 0, 3]), st.sampled_from([1.0, 0.5]))
def test_path_gradients_sum_to_plain_autograd(ids, stopped, alpha):
    g = np.random.default_rng(0)
    table = jnp.asarray(g.normal(size=(7, 3)), jnp.float32)
    out = jnp.asarray(g.normal(size=(5, 7)), jnp.float32)
    ids = np.array(ids)
    head = lambda rows, w: (jnp.tanh(rows @ w.T) * out).sum()  # noqa: E731

    def threaded(table, probe):
        return head(*enter(table, ids, LookupOptions(stop_lookup=stopped, alpha=alpha), probe))

    value, (total, seen) = jax.value_and_grad(threaded, (0, 1))(table, probe())
    d_rows, path_b = jax.grad(head, (0, 1))(table[ids], table)
    path_a = np.zeros((7, 3))
    for token, row in zip(ids, np.asarray(d_rows), strict=True):
        if token != stopped:
            path_a[token] += alpha * row
    assert error(total, path_a + np.asarray(path_b)) < 1e-5
    norms = path_norms(seen)
    b = np.asarray(path_b, np.float64)
    assert norms.a == pytest.approx(np.linalg.norm(path_a), rel=1e-4, abs=1e-6)
    assert norms.b == pytest.approx(np.linalg.norm(b), rel=1e-4)
    assert norms.total == pytest.approx(np.linalg.norm(path_a + b), rel=1e-3)
    if norms.a:
        assert norms.cosine == pytest.approx((path_a * b).sum() / np.linalg.norm(path_a) / np.linalg.norm(b), abs=1e-4)
    assert float(value) == pytest.approx(float(head(table[ids], table)), rel=1e-6)


def test_lookups_chain_and_either_path_may_be_missing():
    table = jnp.arange(12.0).reshape(4, 3)

    def chained(w):
        rows, w = enter(w, np.array([1, 1]))
        more, w = enter(w, np.array([2]))
        return rows.sum() + 2 * more.sum() + 3 * w.sum()

    np.testing.assert_array_equal(jax.grad(chained)(table)[:, 0], [3, 5, 5, 3])
    np.testing.assert_array_equal(jax.grad(lambda w: enter(w, np.array([1]))[0].sum())(table)[:, 0], [0, 1, 0, 0])
    np.testing.assert_array_equal(jax.grad(lambda w: enter(w, np.array([1]))[1].sum())(table)[:, 0], [1, 1, 1, 1])
