"""What each loader makes of a checkpoint: one folder, different models.

The state of a folder is the flag as the loader reads it and what is stored at the two ends; `MATRIX` says what each
loader does in each state. docs/loaders.md tells where each entry comes from and how the verified ones are verified.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.claims import OWN_TYPE, Claim, architecture
from tiewise.checkpoint.dtypes import BITS
from tiewise.checkpoint.facts import TEXT_PARTS, Facts
from tiewise.checkpoint.families import data_version, family
from tiewise.checkpoint.likeness import IDENTICAL, SAME_VALUES
from tiewise.checkpoint.names import module_of
from tiewise.checkpoint.strict_json import short

NONE, SAME, DIFFERENT, ALONE, NEITHER = "no head", "equal head", "other head", "head alone", "neither"
ROUNDED, UNKNOWN = "equal once rounded", "not known"

TIED, UNTIED, KEPT = "tied", "untied", "kept with a warning"
DROPPED, RANDOM_HEAD, RANDOM_TABLE = "head dropped", "random head", "random table"
ERROR, NO_HEAD, NOT_SERVED, DEPENDS = "load error", "no head", "not served", "depends"
_WRAPPED = "The names in the file are those of a wrapped model: nothing in it is found."
_RIGHT = (TIED, UNTIED, KEPT, NO_HEAD)
_PLAIN = {
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
class Outcome:
    """What one loader makes of a checkpoint.

    Args:
        loader: its name.
        versions: for which of its versions this holds.
        outcome: one of the short words above.
        sentence: what happens, and why.
        right: the model computes what the tensors say; None where that cannot be known from here.
        source: the public thread, or the test, that shows it.
        predicted: not verified by loading; False for the transformers of the architecture data.
    """

    loader: str
    versions: str
    outcome: str
    sentence: str
    right: bool | None
    source: str
    predicted: bool = True


@dataclass(frozen=True)
class Loader:
    """A loader's name, its versions, where its column comes from, and its column {(flag, state): outcome}."""

    name: str
    versions: str
    source: str
    column: dict[tuple[bool, str], str]


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
    f"verified by this package's tests with transformers {data_version()}",
    _FLAG_RULES | {(True, DIFFERENT): KEPT, (True, ALONE): TIED},
)
VLLM_BEFORE = Loader("vLLM", "before August 2026", "vllm#51063", _FLAG_RULES | {(True, DIFFERENT): DROPPED} | _LOUD)
VLLM_AFTER = Loader(
    "vLLM", "since August 2026", "vllm#51665", _FLAG_RULES | {(True, DIFFERENT): KEPT, (False, NONE): TIED} | _LOUD
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
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForCondGeneration")


def predict(facts: Facts) -> tuple[Outcome, ...]:
    """Return what each loader makes of a checkpoint; nothing where there is no config, or no tensors, to load."""
    if facts.folder.config is None or not facts.folder.tensors:
        return ()
    return (
        _transformers(facts, TRANSFORMERS_4, _flag_of_text(facts), predicted=True),
        _transformers(facts, TRANSFORMERS_5, facts.claims.tied, predicted=False),
        _server(facts, VLLM_BEFORE, _flag_of_any(facts)),
        _server(facts, VLLM_AFTER, _flag_of_any(facts)),
        _server(facts, _llama_cpp(facts), facts.claims.tied),
        _server(facts, MLX, _flag_or_true(facts)),
    )


# the state of a folder


def state(facts: Facts) -> str:
    """What is stored at the two ends, as one of the words above."""
    roles = facts.roles
    if not facts.complete:
        return UNKNOWN
    if roles.input is None:
        return NEITHER if roles.output is None else ALONE
    if roles.output is None:
        return NONE
    if facts.ends is not None:
        return {IDENTICAL: SAME, SAME_VALUES: _rounded(facts)}.get(facts.ends.kind, DIFFERENT)
    packed = roles.quantised_input or roles.quantised_output
    return DIFFERENT if not packed and roles.input.shape != roles.output.shape else UNKNOWN


def _rounded(facts: Facts) -> str:
    """Two tables that are equal in the narrower of their types are equal to a loader that works in that type."""
    table, head = facts.roles.input, facts.roles.output
    assert table is not None
    assert head is not None
    narrow = min(table.dtype, head.dtype, key=lambda name: (BITS[name], name))
    written = facts.config.get("dtype", facts.config.get("torch_dtype"))
    return SAME if _DTYPES.get(written if isinstance(written, str) else "") == narrow else ROUNDED


def _flag_of_text(facts: Facts) -> bool | None:
    """What transformers 4 asks: the config of the text part, whose base default is true."""
    if facts.claims.fixed is False:
        return False
    below = [c for c in facts.claims.levels if c.level in TEXT_PARTS and c.written is not None]
    claim: Claim | None = below[0] if below else facts.claims.deciding
    if claim is None or claim.effective is None:
        return True
    return claim.effective


def _flag_of_any(facts: Facts) -> bool | None:
    """What vLLM asks: a flag that is true at the root or in the text part."""
    written = any(claim.written for claim in facts.claims.levels)
    return True if written and facts.claims.fixed is not False else facts.claims.tied


def _flag_or_true(facts: Facts) -> bool | None:
    """What mlx-lm asks: the flag as written at any level, true where absent."""
    if facts.claims.fixed is False:
        return False
    written = [claim.written for claim in facts.claims.levels if claim.written is not None]
    return any(written) if written else True


# one loader


def _transformers(facts: Facts, loader: Loader, flag: bool | None, *, predicted: bool) -> Outcome:
    recent = loader is TRANSFORMERS_5
    deciding = facts.claims.deciding
    if facts.config.get("model_type") == OWN_TYPE and not recent:
        return _outcome(loader, ERROR, "It does not know the type `tiewise`.", predicted)
    if not facts.claims.known:
        why = "The family is not in the architecture data: its own code decides."
        return _outcome(loader, DEPENDS, why, True)
    if facts.roles.headless:
        return _outcome(loader, NO_HEAD, _PLAIN[NO_HEAD], predicted)
    if recent and deciding is not None and deciding.malformed is not None and _strict(deciding):
        return _outcome(
            loader, ERROR, "The flag is neither true nor false, and its config class refuses that.", predicted
        )
    if _wrapped(facts):
        return _outcome(loader, RANDOM_TABLE, _WRAPPED, predicted)
    misfit = _misfit(facts)
    if misfit is not None:
        return _outcome(loader, ERROR, misfit, predicted)
    orphan = _orphan(facts) if recent and flag is False else None
    if orphan is not None:
        why = f"{orphan} is drawn at random: only the table that it would be tied to is stored, and the flag is false."
        return _outcome(loader, RANDOM_TABLE, why, predicted)
    return _from_matrix(facts, loader, flag, predicted=predicted)


def _strict(claim: Claim) -> bool:
    """Whether the class refuses a flag that is no boolean."""
    known = family(claim.model_type)
    loose = "" if known is None else known.loose
    return not (loose == "any" or (loose == "null" and claim.malformed == "None"))


def _wrapped(facts: Facts) -> bool:
    """Whether the tables are stored under the names of a wrapped model, which no loader looks for."""
    pairs = ((facts.roles.input, facts.roles.input_name), (facts.roles.output, facts.roles.output_name))
    return any(end is not None and module_of(end.name)[0] != module_of(name or "")[0] for end, name in pairs)


def _misfit(facts: Facts) -> str | None:
    """A plain table whose rows are not the config's vocabulary, which no shape of the class has."""
    wanted = None if facts.text is None else facts.text.vocab_size
    for end, packed in (
        (facts.roles.input, facts.roles.quantised_input),
        (facts.roles.output, facts.roles.quantised_output),
    ):
        if end is not None and not packed and wanted is not None and end.rows not in {wanted, *facts.vocabularies}:
            return f"{short(end.name)} has {end.rows} rows, and the config says {wanted}."
    return None


def _orphan(facts: Facts) -> str | None:
    """An input table that is not stored, though one that the class may tie it to is."""
    stored = {tensor.name for tensor in facts.roles.inputs}
    for target, source in facts.roles.ties.items():
        if target != facts.roles.output_name and target not in stored and source in stored:
            return target
    return None


def _llama_cpp(facts: Facts) -> Loader:
    """Return its column for this family: it converts each by a class of its own, T5 the only encoder-decoder."""
    kind = facts.claims.levels[0].model_type
    special = dict.fromkeys(("gemma", "gemma2"), LLAMA_CPP_GEMMA) | dict.fromkeys(("t5", "mt5", "umt5"), LLAMA_CPP_T5)
    return special.get(kind or "", LLAMA_CPP)


def _server(facts: Facts, loader: Loader, flag: bool | None) -> Outcome:
    if facts.config.get("model_type") == OWN_TYPE:
        return _outcome(loader, ERROR, "It does not know the type `tiewise`: export the model dense first.", True)
    if facts.roles.headless:
        return _outcome(loader, NO_HEAD, _PLAIN[NO_HEAD], True)
    if loader is not LLAMA_CPP_T5 and not _generates(facts):
        return _outcome(loader, NOT_SERVED, _PLAIN[NOT_SERVED], True)
    if _wrapped(facts):
        return _outcome(loader, ERROR, _WRAPPED, True)
    return _from_matrix(facts, loader, flag, predicted=True)


def _generates(facts: Facts) -> bool:
    """Whether the class is a decoder that writes text token by token."""
    name = architecture(facts.config)
    t5_or_bart = facts.config.get("is_encoder_decoder") is True or facts.claims.t5_like
    return not t5_or_bart and (name is None or name.endswith(_DECODERS))


def _from_matrix(facts: Facts, loader: Loader, flag: bool | None, *, predicted: bool) -> Outcome:
    found = state(facts)
    if found == UNKNOWN and not facts.complete:
        return _outcome(loader, DEPENDS, "Some tensors could not be read.", predicted)
    flags = [flag] if flag is not None else [True, False]
    states = [found] if found not in (ROUNDED, UNKNOWN) else [SAME, DIFFERENT]
    words = {loader.column[choice, cell] for choice in flags for cell in states}
    if len(words) == 1:
        word = words.pop()
        return _outcome(loader, word, _PLAIN[word], predicted)
    what = "on whether table and head hold the same values"
    if flag is None:
        what = "on the flag that its own code takes"
    elif found == ROUNDED:
        what = "on the precision in which the two are compared"
    parts = " or ".join(sorted(words))
    right = all(word in _RIGHT for word in words) or None
    made = _outcome(loader, DEPENDS, f"It depends {what}: {parts}.", predicted)
    return Outcome(made.loader, made.versions, DEPENDS, made.sentence, right, made.source, predicted)


def _outcome(loader: Loader, word: str, sentence: str, predicted: bool) -> Outcome:
    right = None if word in (DEPENDS, NOT_SERVED) else word in _RIGHT
    return Outcome(loader.name, loader.versions, word, sentence, right, loader.source, predicted)
