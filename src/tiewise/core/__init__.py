"""What everything else stands on, and the letters used in every docstring and annotation of this package.

    B   batch                    V   vocabulary
    T   time (positions)         D   model (hidden) width
    N   tokens, N = B·T          E   table width; E = D unless the table is factored or projected
    L   layers                   k   a factored table's width, r a correction's rank

A *table* is [V, E] at both ends, one row per token: `logits = hidden @ table.T`.
"""

__version__ = "0.1.0"  # here, where every module may read it: the root imports modules, and no module the root
