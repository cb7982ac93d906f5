"""Counting without building: what every choice of tables and layers costs, from a config, a name or sizes.

- `plan`: `plan(what, boundaries=…)`, its record and its table.
- `read_config` turns a config into an `architecture`, by the readers of `model_families`.
- `costs`: bytes, operations, ranks, the first loss. `catalogue`: public models, to read beside one's own.
"""
