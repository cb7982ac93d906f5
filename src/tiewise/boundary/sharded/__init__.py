"""Save format for a training over many processes, which any number of processes resumes.

- `save_load`: `save_sharded` and `load_sharded`; `export`: an ordinary folder from a save.
- `shard_files`: a save on disk; `live_state`: the tensors of a model and its optimizer in memory;
  `cuts`: the part of each tensor that a process has.
"""
