"""Names of the modules at the two ends of a checkpoint.

`find_end_names` tries three methods in this order: the class in the config, as the architecture data describes it;
the usual names of both ends, after any prefix; matrices with as many rows as the vocabulary in the config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiewise.checkpoint import claims
from tiewise.checkpoint.claims import is_foreign, model_levels, positive_int, usual_names
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.stored_modules import StoredModules

BY_DATA, BY_NAMES, BY_SHAPES = "architecture data", "usual names", "shapes"
MOST_PREFIXES = 64
_STACK = re.compile(r"(^|\.)(shared|(en|de)coder\.embed_tokens)$")  # tables of an encoder-decoder model
_SOUNDS_LIKE_HEAD = re.compile(r"head|out|decoder|proj|logit")


def find_end_names(
    modules: StoredModules, config: Mapping[str, Any], class_ends: ClassEnds | None, tokenless: bool
) -> tuple[str, ClassEnds]:
    """Return (method, ends) of the first method that finds a stored end, else of the last.

    A class that names no token table has ends only if the usual names show an input table, as the text model of
    CLIP has one.

    The names may be of tensors that the checkpoint does not store.

    Args:
        modules: the checkpoint.
        config: its config; empty if it has none.
        class_ends: the class that the config names; None if the architecture data lacks it.
        tokenless: the class names no token table.
    """
    if tokenless:
        return _of_tokenless(modules)
    ends = _by_data(modules, class_ends or claims.family_ends(config))
    if modules.count_stored(ends):
        return BY_DATA, ends
    ends = _by_names(modules)
    if modules.count_stored(ends):
        return BY_NAMES, ends
    return BY_SHAPES, _by_shapes(modules, config)


def _of_tokenless(modules: StoredModules) -> tuple[str, ClassEnds]:
    """Return (method, ends) of a class that names no token table. It has no head without an input table."""
    ends = _by_names(modules)
    if ends.inputs:
        return BY_NAMES, ends
    return BY_DATA, ClassEnds()


def _by_data(modules: StoredModules, ends: ClassEnds | None) -> ClassEnds:
    """Return a class's ends under the names in this file that most stored tensors have."""
    if ends is None:
        return ClassEnds()
    spellings = _spellings(modules, ends)
    if not any(modules.count_stored(spelling) for spelling in spellings):
        spellings = _inside_another_model(modules, spellings)
    return max(spellings, key=modules.count_stored, default=ends)


def _spellings(modules: StoredModules, ends: ClassEnds) -> list[ClassEnds]:
    """Return a class's ends under each set of names that its files may use."""
    loaded: dict[str | None, str] = {}  # {end: first module from which transformers loads it}
    for module in sorted(modules.named_like(ends.spellings)):
        stored_name = module_of(modules.tables[module].name)[0]
        loaded.setdefault(ends.loaded_as(stored_name), module)

    def as_saved(name: str) -> str:
        """Return the name of an end in a file that transformers writes."""
        return ends.disk.get(name, name)

    def as_loaded(name: str) -> str:
        """Return the name in this file from which transformers loads an end, else `as_saved`."""
        return loaded.get(name, as_saved(name))

    spellings = [ends.renamed(as_loaded), ends.renamed(as_saved), ends]
    if ends.prefix:  # names in a file of the body alone, like GPT-2's first conversion
        spellings.append(ends.without_prefix())
    return spellings


def _inside_another_model(modules: StoredModules, spellings: list[ClassEnds]) -> list[ClassEnds]:
    """Return the spellings after every prefix that a surrounding model may add."""
    with_prefixes = []
    for spelling in spellings:
        prefixes = _prefixes(modules, spelling)[:MOST_PREFIXES]
        with_prefixes += [spelling.renamed(prefix.__add__) for prefix in prefixes]
    return with_prefixes


def _prefixes(modules: StoredModules, ends: ClassEnds) -> list[str]:
    """Return the prefixes before these ends' names in stored modules, the shortest first."""
    prefixes = set[str]()
    for module in modules.named_like(ends.modules):
        for name in ends.modules:
            if not module.endswith(f".{name}"):
                continue
            prefix = module.removesuffix(name)
            if not is_foreign(prefix):
                prefixes.add(prefix)
    return sorted(prefixes, key=lambda prefix: (len(prefix), prefix))


class _InputMatch(NamedTuple):
    """Stored module with a usual name of an input embedding.

    Matches are ordered by their fields; the smallest one is the model's input embedding.
    """

    foreign: bool  # it belongs to another modality
    rank: int  # position of the pair in `usual_names().pairs`
    prefix_length: int
    module: str
    output: str  # the pair's head after the same prefix


def _by_names(modules: StoredModules) -> ClassEnds:
    """Return the first usual pair after any prefix, and the other tables of encoder and decoder."""
    matches = _usual_inputs(modules)
    stored_output = modules.find_usual_output()
    if not matches:
        return ClassEnds(output=stored_output)
    best = min(matches)
    output: str | None = best.output
    is_other_output = stored_output is not None and stored_output != best.module
    if output not in modules.tables and is_other_output:
        output = stored_output  # the head has another usual name
    inputs = [best.module]
    stacks = [name for name in modules.end_candidates if _STACK.search(name)]
    if best.module in stacks:
        stacks.remove(best.module)
        inputs += stacks
    return ClassEnds(inputs=tuple(inputs), output=output)


def _usual_inputs(modules: StoredModules) -> list[_InputMatch]:
    """Return a match for every stored module with a usual name of an input embedding."""
    pairs = usual_names().pairs
    matches = []
    for module in modules.named_like([path for path, _ in pairs]):
        for rank, (path, output) in enumerate(pairs):
            if claims.ends_with(module, path):
                prefix = module.removesuffix(path)
                matches.append(_InputMatch(is_foreign(prefix), rank, len(prefix), module, prefix + output))
    return matches


def _by_shapes(modules: StoredModules, config: Mapping[str, Any]) -> ClassEnds:
    """Return the first head-like and the first other matrix with V rows, by name."""
    sizes = {positive_int(level.get("vocab_size")) for _, level in model_levels(config)}
    heads, tables = list[str](), list[str]()
    for module, table in modules.end_candidates.items():
        if len(table.shape) != 2 or table.rows not in sizes:
            continue
        if claims.POSITION.search(module):
            continue
        if _SOUNDS_LIKE_HEAD.search(module):
            heads.append(module)
        else:
            tables.append(module)
    return ClassEnds(inputs=tuple(tables[:1]), output=next(iter(heads), None))


def input_of_head(modules: StoredModules, ends: ClassEnds) -> str | None:
    """Return the input embedding that belongs to the head; None for a class without one.

    Candidates are compared by three criteria in this order: the head's shape, a name with "decoder", the tie of the
    class. If encoder and decoder have separate tables, no forward pass reads the table `shared`. A class that ties its
    head to the encoder's table, as T5Gemma 2 does, names it instead of the decoder's.
    """
    source = module_of(ends.tied.get(f"{ends.output}.weight", ""))[0]
    head = modules.tables.get(ends.output or "")
    candidates = [name for name in ends.inputs if name in modules.tables]
    if not candidates and source in ends.inputs:
        return source
    if not candidates:
        candidates = list(ends.inputs)

    preferred = source if "encoder" in source else "decoder"

    def rank(name: str) -> tuple[bool, bool, bool]:
        """Return the sort key of a candidate; the smallest belongs to the head."""
        has_other_shape = True
        if head is not None and name in modules.tables:
            has_other_shape = modules.tables[name].shape != head.shape
        return has_other_shape, preferred not in name, name != source

    return min(candidates, key=rank, default=None)
