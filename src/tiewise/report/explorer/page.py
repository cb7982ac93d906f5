"""`explore`: the page and what it is told, as one file that opens from disk and asks for nothing.

    facts (JSON) + web/*.js joined + report.css + page.css → web/page.html

The modules import each other by name, so that an editor knows them; joined, they are one script in which every name is
unique, and which a worker of the page runs too. Needs neither torch nor plotly, but for a live model.

Nothing is counted in the page: it puts its sizes into the terms that `planning.resized` has run the counting for. The
verdict on a checkpoint is Python's. Where no script runs, its first sentences and one figure are seen, as SVG.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import usual
from tiewise.core.errors import RunError
from tiewise.core.files import size, write_result
from tiewise.core.found import COLOURS, DIVERGING, PATHS, PLACES, count, plain
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.catalogue import models
from tiewise.planning.costs import DTYPES, training_bytes
from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.planning.plan_rows import NEIGHBOUR_HEADER, OPTIMIZERS, SHOWN_DTYPES, component
from tiewise.planning.read_config import Sizes
from tiewise.planning.resized import BOUNDARIES, LETTERS, growth
from tiewise.report.explorer.compared import compared, is_run
from tiewise.report.explorer.embedded import embedded, live

_FRAME = (  # of a notebook: scripts run in it, and reach nothing of the notebook
    'title="tiewise explore" sandbox="allow-scripts allow-forms" allow="clipboard-write" width="100%" height="760" '
    'style="border: 1px solid #8884; border-radius: 8px; background: #fff"'
)
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
# Decoders by their sizes alone, as `tiewise plan --vocab … [--gated]` counts them.
PLAIN = {"sizes alone": False, "sizes alone, gated": True}
WIDTH, LINE, WRAP = 680, 22, 84  # pixels; of a line of text; letters that fit in it
INK, QUIET, CARD, GRID = "#22252b", "#5d626d", "#ffffff", "#e4e1db"
WORDS, TABLE = ("New", "York", "City"), ((1.0, 0.5), (0.8, 0.9), (0.3, 1.2))  # as the story begins


class Explorer:
    """The page as text; in a notebook it shows itself in a frame that reaches nothing outside of it."""

    def __init__(self, html: str, picture: str) -> None:
        self.html = html
        self.picture = picture  # SVG, for where no script runs

    def __repr__(self) -> str:
        return f"Explorer: a page of {size(len(self.html))}; .write(path) keeps it"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        frame = f'<iframe srcdoc="{escape(self.html)}" {_FRAME}></iframe>'
        return {"text/html": frame, "image/svg+xml": self.picture, "text/plain": repr(self)}

    def write(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the page to `path`, whole or not at all, and return it.

        Raises:
            RunError: something is there already and not to be replaced, or it cannot be written there.
        """
        target = Path(path)
        if target.exists() and not overwrite:
            raise RunError(f"{target} exists", "choose another place, or replace it with --overwrite")
        return write_result(self.html, target, "--out")


def explore(*shown: Any, words: Sequence[str] = (), texts: Sequence[str] = (), tokenizer: Any = None) -> Explorer:
    """Make the page, and open it at what was given.

    Args:
        shown: folders of `tiewise compare` or `tiewise train`, side by side; and a checkpoint to carry a part of, or a
            live Hugging Face model.
        words: tokens whose rows are to be in that part: words that are one token, or "#1234".
        texts: what is counted, as `tiewise compare --text` takes it: that part holds its most frequent tokens.
        tokenizer: of a live model, to name its rows.

    Raises:
        RunError: several checkpoints, or a run that cannot be read, or texts without a checkpoint.
        CheckpointError: what is neither run nor checkpoint, or cannot be read.
        DataError: a word that is no token; a text without tokens, or that no tokenizer beside the model reads.
        InstallError, UnsupportedError: a live model that has no two tables of tokens to show.
    """
    places = [one if hasattr(one, "state_dict") else Path(os.fspath(one)) for one in shown]
    runs = [place for place in places if isinstance(place, Path) and is_run(place)]
    given = [place for place in places if place not in runs]
    if len(given) > 1:
        raise RunError(f"{len(given)} checkpoints", "give one; `tiewise inspect` shows two side by side")
    if texts and not given:
        raise RunError("a text to count, and no checkpoint", "name the checkpoint whose tokens are counted in it")
    held = None
    for model in given:
        path = isinstance(model, Path)
        held = embedded(model, words, texts) if path else live(model, tokenizer, words, texts)
    known = {"at": "checkpoint" if held else "runs" if runs else "symmetry", "counts": facts()}
    known["checkpoint"] = {"names": table_names(), "embedded": held}
    known |= {"runs": compared(runs)} if runs else {}
    # texts of users stand in the JSON, which closes no script, and in the picture
    told = json.dumps(known, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": f"{_text('report/templates/report.css')}{_colours()}{_text('report/explorer/web/page.css')}",
        "picture": picture(known),
        "facts": told.replace("<", "\\u003c"),
        "code": joined(),
    }
    template = _text("report/explorer/web/page.html")
    filled = re.sub(r"/\*(style|picture|facts|code)\*/", lambda found: parts[found[1]], template)
    return Explorer(filled, parts["picture"])


def joined(last: str = "main") -> str:
    """Return a module and all that it imports as one script, each after those that it imports."""
    texts: dict[str, str] = {}

    def take(name: str) -> None:
        text = _text(f"report/explorer/web/{name}.js")
        for imported in IMPORT.findall(text):
            if imported not in texts:
                take(imported)
        texts[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    take(last)
    return "\n".join(('"use strict";', _text("report/templates/theme.js"), *texts.values()))


def _colours() -> str:
    """Return the colours that all pages share as variables of the style sheet."""
    boundaries = "".join(f"--{name}: {COLOURS[place]}; " for name, place in (PLACES | PATHS).items())
    ends = {
        theme: "; ".join(map(": ".join, zip(("--low", "--zero", "--high"), three, strict=True)))
        for theme, three in DIVERGING.items()
    }
    return f':root {{ {boundaries}{ends["light"]}; }}\n:root[data-theme="dark"] {{ {ends["dark"]}; }}\n'


def _text(path: str) -> str:
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path
    return data.decode()


# what it is told whatever it is opened at: of counting, and how tables are usually named


@cache
def facts() -> dict[str, Any]:
    """Everything as JSON takes it; `forms` are the families' terms, of which each preset names one by its place."""
    forms: list[dict[str, Any]] = []
    presets = []
    plain = {name: (Sizes(50_257, 768, 12, heads=12, gated=gated), None) for name, gated in PLAIN.items()}
    known = {model.name: (model.config, model.tied) for model in models() if model.config}
    for name, (described, tied) in (plain | known).items():
        found = growth(described)
        if found is None:
            continue
        form = found.record()
        if form not in forms:
            forms.append(form)
        sizes = {LETTERS[size]: value for size, value in found.sizes.items()}
        presets.append({"name": name, "form": forms.index(form), "tied": tied, "sizes": sizes})
    return {
        "forms": forms,
        "presets": presets,
        "plain": PLAIN,
        "boundaries": BOUNDARIES,
        "options": {letter: f"--{name.replace('_', '-')}" for name, letter in LETTERS.items()},
        "components": {name: component(name) for name in COMPONENTS},
        "checkpoint": {dtype: DTYPES[dtype] for dtype in SHOWN_DTYPES},
        "optimizers": OPTIMIZERS,
        # of one parameter that is trained
        "training": {
            dtype: {name: held["total"] for name, held in training_bytes(1, 1, dtype).items()}
            for dtype in ("float32", "bfloat16")
        },
        "header": NEIGHBOUR_HEADER,
        "models": [[m.name, m.vocab, m.width, m.layers, m.tied, m.checked] for m in models() if m.vocab],
        # what ALBERT measured: by what layers share; and of a model trained on one question, the other's answers right
        "judged": {
            trained: next(r.value for r in results(f"pairs right as {asked}, %") if r.setting == f"objective={trained}")
            for trained, asked in (("sop", "nsp"), ("nsp", "sop"))
        },
        "scores": [
            [result.choice.rpartition("share ")[2], result.value]
            for result in results(ALBERT_AVERAGE)
            if result.model == "ALBERT-base, E = 128"
        ],
    }


def table_names() -> dict[str, Sequence[str]]:
    """Return usual paths of both tables' modules, the likeliest first, and parts of a path that name other towers."""
    names = usual()
    inputs = dict.fromkeys(path for path, _ in names.pairs)
    outputs = dict.fromkeys([*names.outputs, *(path for _, path in names.pairs), *names.whole_outputs])
    return {"inputs": list(inputs), "outputs": list(outputs), "foreign": names.foreign}


# what is seen where no script runs


def picture(facts: Mapping[str, Any]) -> str:
    """Return an SVG of what the page is told."""
    runs, held = facts.get("runs"), facts["checkpoint"]["embedded"]
    sentences = [f"{run['name']}: {run['verdict']}" for run in runs["runs"]] if runs else []
    if held:
        tables = [tensor for tensor in held["tensors"] if "data" in tensor and len(tensor["shape"]) == 2]
        shapes = (f"{t['name']} [{', '.join(map(count, t['shape']))}] {t['dtype']}" for t in tables)
        sentences.append(f"{held['name']}: {' and '.join(shapes) or 'no tables'}.")
    if not runs:
        sentences.append("One table at both ends scores every pair of words alike both ways:")
    said = [line for text in sentences for line in textwrap.wrap(text, WRAP)]
    top = 24 + LINE * len(said)
    figure, height = _curves(runs, top) if runs else _scores(top)
    body = [_label(20, 34 + LINE * i, line, size=15) for i, line in enumerate(said)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + height}" width="{WIDTH}" '
        f'height="{top + height}" role="img" font-family="sans-serif">'
        f'<rect width="100%" height="100%" rx="12" fill="{CARD}"/>{"".join([*body, *figure])}</svg>'
    )


def _scores(top: int) -> tuple[list[str], int]:
    """The direct path of a tied table, which is symmetric."""
    parts, end = [], DIVERGING["light"][2]
    for i, (row, before) in enumerate(zip(TABLE, WORDS, strict=True)):
        y = top + 40 + 44 * i
        parts += [_label(20, y + 26, before), _label(130 + 96 * i, top + 30, WORDS[i])]
        for j, other in enumerate(TABLE):
            score = sum(a * b for a, b in zip(row, other, strict=True))
            share = f'fill="{end}" fill-opacity="{0.5 * score / 1.53:.2f}"'
            parts.append(f'<rect x="{100 + 96 * j}" y="{y}" width="90" height="40" rx="6" {share}/>')
            parts.append(_label(130 + 96 * j, y + 26, plain(score, 2)))
    return parts, 190


def _curves(told: Mapping[str, Any], top: int) -> tuple[list[str], int]:
    """The first measure of the first run that has one."""
    first = next((m for run in told["runs"] for m in run["measures"].values()), None)
    if first is None:
        return [], 12
    left, right, high = 64, WIDTH - 150, 220
    points = zip(*(point for line in first["lines"] for point in line["points"]), strict=True)
    ends = ((min(values), max(values)) for values in points)
    (x0, x1), (y0, y1) = (pair if pair[0] < pair[1] else (pair[0] - 0.5, pair[1] + 0.5) for pair in ends)

    def at(x: float, y: float) -> str:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return f"{left + across * (right - left):.1f} {top + 40 + (1 - up) * high:.1f}"

    parts = [_label(20, top + 24, f"{first['title']}, {first['unit']}", QUIET)]
    for y in (y0, y1):
        parts.append(f'<path d="M{at(x0, y)}L{at(x1, y)}" stroke="{GRID}"/>')
        parts.append(_label(14, float(at(x0, y).split()[1]) + 4, plain(y, 2), QUIET))
    named = [line for line in first["lines"] if not line.get("thin")]
    for i, line in enumerate(named):
        colour = told["colours"][line["arm"]]
        path = "L".join(at(x, y) for x, y in line["points"])
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{right + 14}" y="{top + 40 + 22 * i}" width="12" height="12" rx="3" fill="{colour}"/>')
        parts.append(_label(right + 32, top + 51 + 22 * i, line["arm"]))
    return parts, high + 64


def _label(x: float, y: float, said: str, fill: str = INK, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}">{escape(said)}</text>'
