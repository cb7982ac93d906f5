"""What each loader makes of a checkpoint: one folder, different models.

The state of a folder is the flag as the loader reads it and what is stored at the two ends; a loader's column says what
it does in each state. docs/loaders.md prints the columns, and tells where each entry comes from and how those of
`VERIFIED` are verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tiewise.checkpoint.claims import FLAG, architecture, of_tiewise, unwrapped
from tiewise.checkpoint.facts import TEXT_PARTS, Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import family_data, mlx_data
from tiewise.checkpoint.hf_folder import SINGLE
from tiewise.checkpoint.stored import BITS, TORCH_TYPES
from tiewise.checkpoint.table_scans import SAME_VALUES
from tiewise.checkpoint.untrusted import short

NONE, SAME, DIFFERENT, ALONE, NEITHER = "no head", "equal head", "other head", "head alone", "neither"
ROUNDED, UNKNOWN = "equal once rounded", "not known"

TIED, UNTIED, KEPT = "tied", "untied", "kept with a warning"
DROPPED, RANDOM_HEAD, RANDOM_TABLE, NEW_BIAS = "head dropped", "random head", "random table", "new bias"
NO_SCALE, RANDOM_LAYERS = "scale dropped", "random layers"
ERROR, NO_HEAD, NOT_SERVED, DEPENDS = "load error", "no head", "not served", "depends"
LOST = (RANDOM_HEAD, RANDOM_TABLE, RANDOM_LAYERS, NEW_BIAS, NO_SCALE, ERROR)  # no model, or one that nobody trained
RIGHT = (TIED, UNTIED, KEPT, NO_HEAD)
PLAIN = {
    TIED: "The head is the table.",
    UNTIED: "Both are loaded as stored.",
    KEPT: "Both are loaded as stored; a warning says that they differ.",
    DROPPED: "The stored head is thrown away and the table takes its place.",
    RANDOM_HEAD: "The head is drawn at random: no tensor is its own, and nothing ties it.",
    RANDOM_TABLE: "The input table is drawn at random.",
    RANDOM_LAYERS: "The layers are drawn at random: none is stored under a name that the class is loaded from.",
    ERROR: "It refuses to load.",
    NO_SCALE: "The numbers of the packed head are taken for its weights, and their scales are dropped.",
    NO_HEAD: "The class has no token head.",
    NOT_SERVED: "No class of it is known for this kind of model.",
}
WITH_OWN = "transformers with tiewise.hf"
STATES = (NONE, SAME, DIFFERENT, ALONE, NEITHER)


@dataclass(frozen=True)
class Loader:
    """A loader's name, its versions, where its column comes from, and its column."""

    name: str
    versions: str
    source: str
    tied: tuple[str, ...]  # what it makes of each of `STATES` where the flag that it reads is true
    untied: tuple[str, ...]  # and where it is false
    compares: bool = False  # it asks whether two stored tables hold the same numbers, of which NaN is none


_LOUD, _RANDOM = (ERROR, ERROR), (RANDOM_TABLE, RANDOM_TABLE)  # of a head alone, and of neither
_BY_FLAG, _AS_STORED = (TIED, TIED, DROPPED, *_LOUD), (TIED, UNTIED, UNTIED, *_LOUD)
_NO_HEADS, _DRAWN = (TIED, DROPPED, DROPPED, *_LOUD), (RANDOM_HEAD, UNTIED, UNTIED, *_RANDOM)
_NO_HEAD, _REQUIRED = (TIED, *[ERROR] * 4), (ERROR, UNTIED, UNTIED, *_LOUD)
TRANSFORMERS_4 = Loader("transformers", "4", "transformers#42612", (TIED, TIED, DROPPED, *_RANDOM), _DRAWN)
_SOURCE = "modeling_utils.py and core_model_loading.py of this version"
_VERSION: str = family_data()["transformers"]
TRANSFORMERS_5 = Loader("transformers", _VERSION, _SOURCE, (TIED, TIED, KEPT, TIED, RANDOM_TABLE), _DRAWN, True)
VLLM_BEFORE = Loader("vLLM", "before August 2026", "vllm#51063", _BY_FLAG, (RANDOM_HEAD, UNTIED, UNTIED, *_LOUD))
VLLM_AFTER = Loader("vLLM", "since August 2026", "vllm#51665", (TIED, TIED, KEPT, *_LOUD), _AS_STORED, True)
# models whose class has no head of its own to load one into: cohere2_moe is one more
VLLM_HEADLESS = Loader("vLLM", "since August 2026", "vllm#51665, vllm#53170", _NO_HEAD, _NO_HEAD, True)
# the one class that fills its head only from a stored one, though its flag says tied
VLLM_OWN_HEAD = Loader("vLLM", "before #53020", "vllm#53019, vllm#53020", _DRAWN, _DRAWN)
SGLANG = replace(TRANSFORMERS_4, name="SGLang", versions="at bf7a0e2", source="models/llama.py, load_weights")


def _llama_cpp(source: str, column: tuple[str, ...]) -> Loader:
    return Loader("llama.cpp", "convert_hf_to_gguf", source, column, column)


LLAMA_CPP = _llama_cpp("llama.cpp#13328, llama.cpp#12456", _AS_STORED)
LLAMA_CPP_GEMMA = _llama_cpp("llama.cpp#9065, conversion/gemma.py at 061b8c5", _NO_HEADS)
# its tensor map has no name for a head of these, and the converter stops at what it has no name for
LLAMA_CPP_UNNAMED = _llama_cpp("gguf 0.19.0 (run), conversion/command_r.py (00487aa)", _NO_HEAD)
# its loader wants a head of these, and converters store what they find (their own classes were not read)
LLAMA_CPP_REQUIRED = _llama_cpp("src/models/qwen2moe.cpp (623ac8d), stablelm.cpp (82234e0)", _REQUIRED)
LLAMA_CPP_T5 = _llama_cpp("llama.cpp#8055, llama.cpp#8141", _AS_STORED)
LLAMA_CPP_NAMED = {  # by `llama_cpp` of a family's record
    "": LLAMA_CPP,
    "no head": LLAMA_CPP_GEMMA,
    "head unnamed": LLAMA_CPP_UNNAMED,
    "head required": LLAMA_CPP_REQUIRED,
    "T5": LLAMA_CPP_T5,  # the only encoder-decoder
}
MLX = Loader("mlx-lm", "0.2x", "models/llama.py: sanitize", _BY_FLAG, _REQUIRED)
MLX_LETTERS = {"t": TIED, "u": UNTIED, "d": DROPPED, "e": ERROR}

# classes, and flags by level with which the tests load each in every state of the matrix
_ROOT: tuple[dict[str, bool], ...] = ({"": True}, {"": False}, {})
_NESTED = (*_ROOT, *({"": a, "text_config": b} for a in (True, False) for b in (True, False)), {"text_config": True})
VERIFIED = {
    **dict.fromkeys(("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "BertForMaskedLM"), _ROOT),
    **{f"{name}ForConditionalGeneration": _ROOT for name in ("T5", "SwitchTransformers", "Bart")},
    "RemBertForCausalLM": _ROOT,  # never ties
    "LlavaForConditionalGeneration": _NESTED,  # either level ties
    "Gemma3ForConditionalGeneration": _NESTED,  # the root decides
    "Blip2ForConditionalGeneration": _NESTED,  # the text part decides
}


_OWN_HELP = {  # what teaches transformers tiewise's own model types, by how they begin, the longest first
    "tiewise-": "import tiewise.models",
    "tiewise": "import tiewise.hf",
}
_CANONICAL = "The class saves its shared table under the head's name: its own code decides."
_ELSEWHERE = "Layers under {} are not read, as the class looks for them under {}: all of them are drawn at random."
_ANEW = "{} starts anew: only {}, to which it would be tied, is stored, and the flag is false."


@dataclass(frozen=True)
class LoaderOutcome:
    """What one loader makes of a checkpoint."""

    loader: str  # its name
    versions: str  # for which of its versions this holds
    outcome: str  # one of the short words above
    sentence: str  # what happens, and why
    right: bool | None  # the model computes what the tensors say; None where that cannot be known from here
    source: str  # the public thread, or the test, that shows it
    # from the loader's source or its threads; False where this package's tests load this very case
    predicted: bool = True


def predict(facts: Facts) -> tuple[LoaderOutcome, ...]:
    """Return what each loader makes of a checkpoint; nothing where there is no config, or no tensors, to load."""
    claims = facts.claims
    if facts.folder.config is None or not facts.folder.tensors:
        return ()
    # transformers 4 asks the text part, whose base default is true
    below = (claim for claim in claims.levels if claim.level in TEXT_PARTS and claim.written is not None)
    of_text = next(below, claims.deciding).effective is not False
    # vLLM takes a flag that is true at any level
    of_any = True if any(claim.written for claim in claims.levels) and claims.fixed is not False else claims.tied
    kind = claims.levels[0].model_type or ""
    four = _transformers(facts, TRANSFORMERS_4, of_text and claims.fixed is not False)
    own: tuple[LoaderOutcome, ...] = four, _transformers(facts, TRANSFORMERS_5, claims.tied)
    if facts.is_own:  # stock transformers raises, and this package's classes load it
        taught = replace(TRANSFORMERS_5, name=WITH_OWN)
        own = *own, _transformers(facts, taught, claims.tied)
    if facts.as_class is not None:
        return own
    record = family(kind)
    newer = VLLM_HEADLESS if record.vllm == "no head" else VLLM_AFTER
    vllm = (_server(facts, VLLM_BEFORE, of_any), _server(facts, newer, of_any))
    return (
        *own,
        *((_from_matrix(facts, VLLM_OWN_HEAD, True),) if record.vllm == "own head" else vllm),
        _server(facts, LLAMA_CPP_NAMED[record.llama_cpp], claims.tied),
        mlx(facts, kind),
        *sglang(facts, kind),
    )


def sglang(facts: Facts, kind: str) -> Iterator[LoaderOutcome]:
    """What SGLang makes of it; where that changed, what it made of it before."""
    made, head = _server(facts, SGLANG, facts.claims.tied), facts.roles.output_end
    if made.outcome == UNTIED and family(kind).sglang == "dropped head":
        before = replace(SGLANG, versions="before February 2026", source="sglang#15398, sglang#18024")
        yield _outcome(before, DROPPED, "The input table is copied over the stored head.")
    section = facts.config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    if made.outcome == UNTIED and head.quantised and section.get("quant_method") == "compressed-tensors":
        before = replace(SGLANG, versions="before 19 August 2026", source="sglang#35228, sglang#28130")
        yield _outcome(before, NO_SCALE)
        what = "It loads a packed head that a target of the quantisation names, and drops the scales of any other."
        word = UNTIED if "lm_head" in str(section.get("config_groups")) else NO_SCALE
        made = _outcome(replace(before, versions="since 19 August 2026"), word, what)
    yield made


def mlx(facts: Facts, kind: str) -> LoaderOutcome:
    """What mlx-lm makes of it: as it was run with a tiny model of its family, else as most of its classes read."""
    data, fixed = mlx_data(), facts.claims.fixed
    levels = [claim for claim in facts.claims.levels if not claim.level or claim.level in TEXT_PARTS]
    written = {claim.written for claim in levels}
    if len(levels) == 1:  # of a composite it asks the text part's flag, where the root may say anything
        written = {_as_python_reads(facts.levels[""].get(FLAG, ABSENT))}
    letters = family(kind).mlx_letters
    if letters is None or len(written) > 1:  # run was the flag at every level, or at none
        made = _server(facts, MLX, (written <= {None} or True in written) if fixed is None else fixed)
        return made if family(kind).is_served_by_mlx or made.outcome == NO_HEAD else _outcome(MLX, NOT_SERVED)
    words = tuple(MLX_LETTERS[letter] for letter in letters.split()[(True, False, None).index(written.pop())])
    run = replace(MLX, versions=data["version"], source=f"run on {data['date']}", tied=words, untied=words)
    made = _server(facts, run, True)
    if made.outcome not in (ERROR, NOT_SERVED, NO_HEAD) and (why := _not_in_mlx(facts)) is not None:
        made = _outcome(replace(run, source="load_model of its utils.py: strict"), ERROR, why)
    as_run = made.outcome in words and made.sentence == PLAIN[made.outcome] and not facts.quantised
    return replace(made, predicted=not as_run)


ABSENT = object()


def _as_python_reads(flag: Any) -> bool | None:
    """How `if args.tie_word_embeddings` takes a flag, null as false; None if the config does not have it."""
    return None if flag is ABSENT else bool(flag)


def _not_in_mlx(facts: Facts) -> str | None:
    """Why mlx-lm's strict loading stops: an end of another name or shape than the model of its family has."""
    roles = facts.roles
    if (misfit := _misfit(facts)) is not None:
        return misfit
    if roles.known is None:
        return None
    ends = [name for name in (*roles.known.inputs, roles.known.output) if name is not None]
    saved = {f"{roles.known.disk.get(name, name)}.weight" for name in ends}
    for table in roles.tables:
        bare = {name.removeprefix(f"{roles.known.prefix}.") for name in saved}
        longer = {f"{roles.known.prefix}.{name}" for name in saved}
        if table.name not in saved and table.name in bare | longer:
            names = " or ".join(sorted(saved))
            return f"It loads strictly, and its model has no {short(table.name)} ({names} is its name)."
    return None


def _state(facts: Facts, compares: bool = False) -> str:
    """What is stored at the two ends where a loader looks, as one of the words above; `compares` as in `Loader`."""
    table, head, alike = facts.roles.read_input, facts.roles.read_output, facts.ends
    if not facts.complete or (facts.quantised and facts.roles.opaque):
        return UNKNOWN
    if table is None:
        return NEITHER if head is None else ALONE
    if head is None:
        return NONE
    if alike is None and facts.packed_twice:
        return SAME
    if alike is None:
        return UNKNOWN if table.shape == head.shape or any(map(facts.roles.packed, (table, head))) else DIFFERENT
    if compares and alike.nan:
        return DIFFERENT
    if alike.kind == SAME_VALUES:  # in the narrower of their types: equal to a loader that works in that type
        narrow = min(table.dtype, head.dtype, key=lambda name: (BITS[name], name))
        working = facts.config.get("dtype", facts.config.get("torch_dtype"))
        return SAME if TORCH_TYPES.get(working if isinstance(working, str) else "") == narrow else ROUNDED
    return SAME if alike.equal else DIFFERENT


def _transformers(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    roles, opened, recent = facts.roles, facts.folder.opened, loader.versions == TRANSFORMERS_5.versions
    kind = str(facts.config.get("model_type"))
    if of_tiewise(facts.config) and loader.name != WITH_OWN:
        helps = next(line for start, line in _OWN_HELP.items() if kind.startswith(start))
        return _outcome(loader, ERROR, f"It does not know the type `{short(kind)}` without `{helps}`.")
    if opened is None:
        return _outcome(loader, ERROR, f"It finds no {SINGLE} and no index of shards.")
    if opened.endswith((".bin", ".bin.index.json")):
        return _outcome(loader, DEPENDS, f"It opens {opened}, which was not read.")
    if opened.endswith(".safetensors") and opened not in facts.folder.headers:
        return _outcome(loader, DEPENDS, f"It opens {opened}, which the index does not name and which was not read.")
    if not facts.claims.known:
        why = "Its class is not in the architecture data" if facts.family.is_known else _sentence(facts.family.unknown)
        return _outcome(loader, DEPENDS, f"{why}: its own code decides.")
    if roles.headless:
        missing = roles.known is not None and facts.complete and not roles.opaque
        lost = roles.read_input is None and (roles.unread or missing)
        return _outcome(loader, RANDOM_TABLE if lost else RANDOM_LAYERS if facts.foreign_layers else NO_HEAD)
    deciding = facts.claims.deciding
    if recent and deciding.malformed is not None:
        loose = family(deciding.model_type).ends.loose
        if loose != "any" and (loose, deciding.malformed) != ("null", "None"):
            return _outcome(loader, ERROR, "The flag is neither true nor false, and its config class refuses that.")
    if (misfit := _misfit(facts)) is not None:
        return _outcome(loader, ERROR, misfit)
    anew = facts.fresh if recent else ()
    for pair in anew:
        if not pair[0].endswith("bias"):
            return _outcome(loader, RANDOM_TABLE, _ANEW.format(*pair))
    if not recent and _state(facts) == ALONE and roles.named_like_head:
        return _outcome(loader, DEPENDS, _CANONICAL)
    if facts.half_read and flag is not False:
        return _outcome(loader, DEPENDS, f"{short(facts.half_read[0].name)} is not read; another end takes its place.")
    if facts.missing_tables:
        gone = short(facts.named(facts.missing_tables[0]))
        return _outcome(loader, RANDOM_TABLE, f"{gone} is not stored, and nothing ties it: it is drawn at random.")
    made = _from_matrix(facts, loader, flag)
    if facts.foreign_layers is not None and roles.known is not None and made.outcome not in LOST:
        return _outcome(loader, RANDOM_LAYERS, _ELSEWHERE.format(facts.foreign_layers, roles.known.layers[0]))
    if facts.missing_head and made.outcome not in LOST:
        gone = short(facts.named(facts.missing_head[0]))
        return _outcome(loader, RANDOM_HEAD, f"The layers before the head are drawn at random: {gone} is not stored.")
    if anew and made.outcome not in LOST:
        return _outcome(loader, NEW_BIAS, _ANEW.format(*anew[0]))
    if facts.missing_biases and made.outcome not in LOST:
        gone = short(facts.named(facts.missing_biases[0]))
        return _outcome(loader, NEW_BIAS, f"The head's bias starts anew: {gone} is not stored.")
    # the tests load this class with these flags, its own names and plain tables of one type
    flags = {claim.level: claim.written for claim in facts.claims.levels if claim.written is not None}
    odd = roles.unread or facts.quantised or facts.folder.single or facts.is_own
    rounded = facts.ends is not None and facts.ends.kind == SAME_VALUES
    if not recent or odd or rounded or made.outcome == DEPENDS:
        return made
    loaded = flags in VERIFIED.get(architecture(facts.config) or "", ())
    return replace(made, predicted=False, source="loaded by this package's tests") if loaded else made


def _sentence(text: str) -> str:
    """Return a text with a capital first letter, unless it begins with a name."""
    return f"{text[0].upper()}{text[1:]}" if text.startswith("no ") else text


def _misfit(facts: Facts) -> str | None:
    """A tensor of another shape than the class has: rows that are not the vocabulary, a table that is none, a bias."""
    roles, wanted = facts.roles, facts.text.vocab_size
    for table in (one for one in (roles.read_input, roles.read_output) if one is not None and not roles.packed(one)):
        if wanted is not None and table.rows not in {wanted, *facts.text_vocabularies}:
            return f"{short(table.name)} has {table.rows} rows, and the config says {wanted}."
        if not facts.explains(table):
            return f"{short(table.name)} is {table.shape[1]} wide, which nothing in the config explains."
    if roles.opaque and not facts.quantised:
        return f"{short(roles.opaque[0].name)} has the shape {list(roles.opaque[0].shape)}, which no table has."
    for name, shape in facts.misfits.items():
        return f"{short(name)} has the shape {list(facts.folder.tensors[name].shape)}, and its class {list(shape)}."
    return None


def _server(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    roles = facts.roles
    if facts.is_own:
        return _outcome(loader, ERROR, "It does not know the type `tiewise`: export the model dense first.")
    if roles.headless:
        return _outcome(loader, NO_HEAD)
    name = architecture(facts.config)
    t5_or_bart = facts.config.get("is_encoder_decoder") is True or facts.claims.t5_like
    decoders = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForCondGeneration")
    writes_text = not t5_or_bart and (name is None or name.endswith(decoders))  # token by token
    if loader is not LLAMA_CPP_T5 and not writes_text:
        return _outcome(loader, NOT_SERVED)
    if loader.name in ("llama.cpp", "mlx-lm") and not any(name.startswith("model") for name in facts.folder.headers):
        return _outcome(loader, ERROR, "It opens model*.safetensors alone.")
    if any(unwrapped(name) != name for name in roles.unread):
        return _outcome(loader, ERROR, "The names in the file are those of a wrapped model: nothing in it is found.")
    if roles.unread:
        return _outcome(loader, DEPENDS, "The names in the file are not those of its class: its own code decides.")
    if _state(facts) == ALONE and roles.named_like_head:
        return _outcome(loader, DEPENDS, _CANONICAL)
    if not facts.claims.known and (roles.input is None or roles.output is None) and facts.unplaced:
        return _outcome(loader, DEPENDS, "An end may be stored under a name of its own: its own code decides.")
    return _from_matrix(facts, loader, flag)


def _from_matrix(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    found = _state(facts, loader.compares)
    if found == UNKNOWN and (not facts.complete or facts.roles.opaque):
        return _outcome(loader, DEPENDS, "Some tensors could not be read.")
    flags = [flag] if flag is not None else [True, False]
    states = [found] if found not in (ROUNDED, UNKNOWN) else [SAME, DIFFERENT]
    words = {(loader.tied if choice else loader.untied)[STATES.index(cell)] for choice in flags for cell in states}
    # one table at both ends: another one may lie beside it under a name that nobody looks for
    for name, wanted in facts.roles.unread.items() if words == {TIED} else ():
        why = f"{short(name)} is not read, as the class looks for {wanted}; the other end takes its place."
        equal = None if facts.ends is None else facts.ends.equal
        return _outcome(loader, {True: TIED, False: DROPPED, None: DEPENDS}[equal], why)
    if len(words) == 1:
        return _outcome(loader, words.pop())
    what = "whether table and head hold the same values"
    what = "the precision in which the two are compared" if found == ROUNDED else what
    what = "the flag that its own code takes" if flag is None else what
    made = _outcome(loader, DEPENDS, f"It depends on {what}: {' or '.join(sorted(words))}.")
    known = {word in RIGHT for word in words}
    return replace(made, right=known.pop() if len(known) == 1 else None)


def _outcome(loader: Loader, word: str, sentence: str = "") -> LoaderOutcome:
    right = None if word in (DEPENDS, NOT_SERVED) else word in RIGHT
    return LoaderOutcome(loader.name, loader.versions, word, sentence or PLAIN[word], right, loader.source)
