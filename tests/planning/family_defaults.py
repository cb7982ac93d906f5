"""Write src/tiewise/checkpoint/data/class_defaults.json from the installed transformers: `python family_defaults.py`.

The file records, for each model type that tiewise reads, the class defaults of the keys that its reader accesses. It
also records the names that the class uses for common keys.
"""

import dataclasses
import json
from pathlib import Path

from transformers import CONFIG_MAPPING

import tiewise
from tiewise.checkpoint.families import FAMILIES
from tiewise.planning.config import Config
from tiewise.planning.model_families import reader_for
from tiewise.planning.read_config import initial_scales

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)

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
KEPT = (int, float, str, bool, type(None))


def record_family(family: str) -> dict:
    kind = CONFIG_MAPPING[family]
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if isinstance(field.default, KEPT)}
    names = kind.attribute_map | BESIDES.get(family, {})
    wanted = ("vocab_size", "tie_word_embeddings", *read_keys(family, names))
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
    for changed in ({}, {"use_qk_norm": True, "qk_layernorm": True}, {"new_decoder_architecture": True}):
        values = {**CONFIG_MAPPING[family]().to_dict(), **changed}
        values.pop("architectures", None)
        recorder = _Recorder(values)
        c = Config(recorder, family)
        c.defaults, c.names = {}, names
        reader_for(c.record)(c)
        initial_scales(c)
        accessed |= recorder.asked
    return accessed


def main() -> None:
    lines = [f'"{family}": {json.dumps(record_family(family), sort_keys=True)}' for family in READERS]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
