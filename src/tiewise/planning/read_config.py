"""A config to an `Architecture`: by the family's own reader, by a generic formula, or by building the class.

read(json.load(open("config.json")))      exact for families with a reader; others are estimated, or their tables alone
from_sizes(Sizes(50_000, 1024, 12))       the generic decoder
count_on_meta(config)                     exact for any family of transformers, its layers not told apart
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiewise.checkpoint.families import family
from tiewise.core import Late
from tiewise.core.errors import PlanError
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Heads,
    LayerCounts,
    TokenTables,
    even,
    linear,
    lookup,
)
from tiewise.planning.config import GENERIC, MOST, MOST_LAYERS, UNNAMED, Config
from tiewise.planning.model_families import decoder, reader_of
from tiewise.planning.uncounted import has_token_head, parts_of_body, towers

torch, transformers = Late("torch"), Late("transformers")  # a plan needs them only to build
indexed_tensors = Late("tiewise.checkpoint.indexed_tensors")
TEXT_PART = "_text"  # names a nested text_config without model_type, after the outer model
# What is built of a config, the first that transformers has for its type; older versions lack the last.
BUILT = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText", "MultimodalLM")
UNGATED = ("relu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu2")  # others stand behind a gate today


def read(config: Mapping[str, Any]) -> Architecture:
    """Read a config; a nested text config (vision-language models) is read in the outer one's place.

    Raises:
        PlanError: a size is missing or contradicts another.
    """
    architecture = _read(config)
    if family(config.get("model_type")).reader is not None or has_token_head(config):
        return architecture
    return replace(architecture, ends=replace(architecture.ends, tied=False, head=False, head_biases=0))


def _read(config: Mapping[str, Any]) -> Architecture:
    """Read a config as one of a model with a token head, where no reader knows better."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return _read_nested(config, nested)
    c = Config(config, str(config.get("model_type") or UNNAMED)[:60])
    std, scale = fresh_table(c)
    reader = reader_of(c.record) or _estimated
    architecture, tables = reader(c), other_tables(c)
    if tables.parameters:
        architecture = replace(architecture, around={**architecture.around, "other_tables": tables})
    if c.get("num_nextn_predict_layers"):
        note = "layers that predict further tokens, with what tables they have of their own, are not counted"
        architecture = replace(architecture, notes=(*architecture.notes, note))
    return replace(architecture, table_std=std, output_scale=scale)


def _read_nested(config: Mapping[str, Any], text_config: Mapping[str, Any]) -> Architecture:
    """Read the language model of a config that nests it; the outer config decides whether it ties."""
    values = dict(text_config)
    if "tie_word_embeddings" in config:
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    if not values.get("model_type"):
        values["model_type"] = f"{config.get('model_type', 'unknown')}{TEXT_PART}"
    architecture = _read(values)
    note = "read at text_config: the language model alone, without the other towers"
    not_counted = (*architecture.not_counted, *towers(config))
    return replace(architecture, not_counted=not_counted, notes=(*architecture.notes, note))


def unknown_family(kind: str) -> str:
    """Return the sentence for a plan of a family that tiewise does not know. "" for any other."""
    if kind == GENERIC:
        return ""
    if kind == UNNAMED:
        return family(None).unknown_message
    outer = family(kind.removesuffix(TEXT_PART))  # a nested config without model_type is called by its outer model
    if family(kind).has_facts or outer.has_facts:
        return ""
    return family(kind).unknown_message


def other_tables(c: Config) -> Count:
    """Tables beside the two ends that token ids index, with the maps behind them. Nothing where a config has none."""
    rows = c.size("vocab_size_per_layer_input", 0, least=0)
    width = c.size("hidden_size_per_layer_input", 0, least=0)
    if rows and width:
        # Gemma 3n and 4: a row is as wide as all layers; as much is made of the hidden state, and each layer maps twice
        d, layers = c.size("hidden_size"), c.size("num_hidden_layers")
        return lookup(rows, layers * width) + linear(d, layers * width) + linear(d, width).times(2 * layers)
    if c.get("ngram_vocab_size_ratio") is None:
        return Count()
    # LongCat-Flash-Lite: for each length of n-grams some tables, each of another odd size, and a map behind each
    d, tables = c.size("hidden_size"), c.size("emb_split_num") * (c.size("emb_neighbor_num") - 1)
    base, each = int(c.number("ngram_vocab_size_ratio") * c.size("vocab_size")), even(d, tables)
    rows = tables * base + tables**2  # Σ base + 2 i + 1
    return Count(rows * each, 0, tables * each) + linear(each, d).times(tables)


def fresh_table(c: Config) -> tuple[float, float]:
    """(std of a fresh table's entries, scale at the head) of families that are not followed through their layers.

    T5 draws its table with unit entries and scales hidden states by d^-½, but for the files that say untied (v1.1).
    """
    if c.record.unit_table:
        scales = {"scaled"}
        if c.values.get("tie_word_embeddings") is not False:
            scales.add("scaled if tied")
        factor = c.number("initializer_factor", 1.0)
        if c.record.unit_table in scales:
            return factor, c.size("d_model") ** -0.5
        return factor, 1.0
    if c.get("initializer_range") is None:
        return c.number("init_std", 0.02), 1.0
    return c.number("initializer_range"), 1.0


def _estimated(c: Config) -> Architecture:
    """Estimate a family without a reader. If the formula leaves parts of it out, count its tables alone."""
    missing = parts_of_body(c.values, c.record)
    if not missing:
        return formula(c)
    width = c.width
    ends = TokenTables(c.size("vocab_size"), width, _ties(c))
    layers = c.size("num_hidden_layers", 0)
    stacks: tuple[AppliedLayers, ...] = ()
    if layers:
        stacks = (AppliedLayers("decoder", (LayerCounts({}, {}),) * layers),)
    return Architecture(c.family, width, ends, stacks, estimated=True, not_counted=missing, tables_alone=True)


def _ties(c: Config) -> bool:
    """Return whether a config of a family without a reader ties; one that does not say so does."""
    return bool(c.get("tie_word_embeddings", True))


def formula(c: Config) -> Architecture:
    """Count attention and ffn matrices by the names that most families give their sizes.

    A list of ffn widths counts as its mean.
    """
    sizes = Sizes(
        vocab=c.size("vocab_size"),
        width=c.width,
        layers=c.size("num_hidden_layers"),
        heads=c.size("num_attention_heads", 1),
        kv_heads=c.get("num_key_value_heads"),
        head_dim=c.get("head_dim"),
        ffn=_mean_width(c.get("intermediate_size")),
        gated=(c.text("hidden_act") or c.text("hidden_activation")) not in UNGATED,
    )
    why = unknown_family(c.family) or f"{c.family} is not a family that tiewise counts exactly"
    note = f"{why}: attention and ffn matrices alone are estimated"
    architecture = from_sizes(sizes, _ties(c))
    if c.class_name.endswith("ForMaskedLM"):
        architecture = replace(architecture, stacks=(replace(architecture.stacks[0], name="encoder"),))
    return replace(architecture, family=c.family, notes=(note,))


def _mean_width(ffn: Any) -> Any:
    """Return the mean of a list of widths. Any other value as it is, which `Sizes` checks."""
    if isinstance(ffn, list) and {type(width) for width in ffn} == {int}:
        return sum(ffn) // len(ffn)
    return ffn


@dataclass(frozen=True)
class Sizes:
    """A decoder by its sizes alone. None: as many key-value heads as heads, D / heads, and an ffn of 4 D."""

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
            if name == "gated" or value is None:
                continue
            most = MOST_LAYERS if name == "layers" else MOST
            if not isinstance(value, int) or not 1 <= value <= most:
                raise PlanError(f"{name} = {str(value)[:40]}", f"{name} must be a whole number from 1 to {most:,}")
        Heads.of(self.width, self.heads, self.kv_heads, self.head_dim)  # which says where they do not fit


def from_sizes(sizes: Sizes, tied: bool = True) -> Architecture:
    """Build the generic decoder: four attention matrices and two of the ffn (three if gated), no biases, no norms.

    With full heads and an ffn of 4 D that is 12 D² per layer, the figure of the textbooks.
    """
    values: dict[str, Any] = {"vocab_size": sizes.vocab, "hidden_size": sizes.width, "num_hidden_layers": sizes.layers}
    values |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    values |= {"intermediate_size": sizes.ffn, "tie_word_embeddings": tied}
    architecture = decoder(Config(values, GENERIC), gated=sizes.gated, kind="none", fresh=None)
    return replace(architecture, estimated=True)


def count_on_meta(config: Mapping[str, Any]) -> Architecture:
    """Build `config`'s model on the meta device, which holds no memory: tables, the head's bias, and all else.

    Exact in total and in the tables. Layers are not told apart, so sharing cannot be planned; every matrix counts as
    used by every token.

    Raises:
        PlanError: transformers does not know the family, or refuses the config.
    """
    kind = str(config.get("model_type", ""))
    model = _built_on_meta(config, kind)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is None or head is None:
        raise PlanError(f"{kind} has no token table and head", "plan works on language models")
    bias = getattr(head, "bias", None)
    looked_up = _other_lookups(model)
    counted = {id(parameter) for parameter in (table.weight, head.weight, bias)}.union(looked_up)
    others = [parameter for parameter in model.parameters() if id(parameter) not in counted]
    stored = sum(parameter.numel() for parameter in others)
    multiplied = sum(parameter.numel() for parameter in others if parameter.dim() > 1)
    other = Count(stored, multiplied, stored)
    if head.weight.shape != table.weight.shape:
        raise PlanError(f"{kind}: its two tables differ in shape", "such a model cannot be planned")
    vocab, width = table.weight.shape
    tables = TokenTables(vocab, width, head.weight is table.weight, head_biases=int(bias is not None))
    note = f"{kind} was built on the meta device; its layers are not told apart"
    other_tables = Count()
    for parameter in looked_up.values():
        other_tables += lookup(*parameter.shape)
    return Architecture(kind, width, tables, (), {"other_tables": other_tables, "other": other}, notes=(note,))


def _built_on_meta(config: Mapping[str, Any], kind: str) -> Any:
    """Return a config's language model on the meta device, or raise PlanError."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _model_of(transformers.AutoConfig.for_model(kind, **values))
    except Exception as error:  # an untrusted class may raise anything; the config is to blame for all of it
        what = f"transformers cannot build {kind or 'a config without model_type'}: {str(error)[:120]}"
        if kind and unknown_family(kind):
            what = f"{unknown_family(kind)}, and transformers has no class of this type"
        raise PlanError(what.replace("\n", " "), "leave build out to estimate instead") from None
    if model is None:
        raise PlanError(f"transformers has no language model of type {kind}", "leave build out to estimate instead")
    return model


def _model_of(config: Any) -> Any:
    """Return a model of the first class in `BUILT` that transformers has for a config. None if there is none."""
    for name in BUILT:
        auto = getattr(transformers, f"AutoModelFor{name}", None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto.from_config(config)
    return None


def _other_lookups(model: Any) -> dict[int, Any]:
    """Return by id the parameters that are tables of tokens by their name."""
    tables = {}
    for name, parameter in model.named_parameters():
        if indexed_tensors.PLAIN_TABLE.search(name.removesuffix(".weight")):
            tables[id(parameter)] = parameter
    return tables
