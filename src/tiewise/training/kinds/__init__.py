"""Kinds of run, one file each.

Kinds do not import each other, except to inherit. `tiewise.training.settings.find_kind` finds one by its name.
"""
