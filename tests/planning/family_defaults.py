"""Writes src/tiewise/checkpoint/data/class_defaults.json from the installed transformers: `python family_defaults.py`.

What is recorded: for each model type that tiewise reads, the class defaults of the keys that its readers ask for, and
the class's own names for usual ones.
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
# Names that the classes take but do not list: an older field, or their own for what others call otherwise.
BESIDES = {
    "bloom": {"hidden_size": "n_embed"},
    "falcon": {"hidden_size": "n_embed"},
    "gpt2": {"intermediate_size": "n_inner"},
    "gpt_bigcode": {"intermediate_size": "n_inner"},
    "gptj": {"intermediate_size": "n_inner"},
    "opt": {"intermediate_size": "ffn_dim"},
}
KEPT = (int, float, str, bool, type(None))


def recorded(family: str) -> dict:
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
    """A class's defaults that remember what was asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


def read_keys(family: str, names: dict[str, str]) -> set[str]:
    """Keys that the family's reader asks for, over the switches that make it ask for more."""
    asked = set()
    for changed in ({}, {"use_qk_norm": True, "qk_layernorm": True}, {"new_decoder_architecture": True}):
        values = {**CONFIG_MAPPING[family]().to_dict(), **changed}
        values.pop("architectures", None)
        recorder = _Recorder(values)
        c = Config(recorder, family)
        c.defaults, c.names = {}, names
        reader_for(c.record)(c)
        initial_scales(c)
        asked |= recorder.asked
    return asked


def main() -> None:
    lines = [f'"{family}": {json.dumps(recorded(family), sort_keys=True)}' for family in READERS]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
