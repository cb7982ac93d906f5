"""State of a training over many processes, saved so that any number of them resumes it.

- `shard_files`: a save as it is on disk; `held_state`: the tensors of a model and its optimizer now;
  `cuts`: the part of each that a process holds.
- `save_load`: the one from the other; `export`: an ordinary folder of it.
"""
