"""Records of families of models: their fields, and the generated data behind them.

A `Family` has all facts about one `model_type`. `families.py` has the records and the lookup. Tools write four files
of `data/` from transformers and mlx-lm, and a record reads them on first use:

    families.json            tying and names of tensors, by class          tools/make_families.py
    class_defaults.json      default values and names of config keys       tests/planning/family_defaults.py
    estimated_families.json  families that the generic formula counts      tools/make_estimated_families.py
    mlx_lm.json              outcomes of loading with mlx-lm               tools/make_mlx_outcomes.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from tiewise.checkpoint.mlx_runs import MlxRun
from tiewise.checkpoint.untrusted import short
from tiewise.core.files import read_packaged_json

NONE, RMS, LAYER = "none", "rms", "layer"  # types of norms


def module_of(name: str) -> tuple[str, str]:
    """Return (module, parameter) of a tensor's name."""
    module, _, parameter = name.rpartition(".")
    return module, parameter


@dataclass(frozen=True)
class ClassEnds:
    """Names of modules at the two ends of one model class. The tensor of each is `<name>.weight`."""

    inputs: tuple[str, ...] = ()  # input embeddings; first the one that looks up token ids
    output: str | None = None  # output head; None for a class without one
    biases: tuple[str, ...] = ()  # tensors of the head's bias
    positions: tuple[str, ...] = ()  # position tables
    maps: tuple[str, ...] = ()  # linear modules between table width E and hidden width D
    tied: Mapping[str, str] = field(default_factory=dict)  # tensors that the class may tie, {target: source}
    # {module or bias: its name in a saved file}, if the two names differ
    disk: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""  # prefix of the body in the class ("model"), absent in a file of the body alone; "" for none
    # {module or bias: all other names in a file that transformers loads into it}; None if transformers accepts only a
    # name with or without the prefix
    loads: Mapping[str, Sequence[str]] | None = None
    layers: tuple[str, ...] = ()  # name before a layer's number in a file that is loaded, without the prefix
    # modules inside layers that the same flag ties, with `#` for a number ("model.layers.#.shared_transf")
    layer_ties: tuple[str, ...] = ()
    decides: tuple[str, ...] = ("",)  # levels of the config that decide; one with the flag true is enough
    always: bool = False  # always tied, whatever the flag
    never: bool = False  # never tied, whatever the flag
    joined: bool = False  # the head is never tied, all others in `tied` always are
    # {tensor between the body and the head: its other names in a file, without the prefix}
    head: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # {tensor: (key of the config, value)}: the class has the tensor only with this value
    only_if: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # {key of the config: (value, fields)}: with this value the class has other input tables, and other values of fields
    instead: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    wide: Mapping[str, int] = field(default_factory=dict)  # {head: its width / hidden width}, if not 1
    # {level of the config: (module, "lm" or "body")} of parts whose class follows the level's `model_type`
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    no_boundary: str = ""  # why `install` refuses the class, so that it cannot have factored tables
    counts_from_pad: bool = False  # the positions of tokens start after the id of padding

    @property
    def fixed(self) -> bool | None:
        """Return True if the class always ties, False if it never does, else None."""
        if self.always:
            return True
        return False if self.never else None

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules of input embeddings and output head, the head last."""
        if self.output is None:
            return self.inputs
        return (*self.inputs, self.output)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return the names of all modules that transformers loads into the ends."""
        spellings = list(self.modules)
        if self.loads is not None:
            for names in self.loads.values():
                spellings += names
        return tuple(spellings)

    def renamed(self, rename: Callable[[str], str]) -> ClassEnds:
        """Return the same ends under other names."""

        def all_renamed(names: Sequence[str]) -> tuple[str, ...]:
            """Return modules or biases, renamed."""
            return tuple(rename(name) for name in names)

        def tensor(name: str) -> str:
            """Return the name of a tensor, renamed."""
            module, parameter = module_of(name)
            has_entry = parameter != "weight" and rename(name) != name  # a bias may have its own new name
            if has_entry or not module:
                return rename(name)
            return f"{rename(module)}.{parameter}"

        output = self.output
        if output is not None:
            output = rename(output)
        return replace(
            self,
            inputs=all_renamed(self.inputs),
            output=output,
            biases=all_renamed(self.biases),
            positions=all_renamed(self.positions),
            maps=all_renamed(self.maps),
            wide={rename(head): times for head, times in self.wide.items()},
            tied={tensor(target): tensor(source) for target, source in self.tied.items()},
        )

    def without_prefix(self) -> ClassEnds:
        """Return the same ends under their names in the body, without the prefix."""
        prefix = f"{self.prefix}."

        def bare(name: str) -> str:
            """Return a name without the body's prefix."""
            return name.removeprefix(prefix)

        return replace(self.renamed(bare), layers=tuple(bare(layer) for layer in self.layers))

    def loaded_as(self, name: str) -> str | None:
        """Return the end or bias into which transformers loads `name` of a file; None for none.

        It follows `rename_source_key` in `core_model_loading` of transformers, where the prefix is a pattern.
        """
        if self.loads is not None:
            spellings = _by_spelling(self.loads)
            if name in spellings or self.prefix:
                return spellings.get(name)
            return spellings.get(name[1:])  # an empty pattern removes one letter
        ends = {*self.inputs, *self.biases, self.output}
        bare = re.sub(f"^{self.prefix}.", "", name, count=1)
        if name.startswith(self.prefix) and bare in ends:
            return bare
        with_prefix = f"{self.prefix}.{name}"
        if with_prefix in ends:
            return with_prefix
        return name if name in ends else None

    def head_tensor(self, name: str) -> str | None:
        """Return the tensor between body and head that transformers loads from `name`, else None."""
        spellings = _by_spelling(self.head)
        if name.endswith(".weight"):  # the data lists such names without this ending
            spellings |= {f"{other}.weight": end for other, end in spellings.items() if end.endswith(".weight")}
        return spellings.get(name, spellings.get(name.removeprefix(f"{self.prefix}.")))

    def chosen_by(self, config: Mapping[str, Any]) -> ClassEnds:
        """Return the ends of the class with this config, which may choose other input tables."""
        ends = self
        for key, (value, fields) in self.instead.items():
            if config.get(key) is value:
                ends = replace(ends, **_as_fields(fields))
        return ends

    def has(self, tensor: str, config: Mapping[str, Any]) -> bool:
        """Return whether the class has a tensor with this config."""
        if tensor not in self.only_if:
            return True
        path, value = self.only_if[tensor]
        level: Any = config
        for key in path.split("."):
            level = level.get(key) if isinstance(level, Mapping) else None
        return not isinstance(level, bool) or level is value


def _by_spelling(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return {name in a file: name in the class} from {name in the class: other names}."""
    by_spelling = dict[str, str]()
    for name, others in names.items():
        for spelling in (name, *others):
            by_spelling[spelling] = name
    return by_spelling


@dataclass(frozen=True)
class FamilyEnds:
    """Defaults of a family for tying and sizes, and the ends of its classes."""

    tie: bool | None = None  # default of the flag
    loose: str = ""  # flags besides booleans that the config class accepts: "" (none), "null" or "any"
    older_flag: str = ""  # older key of the flag, which counts if a config has both; "" for none
    levels: Mapping[str, str] = field(default_factory=dict)  # {nested level without model_type: its family}
    sizes: Mapping[str, str] = field(default_factory=dict)  # {`vocab_size` or `hidden_size`: key of the family}
    scalars: Mapping[str, float] = field(default_factory=dict)  # {number at the boundary: its default}
    classes: Mapping[str, ClassEnds] = field(default_factory=dict)  # {model class with a token table: its ends}
    auto: Mapping[str, str] = field(default_factory=dict)  # {"lm" or "body": class of such a part in a composite}


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of a family's config, as `plan` reads them."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # {key: default of the class}
    names: Mapping[str, str] = field(default_factory=dict)  # {usual key: key of the family}


@dataclass(frozen=True)
class ConfigReader:
    """Function in `READERS` of `planning.model_families`, or in `TOWER_READERS`, by name, and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of that function


def read_with(name: str, **options: Any) -> ConfigReader:
    """Return the config reader of this name with these options."""
    return ConfigReader(name, options)


@dataclass(frozen=True)
class FinalNorm:
    """Final norm and scales of a decoder, applied between its two tables."""

    norm: str = "norm"  # module of the final norm, in the same parent as the input embedding
    kind: str = RMS  # "none", "rms" or "layer"
    eps_key: str = "rms_norm_eps"  # config key of ε; "" if the class fixes ε
    eps: float = 1e-6  # default of ε in the class
    stored: bool = True  # the norm has a weight
    plus_one: bool = False  # the stored weight is the gain minus one
    root_width: bool = False  # input rows are multiplied by √E, rounded to their type
    scalars: tuple[str, ...] = ()  # config keys of numbers that the class applies at its two ends


@dataclass(frozen=True)
class BlockNames:
    """Names of the modules of a layer's feed-forward block in a family's body."""

    layers: str = "layers"  # list of layers in the body
    before: tuple[str, ...] = ("post_attention_layernorm",)  # norm before the block: the first of these that exists
    steps: tuple[str, ...] = ("mlp",)  # modules of the block, in order
    after: str = ""  # norm after the block
    scale: str = ""  # attribute of the layer with the factor of the block's output


@dataclass(frozen=True)
class Family:
    """Facts about one `model_type`. Every field but the first has a default."""

    model_type: str
    # reader with which `plan` counts parameters exactly; None: the generic formula, or only the token tables
    reader: ConfigReader | None = None
    # reader with which `plan` counts the towers of a composite; None: it names them as not counted
    towers: ConfigReader | None = None
    unit_table: str = ""  # T5: the table starts with unit entries, and the head scales states: see `fresh_table`
    # facts that `inspect` applies; None: it multiplies the tables as stored, and the section first_mlp refuses
    final_norm: FinalNorm | None = None
    first_mlp: BlockNames | None = None
    # facts that `check` and the rewriting verbs use
    is_t5_like: bool = False  # it always ties its input tables, and the flag also controls a scale
    extra_rows: int = 0  # rows of the input table beyond vocab_size
    head_lacks_extra_rows: bool = False
    has_codebook_rows: bool = False  # text and codebooks share one table
    repeats_first_row: bool = False  # ids beyond its per-layer table use the first row of that table
    replaces_placeholders: bool = False  # placeholder ids of pictures and sounds are replaced before the lookup
    stores_transposed: bool = False  # matrices of layers are stored as [in, out]
    # column of each loader: "" is the usual one; `loader_columns.py` has the names of exceptions
    llama_cpp: str = ""
    vllm: str = ""
    sglang: str = ""
    # written by hand for a family that the generated files lack
    written_ends: FamilyEnds | None = None
    written_keys: ConfigKeys | None = None
    is_written: bool = True  # the record is in the table of `families.py`

    @cached_property
    def ends(self) -> FamilyEnds:
        """Return the defaults for tying, and the ends of each class."""
        if self.written_ends is not None:
            return self.written_ends
        record = dict(family_data()["families"].get(self.model_type, {}))
        classes = {name: ends_from(entry) for name, entry in record.pop("classes", {}).items()}
        return FamilyEnds(**record, classes=classes)

    @property
    def has_ends(self) -> bool:
        """Return whether its config class and model classes are in the data."""
        return self.written_ends is not None or self.model_type in family_data()["families"]

    @property
    def is_tokenless(self) -> bool:
        """Return whether none of its classes has a token table."""
        return self.model_type in family_data()["tokenless"]

    @property
    def has_facts(self) -> bool:
        """Return whether tiewise has any fact about the family."""
        return self.is_written or self.has_ends or self.is_tokenless

    @property
    def keys(self) -> ConfigKeys:
        """Return the defaults and names of the config's keys."""
        if self.written_keys is not None:
            default_flag = {} if self.ends.tie is None else {"tie_word_embeddings": self.ends.tie}
            return replace(self.written_keys, defaults={**default_flag, **self.written_keys.defaults})
        return ConfigKeys(**class_defaults().get(self.model_type, {}))

    @property
    def has_uncounted_parts(self) -> bool:
        """Return whether the generic formula omits parts of its class, by a comparison of both."""
        return self.model_type in estimated_families()["not_counted"]

    @property
    def is_headless(self) -> bool:
        """Return whether none of its classes computes logits over tokens."""
        return self.model_type in estimated_families()["headless"]

    @cached_property
    def mlx_run(self) -> MlxRun | None:
        """Return the recorded runs with mlx-lm; None for a family without runs."""
        record = mlx_data()["families"].get(self.model_type)
        if record is None:
            return None
        return MlxRun(**record)

    @property
    def needed_by_mlx(self) -> Sequence[str]:
        """Return the config keys that mlx-lm needs, for a family without runs. Empty if they are not known."""
        keys: Sequence[str] = mlx_data()["needs"].get(self.model_type, ())
        return keys

    @property
    def is_served_by_mlx(self) -> bool:
        """Return whether mlx-lm has a model of this type."""
        return self.model_type in mlx_data()["served"]

    @property
    def unknown_message(self) -> str:
        """Return the message about an unknown family, without final punctuation."""
        if not self.model_type:
            return "the config has no model_type"
        return f"{short(self.model_type)} is a family that tiewise does not know"


@lru_cache(maxsize=1)
def family_data() -> dict[str, Any]:
    """Return the architecture data; its key "transformers" is the version that it was made from."""
    data: dict[str, Any] = read_packaged_json("checkpoint/data/families.json")
    return data


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """Return `defaults` and `names` of each model type, as in `ConfigKeys`."""
    data: dict[str, dict[str, dict[str, Any]]] = read_packaged_json("checkpoint/data/class_defaults.json")
    return data


@lru_cache(maxsize=1)
def estimated_families() -> dict[str, list[str]]:
    """Return lists of model types of transformers 5.23.

    "estimated" and "not_counted" have no reader; "headless" have no token head.
    """
    data: dict[str, list[str]] = read_packaged_json("checkpoint/data/estimated_families.json")
    return data


@lru_cache(maxsize=1)
def mlx_data() -> dict[str, Any]:
    """Return the outcomes of loading tiny models with mlx-lm; tools/make_mlx_outcomes.py writes them."""
    data: dict[str, Any] = read_packaged_json("checkpoint/data/mlx_lm.json")
    return data


def ends_from(entry: Mapping[str, Any]) -> ClassEnds:
    """Return an entry of the architecture data as `ClassEnds`."""
    fields = _as_fields(entry)
    return ClassEnds(biases=fields.pop("bias", ()), **fields)


def _as_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with tuples instead of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
