"""Experiments and measurements: comparisons, single runs, sweeps, healing, inspections.

- `runs`: `compare`, `train` and `heal`, which start a run, finish it and write its report.
- `studies`: `sweep`, a comparison in every cell of a grid.
- `vocabulary`: `hot_vocabulary`, the most frequent tokens of a text.
- `catalogue`: `public_models`, the catalogue of public models as `tiewise plan --list` prints it.
- `exercises`: `exercise`, which prints an exercise or checks an answer to it.
"""

from tiewise.core.lazy_names import LazyNames

_names = LazyNames(__name__)
__getattr__, __dir__ = _names.get, _names.list
