"""What a checkpoint really holds, read as a stranger's: no torch, nothing executed, no file believed.

- `untrusted`, `stored`: may a file be opened, what does its header say, rows without a map of the file.
- `hf_folder`: what lies in the folder; `table_scans`: what whole tables hold.
- `claims`, `roles`: what the config claims, and which tensor plays which part.
- `facts`: all of it, read once and only when asked. `rules`: what is wrong; `loaders`: what each loader makes of it.
- `audit`: `check(folder)`, the answer.
"""
