"""Check of a checkpoint: its facts, and the findings of the rules."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tiewise.checkpoint.adapter import open_adapter
from tiewise.checkpoint.claims import Claims, needs_tiewise
from tiewise.checkpoint.config_parts import config_for, read_quantisation
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, HubReading, open_folder, open_repository, read_repository
from tiewise.checkpoint.hub_names import HubPath, checkpoint_path, is_hub_path
from tiewise.checkpoint.loader_columns import LoaderOutcome
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rules.gguf_file import GgufFacts, open_gguf, open_gguf_from
from tiewise.checkpoint.rules.onnx_file import OnnxFacts, read_onnx, read_onnx_from
from tiewise.checkpoint.rules.rule import (
    FOLLOWS_FROM_OTHERS,
    SEVERITIES,
    AnyFacts,
    Finding,
    Rule,
    matching,
    names,
    rules,
)
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import IDENTICAL, TableLikeness
from tiewise.checkpoint.untrusted import following_links, path_inside
from tiewise.core import Late, __version__
from tiewise.core.errors import CheckpointError, require_path
from tiewise.core.records import to_strict_json
from tiewise.core.result import PrintedResult, Row

SCHEMA = 1
MOST_OF_A_GROUP = 10  # findings that are reported one by one
AnyPath: TypeAlias = "str | os.PathLike[str]"
view = Late("tiewise.checkpoint.audit_view")  # imported late: a check from Python never needs it
words = Late("tiewise.checkpoint.audit_verdict")
_FILES = (".gguf", ".onnx")
# prefixes of rules on complete models: ends, tokenizer, loaders. A draft is half a model and has B083 to B085.
_COMPLETE_MODEL_RULES = ("B01", "B02", "B03", "B042", "B080")
# {argument of `check`: (type of checkpoint that it needs, message for any other type)}
_NEEDED_BY = {
    "base": ("adapter", "this is not an adapter's folder"),
    "original": ("file", "this is no GGUF or ONNX file"),
    "as_class": ("model", "this is not a model's folder"),
    "target": ("model", "this is no draft model"),
    "quantise": ("model", "this is not a whole checkpoint"),
}
_CHECKPOINT_TYPES = {  # {type of checkpoint that a rule checks: its name in a message}
    "folder": "whole checkpoints",
    "adapter": "adapters",
    "gguf": "GGUF files",
    "onnx": "ONNX files",
    "draft": "drafts",
}


class Part(NamedTuple):
    """A stored tensor and its role.

    The role is "input", "output", "both" (the one table of a file), "bias", "position", "map", or the role of an
    `IndexedTensor`.
    """

    role: str
    tensor: Stored

    def record(self) -> dict[str, Any]:
        """Return the part as a JSON object."""
        return {
            "role": self.role,
            "name": self.tensor.name,
            "file": self.tensor.path.name,
            "dtype": self.tensor.dtype,
            "shape": self.tensor.shape,
            "bytes": self.tensor.nbytes,
        }


@dataclass(frozen=True)
class HubReport:
    """Reading of a repository of the Hub by a check."""

    commit: str  # of all files
    unread: tuple[str, ...]  # shard files whose headers were left out
    requests: int
    bytes_read: int  # of all answers


@dataclass(frozen=True, repr=False)
class Audit(PrintedResult):
    """Result of checking one checkpoint. A notebook renders it as the command prints it.

    Attributes:
        path: the argument of `check`.
        kind: "folder", "file" (one `.safetensors`), "draft", "adapter", "gguf" or "onnx".
        claims: claims of the config on tying; no levels without a config.
        roles: the stored parts of the boundary; None for an adapter, GGUF or ONNX.
        parts: the tensors of `roles`; input embedding and output head first.
        ends: likeness of input table and output table; None unless both are stored, comparable and read.
        spare: bytes of a second, equal copy of the table.
        tensors: number of tensors.
        nbytes: bytes of all tensors.
        outcomes: outcome of loading with each loader; empty unless a complete model.
        findings: sorted by severity, the most severe first, then by id.
        in_baseline: findings that `findings` lacks, because the baseline has them; None without a baseline.
        ran: ids of the rules that ran.
        skipped: {id of a rule that did not run: the reason}.
        scan: tables were read; False: headers only.
        deep: every row was read.
        as_class: class that the check assumed; None: the class that the config names.
        hub: what was read of a repository of the Hub; None for files on disk.

    >>> import tiewise  # the config of `wrong` claims one table, and the folder stores two
    >>> audit = tiewise.check("wrong")
    >>> audit.worst, audit.findings[0].rule
    ('error', 'B012')
    """

    path: Path
    kind: str
    claims: Claims = field(default_factory=Claims)
    roles: Roles | None = None
    parts: tuple[Part, ...] = ()
    ends: TableLikeness | None = None
    spare: int = 0
    tensors: int = 0
    nbytes: int = 0
    outcomes: tuple[LoaderOutcome, ...] = ()
    findings: tuple[Finding, ...] = ()
    in_baseline: tuple[Finding, ...] | None = None
    ran: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    scan: bool = True
    deep: bool = False
    as_class: str | None = None
    hub: HubReport | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict: one sentence, and the first fix unless the checkpoint is sound.

        >>> import tiewise
        >>> tiewise.check("untied").verdict
        'Healthy: untied, two tables [40, 8]; all 7 loaders read it.'
        """
        sentence: str = words.verdict(self)
        return sentence

    def answer_text(self) -> str:
        """Return the verdict."""
        return self.verdict

    def rows(self) -> list[Row]:
        """Return a row for every finding."""
        return [asdict(finding) for finding in self.findings]

    def summary_rows(self) -> list[Row]:
        """Return a row for every finding: rule, severity and place."""
        return [{"rule": one.rule, "severity": one.severity, "where": one.where} for one in self.findings]

    @property
    def worst(self) -> str | None:
        """Return the severity of the most severe finding; None without findings."""
        if not self.findings:
            return None
        return self.findings[0].severity

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of this severity or a worse one.

        Args:
            severity: "info", "warning", "error" or "fatal".

        Raises:
            CheckpointError: there is no such severity.
        """
        if severity not in SEVERITIES:
            raise CheckpointError(f"there is no severity {severity!r}", f"choose one of {', '.join(SEVERITIES)}")
        lowest = SEVERITIES.index(severity)
        return tuple(finding for finding in self.findings if SEVERITIES.index(finding.severity) >= lowest)

    def record(self) -> dict[str, Any]:
        """Return the audit as a JSON object; docs/reference-schemas.md describes its fields."""
        record = {
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
            "claims": _claims_record(self.claims),
            **_roles_record(self.roles),
            "parts": [part.record() for part in self.parts],
            "ends": _ends_record(self.ends),
            "loaders": [asdict(outcome) for outcome in self.outcomes],
            "worst": self.worst,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            **_baseline_record(self.in_baseline),
            "rules": {"ran": self.ran, "skipped": self.skipped},
        }
        if self.hub is not None:
            record["hub"] = asdict(self.hub)
        finite: dict[str, Any] = to_strict_json(record)
        return finite

    def _repr_html_(self) -> str:
        html: str = view.html(self)
        return html


def _ends_record(ends: TableLikeness | None) -> dict[str, Any] | None:
    """Return the likeness of both tables as a JSON object. `of` is left out if all rows were compared."""
    if ends is None:
        return None
    record = asdict(ends)
    if ends.of is None:
        del record["of"]
    return record


def _baseline_record(in_baseline: Iterable[Finding] | None) -> dict[str, Any]:
    """Return the findings of the baseline as a JSON object, which is empty without one."""
    if in_baseline is None:
        return {}
    return {"known_findings": [asdict(finding) for finding in in_baseline]}


def _claims_record(claims: Claims) -> dict[str, Any]:
    """Return the claims of a config as a JSON object."""
    record: dict[str, Any] = {
        "tied": claims.tied,
        "known": claims.has_family_data,
        "t5_like": claims.t5_like,
        "fixed": claims.fixed,
    }
    record["levels"] = [asdict(claim) | {"effective": claim.effective} for claim in claims.levels]
    return record


def _roles_record(roles: Roles | None) -> dict[str, Any]:
    """Return the parts of the boundary as a JSON object. Each is null for an adapter, GGUF or ONNX."""
    if roles is None:
        return {"found_by": None, "headless": None, "names": None, "scalars": {}}
    return {
        "found_by": roles.source,
        "headless": roles.headless,
        "names": {"input": roles.input_name, "output": roles.output_name},
        "scalars": roles.scalars,
    }


def check(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    scan: bool = True,
    base: str | os.PathLike[str] | None = None,
    original: str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | None = None,
    world: int | None = None,
    as_class: str | None = None,
    quantise: str | os.PathLike[str] | None = None,
    build: bool = True,
    follow_links: bool = False,
    all_headers: bool = False,
    full: bool = False,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Audit:
    """Check a checkpoint and report the findings of the rules.

    `check` executes nothing of the checkpoint, writes nothing into it and opens no pickle.

    Args:
        path: a Hugging Face folder, one `.safetensors`, a PEFT adapter's folder, a GGUF or an ONNX file or its folder,
            an address hf://org/model[@revision][/path], or a model's name in the local cache of the Hub.
        deep: read every row of the tables and compare all large tensors.
        scan: compare the tables. False reads headers only, which cannot distinguish equal from different tables.
        base: for an adapter, the checkpoint that it changes.
        original: for a GGUF or ONNX file, the Hugging Face checkpoint that it was made from.
        target: for a draft model or head, the checkpoint that it proposes tokens to.
        world: number of ranks that will share the tables; B042 reports the part of each rank.
        as_class: for a folder, the class of transformers that loads it, if it differs from the class in the config.
        quantise: JSON file with the config of a planned quantisation, which B051 and B053 check in advance.
        build: if transformers is installed, build the class without weights in a child process, which shows for every
            tensor if it is loaded. False, or the environment variable TIEWISE_NO_BUILD=1: judge the two ends alone.
        follow_links: follow links that lead outside the folder, which `check` refuses otherwise.
        all_headers: of an address hf://, read the headers of all shards, not only those with the ends.
        full: of an address hf://, compare tables as a whole, not on random rows.
        select: ids or prefixes of the rules to run, or one of them. Empty runs all.
        ignore: ids or prefixes of the rules to skip, or one of them.

    Returns:
        An `Audit`: the claims of the config, the stored parts, the outcome for each loader, and the findings.

    Raises:
        CheckpointError: nothing at `path` can be read, an id is unknown, or the arguments contradict each other.

    >>> import numpy, tempfile
    >>> from safetensors.numpy import save_file
    >>> folder = tempfile.mkdtemp()
    >>> save_file({"lm_head.weight": numpy.zeros((8, 4), "f4")}, f"{folder}/model.safetensors")
    >>> audit = check(folder, select="B021")
    >>> audit.kind, audit.tensors, audit.nbytes, audit.ran
    ('folder', 1, 128, ('B021',))
    """
    require_path("check(FOLDER)", path)
    reading = HubReading(all_headers or deep, full or deep)
    options = _CheckOptions(
        checkpoint_path(path), deep, scan, base, original, target, world, as_class, quantise, build, reading
    )
    selected = select if isinstance(select, str) else tuple(select)
    with following_links(follow_links):
        options.require_consistent()
        selection = _RuleSelection(selected, ignore)
        return selection.run(_open(options), options)


def check_opened(
    checkpoint: Folder | GgufFacts | OnnxFacts,
    *,
    source: Facts | None = None,
    target: Facts | None = None,
    scan: bool = True,
) -> Audit:
    """Check an opened checkpoint with every rule that applies.

    Its files may be anywhere: on disk, on the Hub, or in memory.

    Args:
        checkpoint: the folder or repository, the GGUF file or the ONNX file.
        source: checkpoint that an adapter changes, or that the file was made from.
        target: checkpoint that a draft proposes tokens to.
        scan: compare the tables, as in `check`.

    Raises:
        CheckpointError: the checkpoint has no tensors.
    """
    options = _CheckOptions(checkpoint.path, scan=scan, base=source, target=target, build=False)
    if isinstance(checkpoint, Folder):
        opened = _of_folder(checkpoint.path, checkpoint, options)
    else:
        opened = _of_file(checkpoint, options)
    return _RuleSelection((), ()).run(opened, options)


class _CheckOptions(NamedTuple):
    """Arguments of `check` without `select` and `ignore`."""

    path: Path
    deep: bool = False
    scan: bool = True
    base: AnyPath | Facts | None = None
    original: AnyPath | Facts | None = None
    target: AnyPath | Facts | None = None
    world: int | None = None
    as_class: str | None = None
    quantise: AnyPath | None = None
    build: bool = True
    reading: HubReading = HubReading()

    def require_consistent(self) -> None:
        """Raise a CheckpointError if the arguments contradict each other for any checkpoint."""
        if self.world is not None and not _is_number_of_ranks(self.world):
            raise CheckpointError(f"world is {self.world!r}", "give a number of ranks, 1 or more")
        if self.deep and not self.scan:
            raise CheckpointError("a deep check reads every row", "leave out one of the two: headers only, or deep")

    def require_fitting(self, folder: Folder | None) -> None:
        """Raise a CheckpointError if an argument does not fit the type of checkpoint.

        `folder` is None for a GGUF or ONNX file.
        """
        kind = "model"
        if folder is None:
            kind = "file"
        elif folder.is_adapter:
            kind = "adapter"
        for name, (needed_kind, why) in _NEEDED_BY.items():
            if kind != needed_kind and getattr(self, name) is not None:
                raise CheckpointError(f"{name} is given, and {why}", f"leave {name} out")

    def source(self) -> Facts | None:
        """Return the facts of the adapter's base or the file's source; None for neither."""
        path = self.original if self.base is None else self.base
        return self.facts_of(path)

    def facts_of(self, path: AnyPath | Facts | None) -> Facts | None:
        """Return the facts of the checkpoint that an argument names or has; None for None."""
        if path is None or isinstance(path, Facts):
            return path
        return Facts(open_folder(path, self.reading), self.scan)


def _is_number_of_ranks(value: Any) -> bool:
    """Return whether a value is a whole number of 1 or more. Integers of NumPy and torch count."""
    if not hasattr(value, "__index__"):
        return False
    return not value < 1


class _OpenedCheckpoint(NamedTuple):
    """A checkpoint before the rules run."""

    facts: AnyFacts  # input of the rules
    audit: Audit  # the audit, still without findings
    checkpoint_types: set[str]  # types of checkpoints whose rules apply to it


def _open(options: _CheckOptions) -> _OpenedCheckpoint:
    """Open the checkpoint at the path."""
    if is_hub_path(options.path):
        return _open_on_hub(options.path, options)
    path, folder = _file_or_folder(options.path, options.reading)
    options.require_fitting(folder)
    if folder is not None:
        return _of_folder(path, folder, options)
    return _of_file(read_onnx(path) if path.suffix == ".onnx" else open_gguf(path), options)


def _open_on_hub(path: HubPath, options: _CheckOptions) -> _OpenedCheckpoint:
    """Open the repository, folder or file at an address of the Hub."""
    repository = open_repository(path, options.reading)
    name = repository.file or ""
    if name.endswith(_FILES):
        options.require_fitting(None)
        read = read_onnx_from if name.endswith(".onnx") else open_gguf_from
        return _of_file(replace(read(repository, name), repository=repository), options)
    folder = read_repository(repository, options.reading)
    options.require_fitting(folder)
    files = [file for file in folder.files if file.endswith(_FILES)]
    if files and not folder.tensors and not folder.faults and not folder.is_adapter:
        remedy = f"give one of them, such as {repository.path / files[0]}"
        raise CheckpointError(f"{path}: {len(files)} GGUF or ONNX files, and no .safetensors", remedy)
    return _of_folder(path, folder, options)


def _of_folder(path: Path, folder: Folder, options: _CheckOptions) -> _OpenedCheckpoint:
    """Open an adapter, or a model."""
    if not folder.is_adapter:
        return _of_model(path, folder, options)
    adapter = open_adapter(folder, options.source(), options.scan)
    return _OpenedCheckpoint(adapter, _with_sizes(Audit(path, "adapter"), adapter.tensors), {"any", "adapter"})


def _file_or_folder(path: Path, reading: HubReading) -> tuple[Path, Folder | None]:
    """Return (path, folder). The folder is None for a GGUF or ONNX file, or a folder with only ONNX.

    The path is that of the folder that was opened: for a name in the cache of the Hub, the folder there.
    """
    if path.suffix in _FILES:
        return path, None
    folder = open_folder(path, reading)
    if not folder.single:
        path = folder.path
    files = [name for name in folder.files if name.endswith(".onnx")]
    if folder.tensors or not files:
        return path, folder
    if len(files) == 1:
        return path_inside(path, files[0]), None
    if "model.onnx" not in files:
        raise CheckpointError(f"{path}: {len(files)} ONNX files", f"give one of them: {names(files)}")
    return path_inside(path, "model.onnx"), None


def _of_file(file: GgufFacts | OnnxFacts, options: _CheckOptions) -> _OpenedCheckpoint:
    """Return a GGUF or ONNX file with its source, before the rules run."""
    facts = replace(file, source=options.source(), scan=options.scan)
    spare = sum(copy.nbytes for copy in facts.copies)
    kind = facts.path.suffix[1:]
    audit = Audit(facts.path, kind, parts=tuple(_parts_of_file(facts)), spare=spare)
    return _OpenedCheckpoint(facts, _with_sizes(audit, facts.tensors), {"any", kind})


def _parts_of_file(facts: GgufFacts | OnnxFacts) -> Iterator[Part]:
    """Yield the input table and the output tables of a GGUF or ONNX file.

    A table that is both appears once, with the role "both".
    """
    table = facts.table
    if table is not None:
        yield Part("both" if table in facts.heads else "input", table)
    for head in facts.heads:
        if head is not table:
            yield Part("output", head)


def _of_model(path: Path, folder: Folder, options: _CheckOptions) -> _OpenedCheckpoint:
    """Open a model's folder or its single file."""
    has_weights = folder.tensors or folder.faults or folder.pickles
    if not has_weights:
        remedy = "give a checkpoint folder, or one .safetensors, .gguf or .onnx file"
        raise CheckpointError(f"{path}: no file of tensors in it", remedy)
    if options.as_class is not None:
        folder = _with_class(folder, path, options.as_class)
    planned = None if options.quantise is None else read_quantisation(options.quantise)
    target = options.facts_of(options.target)
    facts = Facts(folder, options.scan, options.world, options.as_class, planned, target, builds=options.build)
    audit = _audit_of_model(path, facts)
    checkpoint_types = {"any", "folder", audit.kind}
    if target is not None:
        checkpoint_types.add("draft")
    audit = replace(audit, tensors=len(folder.tensor_names), nbytes=folder.nbytes)
    return _OpenedCheckpoint(facts, audit, checkpoint_types)


def _with_class(folder: Folder, path: Path, as_class: str) -> Folder:
    """Return a folder with the config of another class of transformers. `path` is for errors."""
    if folder.config is None:
        remedy = "give the folder that has it"
        raise CheckpointError(f"{path}: it has no config.json to load {as_class} by", remedy)
    return replace(folder, config=config_for(folder.config, as_class))


def _audit_of_model(path: Path, facts: Facts) -> Audit:
    """Return the audit of a model before the rules run, without sizes."""
    kind = "file" if facts.folder.single else "folder"
    if facts.draft is not None:
        kind = "draft"
    parts = tuple(_parts(facts.roles))
    audit = Audit(path, kind, facts.claims, facts.roles, parts, facts.ends_likeness, _spare_bytes(facts))
    if kind == "draft":  # half a model, which no loader loads alone
        return audit
    return replace(audit, outcomes=predict(facts))


def _parts(roles: Roles) -> Iterator[Part]:
    """Yield the stored tensors of the boundary, the tables of both ends first."""
    outputs = roles.tables[len(roles.input_tables) :]
    for role, tensors in (
        ("input", roles.input_tables),
        ("output", outputs),
        ("bias", roles.biases),
        ("position", roles.positions),
        ("map", roles.maps),
    ):
        for tensor in tensors:
            yield Part(role, tensor)
    for other in roles.indexed_tensors:
        yield Part(other.role, other.tensor)


def _spare_bytes(facts: Facts) -> int:
    """Return the bytes of a head that repeats the input table byte by byte, else 0."""
    ends = facts.compared_ends
    if ends is None or ends.likeness.kind != IDENTICAL:
        return 0
    return ends.head.nbytes


def _with_sizes(audit: Audit, tensors: Mapping[str, Stored]) -> Audit:
    """Return an audit with the number of tensors and their bytes filled in."""
    return replace(audit, tensors=len(tensors), nbytes=sum(tensor.nbytes for tensor in tensors.values()))


def _hub_report(facts: AnyFacts) -> HubReport | None:
    """Return what was read of a repository of the Hub; None for files on disk."""
    repository = facts.repository
    if repository is None:
        return None
    unread: tuple[str, ...] = ()
    if isinstance(facts, Facts):
        unread = facts.folder.unread_files
    return HubReport(repository.commit, unread, repository.requests, repository.bytes_read)


class _RuleSelection:
    """Rules that `select` and `ignore` choose."""

    def __init__(self, select: str | tuple[str, ...], ignore: Iterable[str]) -> None:
        self.catalogue = rules()
        self.chosen = matching(select) if select else frozenset(self.catalogue)
        self.ignored = matching(ignore)

    def run(self, opened: _OpenedCheckpoint, options: _CheckOptions) -> Audit:
        """Return the audit of a checkpoint with the findings of every rule that applies."""
        ran = list[Rule]()
        skipped = dict[str, str]()
        for rule in self.catalogue.values():
            reason = self._reason_to_skip(rule, opened, options)
            if reason is None:
                ran.append(rule)
            else:
                skipped[rule.id] = reason
        findings = list[Finding]()
        for rule in sorted(ran, key=_follows_from_others):
            is_alone = all(finding.severity == "info" for finding in findings)
            findings += _first_of_each_group(rule.check(opened.facts, is_alone))
        return replace(
            opened.audit,
            findings=tuple(sorted(findings, key=_by_severity)),
            ran=tuple(rule.id for rule in ran),
            skipped=skipped,
            scan=options.scan,
            deep=options.deep,
            as_class=options.as_class,
            hub=_hub_report(opened.facts),
        )

    def _reason_to_skip(self, rule: Rule, opened: _OpenedCheckpoint, options: _CheckOptions) -> str | None:
        """Return why a rule does not run; None if it runs."""
        if rule.id in self.ignored:
            return "ignored"
        if rule.id not in self.chosen:
            return "not selected"
        if rule.kind not in opened.checkpoint_types:
            return f"for {_CHECKPOINT_TYPES[rule.kind]}"
        if opened.audit.kind == "draft" and rule.id.startswith(_COMPLETE_MODEL_RULES):
            return "for models that stand alone"
        if rule.scans and not options.scan:
            return "compares the two tables, and only headers were read"
        if rule.deep and not options.deep:
            return "reads every row, and was not asked to"
        return None


def _follows_from_others(rule: Rule) -> bool:
    """Return whether a rule runs last, because its findings disappear with the findings that cause them."""
    return rule.id == FOLLOWS_FROM_OTHERS


def _by_severity(finding: Finding) -> tuple[int, str]:
    """Return the key that sorts the most severe findings first, those of one severity by rule."""
    return -SEVERITIES.index(finding.severity), finding.rule


def _first_of_each_group(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield at most ten findings per severity and repair, then one that counts the rest."""
    counts = Counter[tuple[str, bool]]()  # by severity and `safe`
    last = dict[tuple[str, bool], Finding]()
    for finding in findings:
        group: tuple[str, bool] = (finding.severity, finding.safe)
        counts[group] += 1
        if counts[group] <= MOST_OF_A_GROUP:
            yield finding
        else:
            last[group] = finding
    for group, finding in last.items():
        more = counts[group] - MOST_OF_A_GROUP
        if more > 1:
            evidence = f"{more:,} more of {counts[group]:,} findings of this kind, the last at {finding.where}"
            finding = replace(finding, evidence=evidence, count=more)
        yield finding


def errors_of_result(result: Audit, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield the errors of a folder that tiewise wrote; `config` is its config.json.

    B080 is left out for tiewise's own model types. It warns the receiver of a folder that no stock loader opens them.
    """
    is_of_tiewise = config is not None and needs_tiewise(config)
    for finding in result.at_least("error"):
        if finding.rule == "B080" and is_of_tiewise:
            continue
        yield finding
