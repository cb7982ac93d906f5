"""`explore`: the page and its facts, as one file that opens from disk and requests nothing.

    facts (JSON) + web/*.js joined + report.css + page.css → web/page.html

The modules import each other by name, so that an editor can follow the imports. Joined, they are one script in which
every name is unique; a worker of the page runs the same script. Only a live model needs torch, and nothing needs
plotly.

The page has no formulas for counting: it evaluates the terms of `planning.resized` at its sizes. Python computes the
verdict on a checkpoint. If no script runs, `picture` has the first sentences and one figure, as SVG.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tiewise.checkpoint.claims import usual_names
from tiewise.core.errors import RunError, require_path
from tiewise.core.files import format_bytes, write_result
from tiewise.core.measurement import COLOURS, DIVERGING, PATHS, PLACES, count, plain
from tiewise.core.written_options import written_option
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.catalogue import find, models
from tiewise.planning.costs import DTYPES, training_bytes
from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.planning.plan_rows import DTYPE_ROWS, NEIGHBOUR_HEADER, OPTIMIZERS, component
from tiewise.planning.read_config import Sizes
from tiewise.planning.resized import BOUNDARIES, LETTERS, growth
from tiewise.report.explorer.compared import compared, is_comparison, report_mark
from tiewise.report.explorer.embedded import embedded, live
from tiewise.training.folder import REPORT

_FRAME = (  # frame in a notebook: scripts run in it, but cannot access the notebook
    'title="tiewise explore" sandbox="allow-scripts allow-forms" allow="clipboard-write" width="100%" height="760" '
    'style="border: 1px solid #8884; border-radius: 8px; background: #fff"'
)
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
SCALE = ("llama-3.2-1b", "llama-2-7b", "llama-3-70b")  # public models of about 1, 7 and 70 billion parameters
# Generic decoders, as `tiewise plan --vocab … [--gated]` counts them: name → gated.
PLAIN = {"sizes alone": False, "sizes alone, gated": True}
WIDTH, LINE, WRAP = 680, 22, 84  # pixels of the picture, and of a line of text; letters in a line
INK, QUIET, CARD, GRID = "#22252b", "#5d626d", "#ffffff", "#e4e1db"
WORDS, TABLE = ("New", "York", "City"), ((1.0, 0.5), (0.8, 0.9), (0.3, 1.2))  # the first example of the page's story
STRONGEST = 1.53  # largest score of TABLE, of a row with itself


class Explorer:
    """The page as text. A notebook displays it in a frame that cannot reach anything outside.

    Args:
        html: Text of the page.
        picture: SVG of the first sentences and one figure, for viewers that run no script.
        reports: report of each comparison of the page. `write` links to them.

    >>> from tiewise import explore
    >>> explore().html.startswith("<!doctype html>")
    True
    """

    def __init__(self, html: str, picture: str, reports: Sequence[Path] = ()) -> None:
        self.html = html
        self.picture = picture  # SVG, for viewers that run no script
        self.reports = reports

    def __repr__(self) -> str:
        return f"Explorer: a page of {format_bytes(len(self.html))}; .write(path) keeps it"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        frame = f'<iframe srcdoc="{escape(self.html)}" {_FRAME}></iframe>'
        return {"text/html": frame, "image/svg+xml": self.picture, "text/plain": repr(self)}

    def write(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the page to `path`, complete or not at all, and return the path.

        Args:
            path: File to write.
            overwrite: Replace an existing file.

        Raises:
            RunError: The file exists and `overwrite` is false, or it cannot be written.
        """
        target = Path(path)
        if target.exists() and not overwrite:
            remedy = f"choose another place, or replace it with {written_option('overwrite', True)}"
            raise RunError(f"{target} exists", remedy)
        linked = self.html
        for index, report in enumerate(self.reports):
            linked = linked.replace(f'"{report_mark(index)}"', json.dumps(_address_from(target, report)))
        return write_result(linked, target, "out")


def explore(*sources: Any, words: Sequence[str] = (), texts: Sequence[str] = (), tokenizer: Any = None) -> Explorer:
    """Make the page, with the given comparisons and checkpoint.

    Args:
        sources: folders of `tiewise compare` or `tiewise train`, which the page shows next to each other. Also at most
            one checkpoint, or one live model of transformers.
        words: tokens whose rows the page contains: words that are one token, or ids such as "#1234".
        texts: texts to count tokens in, as for `tiewise compare --text`. The page contains the most frequent tokens.
        tokenizer: tokenizer of a live model, which names its rows.

    Returns:
        An `Explorer`. `.write(path)` stores it; a notebook displays it.

    Raises:
        RunError: there are several checkpoints, a comparison cannot be read, or texts are given without a checkpoint.
        CheckpointError: a source is neither a comparison nor a checkpoint, or cannot be read.
        DataError: a word is not one token, a text has no tokens, or no tokenizer can read it.
        InstallError, UnsupportedError: a live model lacks two tables of tokens that can be displayed.

    >>> from tiewise import explore
    >>> page = explore()  # without comparisons and checkpoint
    >>> repr(page).startswith("Explorer: a page of ")
    True
    """
    comparisons, models = _comparisons_and_models(sources)
    if len(models) > 1:
        problem = f"explore shows one checkpoint, not {len(models)}"
        raise RunError(problem, "give one, or compare two with `tiewise inspect`")
    if texts and not models:
        problem = f"{written_option('text')} needs a checkpoint, whose tokens are counted in the text"
        raise RunError(problem, "name the folder of one")
    part = None
    if models:
        part = _part_of(models[0], words, texts, tokenizer)
    page_facts: dict[str, Any] = {
        "at": _opened_at(part, comparisons),
        "counts": facts(),  # equal in every page
        "checkpoint": {"names": table_names(), "embedded": part},
        "trained": json.loads(_text("report/explorer/data/trained_tables.json")),
    }
    if comparisons:
        page_facts["runs"] = compared(comparisons)
    return _fill_page(page_facts, [comparison / REPORT for comparison in comparisons])


def _comparisons_and_models(sources: Iterable[Any]) -> tuple[list[Path], list[Any]]:
    """Return the folders of comparisons, then all other sources: checkpoint folders and live models."""
    comparisons: list[Path] = []
    models: list[Any] = []
    for one in sources:
        if hasattr(one, "state_dict"):
            models.append(one)
            continue
        require_path("explore(FOLDER)", one)
        path = Path(one)
        if is_comparison(path):
            comparisons.append(path)
        else:
            models.append(path)
    return comparisons, models


def _part_of(model: Any, words: Sequence[str], texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Return the part of a checkpoint or a live model that the page contains."""
    if isinstance(model, Path):
        return embedded(model, words, texts)
    return live(model, tokenizer, words, texts)


def _opened_at(part: Mapping[str, Any] | None, comparisons: Sequence[Path]) -> str:
    """Return the section that is open at first."""
    if part:
        return "checkpoint"
    if comparisons:
        return "runs"
    return "symmetry"


def _address_from(page: Path, report: Path) -> str:
    """Return the link from a page to a report: relative if both are on one drive."""
    try:
        relative = os.path.relpath(report.resolve(), page.resolve().parent)
    except ValueError:
        return report.resolve().as_uri()
    return quote(Path(relative).as_posix())


def _fill_page(page_facts: Mapping[str, Any], reports: Sequence[Path] = ()) -> Explorer:
    """Return the page: the template with style, picture, facts and code filled in."""
    # texts of users are in the JSON, which cannot close a script element, and in the picture
    record = json.dumps(page_facts, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    parts = {
        "style": f"{_text('report/templates/report.css')}{_colours()}{_text('report/explorer/web/page.css')}",
        "picture": picture(page_facts),
        "facts": record.replace("<", "\\u003c"),
        "code": join_modules(),
    }
    template = _text("report/explorer/web/page.html")
    filled = re.sub(r"/\*(style|picture|facts|code)\*/", lambda mark: parts[mark[1]], template)
    return Explorer(filled, parts["picture"], reports)


def join_modules(last: str = "main") -> str:
    """Return a module and its imports as one script, each module after its imports."""
    modules: dict[str, str] = {}

    def add(name: str) -> None:
        """Add the module `name` to `modules`, after its imports."""
        text = _text(f"report/explorer/web/{name}.js")
        for imported in IMPORT.findall(text):
            if imported not in modules:
                add(imported)
        modules[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    add(last)
    return "\n".join(('"use strict";', _text("report/templates/theme.js"), *modules.values()))


def _colours() -> str:
    """Return the colours of all pages as variables of the style sheet."""
    boundaries = "".join(f"--{name}: {COLOURS[place]}; " for name, place in (PLACES | PATHS).items())
    scales = {}
    for theme, (low, zero, high) in DIVERGING.items():
        scales[theme] = f"--low: {low}; --zero: {zero}; --high: {high}"
    return f':root {{ {boundaries}{scales["light"]}; }}\n:root[data-theme="dark"] {{ {scales["dark"]}; }}\n'


def _text(path: str) -> str:
    """Return the text of a file of the package."""
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path
    return data.decode()


# facts that are equal in every page: terms of counting, and usual names of tables


@cache
def facts() -> dict[str, Any]:
    """Return the facts of every page as JSON.

    `forms` has the terms of families; a preset has its form's index.
    """
    forms, presets = _forms_and_presets()
    models_with_vocab = [model for model in models() if model.vocab]
    return {
        "forms": forms,
        "presets": presets,
        "plain": PLAIN,
        "scale": [{"name": name, "source": find(name).config_source or find(name).source} for name in SCALE],
        "boundaries": BOUNDARIES,
        "options": {letter: f"--{name.replace('_', '-')}" for name, letter in LETTERS.items()},
        "components": {name: component(name) for name in COMPONENTS},
        "checkpoint": {dtype: DTYPES[dtype] for dtype in DTYPE_ROWS},
        "optimizers": OPTIMIZERS,
        "training": {dtype: _bytes_of_parameter(dtype) for dtype in ("float32", "bfloat16")},
        "header": NEIGHBOUR_HEADER,
        "models": [[m.name, m.vocab, m.width, m.layers, m.tied, m.checked] for m in models_with_vocab],
        # question of the training (sentence order or next sentence) → % of right answers to the other question
        "judged": {"sop": _right_answers("sop", "nsp"), "nsp": _right_answers("nsp", "sop")},
        "scores": _sharing_scores(),
    }


def _forms_and_presets() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the distinct terms of families, and every model whose counts follow one of them."""
    described: dict[str, tuple[Mapping[str, Any] | Sizes, bool | None]] = {}  # name → (config or sizes, is tied)
    for name, gated in PLAIN.items():
        described[name] = (Sizes(50_257, 768, 12, heads=12, gated=gated), None)
    for model in models():
        if model.config:
            described[model.name] = (model.config, model.tied)
    forms: list[dict[str, Any]] = []
    presets: list[dict[str, Any]] = []
    for name, (description, tied) in described.items():
        terms = growth(description)
        if terms is None:
            continue
        form = terms.record()
        if form not in forms:
            forms.append(form)
        sizes = {LETTERS[size]: value for size, value in terms.sizes.items()}
        presets.append({"name": name, "form": forms.index(form), "tied": tied, "sizes": sizes})
    return forms, presets


def _bytes_of_parameter(dtype: str) -> dict[str, int]:
    """Return the bytes of one trained parameter, by optimizer."""
    return {optimizer: parts["total"] for optimizer, parts in training_bytes(1, 1, dtype).items()}


def _right_answers(trained: str, other: str) -> float:
    """Return the share in % of right answers to the `other` question.

    The model was trained on the question `trained`.
    """
    published = results(f"pairs right as {other}, %")
    return next(result.value for result in published if result.setting == f"objective={trained}")


def _sharing_scores() -> list[list[Any]]:
    """Return ALBERT's average at E = 128 for each kind of sharing."""
    scores = []
    for result in results(ALBERT_AVERAGE):
        if result.model == "ALBERT-base, E = 128":
            scores.append([result.choice.rpartition("share ")[2], result.value])
    return scores


def table_names() -> dict[str, Sequence[str]]:
    """Return usual paths of both tables' modules, likeliest first, and names of other towers."""
    names = usual_names()
    inputs = dict.fromkeys(path for path, _ in names.pairs)
    outputs = dict.fromkeys([*names.outputs, *(path for _, path in names.pairs), *names.exact_outputs])
    return {"inputs": list(inputs), "outputs": list(outputs), "foreign": names.foreign}


# the picture for viewers that run no script


def picture(page_facts: Mapping[str, Any]) -> str:
    """Return the facts of a page as SVG: first sentences, and one figure."""
    comparisons, part = page_facts.get("runs"), page_facts["checkpoint"]["embedded"]
    sentences = []
    if comparisons:
        sentences += [f"{comparison['name']}: {comparison['verdict']}" for comparison in comparisons["runs"]]
    if part:
        sentences.append(_tables_in_words(part))
    if not comparisons:
        sentences.append("One table at both ends scores every pair of words alike both ways:")
    lines: list[str] = []
    for text in sentences:
        lines += textwrap.wrap(text, WRAP)
    top = 24 + LINE * len(lines)
    figure, height = _figure(comparisons, top)
    body = [_label(20, 34 + LINE * i, line, size=15) for i, line in enumerate(lines)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + height}" width="{WIDTH}" '
        f'height="{top + height}" role="img" font-family="sans-serif">'
        f'<rect width="100%" height="100%" rx="12" fill="{CARD}"/>{"".join([*body, *figure])}</svg>'
    )


def _figure(comparisons: Mapping[str, Any] | None, top: int) -> tuple[list[str], int]:
    """Return (elements, height) of the picture's figure: the comparisons' curves, or else a table's scores."""
    if comparisons:
        return _curves(comparisons, top)
    return _scores(top)


def _tables_in_words(part: Mapping[str, Any]) -> str:
    """Return name, shape and dtype of the tables in a part of a checkpoint."""
    tables = []
    for tensor in part["tensors"]:
        if "data" in tensor and len(tensor["shape"]) == 2:
            shape = ", ".join(count(size) for size in tensor["shape"])
            tables.append(f"{tensor['name']} [{shape}] {tensor['dtype']}")
    return f"{part['name']}: {' and '.join(tables) or 'no tables'}."


def _scores(top: int) -> tuple[list[str], int]:
    """Return the symmetric direct path of a tied table as (elements, height)."""
    elements = []
    strongest_colour = DIVERGING["light"][2]
    for i, (row, before) in enumerate(zip(TABLE, WORDS, strict=True)):
        y = top + 40 + 44 * i
        elements += [_label(20, y + 26, before), _label(130 + 96 * i, top + 30, WORDS[i])]
        for j, other in enumerate(TABLE):
            score = sum(a * b for a, b in zip(row, other, strict=True))
            share = f'fill="{strongest_colour}" fill-opacity="{0.5 * score / STRONGEST:.2f}"'
            elements.append(f'<rect x="{100 + 96 * j}" y="{y}" width="90" height="40" rx="6" {share}/>')
            elements.append(_label(130 + 96 * j, y + 26, plain(score, 2)))
    return elements, 190


def _curves(comparisons: Mapping[str, Any], top: int) -> tuple[list[str], int]:
    """Return the curves of the first measure of any comparison as (elements, height)."""
    measure = _first_measure(comparisons)
    if measure is None:
        return [], 12
    axes = _Axes.around(measure["lines"], top)
    elements = [_label(20, top + 24, f"{measure['title']}, {measure['unit']}", QUIET)]
    for y in (axes.low, axes.high):
        elements.append(f'<path d="M{axes.at(axes.start, y)}L{axes.at(axes.end, y)}" stroke="{GRID}"/>')
        height = float(axes.at(axes.start, y).split()[1])
        elements.append(_label(14, height + 4, plain(y, 2), QUIET))
    means = [line for line in measure["lines"] if not line.get("thin")]
    for i, line in enumerate(means):
        colour = comparisons["colours"][line["arm"]]
        path = "L".join(axes.at(x, y) for x, y in line["points"])
        x, y = axes.right + 14, top + 40 + 22 * i
        elements.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        elements.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="3" fill="{colour}"/>')
        elements.append(_label(axes.right + 32, top + 51 + 22 * i, line["arm"]))
    return elements, _Axes.height + 64


def _first_measure(comparisons: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first measure of the first comparison that has one."""
    measures: list[Mapping[str, Any]] = []
    for comparison in comparisons["runs"]:
        measures += comparison["measures"].values()
    if not measures:
        return None
    return measures[0]


class _Axes:
    """Axes of the picture's curves: the ranges of both, and the conversion to pixels."""

    left, right, height = 64, WIDTH - 150, 220  # pixels

    def __init__(self, across: tuple[float, float], up: tuple[float, float], top: int) -> None:
        self.start, self.end = across
        self.low, self.high = up
        self.top = top

    @classmethod
    def around(cls, lines: Sequence[Mapping[str, Any]], top: int) -> _Axes:
        """Return axes that contain all points of these lines."""
        points: list[tuple[float, float]] = []
        for line in lines:
            points += line["points"]
        x, y = zip(*points, strict=True)
        return cls(_range(x), _range(y), top)

    def at(self, x: float, y: float) -> str:
        """Return a point's pixels in the form of an SVG path."""
        across, up = (x - self.start) / (self.end - self.start), (y - self.low) / (self.high - self.low)
        return f"{self.left + across * (self.right - self.left):.1f} {self.top + 40 + (1 - up) * self.height:.1f}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, moved apart if they are equal."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    return low - 0.5, high + 0.5


def _label(x: float, y: float, text: str, fill: str = INK, size: int = 13) -> str:
    """Return a text as an SVG element."""
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}">{escape(text)}</text>'
