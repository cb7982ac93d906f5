"""Names of the modules at the two ends of a checkpoint.

They are found in three ways, tried in this order: the class that the config names, as the architecture data describes
it; the names that the two usually have, behind any prefix; matrices with as many rows as the config's vocabulary.
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
_STACK = re.compile(r"(^|\.)(shared|(en|de)coder\.embed_tokens)$")  # tables that an encoder and a decoder share
_SOUNDS_LIKE_HEAD = re.compile(r"head|out|decoder|proj|logit")


def find_end_names(
    modules: StoredModules, config: Mapping[str, Any], class_ends: ClassEnds | None, tokenless: bool
) -> tuple[str, ClassEnds]:
    """Return the last way that was tried, and the ends' names by it, which may not be stored.

    Args:
        modules: the checkpoint.
        config: its config, empty if it has none.
        class_ends: the class that the config names; None if the architecture data lacks it.
        tokenless: the class has no table of tokens, so that no shape suggests one.
    """
    ends = _by_data(modules, class_ends or claims.family_ends(config))
    if modules.count_stored(ends):
        return BY_DATA, ends
    ends = _by_names(modules)
    if modules.count_stored(ends) or tokenless:
        return BY_NAMES, ends
    return BY_SHAPES, _by_shapes(modules, config)


def _by_data(modules: StoredModules, ends: ClassEnds | None) -> ClassEnds:
    """Return a class's ends under their names in this file. Of all possible names, those of most stored tensors."""
    if ends is None:
        return ClassEnds()
    styles = _spellings(modules, ends)
    if not any(modules.count_stored(style) for style in styles):
        styles = _inside_another_model(modules, styles)
    return max(styles, key=modules.count_stored, default=ends)


def _spellings(modules: StoredModules, ends: ClassEnds) -> list[ClassEnds]:
    """Return a class's ends under each set of names that its files may use."""
    loaded: dict[str | None, str] = {}  # {end: the module that transformers loads it from}, the first of several
    for module in sorted(modules.named_like(ends.spellings)):
        stored_name = module_of(modules.tables[module].name)[0]
        loaded.setdefault(ends.loaded_as(stored_name), module)

    def as_saved(name: str) -> str:
        """Return the name of an end in a file that transformers writes."""
        return ends.disk.get(name, name)

    def as_loaded(name: str) -> str:
        """Return the name in this file from which transformers loads an end, else the one that it writes."""
        return loaded.get(name, as_saved(name))

    styles = [ends.renamed(as_loaded), ends.renamed(as_saved), ends]
    if ends.prefix:  # as a body alone saves them, like GPT-2's first conversion
        styles.append(ends.without_prefix())
    return styles


def _inside_another_model(modules: StoredModules, styles: list[ClassEnds]) -> list[ClassEnds]:
    """Return the styles behind every prefix under which a model around this one may store them."""
    behind_prefixes = []
    for style in styles:
        prefixes = _prefixes(modules, style)[:MOST_PREFIXES]
        behind_prefixes += [style.renamed(prefix.__add__) for prefix in prefixes]
    return behind_prefixes


def _prefixes(modules: StoredModules, ends: ClassEnds) -> list[str]:
    """Return the prefixes of stored modules with the names of these ends, the shortest first."""
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
    """A module with the name of a usual input table.

    Matches compare by their fields in this order; the smallest of several is the model's.
    """

    foreign: bool  # of another modality
    rank: int  # of the usual pair
    prefix_length: int
    module: str
    output: str  # the head that the pair has behind the same prefix


def _by_names(modules: StoredModules) -> ClassEnds:
    """Return the first usual pair behind any prefix, and the other tables of its stacks."""
    matches = _usual_inputs(modules)
    stored_output = modules.find_usual_output()
    if not matches:
        return ClassEnds(output=stored_output)
    best = min(matches)
    output: str | None = best.output
    is_other_output = stored_output is not None and stored_output != best.module
    if output not in modules.tables and is_other_output:
        output = stored_output  # the head of this input under another usual name
    inputs = [best.module]
    stacks = [name for name in modules.end_candidates if _STACK.search(name)]
    if best.module in stacks:
        stacks.remove(best.module)
        inputs += stacks
    return ClassEnds(inputs=tuple(inputs), output=output)


def _usual_inputs(modules: StoredModules) -> list[_InputMatch]:
    """Return every stored module that has the name of a usual input table."""
    pairs = usual_names().pairs
    matches = []
    for module in modules.named_like([path for path, _ in pairs]):
        for rank, (path, output) in enumerate(pairs):
            if claims.ends_with(module, path):
                prefix = module.removesuffix(path)
                matches.append(_InputMatch(is_foreign(prefix), rank, len(prefix), module, prefix + output))
    return matches


def _by_shapes(modules: StoredModules, config: Mapping[str, Any]) -> ClassEnds:
    """Return the first two matrices with a vocabulary's rows. One sounds like a head, the other does not."""
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
    """Return the input table that belongs to the head; None for a class without input tables.

    The first that applies decides: the shape of the head, the decoder's table, the table that the head may be tied to.
    Where an encoder and a decoder have separate tables, `shared` is a rest that no forward reads.
    """
    source = module_of(ends.tied.get(f"{ends.output}.weight", ""))[0]
    head = modules.tables.get(ends.output or "")
    candidates = [name for name in ends.inputs if name in modules.tables]
    if not candidates and source in ends.inputs:
        return source
    if not candidates:
        candidates = list(ends.inputs)

    def rank(name: str) -> tuple[bool, bool, bool]:
        """Return the order of an input table among the candidates; the smallest belongs to the head."""
        has_other_shape = True
        if head is not None and name in modules.tables:
            has_other_shape = modules.tables[name].shape != head.shape
        return has_other_shape, "decoder" not in name, name != source

    return min(candidates, key=rank, default=None)
