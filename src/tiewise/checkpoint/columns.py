"""What each loader does, by the flag and by what is stored: the table that docs/loaders.md prints."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.families import data_version

NONE, SAME, DIFFERENT, ALONE, NEITHER = "no head", "equal head", "other head", "head alone", "neither"
ROUNDED, UNKNOWN = "equal once rounded", "not known"

TIED, UNTIED, KEPT = "tied", "untied", "kept with a warning"
DROPPED, RANDOM_HEAD, RANDOM_TABLE, NEW_BIAS = "head dropped", "random head", "random table", "new bias"
ERROR, NO_HEAD, NOT_SERVED, DEPENDS = "load error", "no head", "not served", "depends"
LOST = (RANDOM_HEAD, RANDOM_TABLE, NEW_BIAS, ERROR)  # no model, or one that nobody trained
RIGHT = (TIED, UNTIED, KEPT, NO_HEAD)
PLAIN = {
    TIED: "The head is the table.",
    UNTIED: "Both are loaded as stored.",
    KEPT: "Both are loaded as stored; a warning says that they differ.",
    DROPPED: "The stored head is thrown away and the table takes its place.",
    RANDOM_HEAD: "The head is drawn at random: no tensor is its own, and nothing ties it.",
    RANDOM_TABLE: "The input table is drawn at random.",
    ERROR: "It refuses to load.",
    NO_HEAD: "The class has no token head.",
    NOT_SERVED: "No class of it is known for this kind of model.",
}


@dataclass(frozen=True)
class Loader:
    """A loader's name, its versions, where its column comes from, and its column {(flag, state): outcome}.

    `compares`: it asks whether two stored tables hold the same numbers, of which NaN is none.
    """

    name: str
    versions: str
    source: str
    column: dict[tuple[bool, str], str]
    compares: bool = False


_FLAG_RULES = {
    (True, NONE): TIED,
    (True, SAME): TIED,
    (False, NONE): RANDOM_HEAD,
    (False, SAME): UNTIED,
    (False, DIFFERENT): UNTIED,
    (False, ALONE): RANDOM_TABLE,
    (True, NEITHER): RANDOM_TABLE,
    (False, NEITHER): RANDOM_TABLE,
}
_LOUD = {(flag, state): ERROR for flag in (True, False) for state in (ALONE, NEITHER)}
TRANSFORMERS_4 = Loader(
    "transformers", "4", "transformers#42612", _FLAG_RULES | {(True, DIFFERENT): DROPPED, (True, ALONE): RANDOM_TABLE}
)
TRANSFORMERS_5 = Loader(
    "transformers",
    data_version(),
    "modeling_utils.py and core_model_loading.py of this version",
    _FLAG_RULES | {(True, DIFFERENT): KEPT, (True, ALONE): TIED},
    compares=True,
)
VLLM_BEFORE = Loader("vLLM", "before August 2026", "vllm#51063", _FLAG_RULES | {(True, DIFFERENT): DROPPED} | _LOUD)
VLLM_AFTER = Loader(
    "vLLM",
    "since August 2026",
    "vllm#51665",
    _FLAG_RULES | {(True, DIFFERENT): KEPT, (False, NONE): TIED} | _LOUD,
    compares=True,
)
_BY_FILE = {(flag, NONE): TIED for flag in (True, False)} | {
    (flag, state): UNTIED for flag in (True, False) for state in (SAME, DIFFERENT)
}
LLAMA_CPP = Loader("llama.cpp", "convert_hf_to_gguf", "llama.cpp#13328, llama.cpp#12456", _BY_FILE | _LOUD)
LLAMA_CPP_GEMMA = Loader(
    "llama.cpp",
    "convert_hf_to_gguf",
    "llama.cpp#9065",
    LLAMA_CPP.column | {(flag, state): DROPPED for flag in (True, False) for state in (SAME, DIFFERENT)},
)
LLAMA_CPP_T5 = Loader("llama.cpp", "convert_hf_to_gguf", "llama.cpp#8055, llama.cpp#8141", LLAMA_CPP.column)
MLX = Loader(
    "mlx-lm",
    "0.2x",
    "mlx-lm, models/llama.py: sanitize",
    _FLAG_RULES | {(True, DIFFERENT): DROPPED, (False, NONE): ERROR} | _LOUD,
)
# flags, by level, with which the tests load these classes in every state of the matrix
_ROOT: tuple[dict[str, bool], ...] = ({"": True}, {"": False}, {})
_NESTED = (*_ROOT, *({"": a, "text_config": b} for a in (True, False) for b in (True, False)), {"text_config": True})
VERIFIED = dict.fromkeys(
    (
        *("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"),
        *("SwitchTransformersForConditionalGeneration", "BartForConditionalGeneration"),
        "RemBertForCausalLM",  # never ties
    ),
    _ROOT,
) | dict.fromkeys(
    (
        "LlavaForConditionalGeneration",  # either level ties
        "Gemma3ForConditionalGeneration",  # the root decides
        "Blip2ForConditionalGeneration",  # the text part decides
    ),
    _NESTED,
)
