"""Counting without building: what every choice of tables and layers costs, from a config, a name or sizes.

- `plan`: `plan(what, boundaries=…)`, its record and its table.
- `read_config` turns a config into an `architecture`, with a row per family in `decoders` and `encoders`.
- `budget`: parameters, and from where on a choice pays. `costs`: bytes, operations, ranks, the first loss.
- `catalogue`: public models, to read beside one's own.
"""
