"""`tiewise.inspect`: every section that a request can have, on every model, and what they say of tying.

- `section`: how a section is written; `sections/`: one file each, found by themselves.
- `request`: what is asked of which models, and the texts and opened models that sections share.
- `carry_out`: `inspect`, which runs them, and what of it speaks for one table or two.
"""
