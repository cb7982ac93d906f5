"""Write JSON Schemas for the output of `--json` and the JSON files of results.

    python tools/make_schemas.py           writes src/tiewise/report/schemas/NAME-VERSION.json
    python tools/make_schemas.py --hold    writes nothing, and exits with 1 if a file differs from what it would write

The type hints of a dataclass and the comments behind its fields describe its JSON. A plan is a mapping whose keys
depend on the model, so its schema has what the plans of different models have in common. JSON has no nan: a missing
number is written as null, so every float may be null. `tests/answers` checks every recorded answer against its schema.
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
PLANNED_MODELS = (
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


def schema_of(hint: Any) -> Schema:
    """Return the schema of the JSON form of a type."""
    outer, inner = get_origin(hint), get_args(hint)
    if outer in (Union, types.UnionType):
        schemas = [schema_of(part) for part in inner]
        kinds = [
            kind for one in schemas for kind in ([one["type"]] if isinstance(one.get("type"), str) else one["type"])
        ]
        return {**schemas[0], "type": list(dict.fromkeys(kinds))}
    if hint is float:
        return {"type": ["number", "null"]}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if is_dataclass(hint):
        hints, texts = get_type_hints(hint), comments(hint)
        return object_schema(
            {field.name: (schema_of(hints[field.name]), texts.get(field.name, "")) for field in fields(hint)}
        )
    if outer in (dict, collections.abc.Mapping):
        return mapping(schema_of(inner[1]))
    if outer is tuple and len(inner) > 1 and inner[1] is not Ellipsis:
        return {"type": "array", "prefixItems": [schema_of(part) for part in inner], "minItems": len(inner)}
    if outer in (list, tuple, collections.abc.Sequence):
        return {"type": "array", **({"items": schema_of(inner[0])} if inner and schema_of(inner[0]) else {})}
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


def object_schema(properties: dict[str, Schema | tuple[Schema, str]]) -> Schema:
    """Return the schema of an object that always has these keys.

    Later versions may add others.
    """
    described = {}
    for name, value in properties.items():
        schema, description = value if isinstance(value, tuple) else (value, "")
        described[name] = {**schema, **({"description": description} if description else {})}
    return {"type": "object", "properties": described, "required": list(described)}


def with_optional(schema: Schema, properties: dict[str, Schema | tuple[Schema, str]]) -> Schema:
    """Return the schema of an object that may lack some keys: `properties` are added, or replace required ones."""
    optional = object_schema(properties)["properties"]
    required = [name for name in schema["required"] if name not in optional]
    return {**schema, "properties": schema["properties"] | optional, "required": required}


def mapping(values: Schema) -> Schema:
    """Return the schema of an object with any keys."""
    return {"type": "object", "additionalProperties": values or True}


def or_null(schema: Schema) -> Schema:
    """Return the same schema, or null."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": list(dict.fromkeys([*kinds, "null"]))}


def common(values: list[Any]) -> Schema:
    """Return the common schema of values: keys of objects, required keys, items of lists."""
    kinds = {SCALARS.get(type(v)) or ("object" if isinstance(v, dict) else "array") for v in values}
    kinds |= {"null"} if "number" in kinds else set()
    if {"integer", "number"} <= kinds:
        kinds.discard("integer")
    schema: Schema = {"type": sorted(kinds) if len(kinds) > 1 else kinds.pop()} if kinds else {}
    objects, lists = [v for v in values if isinstance(v, dict)], [v for v in values if isinstance(v, list)]
    if objects:
        keys = list(dict.fromkeys(key for one in objects for key in one))
        parts = {key: [one[key] for one in objects if key in one] for key in keys}
        schema["properties"] = {
            key: OPEN[key] if key in OPEN and isinstance(values[0], dict) else common(values)
            for key, values in parts.items()
        }
        schema["required"] = [key for key in keys if all(key in one for one in objects)]
    if any(lists):
        schema["items"] = common([item for one in lists for item in one])
    return schema


TEXT, COUNT, FLAG, NUMBER, TEXTS = (
    schema_of(str),
    schema_of(int),
    schema_of(bool),
    schema_of(float),
    schema_of(list[str]),
)


OPEN = {"parameters": mapping(COUNT), "config": {"type": ["object", "null"]}}  # their keys depend on the model


def plans() -> Schema:
    """Return the common schema of plans of different models."""
    boundaries, setting = ("tied", "untied", "factored:64", "projected:32"), Setting(world=8, tp=2, fsdp=2, std=0.05)
    records = [tiewise.plan(name, boundaries, setting=setting).record() for name in PLANNED_MODELS]
    records += [tiewise.plan(name).record() for name in PLANNED_MODELS]
    records.append(tiewise.plan({"architectures": ["BertModel"], "model_type": "bert"}).record())
    records += [
        tiewise.plan(sizes).record() for sizes in (tiewise.lab.Sizes(32_000, 512, 8), tiewise.lab.Sizes(2048, 64, 2))
    ]
    experts = {"model_type": "acme", "vocab_size": 2048, "hidden_size": 64, "num_local_experts": 8}
    records += [tiewise.plan(experts, boundaries, setting=setting).record(), tiewise.plan(experts).record()]
    built = Architecture(
        "xglm", 64, TokenTables(2048, 64, tied=True), (), {"other": Count(1000, 900, 1000)}, counts_active=False
    )
    records.append(tiewise.plan(built).record())
    schema = common(records)
    schema["properties"]["neighbours"]["items"] = common([model.record() for model in models()])
    return schema


def audits() -> Schema:
    """Return the schema of `Audit.record`, whose fields docs/reference-schemas.md explains."""
    hints = get_type_hints(audit.Audit)
    claim = object_schema(
        {
            **{key: or_null(FLAG) for key in ("tied", "fixed")},
            **dict.fromkeys(("known", "t5_like"), FLAG),
            "levels": {"type": "array", "items": merged(schema_of(claims.Claim), {"effective": or_null(FLAG)})},
        }
    )
    part = object_schema(
        {"role": TEXT, "name": TEXT, "file": TEXT, "dtype": TEXT, "shape": schema_of(list[int]), "bytes": COUNT}
    )
    rows = "rows of each table, if only `rows` random ones were compared"
    required = object_schema(
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
            "ends": with_optional(schema_of(hints["ends"]), {"of": (COUNT, rows)}),
            "loaders": schema_of(hints["outcomes"]),
            "worst": or_null(TEXT),
            "findings": schema_of(hints["findings"]),
            "rules": object_schema({"ran": TEXTS, "skipped": mapping(TEXT)}),
        }
    )
    known = {**schema_of(hints["findings"]), "description": "findings of the baseline; only with --baseline"}
    return with_optional(required, {"known_findings": known, "hub": schema_of(audit.HubReport)})


def inspections() -> Schema:
    """Return the schema of `Inspection.record`: measurements by section and model."""
    row = dict.fromkeys(("question", "measure", "about", "speaks", "why", "section"), TEXT)
    row |= dict.fromkeys(("value", "low", "high", "level", "p"), NUMBER)
    evidence = object_schema({"rows": {"type": "array", "items": object_schema(row)}, "verdict": TEXT})
    measurements = mapping({"anyOf": [{"$ref": "#/$defs/found"}, {"$ref": "#/$defs/evidence"}]})
    return {
        **object_schema(
            {
                "schema": {"const": inspected.SCHEMA},
                "subjects": (mapping(TEXT), "label → folder"),
                "request": schema_of(workspace.Request),
                "sections": (
                    mapping(object_schema({"found": measurements, "left_out": mapping(TEXT)})),
                    "by name, then by label",
                ),
            }
        ),
        "$defs": {"found": schema_of(Measurement), "evidence": evidence},
    }


def single() -> Schema:
    """Return the schema of one run, as `tiewise train --json` prints it."""
    return merged(
        schema_of(results.RunResult), {"model": (TEXT, "folder of it"), "dense": (or_null(TEXT), "of its dense form")}
    )


def comparison() -> Schema:
    """Return the schema of results.json."""
    schema = schema_of(results.Comparison)
    schema["properties"].pop("folder")
    schema["required"].remove("folder")
    return schema


def receipt() -> Schema:
    """Return the schema of the record of a rewritten checkpoint.

    `loss` is present only if `transplant` got a text, `loaded` only if loading was not skipped (docs/rewrite.md). If
    there was nothing to do, the record has the reason alone.
    """
    done = merged(schema_of(engine.Receipt), {"schema": {"const": engine.SCHEMA}})
    return {"anyOf": [done, object_schema({"verb": TEXT, "source": TEXT, "nothing_to_do": TEXT})]}


def merged(schema: Schema, more: dict[str, Schema | tuple[Schema, str]]) -> Schema:
    """Return an object schema with more keys."""
    other = object_schema(more)
    return object_schema({**schema["properties"], **other["properties"]})


# name → (version, the command that writes it, its schema)
SCHEMAS = {
    "results": (results.SCHEMA, "tiewise compare --json; results.json of a comparison", comparison),
    "run": (results.RUN_SCHEMA, "tiewise train --json", single),
    "inspection": (inspected.SCHEMA, "tiewise inspect --json", inspections),
    "audit": (audit.SCHEMA, "tiewise check --json, of one checkpoint", audits),
    "receipt": (engine.SCHEMA, "the verbs that rewrite a checkpoint, with --json", receipt),
    "plan": (1, "tiewise plan --json", plans),
}


def main() -> None:
    """Write the schemas, or list those that differ from the code."""
    outdated = []
    HOME.mkdir(exist_ok=True)
    for name, (version, writer, make) in SCHEMAS.items():
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name, "description": writer}
        text = json.dumps({**head, **make()}, indent=1, ensure_ascii=False) + "\n"
        path = HOME / f"{name}-{version}.json"
        if "--hold" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            outdated.append(path.name)
    if outdated:
        sys.exit(f"{', '.join(outdated)}: behind the code; run python tools/make_schemas.py")


if __name__ == "__main__":
    main()
