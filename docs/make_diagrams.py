"""Write the diagrams of the Ideas pages as SVG files in docs: `python docs/make_diagrams.py`.

Each is at most 440 units wide with letters of 13 or more, so that a phone, 360 points wide, shows them at 10 or more.
Each has a white background, so that it also looks right on a dark page.
"""

from pathlib import Path

from tiewise.core.measurement import COLOURS, PATHS
from tiewise.planning.ledger import Result, results

INK, PALE, LINE, BOX_FILL = "#22252b", "#5d626d", "#c9c4ba", "#f6f4f0"
TABLE = "#e7eef8"
LOOKUP, HEAD = COLOURS[PATHS["lookup-path"]], COLOURS[PATHS["head-path"]]


def box(x: float, y: float, width: float, height: float, *lines: str, fill: str = BOX_FILL) -> str:
    """Return a rounded box with lines of text: the first bold, the others pale."""
    middle, first = x + width / 2, y + height / 2 + 5 - 9 * (len(lines) - 1)
    svg = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>'
    svg += text(middle, first, lines[0], INK, "middle", bold=True)
    return svg + "".join(text(middle, first + 18 * i, line, PALE, "middle") for i, line in enumerate(lines) if i)


def text(x: float, y: float, words: str, ink: str = PALE, anchor: str = "start", bold: bool = False) -> str:
    """Return words at a position; `anchor` is start, middle or end."""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{ink}"{weight}>{words}</text>'


def arrow(*points: tuple[float, float], ink: str = PALE, dashed: bool = False) -> str:
    """Return a line along these points that ends in an arrow."""
    path = "L".join(f"{x} {y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{path}" stroke="{ink}" stroke-width="1.6" fill="none"{dash} marker-end="url(#{ink[1:]})"/>'


def diagram(title: str, height: float, *parts: str) -> str:
    """Return a complete SVG with a title and these elements."""
    width = 440
    heads = "".join(
        f'<marker id="{ink[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ink}"/></marker>'
        for ink in (PALE, LOOKUP, HEAD)
    )
    attributes = f'width="{width}" height="{height}" font-family="sans-serif" font-size="13" role="img"'
    background = '<rect width="100%" height="100%" rx="12" fill="#ffffff"/>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {attributes}>'
    return f"{start}<title>{title}</title><defs>{heads}</defs>{background}{''.join(parts)}</svg>\n"


def tied_pass() -> str:
    """Draw the tied pass, from the token at the bottom to the loss at the top.

    The table is at the left. Dashed arrows are the two gradient paths.
    """
    return diagram(
        "The tied pass: one table, read by rows at the bottom, compared with at the top",
        386,
        box(20, 116, 116, 152, "W", "[V, D]", "one row", "for each token", fill=TABLE),
        box(230, 20, 190, 44, "logits [V]", "softmax, loss"),
        box(230, 112, 190, 44, "hidden state h [D]"),
        box(230, 184, 190, 44, "body", "layers"),
        box(230, 256, 190, 44, "row of the token [D]"),
        box(230, 328, 190, 40, "token"),
        arrow((325, 328), (325, 302)),
        arrow((325, 256), (325, 230)),
        arrow((325, 184), (325, 158)),
        arrow((325, 112), (325, 66)),
        text(334, 94, "h · each row"),
        text(334, 319, "its row"),
        arrow((56, 116), (56, 34), (228, 34)),
        arrow((100, 268), (100, 292), (228, 292)),
        arrow((230, 50), (92, 50), (92, 114), ink=HEAD, dashed=True),
        text(100, 92, "head path:", HEAD),
        text(100, 108, "all rows", HEAD),
        arrow((230, 268), (186, 268), (186, 220), (138, 220), ink=LOOKUP, dashed=True),
        text(142, 192, "lookup path:", LOOKUP),
        text(142, 208, "its row", LOOKUP),
    )


def two_widths() -> str:
    """Draw a recurrent model whose table is narrower or wider than its state."""
    return diagram(
        "A recurrent net with E not equal to H: two maps let one table serve both ends",
        400,
        box(20, 128, 104, 140, "U", "[V, E]", "one table", fill=TABLE),
        box(216, 20, 204, 44, "scores s [V]", "U · (Q h) + c"),
        box(216, 92, 204, 44, "Q h [E]", "Q is [E, H]"),
        box(216, 164, 204, 44, "state h [H]", "f(P e + R h′ + b)"),
        box(216, 236, 204, 44, "P e [H]", "P is [H, E]"),
        box(216, 308, 204, 40, "row e [E]"),
        text(318, 388, "word", PALE, "middle"),
        arrow((318, 374), (318, 350)),
        arrow((318, 308), (318, 282)),
        arrow((318, 236), (318, 210)),
        arrow((318, 164), (318, 138)),
        arrow((318, 92), (318, 66)),
        arrow((72, 128), (72, 42), (214, 42)),
        arrow((72, 268), (72, 328), (214, 328)),
        arrow((216, 186), (172, 186), (172, 232), (196, 232), (196, 196), (214, 196)),
        text(140, 172, "h′: before"),
    )


def factored() -> str:
    """Draw a plain table next to a factored one.

    Widths are to scale, heights are not.
    """
    return diagram(
        "A plain table, and a factored one: narrow rows and one map",
        250,
        text(88, 30, "plain", INK, "middle", bold=True),
        box(18, 44, 140, 150, "V × D", f"{30_522 * 768 / 1e6:.1f} million", fill=TABLE),
        text(88, 222, "30,522 × 768", PALE, "middle"),
        text(316, 30, "factored:128", INK, "middle", bold=True),
        f'<rect x="214" y="44" width="24" height="150" rx="4" fill="{TABLE}" stroke="{LINE}"/>',
        text(246, 150, "V × k"),
        text(246, 168, "3.9 million"),
        text(246, 66, "×", INK, "middle", bold=True),
        f'<rect x="262" y="48" width="140" height="24" rx="4" fill="{BOX_FILL}" stroke="{LINE}"/>',
        text(332, 65, "k × D", INK, "middle"),
        text(332, 92, "0.1 million", PALE, "middle"),
        text(316, 222, "30,522 × 128, 128 × 768", PALE, "middle"),
    )


def sentence_order() -> str:
    """Draw the source of the second segment of a wrong pair, in both tasks."""

    def page(x: float, y: float, name: str, *sentences: tuple[str, str]) -> str:
        """Return a page with a name and a box for each sentence."""
        svg = f'<rect x="{x}" y="{y}" width="96" height="112" rx="8" fill="#ffffff" stroke="{LINE}"/>'
        svg += text(x + 48, y + 20, name, PALE, "middle")
        return svg + "".join(box(x + 12, y + 32 + 38 * i, 72, 30, s, fill=f) for i, (s, f) in enumerate(sentences))

    a, b, other = ("A", TABLE), ("B", TABLE), ("C", "#f6e7d8")
    parts = []
    for y, name, wrong, second in (
        (20, "next sentence (NSP)", "another text's", other),
        (236, "sentence order (SOP)", "the two swapped", a),
    ):
        first = b if second is a else a
        parts += [
            text(20, y + 12, name, INK, bold=True),
            page(20, y + 28, "one text", a, b),
            text(250, y + 44, "right"),
            box(250, y + 52, 60, 30, "A", fill=TABLE),
            box(316, y + 52, 60, 30, "B", fill=TABLE),
            text(250, y + 108, f"wrong: {wrong}"),
            box(250, y + 116, 60, 30, first[0], fill=first[1]),
            box(316, y + 116, 60, 30, second[0], fill=second[1]),
        ]
    parts.append(page(128, 48, "another", ("C", other[1]), ("D", other[1])))
    parts += [
        text(20, 186, "A shared topic gives the answer away:"),
        text(20, 204, "C speaks of something else."),
        text(20, 402, "Both speak of the same thing:"),
        text(20, 420, "only their order tells."),
    ]
    return diagram("Next sentence prediction beside sentence order prediction", 438, *parts)


def decide() -> str:
    """Draw four questions at the left, and their answers at the right."""
    steps = (
        (("tiewise check", "weights to continue from?"), "yes", ("keep what it has",), "no"),
        (("tiewise plan", "what share is saved?"), "under 5 %", ("either will do",), "more"),
        (("tiewise compare", "what does the loss say?"), "equivalent", ("take the smaller",), "clear"),
        (("two more sizes", "does it carry over?"), "yes", ("take the better",), "no"),
    )
    parts = []
    for index, (question, settled, answer, otherwise) in enumerate(steps):
        y = 20 + 104 * index
        parts += [
            box(20, y, 172, 60, *question),
            arrow((192, y + 30), (286, y + 30)),
            text(238, y + 22, settled, anchor="middle"),
            box(290, y + 8, 130, 44, *answer, fill=TABLE),
            arrow((106, y + 60), (106, y + 100)),
            text(116, y + 86, otherwise),
        ]
    return diagram("From a model to a choice", 494, *parts, box(20, 436, 172, 44, "stay untied", fill=TABLE))


def scores(metric: str) -> dict[str, float]:
    """Return the scores of Table 2 of the ALBERT paper by model."""
    return {result.model: result.value for result in results(metric) if result.source.endswith("Table 2")}


def albert_scores() -> str:
    """Draw BERTs and ALBERTs by their scores on GLUE tasks and on SQuAD, a line for each family."""
    squad = scores("SQuAD 2.0, dev F1, %")
    mnli, sst = scores("MNLI, dev accuracy, %"), scores("SST-2, dev accuracy, %")
    place = {}
    for model, points in squad.items():
        glue = (mnli[model] + sst[model]) / 2
        place[model] = (64 + (glue - 85) * 48, 300 - (points - 79) * 27)
    axes = [f'<path d="M64 38V300H410" stroke="{LINE}" fill="none"/>']
    for mark in range(86, 93, 2):
        axes.append(text(64 + (mark - 85) * 48, 320, str(mark), anchor="middle"))
    for mark in range(80, 89, 2):
        axes.append(text(56, 304 - (mark - 79) * 27, str(mark), anchor="end"))
    axes.append(text(64, 24, "SQuAD 2.0, F1"))
    axes.append(text(410, 344, "mean of MNLI and SST-2, accuracy in %", anchor="end"))
    return diagram("Published scores of BERT and ALBERT on GLUE tasks and SQuAD", 358, *axes, *score_lines(place))


def score_lines(place: dict[str, tuple[float, float]]) -> list[str]:
    """Return the line, points and labels of each family; `place` has the position of each model."""
    parts = []
    sizes = {result.model: millions(result) for result in results("SQuAD 2.0, dev F1, %")}
    for family, ink in (("BERT", HEAD), ("ALBERT", LOOKUP)):
        members = [model for model in place if model.startswith(f"{family}-")]
        path = "L".join(f"{place[model][0]:.1f} {place[model][1]:.1f}" for model in members)
        parts.append(f'<path d="M{path}" stroke="{ink}" stroke-width="1.6" fill="none" stroke-dasharray="5 4"/>')
        for model in members:
            x, y = place[model]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ink}"/>')
            # a label is above its point and left of it; below and to the right for BERTs and the leftmost point
            is_below = family == "BERT" or x < 150
            end, shift = ("start", 19) if is_below else ("end", -9)
            parts.append(text(round(x, 1), round(y + shift, 1), f"{model} {sizes[model]}", ink, end))
    return parts


def millions(result: Result) -> str:
    """Return the parameters that the paper prints: 18M."""
    assert result.parameters_printed is not None
    return f"{result.parameters_printed // 10**6}M"


DRAWINGS = {
    "albert-scores": albert_scores,
    "decide": decide,
    "tied-pass": tied_pass,
    "two-widths": two_widths,
    "factored": factored,
    "sentence-order": sentence_order,
}

if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        Path(__file__).with_name(f"{name}.svg").write_text(drawing(), encoding="utf-8")
