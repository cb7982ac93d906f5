"""Comparisons over a grid of settings, gathered as one study.

`grid` reads grids, `study` writes the table of results. Grids of the package are the `.yaml` files in this folder.
"""
