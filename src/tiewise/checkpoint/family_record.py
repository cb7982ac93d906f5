"""Records of families of models: their fields, and the generated data behind them.

A `Family` is everything that tiewise knows of one `model_type`. `families.py` has the records and the lookup. Tools
write four files of `data/` from transformers and mlx-lm, and a record reads them when they are needed:

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

from tiewise.checkpoint.untrusted import short
from tiewise.core.files import read_packaged_json

NONE, RMS, LAYER = "none", "rms", "layer"  # kinds of norms


def module_of(name: str) -> tuple[str, str]:
    """Return (module, parameter) of a tensor's name."""
    module, _, parameter = name.rpartition(".")
    return module, parameter


@dataclass(frozen=True)
class ClassEnds:
    """Names of modules at the two ends of one model class. The tensor of each is `<name>.weight`."""

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
    layers: tuple[str, ...] = ()  # what stands before a layer's number in a file that is loaded, but for the prefix
    # modules inside numbered layers that the same flag ties, `#` for each number ("model.layers.#.shared_transf")
    layer_ties: tuple[str, ...] = ()
    decides: tuple[str, ...] = ("",)  # levels of the config that decide; of several, one that says true is enough
    always: bool = False  # tied whatever the flag says
    never: bool = False  # never tied whatever the flag says
    joined: bool = False  # all of `tied` but the head is tied whatever the flag says, though the head never is
    # {tensor between the body and the head: its other names in a file, but for the prefix}
    head: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # {tensor: (key of the config, value)}: the class has the tensor with this value alone
    only_if: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    wide: Mapping[str, int] = field(default_factory=dict)  # {head: its width in hidden widths} where that is not one
    # {level of the config: (module, "lm" or "body")} of parts whose class follows the level's `model_type`
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def fixed(self) -> bool | None:
        """Return True of a class that always ties, False of one that never does, else None."""
        if self.always:
            return True
        return False if self.never else None

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the modules of the input tables and of the head, the head's last."""
        if self.output is None:
            return self.inputs
        return (*self.inputs, self.output)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return names of modules that are loaded into the ends, without their prefix."""
        spellings = list(self.modules)
        if self.loads is not None:
            for names in self.loads.values():
                spellings += names
        return tuple(spellings)

    def renamed(self, rename: Callable[[str], str]) -> ClassEnds:
        """Return the same ends under other names."""

        def all_renamed(names: Sequence[str]) -> tuple[str, ...]:
            """Return several modules or biases under their other names."""
            return tuple(rename(name) for name in names)

        def tensor(name: str) -> str:
            """Return a tensor under its other name."""
            module, parameter = module_of(name)
            has_entry = parameter != "weight" and rename(name) != name  # a bias may be renamed apart from its module
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
        """Return the same ends under the names that they have in the body alone."""
        prefix = f"{self.prefix}."

        def bare(name: str) -> str:
            """Return a name without the body's prefix."""
            return name.removeprefix(prefix)

        return replace(self.renamed(bare), layers=tuple(bare(layer) for layer in self.layers))

    def loaded_as(self, name: str) -> str | None:
        """Return the end or bias into which transformers loads the file's `name`; None for none.

        As `rename_source_key` of its `core_model_loading` does it, in which the prefix is a pattern.
        """
        if self.loads is not None:
            spellings = _by_spelling(self.loads)
            if name in spellings or self.prefix:
                return spellings.get(name)
            return spellings.get(name[1:])  # an empty pattern takes one letter
        ends = {*self.inputs, *self.biases, self.output}
        bare = re.sub(f"^{self.prefix}.", "", name, count=1)
        if name.startswith(self.prefix) and bare in ends:
            return bare
        with_prefix = f"{self.prefix}.{name}"
        if with_prefix in ends:
            return with_prefix
        return name if name in ends else None

    def head_tensor(self, name: str) -> str | None:
        """Return the tensor between body and head that is loaded from `name`; None for none."""
        spellings = _by_spelling(self.head)
        if name.endswith(".weight"):  # written without its ending, as the names of modules are
            spellings |= {f"{other}.weight": end for other, end in spellings.items() if end.endswith(".weight")}
        return spellings.get(name, spellings.get(name.removeprefix(f"{self.prefix}.")))

    def has(self, tensor: str, config: Mapping[str, Any]) -> bool:
        """Return whether the class has a tensor with the switches of a config."""
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
    """A family's defaults for tying and sizes, and what its classes do at the two ends."""

    tie: bool | None = None  # the flag where it is absent
    loose: str = ""  # flags that are no boolean and that the config class takes nevertheless: "" none, "null", "any"
    levels: Mapping[str, str] = field(default_factory=dict)  # family of each nested level that does not say it
    sizes: Mapping[str, str] = field(default_factory=dict)  # its own keys for `vocab_size` and `hidden_size`
    scalars: Mapping[str, float] = field(default_factory=dict)  # numbers at the boundary where they are absent
    classes: Mapping[str, ClassEnds] = field(default_factory=dict)  # its model classes with tables of tokens, by name
    auto: Mapping[str, str] = field(default_factory=dict)  # its class as the "lm" or the "body" of a composite


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of a family's config, as `plan` reads them."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # key -> value of the class where a config lacks it
    names: Mapping[str, str] = field(default_factory=dict)  # usual name -> the family's own


@dataclass(frozen=True)
class ConfigReader:
    """Name of a function in `planning.model_families.READERS`, and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of that function


def read_with(name: str, **options: Any) -> ConfigReader:
    """Return the reader of this name with these options."""
    return ConfigReader(name, options)


@dataclass(frozen=True)
class FinalNorm:
    """Final norm and scales of a decoder, applied between its two tables."""

    norm: str = "norm"  # the final norm's module, next to the input table
    kind: str = RMS  # "none"; "rms"; "layer"
    eps_key: str = "rms_norm_eps"  # of the config; "" where the class fixes it
    eps: float = 1e-6  # the class's own, where the config has no key
    stored: bool = True  # whether the norm has a weight
    plus_one: bool = False  # whether the stored weight is the gain less one
    root_width: bool = False  # whether input rows are multiplied by √E, rounded to their type
    scalars: tuple[str, ...] = ()  # keys of the config that this class applies at its two ends


@dataclass(frozen=True)
class BlockNames:
    """The feed-forward block of a layer: names of its modules within a family's body."""

    layers: str = "layers"  # list of layers, below the model's body
    before: tuple[str, ...] = ("post_attention_layernorm",)  # norm that the block reads: the first of these that exists
    steps: tuple[str, ...] = ("mlp",)  # modules of the block, one after the other
    after: str = ""  # norm of what the block gives
    scale: str = ""  # attribute of the layer that its output is multiplied by


@dataclass(frozen=True)
class Family:
    """Everything that tiewise knows of one `model_type`. Every field but the first has a default."""

    model_type: str
    # counted exactly by `plan`; None: the generic formula, or the token tables alone
    reader: ConfigReader | None = None
    unit_table: str = ""  # T5: its table starts with unit entries, and states shrink at the head: see `fresh_table`
    # applied by `inspect`; None: tables are multiplied as stored, the section first_mlp refuses
    final_norm: FinalNorm | None = None
    first_mlp: BlockNames | None = None
    # read by `check` and the verbs that rewrite
    is_t5_like: bool = False  # ties its input tables whatever the flag says, and reads the flag as a scale too
    extra_rows: int = 0  # of the input table beyond vocab_size
    head_lacks_extra_rows: bool = False
    has_codebook_rows: bool = False  # text and codebooks share one table
    repeats_first_row: bool = False  # of its per-layer table, for ids beyond it
    replaces_placeholders: bool = False  # of pictures and sounds, before ids are looked up
    stores_transposed: bool = False  # matrices of layers are stored as [in, out]
    # loaders: "" is what the loader does with most families; names of exceptions are in `loader_columns.py`
    llama_cpp: str = ""
    vllm: str = ""
    sglang: str = ""
    # written by hand for a family that the generated files lack
    written_ends: FamilyEnds | None = None
    written_keys: ConfigKeys | None = None
    is_written: bool = True  # the record is in the table of `families.py`

    @cached_property
    def ends(self) -> FamilyEnds:
        """Return defaults for tying, and the classes with their ends."""
        if self.written_ends is not None:
            return self.written_ends
        record = dict(family_data()["families"].get(self.model_type, {}))
        classes = {name: ends_from(entry) for name, entry in record.pop("classes", {}).items()}
        return FamilyEnds(**record, classes=classes)

    @property
    def has_ends(self) -> bool:
        """Return whether its config class and model classes are known."""
        return self.written_ends is not None or self.model_type in family_data()["families"]

    @property
    def is_tokenless(self) -> bool:
        """Return whether no class of it has a table of tokens."""
        return self.model_type in family_data()["tokenless"]

    @property
    def has_facts(self) -> bool:
        """Return whether tiewise knows anything of the family."""
        return self.is_written or self.has_ends or self.is_tokenless

    @property
    def keys(self) -> ConfigKeys:
        """Return defaults and own names of the config's keys."""
        if self.written_keys is not None:
            tie = {} if self.ends.tie is None else {"tie_word_embeddings": self.ends.tie}
            return replace(self.written_keys, defaults={**tie, **self.written_keys.defaults})
        return ConfigKeys(**class_defaults().get(self.model_type, {}))

    @property
    def has_uncounted_parts(self) -> bool:
        """Return whether the generic formula was compared with its class and leaves parts of it out."""
        return self.model_type in estimated_families()["not_counted"]

    @property
    def is_headless(self) -> bool:
        """Return whether no class of it computes logits over tokens."""
        return self.model_type in estimated_families()["headless"]

    @property
    def mlx_letters(self) -> str | None:
        """Return outcomes of loading tiny models with mlx-lm; None for a family that was not run."""
        letters: str | None = mlx_data()["families"].get(self.model_type)
        return letters

    @property
    def is_served_by_mlx(self) -> bool:
        """Return whether mlx-lm has a model of this type."""
        return self.model_type in mlx_data()["served"]

    @property
    def unknown_message(self) -> str:
        """Return the sentence that every command prints of an unknown family, without its end."""
        if not self.model_type:
            return "the config has no model_type"
        return f"{short(self.model_type)} is a family that tiewise does not know"


@lru_cache(maxsize=1)
def family_data() -> dict[str, Any]:
    """Return the architecture data as stored; "transformers" is the version that it was made from."""
    data: dict[str, Any] = read_packaged_json("checkpoint/data/families.json")
    return data


@lru_cache(maxsize=1)
def class_defaults() -> dict[str, dict[str, dict[str, Any]]]:
    """Return `defaults` and `names` of each model type, as in `ConfigKeys`."""
    data: dict[str, dict[str, dict[str, Any]]] = read_packaged_json("checkpoint/data/class_defaults.json")
    return data


@lru_cache(maxsize=1)
def estimated_families() -> dict[str, list[str]]:
    """Return model types of transformers 5.23: estimated, not_counted (both without a reader), and headless."""
    data: dict[str, list[str]] = read_packaged_json("checkpoint/data/estimated_families.json")
    return data


@lru_cache(maxsize=1)
def mlx_data() -> dict[str, Any]:
    """Return the outcomes of loading tiny models with mlx-lm; tools/make_mlx_outcomes.py writes them."""
    data: dict[str, Any] = read_packaged_json("checkpoint/data/mlx_lm.json")
    return data


def ends_from(entry: Mapping[str, Any]) -> ClassEnds:
    """Return one class of the architecture data as `ClassEnds`."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return ClassEnds(biases=fields.pop("bias", ()), **fields)
