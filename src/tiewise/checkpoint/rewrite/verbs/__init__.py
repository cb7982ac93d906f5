"""The verbs: each file defines the function of its name, which `tiewise.checkpoint.rewrite` offers."""
