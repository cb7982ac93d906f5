"""Columns of loaders: the outcome of loading for each state of the two ends.

The state of a folder is the flag as the loader reads it and the tables that are stored at the two ends. docs/loaders.md
prints the columns, says where each entry comes from, and how those of `VERIFIED` are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiewise.checkpoint.family_record import family_data

# states of the two ends: the tables that are stored
NONE, SAME, DIFFERENT, ALONE, NEITHER = "no head", "equal head", "other head", "head alone", "neither"
ROUNDED, UNKNOWN = "equal once rounded", "not known"
STATES = (NONE, SAME, DIFFERENT, ALONE, NEITHER)

# outcomes
TIED, UNTIED, UNTIED_WITH_WARNING = "tied", "untied", "kept with a warning"
DROPPED, RANDOM_HEAD, RANDOM_TABLE, NEW_BIAS = "head dropped", "random head", "random table", "new bias"
NO_SCALE, RANDOM_LAYERS = "scale dropped", "random layers"
ERROR, NO_HEAD, NOT_SERVED, DEPENDS = "load error", "no head", "not served", "depends"
BROKEN = (RANDOM_HEAD, RANDOM_TABLE, RANDOM_LAYERS, NEW_BIAS, NO_SCALE, ERROR)  # no model, or one that nobody trained
CORRECT = (TIED, UNTIED, UNTIED_WITH_WARNING, NO_HEAD)
SENTENCES = {
    TIED: "The head is the table.",
    UNTIED: "Both are loaded as stored.",
    UNTIED_WITH_WARNING: "Both are loaded as stored; a warning says that they differ.",
    DROPPED: "The stored head is thrown away and the table takes its place.",
    RANDOM_HEAD: "The head is drawn at random: no tensor is its own, and nothing ties it.",
    RANDOM_TABLE: "The input table is drawn at random.",
    RANDOM_LAYERS: "The layers are drawn at random: none is stored under a name that the class is loaded from.",
    ERROR: "It refuses to load.",
    NO_SCALE: "The numbers of the packed head are taken for its weights, and their scales are dropped.",
    NO_HEAD: "The class has no token head.",
    NOT_SERVED: "No class of it is known for this kind of model.",
}


@dataclass(frozen=True)
class LoaderOutcome:
    """Outcome of loading a checkpoint with one loader."""

    loader: str  # its name
    versions: str  # for which of its versions this holds
    outcome: str  # one of the short words above
    sentence: str  # what happens, and why
    right: bool | None  # the model computes what the tensors say; None if that cannot be known from the folder
    source: str  # the public thread, or the test, that shows it
    # from the loader's source or its threads; False where this package's tests load this very case
    predicted: bool = True


@dataclass(frozen=True)
class Loader:
    """Loader's name, its versions, the source of its column, and its column."""

    name: str
    versions: str
    source: str
    tied: tuple[str, ...]  # outcomes for each of `STATES` if the flag that it reads is true
    untied: tuple[str, ...]  # and if it is false
    compares: bool = False  # it compares the numbers of two stored tables, and NaN equals nothing


# ends of columns: a head alone, and neither table
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
# models whose class has no head of its own to load one into: cohere2_moe is one more
VLLM_HEADLESS = Loader("vLLM", "since August 2026", "vllm#51665, vllm#53170", _REFUSES_HEAD, _REFUSES_HEAD, True)
# the one class that fills its head only from a stored one, though its flag says tied
VLLM_SEPARATE_HEAD = Loader("vLLM", "before #53020", "vllm#53019, vllm#53020", _DRAWS_MISSING, _DRAWS_MISSING)
VLLM_NAMED = {"": VLLM_AFTER, "no head": VLLM_HEADLESS}  # by `vllm` of a family's record
SGLANG = replace(TRANSFORMERS_4, name="SGLang", versions="at bf7a0e2", source="models/llama.py, load_weights")


def _llama_cpp(source: str, column: tuple[str, ...]) -> Loader:
    """Return a column of llama.cpp, which reads no flag."""
    return Loader("llama.cpp", "convert_hf_to_gguf", source, column, column)


LLAMA_CPP = _llama_cpp("llama.cpp#13328, llama.cpp#12456", _LOADS_AS_STORED)
LLAMA_CPP_GEMMA = _llama_cpp("llama.cpp#9065, conversion/gemma.py at 061b8c5", _SKIPS_HEAD)
# its tensor map has no name for a head of these, and the converter stops at a tensor without a name
LLAMA_CPP_UNNAMED = _llama_cpp("gguf 0.19.0 (run), conversion/command_r.py (00487aa)", _REFUSES_HEAD)
# its loader requires a head of these, and converters store what the folder has (their own classes were not read)
LLAMA_CPP_REQUIRED = _llama_cpp("src/models/qwen2moe.cpp (623ac8d), stablelm.cpp (82234e0)", _REQUIRES_HEAD)
LLAMA_CPP_T5 = _llama_cpp("llama.cpp#8055, llama.cpp#8141", _LOADS_AS_STORED)
LLAMA_CPP_NAMED = {  # by `llama_cpp` of a family's record
    "": LLAMA_CPP,
    "no head": LLAMA_CPP_GEMMA,
    "head unnamed": LLAMA_CPP_UNNAMED,
    "head required": LLAMA_CPP_REQUIRED,
    "T5": LLAMA_CPP_T5,  # the only encoder-decoder
}
MLX = Loader("mlx-lm", "0.2x", "models/llama.py: sanitize", _OVERWRITES_HEAD, _REQUIRES_HEAD)
MODEL_FILES_ALONE = ("llama.cpp", "mlx-lm")  # loaders that open model*.safetensors and no other file
MLX_LETTERS = {"t": TIED, "u": UNTIED, "d": DROPPED, "e": ERROR}

# classes, and flags by level with which the tests load each in every state of the matrix
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
    """Return one outcome of a loader, with the usual sentence unless one is given."""
    is_right = None
    if word not in (DEPENDS, NOT_SERVED):
        is_right = word in CORRECT
    return LoaderOutcome(loader.name, loader.versions, word, sentence or SENTENCES[word], is_right, loader.source)
