"""Checks and rewrites of stored checkpoints.

A checkpoint is untrusted: the package runs without torch, executes nothing and verifies what a file states.

- `untrusted`, `stored`: safe opening of files, headers, and rows read without a memory map.
- `hf_folder`: contents of a folder; `table_scans`: contents of full tables.
- `claims`, `roles`: the config's claims on tying, and the role of each stored tensor.
- `facts`: all of these for one checkpoint, each read at most once and only on use.
- `rules`: problems of a checkpoint; `loaders`: the outcome of loading it with each loader.
- `audit`: `check(folder)`, the public entry point. `rewrite`: commands that write a changed copy.
"""

from tiewise.core.lazy_names import LazyNames

_names = LazyNames(__name__)
__getattr__, __dir__ = _names.get, _names.list
