"""Readers of a config, which return an `Architecture`.

read(json.load(open("config.json")))      exact for families with a reader; others are estimated, or only their tables
from_sizes(Sizes(50_000, 1024, 12))       the generic decoder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiewise.checkpoint.claims import read_claims
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import Family
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import PlanError
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Heads,
    LayerCounts,
    TokenTables,
    divide_width,
    linear,
    lookup,
)
from tiewise.planning.config import GENERIC, MOST, MOST_LAYERS, UNNAMED, Config, saved_class
from tiewise.planning.model_families import READERS, Reader, decoder
from tiewise.planning.readers.towers import TOWER_READERS, Composite
from tiewise.planning.task_heads import add_task_head
from tiewise.planning.uncounted import has_token_head, towers, uncounted_parts

TEXT_PART = "_text"  # added to the outer model_type to name a nested text_config without one
UNGATED = ("relu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu2")  # any other activation implies a gate today


def reader_for(family_record: Family) -> Reader | None:
    """Return the exact reader of a family with its options. None if it has no reader."""
    if family_record.reader is None:
        return None
    return partial(READERS[family_record.reader.name], **family_record.reader.options)


def read(config: Mapping[str, Any]) -> Architecture:
    """Read a config. If it nests a text config (vision-language models), read that one.

    Raises:
        PlanError: a size is missing or contradicts another.
    """
    architecture = add_task_head(config, _read(config))
    if family(config.get("model_type")).reader is not None or has_token_head(config):
        return architecture
    return replace(architecture, ends=replace(architecture.ends, tied=False, head=False, head_biases=0))


def _read(values: Mapping[str, Any]) -> Architecture:
    """Read a config as a model with a token head, unless its reader says otherwise."""
    nested = values.get("text_config")
    if isinstance(nested, Mapping):
        return _read_nested(values, nested)
    config = Config(values, short(values.get("model_type") or UNNAMED))
    std, scale = initial_scales(config)
    reader = reader_for(config.record) or _estimate
    architecture, tables = reader(config), count_other_tables(config)
    if tables.parameters:
        architecture = replace(architecture, around={**architecture.around, "other_tables": tables})
    if config.get("num_nextn_predict_layers"):
        note = "Layers that predict further tokens, and their tables, are not counted."
        architecture = replace(architecture, notes=(*architecture.notes, note))
    if read_claims(values).fixed is False:  # the class ignores the flag
        architecture = replace(architecture, ends=replace(architecture.ends, tied=False))
    return replace(architecture, table_std=std, output_scale=scale)


def _read_nested(config: Mapping[str, Any], text_config: Mapping[str, Any]) -> Architecture:
    """Read the language model of a config that nests it.

    Towers count if the family has a reader of them.
    """
    values = dict(text_config)
    tied = read_claims(config).tied  # the outer config decides, or its class's default
    if tied is not None:
        values["tie_word_embeddings"] = tied
    if not values.get("model_type"):
        outer = family(config.get("model_type"))
        usual = f"{config.get('model_type', 'unknown')}{TEXT_PART}"
        values["model_type"] = outer.ends.levels.get("text_config", usual)
    values.pop(family(values["model_type"]).ends.older_flag, None)  # the inner config does not decide
    architecture = _read(values)
    tower = family(config.get("model_type")).towers
    if tower is not None and _has_usual_class(config):
        count = TOWER_READERS[tower.name](Composite(config), **tower.options)
        unused = Count(count.parameters)  # a token of a text passes through none of it
        return replace(architecture, around={**architecture.around, "towers": unused})
    note = "Counted from text_config: the language model without its other towers."
    not_counted = (*architecture.not_counted, *towers(config))
    return replace(architecture, not_counted=not_counted, notes=(*architecture.notes, note))


def _has_usual_class(config: Mapping[str, Any]) -> bool:
    """Return whether a composite's class is the one that has all its parts."""
    name = saved_class(config)
    if family(config.get("model_type")).is_headless:
        return not name or name.endswith("Model")
    return not name or name.endswith("ForConditionalGeneration")


def unknown_family(model_type: str) -> str:
    """Return the sentence for a plan of a family that tiewise does not know. "" for any other."""
    if model_type == GENERIC:
        return ""
    if model_type == UNNAMED:
        return family(None).unknown_message
    # a nested config without model_type is called by its outer model
    outer = family(model_type.removesuffix(TEXT_PART))
    if family(model_type).has_facts or outer.has_facts:
        return ""
    return family(model_type).unknown_message


def count_other_tables(config: Config) -> Count:
    """Count tables that token ids index, other than the two at the ends, with their maps.

    An empty count for a config without such tables.
    """
    rows = config.size("vocab_size_per_layer_input", 0, least=0)
    width = config.size("hidden_size_per_layer_input", 0, least=0)
    if rows and width:
        # Gemma 3n and 4: a row has one part per layer. A map makes a vector of the same width from the hidden state,
        # and each layer has two more maps.
        d, layers = config.size("hidden_size"), config.size("num_hidden_layers")
        return lookup(rows, layers * width) + linear(d, layers * width) + linear(d, width).times(2 * layers)
    if config.get("ngram_vocab_size_ratio") is None:
        return Count()
    # LongCat-Flash-Lite: several tables for each length of n-grams, each with another odd number of rows and a map
    d, tables = config.size("hidden_size"), config.size("emb_split_num") * (config.size("emb_neighbor_num") - 1)
    base, each = int(config.number("ngram_vocab_size_ratio") * config.size("vocab_size")), divide_width(d, tables)
    rows = tables * base + tables**2  # Σ base + 2 i + 1
    return Count(rows * each, 0, tables * each) + linear(each, d).times(tables)


def initial_scales(config: Config) -> tuple[float, float]:
    """Return the initial std of the table's entries, and the scale at the head.

    For families whose first loss is not followed through their layers. T5 draws its table with unit entries and scales
    hidden states by d^-½, except for files that say untied (v1.1).
    """
    if config.record.unit_table:
        scales = {"scaled"}
        if config.values.get("tie_word_embeddings") is not False:
            scales.add("scaled if tied")
        factor = config.number("initializer_factor", 1.0)
        if config.record.unit_table in scales:
            return factor, config.size("d_model") ** -0.5
        return factor, 1.0
    if config.get("initializer_range") is None:
        return config.number("init_std", 0.02), 1.0
    return config.number("initializer_range"), 1.0


def _estimate(config: Config) -> Architecture:
    """Estimate a family without a reader.

    If the formula leaves out parts of the model, count only its tables.
    """
    missing = uncounted_parts(config.values, config.record)
    if not missing:
        return estimate_by_formula(config)
    width = config.width
    ends = TokenTables(config.size("vocab_size"), width, _is_tied(config))
    layers = config.size("num_hidden_layers", 0)
    stacks: tuple[AppliedLayers, ...] = ()
    if layers:
        stacks = (AppliedLayers("decoder", (LayerCounts({}, {}),) * layers),)
    return Architecture(config.family, width, ends, stacks, estimated=True, not_counted=missing, tables_alone=True)


def _is_tied(config: Config) -> bool:
    """Return whether a family without a reader ties: as its class does, else by default."""
    tied = read_claims(config.values).tied
    if tied is None:
        return bool(config.get("tie_word_embeddings", True))
    return tied


def estimate_by_formula(config: Config) -> Architecture:
    """Estimate attention and ffn matrices from the usual keys of configs.

    A list of ffn widths counts as its mean.
    """
    sizes = Sizes(
        vocab=config.size("vocab_size"),
        width=config.width,
        layers=config.size("num_hidden_layers"),
        heads=config.size("num_attention_heads", 1),
        kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        ffn=_mean_width(config.get("intermediate_size")),
        gated=(config.text("hidden_act") or config.text("hidden_activation")) not in UNGATED,
    )
    why = unknown_family(config.family) or f"{config.family} is not a family that tiewise counts exactly"
    note = f"{why}. Only attention and ffn matrices are estimated."
    architecture = from_sizes(sizes, _is_tied(config))
    if config.class_name.endswith("ForMaskedLM"):
        architecture = replace(architecture, stacks=(replace(architecture.stacks[0], name="encoder"),))
    return replace(architecture, family=config.family, notes=(note,))


def _mean_width(ffn: Any) -> Any:
    """Return the mean of a list of widths. Any other value is returned as it is; `Sizes` checks it."""
    if isinstance(ffn, list) and {type(width) for width in ffn} == {int}:
        return sum(ffn) // len(ffn)
    return ffn


def require_size(name: str, value: object) -> None:
    """Raise PlanError for a size of a wrong type or outside its range."""
    if name == "gated":
        if not isinstance(value, bool):
            raise PlanError(f"gated = {repr(value)[:40]}", "gated must be True or False")
        return
    most = MOST_LAYERS if name == "layers" else MOST
    if not isinstance(value, int) or not 1 <= value <= most:
        raise PlanError(f"{name} = {repr(value)[:40]}", f"{name} must be a whole number from 1 to {most:,}")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a generic decoder.

    Args:
        vocab: V, rows of the tables.
        width: D, width of the hidden states and of the tables.
        layers: L.
        heads: Attention heads per layer.
        kv_heads: Heads of keys and values. None: as many as `heads`.
        head_dim: Width of one head. None: D / heads.
        ffn: Width of the feed-forward layer. None: 4 D.
        gated: The feed-forward layer has a gate, a third matrix.

    Raises:
        PlanError: A size is not a whole number in its range, or heads and width contradict each other.

    >>> from tiewise import plan
    >>> from tiewise.lab import Sizes
    >>> plan(Sizes(vocab=50_000, width=1024, layers=12)).architecture.total
    202194944
    """

    vocab: int
    width: int
    layers: int
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                require_size(name, value)
        Heads.of(self.width, self.heads, self.kv_heads, self.head_dim)  # raises PlanError if the heads do not fit


def from_sizes(sizes: Sizes, tied: bool = True) -> Architecture:
    """Build the generic decoder: four attention matrices and two of the ffn (three if gated).

    It has no biases and no norms. With full heads and an ffn of 4 D that is 12 D² per layer, the textbook figure.
    """
    values: dict[str, Any] = {"vocab_size": sizes.vocab, "hidden_size": sizes.width, "num_hidden_layers": sizes.layers}
    values |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    values |= {"intermediate_size": sizes.ffn, "tie_word_embeddings": tied}
    architecture = decoder(Config(values, GENERIC), gated=sizes.gated, kind="none", fresh=None)
    return replace(architecture, estimated=True)
