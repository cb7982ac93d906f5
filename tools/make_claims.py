"""Write docs/dev/claims.md from the published claims and their recorded results.

python tools/make_claims.py              writes the page
python tools/make_claims.py --hold       writes nothing, and exits with 1 if the page differs
python tools/make_claims.py --add FILE…  first adds results that `tiewise sweep --claim` wrote into its folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiewise
from tiewise.core.records import from_record
from tiewise.lab.claims.expected import NOT_RUN
from tiewise.lab.claims.listing import summary
from tiewise.lab.claims.recorded import RECORDED, ClaimResult, recorded_results, recorded_verdict, save_results
from tiewise.lab.claims.registry import PublishedClaim, published_claims

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "claims.md"
BEGIN = """# Published claims

`tools/make_claims.py` writes this page from `lab/claims/claims.yaml` and `lab/claims/recorded.json`.
[Sweep](../sweep.md#published-claims) says how a claim is judged. The range of each claim was fixed before any run.
Intervals are 95 % over seeds, for one held-out text. Verdicts are not corrected for their number: on average, one of 20
intervals misses the true value. Claims of one grid share their runs, so their verdicts are not independent.
`retie` is `untie-small-vocabulary` with the sign turned, in other units, and `second-table` and `table-counts-less` are
one measurement, too. Nobody has published `second-table`; it is our counterpart of `recurrence-exponent`.

Each verdict, also "contradicted", is about models of this size after the steps of its grid, mostly 200. After more
steps our [studies](atlas.md#what-was-found) find smaller costs of tying, or none that is detected. Text and V are not
always the same there, and no test compares the studies with the claims.

Seven grids of decoders were registered twice. The first time all arms had the rate 0.004; the second time each has
its best one (`tune`), because that had removed differences in [another study](atlas.md#rates). So these settings were
chosen after the first verdicts, and before the runs that are printed here. Two of 13 verdicts
changed: `input-gradient-x5` was reproduced and is undecided, `output-gradient-falls` was undecided and is reproduced.
The other grids have one rate for all arms. Nearly all give the tables the rate of the body.

Four verdicts need a second sentence:

- `tying-regularises` is about the distance alone. In the same runs the tied model is worse on held-out text, too
  (`tying-little-text`): the distance shrinks because the loss on training text rises more.
- `head-beyond-chance` is our reading. The source says that most of the gradient is lost, which holds in these runs.
  Only a loss beyond that of a random head is contradicted.
- `output-gradient-falls` compares the second half of training with its first tenth. In
  [longer runs](../measured.md#how-does-the-head-paths-share-move) the share rises before it falls. With a separate rate
  of the tables, its last tenth is above the first.
- `tied-nearer-output` was tested with one rate. On
  [two other texts](../measured.md#which-end-does-a-tied-table-resemble) a large part of that lead goes with frequency.

"""
RULES = "\n## Rules\n\n| claim | source | it says | their setting | rule | hash |\n|---|---|---|---|---|---|\n"
SETTINGS = "\n## Grids\n\n| grid | settings | axes |\n|---|---|---|\n"


def page() -> str:
    """Return the page: verdicts, then each claim with its rule, then the grids."""
    lines = [BEGIN, f"{summary()}\n\n", "| claim | verdict | measured | published | price |\n|---|---|---|---|---|\n"]
    claims = published_claims()
    lines += [_verdict_row(claim) for claim in claims.values()]
    lines.append(RULES)
    lines += [_rule_row(claim) for claim in claims.values()]
    grids = {claim.grid.name: claim.grid for claim in claims.values()}
    lines.append(SETTINGS)
    for name, grid in grids.items():
        written = f"text `{grid.make}`, " if grid.make else ""
        lines.append(f"| {name} | {written}{_code(grid.settings)} | {_code(grid.axes)} |\n")
    return "".join(lines)


def _verdict_row(claim: PublishedClaim) -> str:
    """Return a claim's row of the first table."""
    result, measured = recorded_results().get(claim.name), "–"
    if result is not None:
        measured = f"{result.outcome_text} {claim.unit}, {result.seeds} seeds"
    verdict = recorded_verdict(claim.name)
    if verdict != NOT_RUN:
        verdict = f"**{verdict}**"
    return f"| `{claim.name}` | {verdict} | {measured} | {claim.published} | {claim.price} |\n"


def _rule_row(claim: PublishedClaim) -> str:
    """Return a claim's row of the second table."""
    source = f"{claim.paper} ({claim.year}), {claim.where}"
    rule = f"{claim.expects.spelled()} ({claim.unit}) in grid {claim.grid.name}: {_code(claim.measure)}"
    return f"| `{claim.name}` | {source} | {claim.says} | {claim.their} | {rule} | {claim.rule_hash} |\n"


def _code(value: object) -> str:
    """Return a value as JSON in a code span."""
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def add_results(files: list[str]) -> None:
    """Add the results of these files to the recorded ones."""
    results = dict(recorded_results())
    for file in files:
        result = from_record(ClaimResult, json.loads(Path(file).read_text(encoding="utf-8")), file)
        results[result.claim] = result
    save_results(results, Path(tiewise.__file__).parent / RECORDED)
    recorded_results.cache_clear()


def main(arguments: list[str]) -> int:
    """Write or compare the page."""
    if arguments[:1] == ["--add"]:
        add_results(arguments[1:])
    if arguments == ["--hold"]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
