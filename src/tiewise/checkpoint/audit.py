"""Audit a checkpoint: run the rules, and say beside them what was read."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.adapter import AdapterFacts, open_adapter
from tiewise.checkpoint.claims import Claims
from tiewise.checkpoint.facts import Draft, Facts, config_for
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loaders import LoaderOutcome, predict
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rule import SEVERITIES, Finding, matching, names, rules
from tiewise.checkpoint.rules_gguf import GgufFacts, open_gguf
from tiewise.checkpoint.rules_onnx import OnnxFacts, read_onnx
from tiewise.checkpoint.rules_types_and_rows import read_quantisation
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import IDENTICAL, TableLikeness
from tiewise.checkpoint.untrusted import inside
from tiewise.core import Late, __version__
from tiewise.core.errors import CheckpointError
from tiewise.core.files import strict

SCHEMA = 1
_VIEW = Late("tiewise.checkpoint.audit_view")  # a check from Python never needs rich
_FILES = (".gguf", ".onnx")
# rules on models that stand alone: their ends, tokenizer and loaders; a draft, half a model, has B083 to B085
_ALONE = ("B01", "B02", "B03", "B042", "B080")
MOST_OF_A_KIND = 10  # findings that are told one by one


class Part(NamedTuple):
    """A stored tensor and its part: "input", "output", "bias", "position", "map", or the role of an `IndexedTensor`."""

    role: str
    tensor: Stored


@dataclass(frozen=True)
class Audit:
    """What is true of one checkpoint. In a notebook it shows what the command prints."""

    path: Path  # what was given
    kind: str  # "folder", "file" (one `.safetensors`), "draft", "adapter", "gguf" or "onnx"
    claims: Claims = field(default_factory=Claims)  # of the config; without levels where there is none
    roles: Roles | None = None  # the parts of the boundary that are stored; None for an adapter or a GGUF file
    parts: tuple[Part, ...] = ()  # their tensors, the two ends first
    ends: TableLikeness | None = None  # how alike the two tables are; None where not both stored, comparable and read
    spare: int = 0  # bytes that a second, equal copy of the table takes
    tensors: int = 0  # number of tensors, and
    nbytes: int = 0  # their bytes
    outcomes: tuple[LoaderOutcome, ...] = ()  # what each loader will make of it; empty for an adapter or a GGUF file
    findings: tuple[Finding, ...] = ()  # the most severe first, then by id
    ran: tuple[str, ...] = ()  # ids of the rules that ran
    skipped: dict[str, str] = field(default_factory=dict)  # id → why a rule did not run
    scan: bool = True  # the tables were read, not only headers
    deep: bool = False  # every row was read
    as_class: str | None = None  # the class that it was judged as; None for the one that its config names

    @property
    def worst(self) -> str | None:
        """The severity of the most severe finding; None without findings."""
        return self.findings[0].severity if self.findings else None

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings of this severity ("info", "warning", "error", "fatal") or a worse one.

        Raises:
            CheckpointError: no such severity.
        """
        if severity not in SEVERITIES:
            raise CheckpointError(f"there is no severity {severity!r}", f"choose one of {', '.join(SEVERITIES)}")
        least = SEVERITIES.index(severity)
        return tuple(finding for finding in self.findings if SEVERITIES.index(finding.severity) >= least)

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it; the fields are described in docs/check-schema.md."""
        roles, claims = self.roles, self.claims
        said = {key: getattr(claims, key) for key in ("tied", "known", "t5_like", "fixed")}
        levels = [asdict(claim) | {"effective": claim.effective} for claim in claims.levels]
        return strict(
            {
                "schema": SCHEMA,
                "versions": {"tiewise": __version__, "python": platform.python_version()},
                "path": str(self.path),
                "kind": self.kind,
                "as": self.as_class,
                "scan": self.scan,
                "deep": self.deep,
                "tensors": self.tensors,
                "bytes": self.nbytes,
                "spare_bytes": self.spare,
                "claims": said | {"levels": levels},
                "found_by": None if roles is None else roles.source,
                "headless": None if roles is None else roles.headless,
                "names": None if roles is None else {"input": roles.input_name, "output": roles.output_name},
                "scalars": {} if roles is None else roles.scalars,
                "parts": [
                    {"role": role, "name": tensor.name, "file": tensor.path.name}
                    | {"dtype": tensor.dtype, "shape": tensor.shape, "bytes": tensor.nbytes}
                    for role, tensor in self.parts
                ],
                "ends": None if self.ends is None else asdict(self.ends),
                "loaders": [asdict(outcome) for outcome in self.outcomes],
                "worst": self.worst,
                "findings": [asdict(finding) for finding in self.findings],
                "rules": {"ran": self.ran, "skipped": self.skipped},
            }
        )

    def _repr_html_(self) -> str:
        return str(_VIEW.audit_html(self))


def check(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    scan: bool = True,
    base: str | os.PathLike[str] | None = None,
    beside: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | None = None,
    world: int | None = None,
    as_class: str | None = None,
    quantise: str | os.PathLike[str] | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Audit:
    """Audit a checkpoint. Nothing is executed, nothing written, no pickle opened.

    Args:
        path: a Hugging Face folder, one `.safetensors`, a PEFT adapter's folder, a GGUF or an ONNX file or its folder.
        deep: read every row of the tables and compare all large tensors.
        scan: False reads headers only, so that equal tables are not told from different ones.
        base: of an adapter: the checkpoint that it changes.
        beside: of a GGUF or ONNX file: the Hugging Face checkpoint that it was made from.
        target: of a draft model or head: the checkpoint that it proposes tokens to.
        world: ranks that the tables are to be spread over: B042 says what of them each gets.
        as_class: of a folder: the class of transformers that loads it, where it is not the one that its config names.
        quantise: a JSON file with the config of a quantisation that is to come: B051 and B053 judge it beforehand.
        select: ids or prefixes of the rules to run; none given: all.
        ignore: ids or prefixes of rules to leave out.

    Raises:
        CheckpointError: nothing at `path` can be read, an id is unknown, or the arguments contradict each other.
    """
    path, select = Path(path), tuple(select)
    if world is not None and (not hasattr(world, "__index__") or world < 1):
        raise CheckpointError(f"world is {world!r}", "give a number of ranks, 1 or more")
    if deep and not scan:
        raise CheckpointError("a deep check reads every row", "leave out one of the two: headers only, or deep")
    catalogue = rules()
    chosen, ignored = matching(select) if select else frozenset(catalogue), matching(ignore)
    folder = None if path.suffix in _FILES else open_folder(path)
    if (
        folder is not None
        and not folder.tensors
        and (exports := [one for one in folder.files if one.endswith(".onnx")])
    ):
        if len(exports) > 1 and "model.onnx" not in exports:
            raise CheckpointError(f"{path}: {len(exports)} ONNX files", f"give one of them: {names(exports)}")
        path, folder = inside(path, "model.onnx" if len(exports) > 1 else exports[0]), None
    if base is not None and (folder is None or not folder.is_adapter):
        raise CheckpointError("base is given, and this is not an adapter's folder", "leave base out")
    if beside is not None and folder is not None:
        raise CheckpointError("beside is given, and this is no GGUF or ONNX file", "leave beside out")
    if as_class is not None and (folder is None or folder.is_adapter):
        raise CheckpointError("as_class is given, and this is not a model's folder", "leave as_class out")
    if target is not None and (folder is None or folder.is_adapter):
        raise CheckpointError("target is given, and this is no draft model", "leave target out")
    source = base if base is not None else beside
    if quantise is not None and (folder is None or folder.is_adapter):
        raise CheckpointError("quantise is given, and this is not a whole checkpoint", "leave quantise out")
    made_of = Facts(open_folder(source), scan) if source is not None else None
    facts: Facts | AdapterFacts | GgufFacts | OnnxFacts
    kinds: tuple[str, ...]
    if path.suffix == ".onnx":
        facts = onnx = replace(read_onnx(path), source=made_of, scan=scan)
        held, kinds = onnx.tensors, ("any", "onnx")
        ends = [("both" if onnx.table in onnx.heads else "input", onnx.table)]
        ends += [("output", head) for head in onnx.heads if head is not onnx.table]
        parts = tuple(Part(role, tensor) for role, tensor in ends if tensor is not None)
        audit = Audit(path, "onnx", parts=parts, spare=sum(copy.nbytes for copy in onnx.copies))
    elif folder is None:
        facts = gguf = replace(open_gguf(path), source=made_of, scan=scan)
        held, kinds = gguf.tensors, ("any", "gguf")
        ends = [("input", gguf.table), ("output", gguf.head)]
        parts = tuple(Part(role, tensor) for role, tensor in ends if tensor is not None)
        audit = Audit(path, "gguf", parts=parts, spare=parts[1].tensor.nbytes if gguf.equal else 0)
    elif folder.is_adapter:
        facts = adapter = open_adapter(folder, made_of, scan)
        held, kinds, audit = adapter.tensors, ("any", "adapter"), Audit(path, "adapter")
    else:
        if not folder.tensors and not folder.faults and not folder.pickles:
            fix = "give a checkpoint folder, or one .safetensors, .gguf or .onnx file"
            raise CheckpointError(f"{path}: no file of tensors in it", fix)
        if as_class is not None:
            if folder.config is None:
                raise CheckpointError(
                    f"{path}: it has no config.json to load {as_class} by", "give the folder that has it"
                )
            folder = replace(folder, config=config_for(folder.config, as_class))
        planned = None if quantise is None else read_quantisation(quantise)
        proposes_to = None if target is None else Facts(open_folder(target), scan)
        facts = whole = Facts(folder, scan, world, as_class, planned, proposes_to)
        draft = whole.draft
        kinds = ("any", "folder", "draft") if draft is not None or target is not None else ("any", "folder")
        held, audit = folder.tensors, _whole(path, whole, draft)

    elsewhere = {"folder": "for whole checkpoints", "adapter": "for adapters", "gguf": "for GGUF files"}
    elsewhere |= {"draft": "for drafts", "onnx": "for ONNX files"}
    skipped: dict[str, str] = {}
    found: list[Finding] = []
    for name, rule in catalogue.items():
        if name in ignored:
            skipped[name] = "ignored"
        elif name not in chosen:
            skipped[name] = "not selected"
        elif rule.kind not in kinds:
            skipped[name] = elsewhere[rule.kind]
        elif audit.kind == "draft" and name.startswith(_ALONE):
            skipped[name] = "for models that stand alone"
        elif rule.scans and not scan:
            skipped[name] = "compares the two tables, and only headers were read"
        elif rule.deep and not deep:
            skipped[name] = "reads every row, and was not asked to"
        else:
            found += _counted(rule.check(facts))
    found.sort(key=lambda finding: (-SEVERITIES.index(finding.severity), finding.rule))
    return replace(
        audit,
        tensors=len(held),
        nbytes=sum(tensor.nbytes for tensor in held.values()),
        findings=tuple(found),
        ran=tuple(name for name in catalogue if name not in skipped),
        skipped=skipped,
        scan=scan,
        deep=deep,
        as_class=as_class,
    )


def _counted(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield ten findings of each kind of one rule, and one that stands for all others of it."""
    seen: Counter[str] = Counter()
    last: dict[str, Finding] = {}
    for finding in findings:
        kind = f"{finding.severity} {finding.safe}"
        seen[kind] += 1
        if seen[kind] <= MOST_OF_A_KIND:
            yield finding
        else:
            last[kind] = finding
    for kind, finding in last.items():
        left = seen[kind] - MOST_OF_A_KIND
        what = f"{left:,} more of {seen[kind]:,} findings of this kind, the last at {finding.where}"
        yield finding if left == 1 else replace(finding, evidence=what, count=left)


def _whole(path: Path, facts: Facts, draft: Draft | None) -> Audit:
    """What is stored at the two ends, and what loaders make of it."""
    roles, ends = facts.roles, facts.ends
    groups = {"input": roles.inputs, "output": roles.tables[len(roles.inputs) :], "bias": roles.biases}
    groups |= {"position": roles.positions, "map": roles.maps}
    return Audit(
        path,
        "draft" if draft is not None else "file" if facts.folder.single else "folder",
        facts.claims,
        roles,
        (
            *(Part(role, tensor) for role, tensors in groups.items() for tensor in tensors),
            *(Part(other.role, other.tensor) for other in roles.others),
        ),
        ends,
        spare=roles.output.nbytes if roles.output is not None and ends is not None and ends.kind == IDENTICAL else 0,
        outcomes=predict(facts) if draft is None else (),
    )
