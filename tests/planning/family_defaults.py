"""Write src/tiewise/checkpoint/data/class_defaults.json from the installed transformers: `python family_defaults.py`.

The file records, for each model type that tiewise reads, the class defaults of the keys that its reader accesses. It
also records the names that the class uses for common keys.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import CONFIG_MAPPING

import tiewise
from tiewise.checkpoint.families import FAMILIES
from tiewise.planning.config import Config
from tiewise.planning.read_config import count_other_tables, initial_scales, reader_for
from tiewise.planning.readers.towers import TOWER_READERS, Composite

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)
COMPOSITES = sorted(kind for kind, one in FAMILIES.items() if one.towers is not None)
# switches that make a reader read more keys
SWITCHES = (
    {},
    {"use_qk_norm": True, "qk_layernorm": True},
    {"new_decoder_architecture": True},
    {"add_cross_attention": True, "is_decoder": True, "multi_query": False},
    {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    },
)
ALWAYS = ("vocab_size", "tie_word_embeddings")

PATH = Path(tiewise.__file__).parent / "checkpoint" / "data" / "class_defaults.json"
# Names that the classes accept but do not list in `attribute_map`.
BESIDES = {
    "bloom": {"hidden_size": "n_embed"},
    "falcon": {"hidden_size": "n_embed"},
    "gpt2": {"intermediate_size": "n_inner"},
    "gpt_bigcode": {"intermediate_size": "n_inner"},
    "gptj": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim"},
}
# keys without a usable default in the class
REQUIRED = {"lfm2_moe": {"layer_types": ["full_attention"] * 32}}
KEPT = (int, float, str, bool, list, type(None))


def record_family(family: str) -> dict:
    names = CONFIG_MAPPING[family].attribute_map | BESIDES.get(family, {})
    return record_keys(family, (*ALWAYS, *read_keys(family, names)))


def record_keys(family: str, wanted: Iterable[str]) -> dict:
    """Return defaults and names of the keys that a reader wants."""
    kind = CONFIG_MAPPING[family]
    defaults = {}
    for field in dataclasses.fields(kind):
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        if isinstance(value, KEPT):
            defaults[field.name] = value
    names = kind.attribute_map | BESIDES.get(family, {})
    own = {names.get(key, key) for key in wanted} | set(wanted) | {key for key, own in names.items() if own in wanted}
    return {
        "defaults": {key: value for key, value in defaults.items() if key in own},
        "names": {key: value for key, value in names.items() if key in wanted or value in wanted},
    }


class _Recorder(dict):
    """Class defaults that record which keys a reader accesses."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


def read_keys(family: str, names: dict[str, str]) -> set[str]:
    """Return the keys that the family's reader accesses, with each switch that makes it read more."""
    accessed = set()
    for changed in SWITCHES:
        values = {**CONFIG_MAPPING[family]().to_dict(), **REQUIRED.get(family, {}), **changed}
        values.pop("architectures", None)
        recorder = _Recorder(values)
        c = Config(recorder, family)
        c.defaults, c.names = {}, names
        reader_for(c.record)(c)
        initial_scales(c)
        count_other_tables(c)
        accessed |= recorder.asked
    return accessed


class _RecordingComposite(Composite):
    """A composite that records which parts a reader asks for."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = {}

    def has(self, name):
        """Record that the reader asks for the part, and let it read parts that are null by default."""
        super().has(name)
        return True

    def part(self, name, family):
        part = self.outer.values.get(name)
        if part is None:
            part = self.outer.values[name] = _Recorder(CONFIG_MAPPING[family]().to_dict())
        self.asked[family] = part.asked
        config = super().part(name, family)
        config.defaults, config.names = {}, CONFIG_MAPPING[family].attribute_map
        return config


def record_towers(family: str) -> dict[str, dict]:
    """Return the records of a composite and of its towers."""
    values = CONFIG_MAPPING[family]().to_dict()
    for name, part in values.items():
        if isinstance(part, dict):
            values[name] = _Recorder(part)
    outer = _Recorder({**values, "model_type": family})
    composite = _RecordingComposite(outer)
    reader = FAMILIES[family].towers
    TOWER_READERS[reader.name](composite, **reader.options)
    keys = {**composite.asked, family: outer.asked - {"model_type"}}
    return {each: record_keys(each, sorted(asked)) for each, asked in keys.items()}


def all_records() -> dict[str, dict]:
    """Return every record by model type; a text encoder beside a tower has the keys of both readers."""
    records = {family: record_family(family) for family in READERS}
    for composite in COMPOSITES:
        for family, record in record_towers(composite).items():
            known = records.get(family, {"defaults": {}, "names": {}})
            records[family] = {part: {**known[part], **record[part]} for part in record}
    return dict(sorted(records.items()))


def main() -> None:
    lines = [f'"{family}": {json.dumps(record, sort_keys=True)}' for family, record in all_records().items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
