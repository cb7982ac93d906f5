"""What the page must know of model families to find a checkpoint's two ends and judge them by rules B010 to B016.

Everything comes from where `tiewise check` and `tiewise inspect` take it, so that page and commands decide
by one table.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tiewise.analysis.open_path import FAMILIES
from tiewise.checkpoint.claims import BESIDE, PACKED, POSITION, SCALARS, family_data, usual
from tiewise.checkpoint.token_tables import PLAIN_TABLE

RULES = ("B010", "B011", "B012", "B013", "B014", "B015", "B016")


def verdict_table() -> dict[str, Any]:
    """Return the table, some 100 kB as JSON; classes whose ends are alike share one entry of `ends`."""
    data = family_data()
    places: dict[str, int] = {}
    families: dict[str, Any] = {}
    for kind, known in data["families"].items():
        classes = {
            name: places.setdefault(json.dumps(entry | {"layers": ()}, sort_keys=True), len(places))
            for name, entry in known.get("classes", {}).items()
        }
        families[kind] = {key: known[key] for key in ("tie", "loose", "levels", "sizes", "scalars") if key in known}
        families[kind] |= {"classes": classes} if classes else {}
    norms = sorted({json.dumps(asdict(ending)) for ending in FAMILIES.values()})
    return {
        "transformers": data["transformers"],
        "tokenless": data["tokenless"],
        "not_built": data["not_built"],
        "families": families,
        "ends": [json.loads(entry) for entry in places],
        "usual": usual()._asdict(),
        "position": POSITION.pattern,
        "beside_ends": PLAIN_TABLE.pattern,
        "beside": BESIDE.pattern,
        "packed": PACKED,
        "scalars": SCALARS,
        "norms": [json.loads(norm) for norm in norms],
        "norm_of": {kind: norms.index(json.dumps(asdict(ending))) for kind, ending in FAMILIES.items()},
    }
