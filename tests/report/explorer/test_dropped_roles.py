"""Which tensor plays which part: the page finds for every class of the data what Python finds, however it was saved.
And its verdict on a dropped checkpoint is `tiewise check`'s, word for word, on all that their tests write."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.report.explorer.dropping import drop

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.claims import class_ends, family_data, usual
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.rules.rule import rules
from tiewise.checkpoint.stored import Stored

from test_rules_tying import FIRES, SILENT  # isort: skip - dropping.py says where they are
from tiny_checkpoints import written  # isort: skip

V, D = 24, 8
RULES = ("B010", "B011", "B012", "B013", "B014", "B015", "B016")  # that the page decides
HEADERS_ALONE = ("B010", "B011", "B016")
FIELDS = ("rule", "severity", "where", "evidence", "repair", "safe")
WRITTEN = [case[4] for case in FIRES] + [case[1] for case in SILENT]
FOUND = """folders => folders.map(folder => {
  const known = factsOf(folder, facts.checkpoint.table), { claims, roles } = known, name = (t) => t && t.name;
  const keys = ["rule", "severity", "where", "evidence", "repair", "safe"];
  return {
    tied: claims.tied, fixed: claims.fixed, deciding: claims.deciding.level, t5: claims.t5Like, known: claims.known,
    vocab: known.text.vocab, width: known.text.hidden, source: roles.source, headless: roles.headless,
    inputs: roles.inputs.map(name), output: name(roles.output), names: [roles.inputName, roles.outputName],
    biases: roles.biases.map(name), positions: roles.positions.map(name), maps: roles.maps.map(name),
    unread: Object.fromEntries(roles.unread), quantised: known.quantised, unplaced: known.unplaced.map(name),
    findings: tyingFindings("a", known, null).map(finding => keys.map(key => finding[key])).sort(),
  };
})"""


def by_python(record):
    tensors = {
        t["name"]: Stored(t["name"], Path("m.safetensors"), t["dtype"], tuple(t["shape"]), 0, 1)
        for t in record["tensors"]
    }
    facts = Facts(Folder(Path("a"), (), record["config"], {}, tensors), scan=False)
    claims, roles = facts.claims, facts.roles
    told = [asdict(finding) for rule in HEADERS_ALONE for finding in rules()[rule].check(facts)]
    return {
        "tied": claims.tied, "fixed": claims.fixed, "deciding": claims.deciding.level, "t5": claims.t5_like,
        "known": claims.known, "vocab": facts.text.vocab_size, "width": facts.text.hidden_size,
        "source": roles.source, "headless": roles.headless, "inputs": [t.name for t in roles.inputs],
        "output": roles.output and roles.output.name, "names": [roles.input_name, roles.output_name],
        "biases": [t.name for t in roles.biases], "positions": [t.name for t in roles.positions],
        "maps": [t.name for t in roles.maps], "unread": dict(roles.unread), "quantised": facts.quantised,
        "unplaced": [t.name for t in facts.unplaced],
        "findings": sorted([finding[field] for field in FIELDS] for finding in told),
    }  # fmt: skip


def folder(config, names, dtype="F32", more=()):
    shapes = {name: [V] if name.endswith("bias") else [V, D] for name in dict.fromkeys(names)} | dict(more)
    tensors = [{"name": name, "dtype": dtype, "shape": shape, "start": 0, "end": 1} for name, shape in shapes.items()]
    return {"config": config, "tensors": tensors, "count": len(tensors), "complete": bool(tensors)}


def of_class(kind, name):
    """A class as transformers saves it and as it is met elsewhere: tied, untied, unsaid; wrapped, half, packed."""
    ends, config = class_ends(kind, name), {"model_type": kind, "architectures": [name], "vocab_size": V}
    on_disk = [ends.disk.get(module, module) for module in (*ends.inputs, ends.output) if module]
    stored = [f"{module}.weight" for module in on_disk] + list(ends.biases)
    half = {f"{ends.disk.get(module, module)}.weight" for module in ends.inputs}
    for flag in (True, False, None):
        said = config | ({} if flag is None else {"tie_word_embeddings": flag})
        yield folder(said, stored)
        yield folder(said, [one for one in stored if one in half])
        yield folder(said, [one for one in stored if one not in half])
        yield folder(said, [f"_orig_mod.{one}" for one in stored])
        yield folder(said, [one.removeprefix(f"{ends.prefix}.") for one in stored])
        yield folder(said, [f"language_model.{one}" for one in stored], "BF16")
        yield folder(said | {"text_config": {"vocab_size": V, "tie_word_embeddings": True}}, stored[:1])
    yield folder(said, stored, "I8", {f"{stored[0]}_scale": [V, 1]} if stored else ())
    yield folder({"vocab_size": V, "architectures": ["Unheard" + name]}, stored)


def strange():
    for pair in usual().pairs:
        for flag in (True, False):
            said = {"vocab_size": V, "tie_word_embeddings": flag}
            yield folder(said, [f"{one}.weight" for one in pair])
            yield folder(said, [f"a.b.{pair[0]}.weight", "model.lm_head.weight"])
    for kind in (*family_data()["tokenless"], None, 5, [], "mine"):
        yield folder({"model_type": kind, "vocab_size": V}, ["encoder.weight", "words.0.weight", "my_head.weight"])
    for architectures in (None, [], [3], "LlamaForCausalLM", ["MineModel"], ["MineForSequenceClassification"]):
        yield folder({"architectures": architectures, "vocab_size": V}, ["tok.weight", "proj.weight"])
    for size in (0, -1, 1.5, True, "24", 2**70, None):
        yield folder({"model_type": "llama", "vocab_size": size, "hidden_size": size}, ["model.embed_tokens.weight"])
    for config in (None, {}, {"model_type": "gemma3", "text_config": 3}, {"decoder": {"decoder": {"vocab_size": V}}}):
        yield folder(config, ["x.weight", "model.embed_tokens.weight"])


def cases():
    known = [(kind, name) for kind, family in family_data()["families"].items() for name in family.get("classes", {})]
    return [one for kind, name in known for one in of_class(kind, name)] + list(strange())


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_the_page_finds_what_python_finds_for_every_class(dropper, step):
    every = cases()[::step]
    wanted = [json.loads(json.dumps(by_python(case))) for case in every]
    wrong = [
        (case["config"], [t["name"] for t in case["tensors"]], made, said)
        for case, made, said in zip(every, dropper.page.evaluate(FOUND, every), wanted, strict=True)
        if made != said
    ]
    assert not wrong, f"{len(wrong)} of {len(every)}, the first: {wrong[0]}"
    assert {rule for said in wanted for rule, *_ in said["findings"]} == set(HEADERS_ALONE)


@pytest.mark.parametrize("number", range(len(WRITTEN)))
def test_the_verdict_is_that_of_check(dropper, tmp_path, monkeypatch, number):
    path = written(tmp_path / "a", WRITTEN[number])
    monkeypatch.chdir(tmp_path)  # the page knows the folder's name alone
    audit = [asdict(finding) for finding in check("a").findings if finding.rule in RULES]
    page = drop(dropper, path, answered=False)
    assert page.locator("#refused").all_inner_texts() == []
    found = page.evaluate("dropped.opened.verdict.findings")
    assert sorted(found, key=repr) == sorted(({key: one[key] for key in FIELDS} for one in audit), key=repr)
