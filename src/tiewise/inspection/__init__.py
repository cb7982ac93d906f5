"""`tiewise.inspect`: the sections of an inspection, and the evidence for tying.

- `inspection`: the list of sections, and their measurement; `sections/`: one file each.
- `workspace`: the inputs of a section: a checkpoint, the request, texts and opened models that all share.
"""
