"""`tiewise.inspect`: every section that a request can have, on every model, and what they say of tying.

- `inspection`: what a section is, which there are, and how they are carried out; `sections/`: one file each.
- `bench`: what a section is given: a checkpoint, the request, texts and opened models that all of them share.
"""
