"""The state of a training over many processes, kept so that any number of them takes it up.

- `shard_files`: a save as it lies on disk; `held_state`: what a model and its optimizer hold now, and which
  part of each tensor.
- `save_load`: the one from the other; `export`: an ordinary folder of it.
"""
