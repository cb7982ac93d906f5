"""Training the arms of a comparison inside `transformers.Trainer`: seeds paired, resumable, in several processes.

- `settings`, `start`, `folder`: what is asked for, and the folder that holds it.
- `run`: one arm with one seed; `compare`: all of them; `results`, `statistics`: what came out, and whether it differs.
- `kind`: what differs between kinds of model, one file each in `kinds/`.
- `ranks`: what several processes agree on.
"""
