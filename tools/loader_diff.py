"""Compare `check`'s table of loaders with the loaders, on random checkpoints.

    python tools/loader_diff.py --minutes 10                 draw checkpoints for ten minutes
    python tools/loader_diff.py --minutes 10 --out FILE      write a line per checkpoint; the same line continues
    python tools/loader_diff.py --seed 17                    run one checkpoint and print every outcome
    python tools/loader_diff.py --count 500 --families llama,gpt2 --loaders mlx-lm

A seed decides a checkpoint: a tiny model of a class, config keys, flag, stored tables, other tensors, names, files,
tokenizer (tests/checkpoint/random_folders.py). Loaders run on it: transformers twice under two seeds; mlx-lm where it
is installed; the names and the writer of the gguf package. The outcome for the whole model is compared with the row
that `check` prints. "not known" counts rows that say that they depend on the loader's code. gguf's reader and
`check FILE --original FOLDER` both read the file of gguf's writer: tables, shapes and findings must agree.

A disagreement is printed with its seed. A line of FILE is a JSON object with the comparisons of one seed; a run with a
file of earlier runs continues after its last seed and counts all of its lines.

Exit code 0: no disagreement; 1: at least one; 130: interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "checkpoint"), str(ROOT / "tests" / "boundary")]

import observed_loads as loads  # noqa: E402
import random_folders as folders  # noqa: E402
import saved_models as saved  # noqa: E402
import transformers as tr  # noqa: E402
from asked_classes import asking_in_this_process  # noqa: E402

from tiewise.checkpoint import loader_columns as columns  # noqa: E402
from tiewise.checkpoint.audit import Audit, check  # noqa: E402
from tiewise.checkpoint.facts import Facts  # noqa: E402
from tiewise.checkpoint.families import family  # noqa: E402
from tiewise.checkpoint.family_record import family_data  # noqa: E402
from tiewise.checkpoint.hf_folder import open_folder  # noqa: E402
from tiewise.checkpoint.loader_columns import LoaderOutcome  # noqa: E402
from tiewise.checkpoint.loaders import predict  # noqa: E402

FILE = "gguf"  # the file that gguf's writer writes, read by both readers
LOADERS = ("transformers", "mlx-lm", "llama.cpp", FILE)
AGREES, NOT_KNOWN, DISAGREES, UNSEEN = "as run", "not known", "disagrees", "cannot be observed"
MLX_SHARE = 0.5  # share of checkpoints whose family mlx-lm serves


@dataclass(frozen=True)
class Comparison:
    """Outcome of one loader on one checkpoint, compared with the table's row."""

    seed: int
    loader: str
    class_name: str
    model_type: str
    changes: tuple[str, ...]
    verdict: str
    predicted: str
    sentence: str
    observed: str
    details: str  # error of the loader, or parameters that no file fills

    def line(self) -> str:
        """Return the comparison in one line."""
        changes = "; ".join(self.changes) or "unchanged"
        said = f"{self.predicted} ({self.sentence})"
        where = f"seed {self.seed} {self.loader} {self.class_name} [{changes}]"
        return f"{where}: table {said}, {self.loader} {self.observed} {self.details}".rstrip()


@dataclass
class Tally:
    """Counts of a run, and where it stopped."""

    next_seed: int = 0
    checkpoints: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # {loader: {verdict: number}}
    disagreements: list[str] = field(default_factory=list)

    def add_checkpoint(self, seed: int, comparisons: Sequence[Comparison]) -> None:
        """Count a checkpoint with its comparisons."""
        self.checkpoints += 1
        self.next_seed = seed + 1
        for comparison in comparisons:
            self._add(comparison)

    def _add(self, comparison: Comparison) -> None:
        """Count a comparison."""
        counts = self.counts.setdefault(comparison.loader, {})
        counts[comparison.verdict] = counts.get(comparison.verdict, 0) + 1
        if comparison.verdict == DISAGREES:
            self.disagreements.append(comparison.line())

    def summary(self) -> str:
        """Return the counts as lines."""
        lines = [f"{self.checkpoints} checkpoints, next seed {self.next_seed}"]
        for loader, counts in self.counts.items():
            listed = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
            lines.append(f"{loader}: {listed}")
        return "\n".join(lines)


def main() -> int:
    """Run the comparison; return the exit code."""
    options = parsed_options()
    os.environ.pop("TIEWISE_NO_BUILD", None)  # the whole model counts
    tr.logging.set_verbosity_error()
    tr.logging.disable_default_handler()
    tr.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if options.minutes is None and options.count is None:
        return run_one(options)
    tally = read_tally(options)
    code = run_many(options, tally)
    print(tally.summary())
    return code


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="draw checkpoints for this long")
    parser.add_argument("--count", type=int, help="draw this many checkpoints")
    parser.add_argument("--seed", type=int, help="first seed; alone: the only one, printed in full")
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of this run and of earlier ones; it grows")
    parser.add_argument("--families", help="model types to draw, separated by commas")
    parser.add_argument("--loaders", default=",".join(LOADERS), help="loaders to run (%(default)s)")
    options = parser.parse_args()
    options.loaders = options.loaders.split(",")
    unknown = set(options.loaders) - set(LOADERS)
    if unknown:
        parser.error(f"no such loader: {', '.join(sorted(unknown))} (one of {', '.join(LOADERS)})")
    options.pools = class_pools(tuple((options.families or "").split(",")) if options.families else ())
    if not options.pools.all:
        parser.error(f"no class of transformers has one of these model types: {options.families}")
    if options.out is not None and (options.out.is_dir() or not options.out.absolute().parent.is_dir()):
        parser.error(f"--out {options.out}: name a file in a folder that exists")
    if options.minutes is None and options.count is None and options.seed is None:
        parser.error("give --minutes, --count or --seed")
    return options


@dataclass(frozen=True)
class Pools:
    """Classes to draw from."""

    all: tuple[str, ...]
    of_mlx: tuple[str, ...]  # those whose family mlx-lm serves


@lru_cache
def class_pools(families: tuple[str, ...] = ()) -> Pools:
    """Return the classes of transformers over tokens, of these families or of all."""
    known = {name: kind for kind, record in family_data()["families"].items() for name in record.get("classes", {})}
    names = [name for name in saved.classes() if name in known]
    if families:
        names = [name for name in names if known[name] in families]
    of_mlx = [name for name in names if family(known[name]).is_served_by_mlx and name.endswith(_SERVED_ENDINGS)]
    return Pools(tuple(names), tuple(of_mlx))


_SERVED_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def run_one(options: argparse.Namespace) -> int:
    """Run one seed and print everything about it."""
    disagrees = False
    for comparison in compare(options.seed, options.pools, options.loaders):
        for key, value in asdict(comparison).items():
            print(f"{key:>12} {value}")
        disagrees |= comparison.verdict == DISAGREES
        print()
    return int(disagrees)


def run_many(options: argparse.Namespace, tally: Tally) -> int:
    """Run seeds until the time or the number is used up; return the exit code."""
    stop = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")
    last = tally.checkpoints + options.count if options.count is not None else float("inf")
    try:
        while time.monotonic() < stop and tally.checkpoints < last:
            seed = tally.next_seed
            comparisons = list(compare(seed, options.pools, options.loaders))
            tally.add_checkpoint(seed, comparisons)
            append_line(options.out, seed, comparisons)
            for comparison in comparisons:
                if comparison.verdict == DISAGREES:
                    print(comparison.line(), flush=True)
    except KeyboardInterrupt:
        return 130
    return int(bool(tally.disagreements))


def read_tally(options: argparse.Namespace) -> Tally:
    """Return the counts of the file's lines; new ones without such a file. A torn last line is removed."""
    tally = Tally(next_seed=options.seed or 0)
    if options.out is None or not options.out.exists():
        return tally
    try:
        text = options.out.read_text("utf-8")
        complete = text[: text.rfind("\n") + 1]
        for line in complete.splitlines():
            record = json.loads(line)
            tally.add_checkpoint(record["seed"], [comparison_of(fields) for fields in record["comparisons"]])
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"{options.out}: not a file of this tool ({error}); name another one") from None
    if not complete and text:
        raise SystemExit(f"{options.out}: not a file of this tool; name another one")
    if complete != text:
        options.out.write_text(complete, "utf-8")
    return tally


def comparison_of(fields: dict[str, Any]) -> Comparison:
    """Return a comparison from a record of a file."""
    return Comparison(**fields | {"changes": tuple(fields["changes"])})


def append_line(out: Path | None, seed: int, comparisons: Sequence[Comparison]) -> None:
    """Append the line of a checkpoint to the file, if one was named."""
    if out is None:
        return
    record = {"seed": seed, "comparisons": [asdict(comparison) for comparison in comparisons]}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def compare(seed: int, pools: Pools, loaders: Sequence[str]) -> Iterator[Comparison]:
    """Yield the comparison of every loader on the checkpoint of a seed."""
    of_mlx = pools.of_mlx and folders.random.Random(f"pool {seed}").random() < MLX_SHARE
    checkpoint = folders.draw_checkpoint(seed, pools.of_mlx if of_mlx else pools.all)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        checkpoint.write(folder)
        with asking_in_this_process():
            rows = predict(Facts(open_folder(folder), builds=True))
        for loader in loaders:
            if loader == FILE:
                yield from compare_files(seed, checkpoint, folder)
                continue
            observed = observe(loader, checkpoint, folder)
            if observed is not None:
                yield compared(seed, checkpoint, row_of(loader, rows), observed)


def row_of(loader: str, rows: Sequence[LoaderOutcome]) -> LoaderOutcome:
    """Return the table's row of a loader, in the installed version."""
    own = [row for row in rows if row.loader == loader]
    for row in own:
        if row.versions == tr.__version__:
            return row
    return own[-1]


def observe(loader: str, checkpoint: folders.Checkpoint, folder: Path) -> loads.Observed | None:
    """Run a loader; None if it is not installed, or cannot load the healthy model of this class."""
    if loader == "transformers":
        return loads.observe_transformers(checkpoint.class_name, folder)
    if loader == "mlx-lm":
        if not _is_installed("mlx_lm"):
            return None
        return loads.observe_mlx(folder, checkpoint.stored(checkpoint.inputs), checkpoint.stored(checkpoint.heads))
    return observe_gguf(checkpoint, folder)


def observe_gguf(checkpoint: folders.Checkpoint, folder: Path) -> loads.Observed | None:
    """Run gguf's names and writer; None if it is not installed, or a class of the converter handles the head."""
    column = family(checkpoint.model_type).llama_cpp
    if not _is_installed("gguf") or column == "no head" or not names_all_tensors(checkpoint.class_name):
        return None
    observed = loads.observe_gguf(folder, checkpoint.model_type)
    if column == "head required" and columns.TIED in observed.outcomes:  # only its loader refuses that
        return loads.Observed(frozenset())
    return observed


def compare_files(seed: int, checkpoint: folders.Checkpoint, folder: Path) -> Iterator[Comparison]:
    """Yield the comparison of both readers of the GGUF file, if gguf's writer writes this checkpoint."""
    if not _is_installed("gguf") or not names_all_tensors(checkpoint.class_name):
        return
    path = folder / "written.gguf"
    if not loads.write_gguf(folder, checkpoint.model_type, path):
        return
    expected, audit = loads.gguf_ends(path), check(path, original=folder)
    path.unlink()
    findings = sorted({finding.rule for finding in audit.findings})
    expected_findings = ["B071"] if expected.is_stored_twice else []  # it holds every tensor, and no tokenizer
    ends = ends_of_audit(audit)
    agrees = ends == expected and findings == expected_findings
    yield Comparison(
        seed,
        FILE,
        checkpoint.class_name,
        checkpoint.model_type,
        tuple(checkpoint.changes),
        AGREES if agrees else DISAGREES,
        str(ends),
        f"findings {findings}",
        str(expected),
        f"findings {expected_findings}",
    )


def ends_of_audit(audit: Audit) -> loads.GgufEnds:
    """Return the ends of a GGUF file as `check` reports them."""
    shapes = {part.role: part.tensor.shape for part in audit.parts}
    return loads.GgufEnds(shapes.get("input"), shapes.get("output"), audit.spare > 0, audit.tensors)


@lru_cache
def names_all_tensors(class_name: str) -> bool:
    """Return whether gguf's map names all tensors of a healthy model, without a class of the converter."""
    healthy = folders.saved_class(class_name)
    try:
        names = loads.gguf_names(healthy.model_type, set(healthy.tensors).difference(healthy.heads))
    except KeyError:  # no architecture of this name
        return False
    return names is not None


@lru_cache
def _is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def compared(seed: int, checkpoint: folders.Checkpoint, row: LoaderOutcome, observed: loads.Observed) -> Comparison:
    """Return the comparison of a row with an observed load."""
    details = observed.error.partition("\n")[0][:200] or ", ".join(observed.random[:6])
    return Comparison(
        seed,
        row.loader,
        checkpoint.class_name,
        checkpoint.model_type,
        tuple(checkpoint.changes),
        verdict_of(row, observed),
        row.outcome,
        row.sentence,
        " and ".join(sorted(observed.outcomes)),
        details,
    )


# {outcome of a row: outcomes of a load that it describes as well}
ALSO = {
    columns.NOT_SERVED: (columns.ERROR,),
    columns.DROPPED: (columns.TIED,),  # of two equal tables, or where another end is not read
}


def _is_of_loader_alone(row: LoaderOutcome, observed: loads.Observed) -> bool:
    """Return whether a row is about missing tensors in llama.cpp, which its converter writes without them."""
    return row.outcome == columns.INCOMPLETE and columns.ERROR not in observed.outcomes


def verdict_of(row: LoaderOutcome, observed: loads.Observed) -> str:
    """Return whether a row agrees with a load."""
    if not observed.outcomes or _is_of_loader_alone(row, observed):
        return UNSEEN
    if row.outcome == columns.DEPENDS:
        return NOT_KNOWN
    described = {row.outcome, *ALSO.get(row.outcome, ())}
    return DISAGREES if described.isdisjoint(observed.outcomes) else AGREES


if __name__ == "__main__":
    raise SystemExit(main())
