"""`find_tables` and `check_ends` on small Flax modules that each make one of four classic mistakes of tying."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from tiewise.boundary.flax.boundary import NNXBoundary
from tiewise.boundary.flax.find_tables import check_ends, find_tables
from tiewise.boundary.flax.models import TiedIO
from tiewise.core.errors import DataError

V, D = 11, 4
IDS = np.array([1, 4, 4, 2])


class SeparateHead(linen.Module):
    """Mistake 1: `nn.Embed` and a head with a separate table."""

    @linen.compact
    def __call__(self, ids):
        return linen.Dense(V, use_bias=False)(linen.Embed(V, D)(ids))


class DeclaredTable(linen.Module):
    """Mistake 2: the head does not transpose the table, which fails if V ≠ D. Mistake 4: two calls of `self.param`."""

    size: int = D
    second: bool = False

    @linen.compact
    def __call__(self, ids):
        draw = linen.initializers.normal(0.02)
        table = self.param("embedding", draw, (V, self.size))
        return table[ids] @ (self.param("unembedding", draw, (V, D)).T if self.second else table)


def initialise(module, ids=IDS):
    return module.init(jax.random.PRNGKey(0), ids)


def test_find_tables_reports_two_tables_for_an_embed_and_a_separate_head():
    params = initialise(SeparateHead())
    tables = find_tables(params)
    assert str(tables) == (
        "2 tables of 11 tokens, not equal: params/Dense_0/kernel [4, V] (transposed), params/Embed_0/embedding [V, 4]"
    )
    assert len(check_ends(SeparateHead().apply, params, IDS)) == 1


def test_find_tables_reports_equal_values_in_two_leaves_as_untied():
    params = initialise(SeparateHead())
    params["params"]["Dense_0"]["kernel"] = params["params"]["Embed_0"]["embedding"].T
    tables = find_tables(params)
    assert tables.equal == (("params/Dense_0/kernel", "params/Embed_0/embedding"),)
    assert not tables.one
    assert "equal now, but free to move apart" in str(tables)
    same = dict.fromkeys(("in", "out"), jnp.ones((V, D)))  # one array at two places of a tree
    assert len(find_tables(same, V).leaves) == 2
    grads = jax.grad(lambda p: SeparateHead().apply(p, IDS).var())(params)
    assert not find_tables(optax.apply_updates(params, grads)).equal  # different after one step


def test_check_ends_reports_a_table_that_the_head_does_not_transpose():
    with pytest.raises(TypeError, match="dot_general"):
        initialise(DeclaredTable())
    params = {"params": {"embedding": jnp.ones((V, D))}}
    assert check_ends(DeclaredTable().apply, params, IDS)[0].endswith("is the head table.T?")
    square = initialise(DeclaredTable(V))  # D = V: Flax raises no error, and the tree looks tied
    assert find_tables(square).one
    assert "moves other tokens' logits" in check_ends(DeclaredTable(V).apply, square, IDS)[0]


def test_check_ends_reports_float_token_ids():
    params = initialise(TiedIO(V, D))
    with pytest.raises(TypeError, match="integer"):
        TiedIO(V, D).apply(params, jnp.array([1.0, 2.0]))
    assert jnp.array(257, jnp.bfloat16) == jnp.array(256, jnp.bfloat16)  # too late to cast: the id is already rounded
    (found,) = check_ends(TiedIO(V, D).apply, params, jnp.array([1.0, 2.0], jnp.bfloat16))
    assert found.startswith("token ids are bfloat16: indexing refuses them, and beyond 256 two tokens are one number; ")


def test_check_ends_reports_two_calls_of_param():
    params = initialise(DeclaredTable(second=True))
    assert [leaf.path for leaf in find_tables(params).leaves] == ["params/embedding", "params/unembedding"]
    assert "declare one and use it at both ends" in check_ends(DeclaredTable(second=True).apply, params, IDS)[0]


def test_check_ends_reports_nothing_for_a_tied_model():
    assert check_ends(TiedIO(V, D).apply, initialise(TiedIO(V, D)), IDS) == []
    with pytest.raises(DataError, match="every one of 11 tokens"):
        check_ends(TiedIO(V, D).apply, initialise(TiedIO(V, D)), np.arange(V))
    with pytest.raises(DataError, match="no matrix"):
        find_tables({"scale": jnp.ones(3)})


def test_find_tables_reports_readable_paths_of_an_nnx_state():
    state = nnx.state(NNXBoundary("factored-untied:3", V, D, rngs=nnx.Rngs(0)))
    assert [str(leaf) for leaf in find_tables(state, V).leaves] == ["table_in [V, 3]", "table_out [V, 3]"]
