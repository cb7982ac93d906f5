"""`tiewise.inspect`: every section that a request can have, on every model, and what they say of tying.

- `section`: how a section is written; `sections/`: one file each, found by themselves.
- `carry_out`: `inspect`, which runs them; `request`: what was asked for, of which models.
- `workbench`: texts and opened models, which sections share.
- `evidence`: which of their numbers speak for one table or two.
"""
