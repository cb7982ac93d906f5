"""What is known of names: how tensors are wrapped, what the two ends are usually called, and what each family does.

`data/families.json` is made by `tools/make_families.py` from the classes of transformers themselves, and says for which
version; `data/usual_names.json` is written by hand, for families that it does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from tiewise.core.files import packaged_json

POSITION = re.compile(
    r"(^|\.)(wpe|positions?_embed\w*|embed_positions?|pos_embed\w*|positional_embed\w*|pos_emb)(\.|$)"
)
PACKED = ("qweight", "weight_packed", "qweight_packed", "B", "weight_q")  # the bytes of a quantised table
BESIDE = re.compile(
    r"(qzeros|g_idx|scales|biases|zeros|SCB|weight_(scale|shape|zero_point|g_idx|scale_inv|format|scale_2|global_scale)"
    r"|input_scale|absmax|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))"
)
_INSIDE = re.compile(r"\.\d+\.")


class Usual(NamedTuple):
    """The hand-written names; what each list holds is said in the file."""

    pairs: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    whole_outputs: tuple[str, ...]
    maps: tuple[str, ...]
    biases: tuple[str, ...]
    wrappers: tuple[str, ...]
    foreign: tuple[str, ...]


@lru_cache(maxsize=1)
def usual() -> Usual:
    """Read the hand-written names, longest paths first."""
    data = packaged_json("checkpoint/data/usual_names.json")
    pairs = sorted(((pair["input"], pair["output"]) for pair in data["pairs"]), key=lambda p: -p[0].count("."))
    return Usual(tuple(pairs), *(tuple(data[name]) for name in Usual._fields[1:]))


def unwrapped(name: str) -> str:
    """Return a tensor's name without what torch.compile, DDP, FSDP and PEFT put around modules.

    >>> unwrapped("base_model.model.model.embed_tokens.base_layer.weight")
    'model.embed_tokens.weight'
    """
    if name.startswith("base_model.model."):
        name = name.removeprefix("base_model.model.")
    parts = [part for part in name.split(".") if part not in usual().wrappers]
    return ".".join(parts).replace(".modules_to_save.default.", ".")


def module_of(name: str) -> tuple[str, str]:
    """(module, parameter) of a tensor's name."""
    module, _, parameter = name.rpartition(".")
    return module, parameter


def ends_with(module: str, path: str) -> bool:
    """Whether a module's name ends with a path of whole parts.

    >>> ends_with("model.lm_head", "lm_head"), ends_with("model.my_lm_head", "lm_head")
    (True, False)
    """
    return module == path or module.endswith(f".{path}")


def in_layer(name: str) -> bool:
    """Whether a module lies inside a numbered layer: tables there belong to no end of the model."""
    return bool(_INSIDE.search(f".{name}."))


def is_foreign(name: str) -> bool:
    """Whether a module belongs to another modality, a codec, or a draft head."""
    return any(part in usual().foreign or part.startswith(("vision_", "audio_", "mtp_")) for part in name.split("."))


_HEADED = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "MTModel", "ForPreTraining")


@dataclass(frozen=True)
class ClassEnds:
    """What one model class does at its two ends; names of modules, whose tensor is `<name>.weight`."""

    name: str  # of the class
    inputs: tuple[str, ...] = ()  # input tables, the one that ids are looked up in first
    output: str | None = None  # the head; None for a class without one
    biases: tuple[str, ...] = ()  # tensors of the head's bias
    positions: tuple[str, ...] = ()  # position tables
    maps: tuple[str, ...] = ()  # linear modules between table and hidden width
    tied: Mapping[str, str] = field(default_factory=dict)  # tensors that the class may tie, {target: source}
    # {module or bias: its name in a saved file} where that differs
    disk: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""  # of the body in the class ("model"); a body saved alone lacks it. "" where there is none.
    # {module or bias: every other name in a file that transformers loads into it}; None where the prefix, put before a
    # name or taken away, is all that it forgives
    loads: Mapping[str, Sequence[str]] | None = None
    decides: tuple[str, ...] = ("",)  # levels of the config whose flags decide
    joined: str = ""  # "any" where one of several deciding levels that says true is enough; else ""
    always: bool = False  # tied whatever the flag says
    never: bool = False  # never tied whatever the flag says

    @property
    def spellings(self) -> tuple[str, ...]:
        """Names of modules that are loaded into the ends, but for what stands before them."""
        own = [name for name in (*self.inputs, self.output) if name is not None]
        return (*own, *(name for names in (self.loads or {}).values() for name in names))

    def renamed(self, rename: Callable[[str], str]) -> ClassEnds:
        """The same ends under other names."""

        def tensor(name: str) -> str:
            module, parameter = module_of(name)
            return f"{rename(module)}.weight" if parameter == "weight" else rename(name)

        return replace(
            self,
            inputs=tuple(map(rename, self.inputs)),
            output=None if self.output is None else rename(self.output),
            biases=tuple(map(rename, self.biases)),
            positions=tuple(map(rename, self.positions)),
            maps=tuple(map(rename, self.maps)),
            tied={tensor(target): tensor(source) for target, source in self.tied.items()},
        )

    def loaded_as(self, name: str) -> str | None:
        """The module at an end, or the bias, that transformers loads what a file calls `name` into; None for none.

        As `rename_source_key` of its `core_model_loading` does it, in which the prefix is a pattern.
        """
        known = {*self.inputs, *self.biases, self.output}
        if self.loads is not None:
            spelt = {other: own for own, names in self.loads.items() for other in (own, *names)}
            return spelt.get(name, None if self.prefix else spelt.get(name[1:]))  # an empty pattern takes one letter
        bare = re.sub(f"^{self.prefix}.", "", name, count=1)
        if name.startswith(self.prefix) and bare in known:
            return bare
        return next((own for own in (f"{self.prefix}.{name}", name) if own in known), None)


@dataclass(frozen=True)
class Family:
    """What a `model_type` says by default."""

    tie: bool | None = None  # the flag where it is absent
    loose: str = ""  # flags that are no boolean and that the config class takes nevertheless: "" none, "null", "any"
    # family of each nested level where its `model_type` is absent
    levels: Mapping[str, str] = field(default_factory=dict)
    # its own keys for `vocab_size` and `hidden_size`, where it has such
    sizes: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)  # numbers at the boundary where they are absent
    classes: Mapping[str, ClassEnds] = field(default_factory=dict)  # its model classes with tables of tokens, by name


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return packaged_json("checkpoint/data/families.json")


def data_version() -> str:
    """Version of transformers that the data was made from."""
    return str(_data()["transformers"])


@lru_cache(maxsize=64)
def family(model_type: str | None) -> Family | None:
    """Return what is known of a `model_type`; None where it is not in the data."""
    record = _data()["families"].get(model_type)
    if record is None:
        return None
    classes = {name: _ends(name, entry) for name, entry in record.get("classes", {}).items()}
    rest = {key: record[key] for key in ("tie", "loose", "levels", "sizes", "scalars") if key in record}
    return Family(**rest, classes=classes)


def class_ends(model_type: str | None, architecture: str | None) -> ClassEnds | None:
    """Return what is known of a class; of the family's own main class where no class is named.

    A class is looked for in its family first, then in any other (several families share `EncoderDecoderModel`).
    """
    own = family(model_type)
    classes = own.classes if own is not None else {}
    if architecture is None:
        ranked = [name for end in (*_HEADED, "") for name in sorted(classes) if name.endswith(end)]
        return classes[ranked[0]] if ranked else None
    if architecture in classes:
        return classes[architecture]
    for record in _data()["families"].values():
        if architecture in record.get("classes", {}):
            return _ends(architecture, record["classes"][architecture])
    return None


def without_tokens(model_type: str | None, architecture: str | None) -> bool:
    """Whether a known class has no table of tokens at all: the data was made from it, and found none."""
    if model_type in _data()["tokenless"]:
        return True
    known = family(model_type)
    if known is None or known.classes or architecture is None:
        return False
    return architecture not in _data()["not_built"] and class_ends(model_type, architecture) is None


def _ends(name: str, entry: Mapping[str, Any]) -> ClassEnds:
    made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return ClassEnds(name, biases=made.pop("bias", ()), **made)
