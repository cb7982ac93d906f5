"""Rule on a checkpoint's Python files: their classes must tie as transformers 5 requires.

B023 imports and runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Fault, Folder
from tiewise.checkpoint.rules.code_classes import ARGUMENTS, KEYS, Assigned, CodeClass, read_code
from tiewise.checkpoint.rules.rule import Observation, Observations, Severity, rule
from tiewise.checkpoint.untrusted import object_of, short

MOST_ANCESTORS = 100
_SIGNATURE = "def tie_weights(self, missing_keys=None, recompute_mapping=True):"
_MODEL = re.compile(r".*(PreTrainedModel|ForCausalLM|ForConditionalGeneration|ForMaskedLM|LMHeadModel)")
_PLAIN = re.compile(r"PreTrainedModel|.*Mixin|ABC|Module|Generic|Protocol|object")  # bases that declare no tied keys
_BASE_CONFIGS = {"PretrainedConfig", "PreTrainedConfig"}


@rule("B023", "error", "the code that comes with a checkpoint ties as transformers 5 asks")
def custom_code(facts: Facts) -> Observations:
    """transformers 5 takes _tied_weights_keys as a dict {target: source}. A list, right in version 4, stops it while it
    builds or saves a model: 'list' object has no attribute 'keys'. An attribute of another name is not read at all, and
    a class without one stays untied where version 4 tied every class with get_output_embeddings: its head is random.
    transformers 5 calls tie_weights with missing_keys and recompute_mapping, which an override of the old form does not
    accept. The base config lost its default for tie_word_embeddings, so a config class without a default means tied in
    version 4 and untied in 5. The rule parses the code as text and never imports it; it reads only classes of the
    folder itself.
    What to do: write the line that the finding gives.
    Sources: transformers#44861; prime-rl#1998; EXAONE-3.5#7; Model-Optimizer#2071; sglang#27234; transformers#42270
    """
    used = auto_map(facts.config)
    if not used:
        return
    classes, faults = read_code(facts.folder)
    yield from _unread_code(facts.folder, faults)
    yield from _models(facts, classes, used)
    config = classes.get(used.get("AutoConfig", ""))
    if config is not None:
        yield from _missing_default(facts, config)


def _models(facts: Facts, classes: Mapping[str, CodeClass], used: Mapping[str, str]) -> Observations:
    """Report faults of the folder's model classes, known by config.json or by their bases."""
    models = {name for auto, name in used.items() if auto.startswith("AutoModel")}
    for code in classes.values():
        above = _ancestors(classes, code)
        derives_from_model = any(map(_MODEL.fullmatch, above))
        if derives_from_model or code.name in models:
            inherits_keys = _inherits_keys(classes, above)
            yield from _model_findings(facts, code, inherits_keys)


def _unread_code(folder: Folder, faults: list[Fault]) -> Observations:
    """Report Python files that cannot be read."""
    for fault in faults:
        where = short(fault.file)
        problem = fault.problem.removeprefix(f"{folder.path}/")
        yield Observation(where, problem, fault.remedy, severity="warning")


def _ancestors(classes: Mapping[str, CodeClass], code: CodeClass) -> list[str]:
    """Return the names of a class's direct and indirect bases, the nearest first."""
    above, waiting = list[str](), list(code.bases)
    while waiting and len(above) < MOST_ANCESTORS:
        name = waiting.pop(0)
        if name == code.name or name in above:
            continue
        above.append(name)
        if name in classes:
            waiting += classes[name].bases
    return above


def _inherits_keys(classes: Mapping[str, CodeClass], above: list[str]) -> bool:
    """Return whether a base class declares tied keys, or may declare them.

    A base may declare them if the folder lacks its code and it is no well-known plain base.
    """
    for name in above:
        if name in classes:
            if classes[name].keyed:
                return True
        elif not _PLAIN.fullmatch(name):
            return True
    return False


def _model_findings(facts: Facts, code: CodeClass, inherits: bool) -> Observations:
    """Report how a model's class differs from what transformers 5 requires.

    Args:
        inherits: True if a base may declare tied keys.
    """
    lacks_keys = not inherits and not code.keyed
    for assigned in code.tied:
        if assigned.is_list_of_keys:
            yield _list_of_keys(facts, code, assigned)
        elif lacks_keys:
            yield _misnamed_keys(facts, code, assigned)
    if lacks_keys and not code.tied:
        yield from _no_keys(facts, code)
    if code.tie_weights is not None:
        problem = f"{code.name}.tie_weights does not accept {' and '.join(ARGUMENTS)}, which transformers 5 passes"
        yield _finding("error", code, code.tie_weights, problem, f"write: {_SIGNATURE}")


def _misnamed_keys(facts: Facts, code: CodeClass, assigned: Assigned) -> Observation:
    """Return the finding about tied keys in an attribute with a wrong name."""
    problem = f"{code.name} sets {assigned.name}, which transformers 5 does not read: the name is {KEYS}"
    remedy = _assignment(facts, assigned.entries)
    return _finding("error", code, assigned.line, problem, remedy)


def _no_keys(facts: Facts, code: CodeClass) -> Observations:
    """Report a class with a head and without tied keys."""
    if not facts.claims.tied or "tie_weights" in code.methods:
        return
    if "get_output_embeddings" in code.methods:
        problem = (
            f"{code.name} has get_output_embeddings and no {KEYS}: transformers 5 leaves the head untied, and random"
        )
        remedy = _assignment(facts, ())
        yield _finding("error", code, code.line, problem, remedy)


def _list_of_keys(facts: Facts, code: CodeClass, assigned: Assigned) -> Observation:
    """Return the finding about tied keys in a list.

    An untied model fails only when it is saved.
    """
    problem = f"{code.name}.{KEYS} is a list, and"
    remedy = _assignment(facts, assigned.entries)
    if facts.claims.tied is False:
        problem += " saving it raises 'list' object has no attribute 'keys'"
        return _finding("warning", code, assigned.line, problem, remedy)
    problem += " transformers 5 stops while it builds the model: 'list' object has no attribute 'keys'"
    return _finding("error", code, assigned.line, problem, remedy)


def _missing_default(facts: Facts, config: CodeClass) -> Observations:
    """Report that neither the config class nor config.json has a value for the flag."""
    if facts.claims.deciding.written is not None or facts.roles.headless:
        return
    is_base_alone = bool(config.bases) and _BASE_CONFIGS.issuperset(config.bases)
    if config.names_flag or not is_base_alone:
        return
    problem = f"{FLAG} has no value in {config.name} or config.json: transformers 4 ties, and 5 does not"
    value = f"{FLAG}={bool(facts.tables_are_tied)}"
    remedy = f"write {FLAG} into config.json, or {value} among the arguments of {short(config.name)}.__init__"
    yield _finding("warning", config, config.line, problem, remedy)


def _assignment(facts: Facts, entries: tuple[str, ...]) -> str:
    """Return the line of code that declares the tied keys as a dict."""
    table = facts.roles.input_name or "model.embed_tokens.weight"
    heads = [entry for entry in entries if entry != table]
    if not heads:
        heads.append(facts.roles.output_name or "lm_head.weight")
    pairs = [f'"{short(head)}": "{short(table)}"' for head in heads[:8]]
    return f"write: {KEYS} = {{{', '.join(pairs)}}}"


def _finding(severity: Severity, code: CodeClass, line: int, evidence: str, repair: str) -> Observation:
    """Return a finding at a line of a file, with evidence of bounded length."""
    return Observation(f"{short(code.file)}:{line}", short(evidence, 400), repair, severity=severity)


def auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the class that config.json names for each auto class, if the folder has its code.

    >>> auto_map({"auto_map": {"AutoModel": "modeling_x.X", "AutoConfig": "org/other--configuration_x.C"}})
    {'AutoModel': 'X'}
    """
    local = dict[str, str]()
    for auto, path in object_of(config.get("auto_map")).items():
        if isinstance(path, str) and "--" not in path:
            local[auto] = path.rpartition(".")[2]
    return local
