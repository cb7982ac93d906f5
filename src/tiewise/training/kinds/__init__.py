"""Kinds of run, one file each, which do not know each other; `tiewise.training.settings.find` finds one by its name."""
