"""Formats in which `tiewise check` prints its answers: one file each, listed in `table.py`."""
