"""Write JSON Schemas for the output of `--json` and the JSON files of results.

    python tools/make_schemas.py           writes src/tiewise/report/schemas/NAME-VERSION.json
    python tools/make_schemas.py --hold    writes nothing, and exits with 1 where one is not what it would write

What is a dataclass is described by its hints, and by the comments behind its fields. What a plan says is a mapping
whose keys depend on the model, so its schema holds what plans of unlike models have in common. A number that is none is
written as null, so every number may be null. `tests/answers` holds every recorded answer against its schema.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import re
import sys
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import tiewise
from tiewise.checkpoint import audit, claims
from tiewise.checkpoint.rewrite import engine
from tiewise.core.measurement import Measurement
from tiewise.inspection import inspection as inspected
from tiewise.inspection import workspace
from tiewise.planning.architecture import Architecture, Count, TokenTables
from tiewise.planning.catalogue import models
from tiewise.planning.costs import Setting
from tiewise.training import results

HOME = Path(tiewise.__file__).parent / "report" / "schemas"
SCALARS = {str: "string", int: "integer", bool: "boolean", float: "number", Path: "string", types.NoneType: "null"}
LIKE = (
    "gpt2",
    "llama-3.1-405b",
    "t5-small",
    "bert-base-uncased",
    "albert-base-v2",
    "gemma-4-e2b",
    "deepseek-v3",
    "bloom-560m",
)
Schema = dict[str, Any]


def of(hint: Any) -> Schema:
    """The schema of what a type is written as."""
    outer, inner = get_origin(hint), get_args(hint)
    if outer in (Union, types.UnionType):
        found = [of(one) for one in inner]
        kinds = [kind for one in found for kind in ([one["type"]] if isinstance(one.get("type"), str) else one["type"])]
        return {**found[0], "type": list(dict.fromkeys(kinds))}
    if hint is float:
        return {"type": ["number", "null"]}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if is_dataclass(hint):
        hints, said = get_type_hints(hint), comments(hint)
        return thing({field.name: (of(hints[field.name]), said.get(field.name, "")) for field in fields(hint)})
    if outer in (dict, collections.abc.Mapping):
        return mapping(of(inner[1]))
    if outer is tuple and len(inner) > 1 and inner[1] is not Ellipsis:
        return {"type": "array", "prefixItems": [of(one) for one in inner], "minItems": len(inner)}
    if outer in (list, tuple, collections.abc.Sequence):
        return {"type": "array", **({"items": of(inner[0])} if inner and of(inner[0]) else {})}
    return {}


def comments(kind: type) -> dict[str, str]:
    """Return the descriptions of a dataclass's fields: its docstring's `Attributes`, and trailing comments."""
    trailing = re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(kind), re.M)
    return dict(trailing) | attributes(kind)


def attributes(kind: type) -> dict[str, str]:
    """Return the entries of the `Attributes` section of a class's docstring, each on one line without its period."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.split(r"^    (?=\w+:)", section, flags=re.M)[1:]
    descriptions = {}
    for entry in entries:
        name, _, text = " ".join(entry.split()).partition(": ")
        descriptions[name] = text.removesuffix(".")
    return descriptions


def thing(properties: dict[str, Schema | tuple[Schema, str]]) -> Schema:
    """An object with these keys, all of which are always there; later versions may add others."""
    found = {}
    for name, value in properties.items():
        schema, said = value if isinstance(value, tuple) else (value, "")
        found[name] = {**schema, **({"description": said} if said else {})}
    return {"type": "object", "properties": found, "required": list(found)}


def mapping(values: Schema) -> Schema:
    """An object whose keys are names of the reader's own."""
    return {"type": "object", "additionalProperties": values or True}


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": list(dict.fromkeys([*kinds, "null"]))}


def common(values: list[Any]) -> Schema:
    """Return the common schema of values: keys of objects, required keys, items of lists."""
    kinds = {SCALARS.get(type(v)) or ("object" if isinstance(v, dict) else "array") for v in values}
    kinds |= {"null"} if "number" in kinds else set()
    if {"integer", "number"} <= kinds:
        kinds.discard("integer")
    found: Schema = {"type": sorted(kinds) if len(kinds) > 1 else kinds.pop()} if kinds else {}
    objects, lists = [v for v in values if isinstance(v, dict)], [v for v in values if isinstance(v, list)]
    if objects:
        keys = list(dict.fromkeys(key for one in objects for key in one))
        parts = {key: [one[key] for one in objects if key in one] for key in keys}
        found["properties"] = {
            key: OPEN[key] if key in OPEN and isinstance(values[0], dict) else common(values)
            for key, values in parts.items()
        }
        found["required"] = [key for key in keys if all(key in one for one in objects)]
    if any(lists):
        found["items"] = common([item for one in lists for item in one])
    return found


TEXT, COUNT, FLAG, NUMBER, TEXTS = of(str), of(int), of(bool), of(float), of(list[str])


OPEN = {"parameters": mapping(COUNT), "config": {"type": ["object", "null"]}}  # their keys are the model's own


def plans() -> Schema:
    """Return the common schema of plans of different models."""
    boundaries, setting = ("tied", "untied", "factored:64", "projected:32"), Setting(world=8, tp=2, fsdp=2, std=0.05)
    made = [tiewise.plan(name, boundaries, setting=setting).record() for name in LIKE]
    made += [tiewise.plan(name).record() for name in LIKE]
    made.append(tiewise.plan({"architectures": ["BertModel"], "model_type": "bert"}).record())
    made += [tiewise.plan(sizes).record() for sizes in (tiewise.Sizes(32_000, 512, 8), tiewise.Sizes(2048, 64, 2))]
    experts = {"model_type": "minimax_m2", "vocab_size": 2048, "hidden_size": 64, "num_local_experts": 8}
    made += [tiewise.plan(experts, boundaries, setting=setting).record(), tiewise.plan(experts).record()]
    built = Architecture("xglm", 64, TokenTables(2048, 64, tied=True), (), {"other": Count(1000, 900, 1000)})
    made.append(tiewise.plan(built).record())
    found = common(made)
    found["properties"]["neighbours"]["items"] = common([model.record() for model in models()])
    return found


def audits() -> Schema:
    """`Audit.record`, whose fields docs/check-schema.md explains."""
    hints = get_type_hints(audit.Audit)
    claim = thing(
        {
            **{key: or_null(FLAG) for key in ("tied", "fixed")},
            **dict.fromkeys(("known", "t5_like"), FLAG),
            "levels": {"type": "array", "items": merged(of(claims.Claim), {"effective": or_null(FLAG)})},
        }
    )
    part = thing({"role": TEXT, "name": TEXT, "file": TEXT, "dtype": TEXT, "shape": of(list[int]), "bytes": COUNT})
    return thing(
        {
            "schema": {"const": audit.SCHEMA},
            "versions": mapping(TEXT),
            "path": TEXT,
            "kind": {"enum": ["folder", "file", "draft", "adapter", "gguf", "onnx"]},
            "as": or_null(TEXT),
            **dict.fromkeys(("scan", "deep"), FLAG),
            **dict.fromkeys(("tensors", "bytes", "spare_bytes"), COUNT),
            "claims": claim,
            "found_by": or_null(TEXT),
            "headless": or_null(FLAG),
            "names": or_null(mapping({})),
            "scalars": mapping({}),
            "parts": {"type": "array", "items": part},
            "ends": of(hints["ends"]),
            "loaders": of(hints["outcomes"]),
            "worst": or_null(TEXT),
            "findings": of(hints["findings"]),
            "rules": thing({"ran": TEXTS, "skipped": mapping(TEXT)}),
        }
    )


def inspections() -> Schema:
    """`Inspection.record`: by section and model what was found, and of the evidence its rows."""
    row = dict.fromkeys(("question", "measure", "about", "speaks", "why", "section"), TEXT)
    row |= dict.fromkeys(("value", "low", "high", "level", "p"), NUMBER)
    evidence = thing({"rows": {"type": "array", "items": thing(row)}, "verdict": TEXT})
    found = mapping({"anyOf": [{"$ref": "#/$defs/found"}, {"$ref": "#/$defs/evidence"}]})
    return {
        **thing(
            {
                "schema": {"const": inspected.SCHEMA},
                "subjects": (mapping(TEXT), "label → folder"),
                "request": of(workspace.Request),
                "sections": (mapping(thing({"found": found, "left_out": mapping(TEXT)})), "by name, then by label"),
            }
        ),
        "$defs": {"found": of(Measurement), "evidence": evidence},
    }


def single() -> Schema:
    """One run, as `tiewise train --json` prints it."""
    return merged(
        of(results.RunResult), {"model": (TEXT, "folder of it"), "dense": (or_null(TEXT), "of its dense form")}
    )


def comparison() -> Schema:
    """results.json."""
    found = of(results.Comparison)
    found["properties"].pop("folder")
    found["required"].remove("folder")
    return found


def receipt() -> Schema:
    """Return the schema of the record of a rewritten checkpoint.

    `loss` only where a text was given to `transplant`; `loaded` only where loading was not skipped (docs/rewrite.md).
    Where there was nothing to do, the reason alone.
    """
    done = merged(of(engine.Receipt), {"schema": {"const": engine.SCHEMA}})
    return {"anyOf": [done, thing({"verb": TEXT, "source": TEXT, "nothing_to_do": TEXT})]}


def merged(schema: Schema, more: dict[str, Schema | tuple[Schema, str]]) -> Schema:
    """An object with more keys."""
    other = thing(more)
    return thing({**schema["properties"], **other["properties"]})


# name → (version, what writes it, its schema)
SCHEMAS = {
    "results": (results.SCHEMA, "tiewise compare --json; results.json of a comparison", comparison),
    "run": (results.SCHEMA, "tiewise train --json", single),
    "inspection": (inspected.SCHEMA, "tiewise inspect --json", inspections),
    "audit": (audit.SCHEMA, "tiewise check --json, of one checkpoint", audits),
    "receipt": (engine.SCHEMA, "the verbs that rewrite a checkpoint, with --json", receipt),
    "plan": (1, "tiewise plan --json", plans),
}


def main() -> None:
    """Write the schemas, or say which of them is behind."""
    behind = []
    HOME.mkdir(exist_ok=True)
    for name, (version, writer, make) in SCHEMAS.items():
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, "description": writer}
        text = json.dumps({**head, **make()}, indent=1, ensure_ascii=False) + "\n"
        path = HOME / f"{name}-{version}.json"
        if "--hold" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            behind.append(path.name)
    if behind:
        sys.exit(f"{', '.join(behind)}: behind the code; run python tools/make_schemas.py")


if __name__ == "__main__":
    main()
