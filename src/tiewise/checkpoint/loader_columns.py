"""Columns of loaders: the outcome of loading for each state of the two ends.

The outcome depends on the flag that the loader reads, and on the stored tables of input embedding and output head.
docs/dev/incidents.md prints the columns, the source of each entry, and how the tests verify the classes in `VERIFIED`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tiewise.checkpoint.family_record import family_data

# states of the two ends, by their stored tables
NONE, SAME, DIFFERENT, ALONE, NEITHER = "no head", "equal head", "other head", "head alone", "neither"
ROUNDED, UNKNOWN = "equal once rounded", "not known"
STATES = (NONE, SAME, DIFFERENT, ALONE, NEITHER)

# outcomes
TIED, UNTIED, UNTIED_WITH_WARNING = "tied", "untied", "kept with a warning"
DROPPED, RANDOM_HEAD, RANDOM_TABLE, NEW_BIAS = "head dropped", "random head", "random table", "new bias"
NO_SCALE, RANDOM_LAYERS, RANDOM_TENSORS = "scale dropped", "random layers", "random tensors"
NEW_TENSORS, INCOMPLETE = "new tensors", "incomplete"
ERROR, NO_HEAD, NOT_SERVED, DEPENDS = "load error", "no head", "not served", "depends"
# outcomes without a model, or with parts that nobody trained
BROKEN = (RANDOM_HEAD, RANDOM_TABLE, RANDOM_LAYERS, RANDOM_TENSORS, NEW_TENSORS, INCOMPLETE, NEW_BIAS, NO_SCALE, ERROR)
CORRECT = (TIED, UNTIED, UNTIED_WITH_WARNING, NO_HEAD)
SENTENCES = {  # {outcome: the usual sentence about it}
    TIED: "The head is the table.",
    UNTIED: "Both are loaded as stored.",
    UNTIED_WITH_WARNING: "Both are loaded as stored; a warning says that they differ.",
    DROPPED: "The stored head is thrown away and the table takes its place.",
    RANDOM_HEAD: "The head is drawn at random: no tensor is its own, and nothing ties it.",
    RANDOM_TABLE: "The input table is drawn at random.",
    RANDOM_LAYERS: "The layers are drawn at random: none is stored under a name that the class is loaded from.",
    RANDOM_TENSORS: "Tensors outside the embedding and head are drawn at random.",
    NEW_TENSORS: "Tensors outside the embedding and head start with fixed numbers.",
    INCOMPLETE: "Tensors outside the embedding and head are not stored.",
    ERROR: "It refuses to load.",
    NO_SCALE: "The numbers of the packed head are taken for its weights, and their scales are dropped.",
    NO_HEAD: "The class has no token head.",
    NOT_SERVED: "No class of it is known for this kind of model.",
    DEPENDS: "It was not seen in a run.",
}
PHRASES = {  # {outcome: the predicate of a sentence whose subject is several loaders}
    TIED: "use one table for both ends",
    UNTIED: "load both tables as stored",
    UNTIED_WITH_WARNING: "load both tables as stored, and warn",
    DROPPED: "drop the stored head",
    RANDOM_HEAD: "draw the head at random",
    RANDOM_TABLE: "draw the input table at random",
    RANDOM_LAYERS: "draw layers at random",
    RANDOM_TENSORS: "draw tensors outside the two ends at random",
    NEW_TENSORS: "start tensors outside the two ends with fixed numbers",
    INCOMPLETE: "lack tensors outside the two ends",
    NEW_BIAS: "start the head's bias anew",
    NO_SCALE: "drop the scales of the head",
    ERROR: "refuse to load",
    NO_HEAD: "load a model without a token head",
    NOT_SERVED: "lack a class for this model",
    DEPENDS: "depend on the class's code",
}


@dataclass(frozen=True)
class LoaderOutcome:
    """Outcome of loading a checkpoint with one loader."""

    loader: str  # name of the loader
    versions: str  # versions of the loader that give this outcome
    outcome: str  # short name, such as "tied" or "load error"
    sentence: str  # the outcome and its reason
    right: bool | None  # the loaded model uses the stored tensors; None if the folder does not decide it
    source: str  # public thread, source file or test that shows it
    # derived from the loader's source or threads; False if the tests of tiewise load this case
    predicted: bool = True


@dataclass(frozen=True)
class Loader:
    """Loader with its versions, its column, and the source of the column."""

    name: str
    versions: str
    source: str
    tied: tuple[str, ...]  # outcomes for each of `STATES` if the flag is true
    untied: tuple[str, ...]  # outcomes for each of `STATES` if the flag is false
    compares: bool = False  # it compares the numbers of two stored tables; NaN differs from every number


# last two entries of columns: states `ALONE` and `NEITHER`
_RAISES = (ERROR, ERROR)
_DRAWS_TABLE = (RANDOM_TABLE, RANDOM_TABLE)
# columns, in the order of `STATES`
_OVERWRITES_HEAD = (TIED, TIED, DROPPED, *_RAISES)
_KEEPS_OTHER_HEAD = (TIED, TIED, UNTIED_WITH_WARNING, *_RAISES)
_SKIPS_HEAD = (TIED, DROPPED, DROPPED, *_RAISES)
_LOADS_AS_STORED = (TIED, UNTIED, UNTIED, *_RAISES)
_DRAWS_HEAD = (RANDOM_HEAD, UNTIED, UNTIED, *_RAISES)
_DRAWS_MISSING = (RANDOM_HEAD, UNTIED, UNTIED, *_DRAWS_TABLE)
_REFUSES_HEAD = (TIED, ERROR, ERROR, *_RAISES)
_REQUIRES_HEAD = (ERROR, UNTIED, UNTIED, *_RAISES)

TRANSFORMERS_4 = Loader(
    "transformers", "4", "transformers#42612", (TIED, TIED, DROPPED, *_DRAWS_TABLE), untied=_DRAWS_MISSING
)
TRANSFORMERS_5 = Loader(
    "transformers",
    family_data()["transformers"],
    "modeling_utils.py and core_model_loading.py of this version",
    (TIED, TIED, UNTIED_WITH_WARNING, TIED, RANDOM_TABLE),
    untied=_DRAWS_MISSING,
    compares=True,
)
VLLM_BEFORE = Loader("vLLM", "before August 2026", "vllm#51063", _OVERWRITES_HEAD, _DRAWS_HEAD)
VLLM_AFTER = Loader("vLLM", "since August 2026", "vllm#51665", _KEEPS_OTHER_HEAD, _LOADS_AS_STORED, compares=True)
# models whose class has no separate head to load weights into; cohere2_moe is one too
VLLM_HEADLESS = Loader("vLLM", "since August 2026", "vllm#51665, vllm#53170", _REFUSES_HEAD, _REFUSES_HEAD, True)
# the class that loads its head only from a stored tensor, even if its flag is true
VLLM_SEPARATE_HEAD = Loader("vLLM", "before #53020", "vllm#53019, vllm#53020", _DRAWS_MISSING, _DRAWS_MISSING)
VLLM_NAMED = {"": VLLM_AFTER, "no head": VLLM_HEADLESS}  # {`vllm` of a family's record: loader}
SGLANG = replace(TRANSFORMERS_4, name="SGLang", versions="at bf7a0e2", source="models/llama.py, load_weights")


def _llama_cpp(source: str, column: tuple[str, ...]) -> Loader:
    """Return a column of llama.cpp, which ignores the flag."""
    return Loader("llama.cpp", "convert_hf_to_gguf", source, column, column)


LLAMA_CPP = _llama_cpp("llama.cpp#13328, llama.cpp#12456", _LOADS_AS_STORED)
LLAMA_CPP_GEMMA = _llama_cpp("llama.cpp#9065, conversion/gemma.py at 061b8c5", _SKIPS_HEAD)
# models for which its tensor map lacks a name for the head; the converter stops at such a tensor
LLAMA_CPP_UNNAMED = _llama_cpp("gguf 0.19.0 (run), conversion/command_r.py (00487aa)", _REFUSES_HEAD)
# models for which its loader requires a head; converters store only what the folder has (classes not examined)
LLAMA_CPP_REQUIRED = _llama_cpp("src/models/qwen2moe.cpp (623ac8d), stablelm.cpp (82234e0)", _REQUIRES_HEAD)
LLAMA_CPP_T5 = _llama_cpp("llama.cpp#8055, llama.cpp#8141", _LOADS_AS_STORED)
LLAMA_CPP_NAMED = {  # {`llama_cpp` of a family's record: loader}
    "": LLAMA_CPP,
    "no head": LLAMA_CPP_GEMMA,
    "head unnamed": LLAMA_CPP_UNNAMED,
    "head required": LLAMA_CPP_REQUIRED,
    "T5": LLAMA_CPP_T5,  # the only encoder-decoder
}
MLX = Loader("mlx-lm", "0.2x", "models/llama.py: sanitize", _OVERWRITES_HEAD, _REQUIRES_HEAD)
MODEL_FILES_ALONE = ("llama.cpp", "mlx-lm")  # loaders that open only model*.safetensors
# outcomes of test runs in data/mlx_lm.json
MLX_LETTERS = {"t": TIED, "u": UNTIED, "d": DROPPED, "e": ERROR, "?": DEPENDS}

# {class: flags by level of the config} that the tests load in every one of `STATES`
_ROOT: tuple[dict[str, bool], ...] = ({"": True}, {"": False}, {})
_NESTED: tuple[dict[str, bool], ...] = (
    *_ROOT,
    {"": True, "text_config": True},
    {"": True, "text_config": False},
    {"": False, "text_config": True},
    {"": False, "text_config": False},
    {"text_config": True},
)
VERIFIED = {
    **dict.fromkeys(("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "BertForMaskedLM"), _ROOT),
    **{f"{name}ForConditionalGeneration": _ROOT for name in ("T5", "SwitchTransformers", "Bart")},
    "RemBertForCausalLM": _ROOT,  # never ties
    "LlavaForConditionalGeneration": _NESTED,  # either level ties
    "Gemma3ForConditionalGeneration": _NESTED,  # the root decides
    "Blip2ForConditionalGeneration": _NESTED,  # the text part decides
}


def outcome_of(loader: Loader, word: str, sentence: str = "") -> LoaderOutcome:
    """Return an outcome of a loader, by default with the usual sentence."""
    is_right = None
    if word not in (DEPENDS, NOT_SERVED):
        is_right = word in CORRECT
    return LoaderOutcome(loader.name, loader.versions, word, sentence or SENTENCES[word], is_right, loader.source)


def named_loaders(group: Iterable[LoaderOutcome], outcomes: Iterable[LoaderOutcome]) -> str:
    """Return the names of the loaders of a group.

    A loader has its versions only if other versions of it are outside the group.

    Args:
        group: some of the outcomes.
        outcomes: all outcomes.
    """
    versions: dict[str, list[str]] = {}
    for outcome in group:
        versions.setdefault(outcome.loader, []).append(outcome.versions)
    every = Counter(outcome.loader for outcome in outcomes)
    listed = []
    for loader, its_versions in versions.items():
        if len(its_versions) < every[loader]:
            loader = f"{loader} {' and '.join(its_versions)}"
        listed.append(loader)
    return ", ".join(listed)
