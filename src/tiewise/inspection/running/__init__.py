"""What a checkpoint does when it runs, forward and backward; `loaded` opens it.

- `two_paths`: what comes to a table by the lookup and by the head.
- `stack`: the layers of any model, one application after the other, and which of them repeat.
"""
