"""Training of a comparison's arms in `transformers.Trainer`.

Seeds are paired, runs can be resumed, and several processes can train together.

- `settings`, `folder`: the settings of a run, and its folder on disk.
- `run`: one arm with one seed. `kinds/` has one file for each kind of model, which may override parts of a run.
- `compare`: all runs of a comparison. `results`: their figures, and which differences are significant.
- `ranks`: agreement among several processes.
"""
