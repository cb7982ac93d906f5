"""Colours that mean the same in every figure and page: each boundary's, and those of negative and positive numbers.

Mid tones, with a contrast of at least 3 : 1 on both page backgrounds; they never carry meaning alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import count

COLOURS = ("#2f7fd1", "#d1660a", "#2a9468", "#9466d6", "#d4475a", "#13879a", "#9a7b12", "#c4559c")
# the place in these of each boundary, whatever the figure
PLACES = {"tied": 0, "untied": 1, "factored": 2, "projected": 3, "residual": 4, "spd": 5, "factored-untied": 6}
PATHS = {"lookup-path": 5, "head-path": 7}  # of the two gradients of a table
BACKGROUNDS = {"light": "#fbfaf8", "dark": "#17191d"}  # the same as --page in report/templates/report.css
# from negative over zero to positive
DIVERGING = {"light": ("#2166ac", "#f7f5f1", "#b2441a"), "dark": ("#5aa2ea", "#1f2227", "#ee8a4a")}
# the kind of boundary that a name begins with, or one of the folders of a path
_KIND = re.compile(rf"(?:^|/)({'|'.join(sorted(PLACES, key=len, reverse=True))})(?![a-z])")


def places(names: Iterable[str]) -> dict[str, int]:
    """A place for each of these: boundaries, models that are called by one, or anything else.

    The first of a kind of boundary has that kind's place in every figure; what is left takes places that are free, but
    never those of tied and untied.
    """
    names, found = list(dict.fromkeys(names)), dict[str, int]()
    for name in names:
        kind = _KIND.search(name)
        if kind and PLACES[kind[1]] not in found.values():
            found[name] = PLACES[kind[1]]
    free = (place for place in count() if place % len(COLOURS) > PLACES["untied"] and place not in found.values())
    found |= {name: next(free) for name in names if name not in found}
    return {name: found[name] for name in names}
