"""`tiewise.inspect`: every section that a request can have, on every model, and what they say of tying.

- `inspection`: which sections there are, and how they are carried out; `sections/`: one file each.
- `workspace`: a section, and what it is given: a checkpoint, the request, texts and opened models that all share.
"""
