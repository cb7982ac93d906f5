"""Audit a checkpoint: run the rules, and say beside them what was read."""

from __future__ import annotations

import io
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.adapter import AdapterFacts, open_adapter
from tiewise.checkpoint.claims import FLAG, Claims, of_tiewise
from tiewise.checkpoint.facts import Facts, config_for, read_quantisation
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.loader_columns import LoaderOutcome
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rules.gguf_file import GgufFacts, open_gguf
from tiewise.checkpoint.rules.onnx_file import OnnxFacts, read_onnx
from tiewise.checkpoint.rules.rule import SEVERITIES, Finding, Rule, difference, matching, names, rules, said
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import IDENTICAL, TableLikeness
from tiewise.checkpoint.untrusted import following_links, inside, short
from tiewise.core import Late, __version__
from tiewise.core.errors import CheckpointError, refuse_live_model
from tiewise.core.files import size, strict

SCHEMA = 1
# a check from Python never needs these
rich_box, rich_console, rich_padding = Late("rich.box"), Late("rich.console"), Late("rich.padding")
rich_table, rich_text = Late("rich.table"), Late("rich.text")
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
    roles: Roles | None = None  # the parts of the boundary that are stored; None for an adapter, GGUF or ONNX
    parts: tuple[Part, ...] = ()  # their tensors, the two ends first
    ends: TableLikeness | None = None  # how alike the two tables are; None where not both stored, comparable and read
    spare: int = 0  # bytes that a second, equal copy of the table takes
    tensors: int = 0  # number of tensors, and
    nbytes: int = 0  # their bytes
    outcomes: tuple[LoaderOutcome, ...] = ()  # what each loader will make of it; only of a model of its own
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
        claimed = {key: getattr(claims, key) for key in ("tied", "known", "t5_like", "fixed")}
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
                "claims": claimed | {"levels": levels},
                "found_by": roles and roles.source,
                "headless": roles and roles.headless,
                "names": roles and {"input": roles.input_name, "output": roles.output_name},
                "scalars": roles.scalars if roles else {},
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
        console = rich_console.Console(file=io.StringIO(), record=True, width=120, highlight=False)
        console.print(audit_view(self))
        return str(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))


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
    follow_links: bool = False,
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
        follow_links: read through links that lead outside the folder too; without it they are refused.
        select: ids or prefixes of the rules to run, or one of them; none given: all.
        ignore: ids or prefixes of rules to leave out, or one.

    Raises:
        CheckpointError: nothing at `path` can be read, an id is unknown, or the arguments contradict each other.
    """
    refuse_live_model("check", path)
    options: dict[str, Any] = {"deep": deep, "scan": scan, "base": base, "beside": beside, "target": target}
    options |= {"world": world, "as_class": as_class, "quantise": quantise, "select": select, "ignore": ignore}
    with following_links(follow_links):
        return _audit(path, **options)


def _audit(
    path: str | os.PathLike[str],
    *,
    deep: bool,
    scan: bool,
    base: str | os.PathLike[str] | None,
    beside: str | os.PathLike[str] | None,
    target: str | os.PathLike[str] | None,
    world: int | None,
    as_class: str | None,
    quantise: str | os.PathLike[str] | None,
    select: Iterable[str],
    ignore: Iterable[str],
) -> Audit:
    """Audit a checkpoint, with the arguments of `check`."""
    path, select = Path(path), select if isinstance(select, str) else tuple(select)
    if world is not None and (not hasattr(world, "__index__") or world < 1):
        raise CheckpointError(f"world is {world!r}", "give a number of ranks, 1 or more")
    if deep and not scan:
        raise CheckpointError("a deep check reads every row", "leave out one of the two: headers only, or deep")
    catalogue = rules()
    chosen, ignored = matching(select) if select else frozenset(catalogue), matching(ignore)
    folder = None if path.suffix in _FILES else open_folder(path)
    if folder is not None and not folder.tensors and (files := [one for one in folder.files if one.endswith(".onnx")]):
        if len(files) > 1 and "model.onnx" not in files:
            raise CheckpointError(f"{path}: {len(files)} ONNX files", f"give one of them: {names(files)}")
        path, folder = inside(path, "model.onnx" if len(files) > 1 else files[0]), None
    adapted = folder is not None and folder.is_adapter
    model = folder is not None and not adapted
    for name, given, right, what in (
        ("base", base, adapted, "this is not an adapter's folder"),
        ("beside", beside, folder is None, "this is no GGUF or ONNX file"),
        ("as_class", as_class, model, "this is not a model's folder"),
        ("target", target, model, "this is no draft model"),
        ("quantise", quantise, model, "this is not a whole checkpoint"),
    ):
        if given is not None and not right:
            raise CheckpointError(f"{name} is given, and {what}", f"leave {name} out")
    source = base if base is not None else beside
    made_of = Facts(open_folder(source), scan) if source is not None else None
    facts: Facts | AdapterFacts | GgufFacts | OnnxFacts
    if folder is None:
        file = read_onnx(path) if path.suffix == ".onnx" else open_gguf(path)
        facts = file = replace(file, source=made_of, scan=scan)
        ends = [("both" if file.table in file.heads else "input", file.table)]
        ends += [("output", head) for head in file.heads if head is not file.table]
        parts = tuple(Part(role, tensor) for role, tensor in ends if tensor is not None)
        spare = sum(copy.nbytes for copy in file.copies)
        held, audit = file.tensors, Audit(path, path.suffix[1:], parts=parts, spare=spare)
    elif folder.is_adapter:
        facts = adapter = open_adapter(folder, made_of, scan)
        held, audit = adapter.tensors, Audit(path, "adapter")
    else:
        if not folder.tensors and not folder.faults and not folder.pickles:
            fix = "give a checkpoint folder, or one .safetensors, .gguf or .onnx file"
            raise CheckpointError(f"{path}: no file of tensors in it", fix)
        if as_class is not None:
            if folder.config is None:
                fix = "give the folder that has it"
                raise CheckpointError(f"{path}: it has no config.json to load {as_class} by", fix)
            folder = replace(folder, config=config_for(folder.config, as_class))
        planned = None if quantise is None else read_quantisation(quantise)
        proposes_to = None if target is None else Facts(open_folder(target), scan)
        facts = whole = Facts(folder, scan, world, as_class, planned, proposes_to)
        held, audit = folder.tensors, _of_model(path, whole)
    kinds = {"any", audit.kind, "folder" if model else "any", "any" if target is None else "draft"}
    others = {"folder": "whole checkpoints", "adapter": "adapters", "gguf": "GGUF files", "draft": "drafts"}
    skipped: dict[str, str] = {}
    found: list[Finding] = []
    for name, rule in catalogue.items():
        if name in ignored:
            skipped[name] = "ignored"
        elif name not in chosen:
            skipped[name] = "not selected"
        elif rule.kind not in kinds:
            skipped[name] = f"for {others.get(rule.kind, 'ONNX files')}"
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
    seen, last = Counter[tuple[str, bool]](), dict[tuple[str, bool], Finding]()
    for finding in findings:
        kind = finding.severity, finding.safe
        seen[kind] += 1
        if seen[kind] <= MOST_OF_A_KIND:
            yield finding
        else:
            last[kind] = finding
    for of, finding in last.items():
        left = seen[of] - MOST_OF_A_KIND
        what = f"{left:,} more of {seen[of]:,} findings of this kind, the last at {finding.where}"
        yield finding if left == 1 else replace(finding, evidence=what, count=left)


def _of_model(path: Path, facts: Facts) -> Audit:
    """What is stored at the two ends, and what loaders make of it."""
    roles, ends = facts.roles, facts.ends
    groups = {"input": roles.inputs, "output": roles.tables[len(roles.inputs) :], "bias": roles.biases}
    groups |= {"position": roles.positions, "map": roles.maps}
    parts = [Part(role, tensor) for role, tensors in groups.items() for tensor in tensors]
    parts += [Part(other.role, other.tensor) for other in roles.others]
    kind = "draft" if facts.draft is not None else "file" if facts.folder.single else "folder"
    spare = roles.output.nbytes if roles.output is not None and ends is not None and ends.kind == IDENTICAL else 0
    outcomes = predict(facts) if facts.draft is None else ()
    return Audit(path, kind, facts.claims, roles, tuple(parts), ends, spare, outcomes=outcomes)


STYLE = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "cyan"}
ROLES = {"input": "input table", "output": "output head", "bias": "bias", "position": "positions", "map": "map"}
ROLES |= {"draft map": "draft map", "both": "both ends"}


def errors_of_result(result: Audit, config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yield the errors that a folder of ours should not have; `config` is its config.json.

    No stock loader opens a model of tiewise's own types, which B080 reports of a folder that somebody was given.
    """
    expected = {"B080"} if config is not None and of_tiewise(config) else set()
    yield from (finding for finding in result.at_least("error") if finding.rule not in expected)


def audit_view(audit: Audit) -> Any:
    """Return an audit as it is printed. Everything that comes from the checkpoint is `Text`, never markup."""
    what = f"{audit.tensors:,} tensors, {size(audit.nbytes)}"
    loaded_as = f" as {audit.as_class}" if audit.as_class is not None else ""
    table = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(audit):
        table.add_row(name, rich_text.Text(value))
    title = rich_text.Text.assemble((str(audit.path), "bold"), f"  {audit.kind}{loaded_as}, {what}", overflow="fold")
    parts: list[Any] = [title, table, *([_loaders(audit.outcomes)] if audit.outcomes else [])]
    for found in audit.findings:
        severity = (found.severity, STYLE[found.severity])
        head = rich_text.Text.assemble((found.rule, "bold"), " ", severity, "  ", found.evidence)
        safe = "  (safe: tiewise repair does it)" if found.safe else ""
        repair = rich_text.Text.assemble(("  → ", "green"), found.repair, (safe, "dim"))
        parts.append(rich_padding.Padding(rich_console.Group(head, repair), (0, 0, 0, 2)))
    if audit.findings:
        told = f"  {counted_findings(audit)}; tiewise check --explain {audit.findings[0].rule} says more"
        parts.append(rich_text.Text(told, "dim"))
    else:
        parts.append(rich_text.Text(f"  {counted_findings(audit)}", "green"))
    return rich_console.Group(*parts)


def summary_rows(audit: Audit) -> list[tuple[str, str]]:
    """Return what the config states and what is stored at the two ends, as (label, value)."""
    return [*_claims(audit), *_stored(audit)]


def counted_findings(audit: Audit) -> str:
    """Return the findings by severity in words, e.g. "1 error, 2 warnings"."""
    if not audit.findings:
        return f"nothing found by {len(audit.ran)} rules"
    counts = {name: sum(f.count for f in audit.findings if f.severity == name) for name in reversed(SEVERITIES)}
    ending = {name: "s" if count > 1 and name in ("error", "warning") else "" for name, count in counts.items()}
    return ", ".join(f"{count:,} {name}{ending[name]}" for name, count in counts.items() if count)


def rule_view(rule: Rule) -> Any:
    """Return what `--explain` prints of one rule."""
    head = rich_text.Text.assemble((rule.id, "bold"), "  ", (rule.severity, STYLE[rule.severity]), "  ", rule.title)
    below = [*(["Runs only with --deep."] if rule.deep else []), f"Sources: {', '.join(rule.sources)}"]
    about = [rich_text.Text(part.replace("\n", " ").strip()) for part in rule.explain.split("What to do: ")]
    if len(about) == 2:
        about[1] = rich_text.Text.assemble(("What to do: ", "bold"), about[1])
    blank = rich_text.Text()
    return rich_console.Group(head, blank, *about, blank, *(rich_text.Text(line, "dim") for line in below))


def _claims(audit: Audit) -> Iterator[tuple[str, str]]:
    for claim in audit.claims.levels:
        takes = ", and its class is not known" if claim.default is None else f"; its class takes {said(claim.default)}"
        what = f"{FLAG} absent{takes}" if claim.written is None else f"{FLAG}: {said(claim.written)}"
        kind = short(f" ({claim.model_type})" if claim.model_type else "")
        decides = ", decides" if claim is audit.claims.deciding and len(audit.claims.levels) > 1 else ""
        yield f"config {short(claim.level) or 'root'}", what + kind + decides
    if not audit.claims.levels and audit.roles is not None:
        yield "config", "none: tying is known from the tensors alone"
    root = family(audit.claims.levels[0].model_type if audit.claims.levels else None)
    if audit.claims.levels and audit.roles is not None and not root.is_known:
        yield "family", f"{root.unknown}: its ends were identified by {audit.roles.source}"


def _stored(audit: Audit) -> Iterator[tuple[str, str]]:
    def described(tensor: Stored) -> str:
        return f"{short(tensor.name)}  {tensor.dtype} {list(tensor.shape)}  {size(tensor.nbytes)}"

    roles = audit.roles
    told = [(ROLES[role], described(tensor)) for role, tensor in audit.parts if role in ROLES]
    inputs = sum(role == "input" for role, _ in audit.parts)  # they come first
    yield from told[:inputs]
    if roles is not None and roles.output is None and roles.input is not None:
        used = "not stored: the input table is used" if audit.claims.tied else "not stored"
        yield ROLES["output"], "none: this class has no token head" if roles.headless else used
    yield from told[inputs:]
    for role in dict.fromkeys(role for role, _ in audit.parts if role not in ROLES):  # a line for all of a role
        first, *rest = (tensor for other, tensor in audit.parts if other == role)
        more = f" and {len(rest):,} more, {size(sum(each.nbytes for each in (first, *rest)))} in all" if rest else ""
        yield role, described(first) + more
    if audit.ends is not None:
        spare = f"; {size(audit.spare)} stored twice" if audit.spare else ""
        yield "the two are", difference(audit.ends) + spare
    elif roles is not None and roles.input is not None and roles.output is not None and audit.kind != "draft":
        yield "the two are", "not compared" + ("" if audit.scan else " (headers only)")


def _loaders(outcomes: tuple[LoaderOutcome, ...]) -> Any:
    table = rich_table.Table(box=rich_box.SIMPLE_HEAD, pad_edge=False)
    for name in ("loader", "makes of it", "that is"):
        table.add_column(name, overflow="fold")
    for outcome in outcomes:
        basis = f"from reading {outcome.source}" if outcome.predicted else outcome.source
        loader = rich_text.Text.assemble(f"{outcome.loader} {outcome.versions}\n", (basis, "dim"))
        word = rich_text.Text(outcome.outcome, STYLE["error"] if outcome.right is False else "")
        table.add_row(loader, word, rich_text.Text(outcome.sentence))
    return rich_padding.Padding(table, (0, 0, 0, 2))
