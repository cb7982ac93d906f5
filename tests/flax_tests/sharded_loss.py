"""Four simulated devices: the loss with its table split over the vocabulary. Prints {case: {what: error}} as JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from fp64_truth import error, problem, truth
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tiewise.flax.flax_loss import linear_cross_entropy

OPTIONS = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.7}
V, ROWS = 13, 16  # 13 rows do not split evenly over devices: three are padding, all on the last


def errors(values, wanted):
    loss, grads = wanted
    found = [np.asarray(g)[: len(w)] for g, w in zip(values[1], grads, strict=True)]
    pairs = zip(("features", "weight", "bias"), found, grads, strict=True)
    padding = max(float(np.abs(np.asarray(g)[V:]).max()) for g in values[1][1:])
    return {"loss": error(values[0], loss), "padding": padding, **{name: error(a, b) for name, a, b in pairs}}


def by_shard_map(leaves, targets, options, mesh, data):
    """Table over `vocab`; tokens whole on every device, or split over `data`."""
    weights = options.get("class_weight")

    def loss(leaves, targets, weights):
        h, w, b = leaves
        chosen = {"axis": "vocab", "vocab": V, "chunk": 4, **options, "class_weight": weights}
        value = linear_cross_entropy(h, w, targets, b, **chosen)
        return jax.lax.psum(value, data) if data else value

    split = (P(data), P("vocab"), P("vocab"))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(split, P(data), P("vocab")), out_specs=P())
    return jax.jit(jax.value_and_grad(sharded))(leaves, targets, weights)


def by_the_compiler(leaves, targets, options, mesh):
    """The same arrays placed on the mesh, and nothing said in the program."""
    h, w, b = leaves
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))  # noqa: E731
    placed = put(h), put(w, "vocab"), put(b, "vocab")

    def loss(leaves, targets):
        h, w, b = leaves
        return linear_cross_entropy(h, w, targets, b, vocab=V, chunk=4, **options)

    value, grads = jax.jit(jax.value_and_grad(loss), out_shardings=None)(placed, targets)
    return value, grads


def main() -> None:
    assert len(jax.devices()) == 4, jax.devices()
    given = problem(10, V, 4, bias=True)
    padded = [given["features"], np.pad(given["weight"], ((0, 3), (0, 0))), np.pad(given["bias"], (0, 3))]
    leaves = tuple(jnp.asarray(x, jnp.float32) for x in padded)
    targets = jnp.asarray(given["targets"])
    line = jax.make_mesh((4,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))
    square = jax.make_mesh((2, 2), ("data", "vocab"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = {}
    weighted = OPTIONS | {"class_weight": np.linspace(0.2, 2, V)}
    for name, options in (("plain", {}), ("options", OPTIONS), ("class weights", weighted)):
        options = options | {"reduction": "sum"}
        wanted = truth(given, **options)
        if "class_weight" in options:
            options["class_weight"] = jnp.pad(options["class_weight"], (0, ROWS - V))
        found[f"shard_map {name}"] = errors(by_shard_map(leaves, targets, options, line, None), wanted)
        found[f"shard_map batch and vocabulary {name}"] = errors(
            by_shard_map(leaves, targets, options, square, "data"), wanted
        )
        found[f"compiler {name}"] = errors(by_the_compiler(leaves, targets, options, line), wanted)
    mean = {"class_weight": options["class_weight"]}
    wanted = truth(given, class_weight=weighted["class_weight"])
    found["shard_map weighted mean"] = errors(by_shard_map(leaves, targets, mean, line, None), wanted)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
