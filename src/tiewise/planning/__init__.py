"""Counts without building a model: the costs of every choice of tables and layers.

- `plan`: `plan(model, arms=…)`, its record and its table, from a config, a name or sizes.
- `read_config` returns the `architecture` of a config, with the readers of `model_families`.
- `costs`: bytes, operations, ranks, the first loss. `catalogue`: public models, for comparison.
"""
