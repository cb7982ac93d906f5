"""Figures of docs/findings.md: both inspections, in the columns of the page.

python -m benchmarks.findings runs/wikitext-2 runs/war-and-peace

Each folder holds a comparison and, in `inspected`, what `tiewise inspect --only which_end,gradients_over_training`
found; docs/findings.md has the commands. They took eight minutes of one core. Writes benchmarks/results/findings.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "findings.md"
CKA = ["by CKA above chance" + out for out in ("", ", a line in log frequency taken out", ", frequency taken out")]
MAPS = ["as they stand", "after the best rotation", "after the best linear map"]
BESIDE = ["tied – untied input", "tied – untied output"]
AGAIN = ["untied input, two seeds", "untied output, two seeds", "tied table, two seeds"]
TITLES = {"wikitext-2": "WikiText-2", "war-and-peace": "War and Peace"}
ENDS = ["untied input", "untied output", "tied table"]


def told(quantity: dict[str, Any]) -> str:
    """A figure and its interval, with two digits more than the page has; shares in per cent."""
    times = 100 if quantity["unit"] == "%" else 1
    figures = [times * quantity[key] for key in ("value", "low", "high") if quantity[key] is not None]
    return "{:.5f} [{:.5f}, {:.5f}]".format(*figures) if len(figures) == 3 else f"{figures[0]:.5f}"


def rows(run: Path) -> list[str]:
    """All rows of one text."""
    sections = json.loads((run / "inspected" / "inspection.json").read_text(encoding="utf-8"))["sections"]
    ends, paths = sections["which_end"]["found"]["tied"], sections["gradients_over_training"]["found"]
    of = {(one["name"], one["of"]): told(one) for one in ends["quantities"]}
    (evidence,) = sections["evidence"]["found"].values()
    loss = evidence["rows"][0]
    turned = {"value": -loss["value"], "low": -loss["high"], "high": -loss["low"], "unit": "nats"}
    said = [("loss, tied − untied", [told(turned)])]
    said += [
        (
            f"corrected, {cka}",
            [of["corrected, " + cka, end] for end in BESIDE] + [of[f"corrected output − input, {cka}", "tied"]],
        )
        for cka in CKA
    ]
    for seed, where in (("other", ""), ("same", ", models of the same seed")):
        said += [
            (
                f"{what}, {seed} seed",
                [of[what + where, end] for end in BESIDE]
                + [of[f"output − input, {what}", f"tied, models of the {seed} seed"]],
            )
            for what in MAPS
        ]
    said += [(f"{what}, trained again", [of[what, two] for two in AGAIN]) for what in MAPS + CKA]
    curve = "variance that is a curve in log frequency"
    said += [(curve, [of[curve, end] for end in ENDS])]
    for arm in ("tied", "untied"):
        whole, change, *cosines = map(told, paths[arm]["quantities"])
        tenths = [share for _, share in paths[arm]["listings"][0]["rows"]]
        said += [(f"share of {arm}", [tenths[0], tenths[9], change, whole])]
        said += [("cosine of the paths", cosines)] * bool(cosines)
    return [f"| {TITLES[run.name]}: {what} | {' | '.join(found)} |" for what, found in said]


def main() -> None:
    """Write the results of the folders that are named."""
    body = [row for run in sys.argv[1:] for row in rows(Path(run))]
    head = f"# findings\n\n{__doc__.splitlines()[2]}\n\n"
    head += "| | with the input | with the output | difference, or the tied table |\n|---|---|---|---|\n"
    RESULTS.write_text(
        head.replace("python", "`python").replace("peace\n", "peace`\n") + "\n".join(body) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
