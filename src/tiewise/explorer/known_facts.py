"""What the page is told whatever it is opened at: of counting, and of how a checkpoint's ends are found and judged.

Nothing is counted in the page: it puts its sizes into the terms that `planning.resized` has run the counting for. What
decides a verdict comes from where `tiewise check` and `tiewise inspect` take it: they and the page decide by one table.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any

from tiewise.analysis.open_path import FAMILIES
from tiewise.checkpoint.claims import BESIDE, PACKED, POSITION, SCALARS, family_data, usual
from tiewise.checkpoint.token_tables import PLAIN_TABLE
from tiewise.core.ledger import ALBERT_AVERAGE, results
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.catalogue import models
from tiewise.planning.costs import DTYPES, training_bytes
from tiewise.planning.plan_rows import NEIGHBOUR_HEADER, OPTIMIZERS, SHOWN_DTYPES, component
from tiewise.planning.read_config import Sizes
from tiewise.planning.resized import BOUNDARIES, LETTERS, growth

# Decoders by their sizes alone, as `tiewise plan --vocab … [--gated]` counts them.
PLAIN = {"sizes alone": False, "sizes alone, gated": True}


@cache
def facts() -> dict[str, Any]:
    """Everything as JSON takes it; `forms` are the families' terms, of which each preset names one by its place."""
    forms: list[dict[str, Any]] = []
    presets = []
    plain = {name: (Sizes(50_257, 768, 12, heads=12, gated=gated), None) for name, gated in PLAIN.items()}
    known = {model.name: (model.config, model.tied) for model in models() if model.config}
    for name, (described, tied) in (plain | known).items():
        found = growth(described)
        if found is None:
            continue
        form = found.record()
        if form not in forms:
            forms.append(form)
        sizes = {LETTERS[size]: value for size, value in found.sizes.items()}
        presets.append({"name": name, "form": forms.index(form), "tied": tied, "sizes": sizes})
    return {
        "forms": forms,
        "presets": presets,
        "plain": PLAIN,
        "boundaries": BOUNDARIES,
        "options": {letter: f"--{name.replace('_', '-')}" for name, letter in LETTERS.items()},
        "components": {name: component(name) for name in COMPONENTS},
        "checkpoint": {dtype: DTYPES[dtype] for dtype in SHOWN_DTYPES},
        "optimizers": OPTIMIZERS,
        # of one parameter that is trained
        "training": {
            dtype: {name: held["total"] for name, held in training_bytes(1, 1, dtype).items()}
            for dtype in ("float32", "bfloat16")
        },
        "header": NEIGHBOUR_HEADER,
        "models": [[m.name, m.vocab, m.width, m.layers, m.tied, m.checked] for m in models() if m.vocab],
        # what ALBERT measured: by what layers share; and of a model trained on one question, the other's answers right
        "judged": {
            trained: next(r.value for r in results(f"pairs right as {asked}, %") if r.setting == f"objective={trained}")
            for trained, asked in (("sop", "nsp"), ("nsp", "sop"))
        },
        "scores": [
            [result.choice.rpartition("share ")[2], result.value]
            for result in results(ALBERT_AVERAGE)
            if result.model == "ALBERT-base, E = 128"
        ],
    }


def verdict_table() -> dict[str, Any]:
    """What rules B010 to B016 need to know of families, some 100 kB; classes with ends alike share one of `ends`."""
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
