"""Many comparisons over a grid of settings as one study: the grids, the table of what was found, and a surface of it.

Grids that come with the package are the `.yaml` files here, found by their names.
"""
