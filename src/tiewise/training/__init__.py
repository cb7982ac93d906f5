"""Training the arms of a comparison inside `transformers.Trainer`: seeds paired, resumable, in several processes.

- `settings`, `folder`: what is asked for, and the folder that holds it.
- `run`: one arm with one seed, and what a kind of model may do its own way, one file each in `kinds/`.
- `compare`: all of them; `results`: what came out, and whether it differs.
- `ranks`: what several processes agree on.
"""
