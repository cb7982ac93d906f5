"""B023: the code that comes with a checkpoint ties as transformers 5 asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tiewise.checkpoint.custom_code import FLAG, KEYS, Class, Code, auto_map, read_code
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import ERROR, WARNING, Finding, Rule
from tiewise.checkpoint.untrusted import short

_MODEL = re.compile(r".*(PreTrainedModel|ForCausalLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
_PLAIN = re.compile(r"PreTrainedModel|.*Mixin|ABC|Module|Generic|Protocol|object")  # bases that bring no keys
_BASE_CONFIG = re.compile(r"Pre[tT]rainedConfig")
_SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"


def _code(facts: Facts) -> Iterator[Finding]:
    used = auto_map(facts.config)
    if not used:
        return
    code = read_code(facts.folder)
    for fault in code.faults:
        what = fault.what.removeprefix(f"{facts.folder.path}/")
        yield Finding("B023", WARNING, short(fault.file), what, fault.fix)
    for found in code.classes.values():
        if _is_model(code, found, used):
            yield from _keys(facts, code, found)
            yield from _method(found)
    config = code.classes.get(used.get("AutoConfig", ""))
    if config is not None:
        yield from _default(facts, config)


def _is_model(code: Code, found: Class, used: dict[str, str]) -> bool:
    if any(found.name == name for auto, name in used.items() if auto.startswith("AutoModel")):
        return True
    lines = [line if isinstance(line, str) else line.name for line in code.ancestors(found)]
    return any(_MODEL.fullmatch(name) for name in lines)


def _keys(facts: Facts, code: Code, found: Class) -> Iterator[Finding]:
    right = [tied for tied in found.tied if tied.name == KEYS]
    for tied in right:
        if tied.kind == "list":
            untied = facts.claims.tied is False
            how = "saving it raises" if untied else "transformers 5 stops while it builds the model:"
            what = f"{found.name}.{KEYS} is a list, and {how} 'list' object has no attribute 'keys'"
            yield _finding(WARNING if untied else ERROR, found, tied.line, what, _line(facts, tied.entries))
    for tied in found.tied:
        if tied.name != KEYS and not right and not _inherits_keys(code, found):
            what = f"{found.name} sets {tied.name}, which transformers 5 does not read: the name is {KEYS}"
            yield _finding(ERROR, found, tied.line, what, _line(facts, tied.entries))
    if found.output_embeddings is None or found.tied or found.tie_weights is not None or not facts.claims.tied:
        return
    if not _inherits_keys(code, found):
        what = (
            f"{found.name} has get_output_embeddings and no {KEYS}: transformers 5 leaves the head untied, and random"
        )
        yield _finding(ERROR, found, found.line, what, _line(facts, ()))


def _inherits_keys(code: Code, found: Class) -> bool:
    """Whether a class above declares keys, or may: one that is not in the folder and is no plain base."""
    for above in code.ancestors(found):
        if isinstance(above, Class):
            if any(tied.name == KEYS for tied in above.tied):
                return True
        elif not _PLAIN.fullmatch(above):
            return True
    return False


def _method(found: Class) -> Iterator[Finding]:
    if found.tie_weights is not None and not found.takes_arguments:
        what = f"{found.name}.tie_weights does not take missing_keys and recompute_mapping, which transformers 5 passes"
        yield _finding(ERROR, found, found.tie_weights, what, f"write: {_SIGNATURE}")


def _default(facts: Facts, config: Class) -> Iterator[Finding]:
    deciding = facts.claims.deciding
    if config.names_flag or not config.bases or not all(_BASE_CONFIG.fullmatch(base) for base in config.bases):
        return
    if deciding is None or deciding.written is not None or facts.roles.headless:
        return
    what = f"{config.name} gives {FLAG} no value, nor does config.json: true for transformers 4, false for 5"
    said = "True" if facts.truth else "False"
    repair = f"write {FLAG} into config.json, or {FLAG}={said} among the arguments of {short(config.name)}.__init__"
    yield _finding(WARNING, config, config.line, what, repair)


def _line(facts: Facts, entries: tuple[str, ...]) -> str:
    """The assignment to write."""
    table = facts.roles.input_name or "model.embed_tokens.weight"
    heads = [entry for entry in entries if entry != table] or [facts.roles.output_name or "lm_head.weight"]
    pairs = ", ".join(f'"{short(head)}": "{short(table)}"' for head in heads[:8])
    return f"write: {KEYS} = {{{pairs}}}"


def _finding(severity: str, found: Class, line: int, evidence: str, repair: str) -> Finding:
    return Finding("B023", severity, f"{short(found.file)}:{line}", short(evidence, 400), repair)


RULES: tuple[Rule, ...] = (
    Rule(
        "B023",
        ERROR,
        "the code that comes with a checkpoint ties as transformers 5 asks",
        """transformers 5 takes _tied_weights_keys as a dict {target: source}. A list, right in version 4, stops it
while it builds or saves a model: 'list' object has no attribute 'keys'. An attribute of another name is not read at
all, and a class without one stays untied where version 4 tied every class with get_output_embeddings: its head
is random. tie_weights is called with missing_keys and recompute_mapping, which an override of the old form does
not take. The base config lost its default for tie_word_embeddings, so a config class that gives none means tied
in version 4 and untied in 5. The code is parsed as text and never imported; only classes of the folder itself
are read.
What to do: write the line that the finding gives.""",
        (
            "transformers#44861",
            "prime-rl#1998",
            "EXAONE-3.5#7",
            "Model-Optimizer#2071",
            "sglang#27234",
            "transformers#42270",
        ),
        _code,
    ),
)
