"""Read the points that a static chart draws, and the points that the interactive figure has, in the same form."""

import math
import re
from xml.etree import ElementTree

POINT = re.compile(r"[ML](-?[\d.]+) (-?[\d.]+)")
SVG_LEVELS = 40  # steps of the colour scale from zero to each end


def svg_of(chart):
    """Return the SVG of a chart, parsed."""
    return ElementTree.fromstring(chart).find("div[@class='frame']/svg")


def class_elements(svg, name):
    """Return the elements of a class."""
    return [element for element in svg.iter() if element.get("class") == name]


def _ends(svg, side):
    """Return the numbers at 0 % and 100 % of an axis: logarithms on a logarithmic axis."""
    start, end = map(float, svg.get(f"data-{side}").split())
    return start, end


def _is_log(layout, side):
    """Return whether an axis is logarithmic."""
    return layout.get(f"{side}axis", {}).get("type") == "log"


def _to_values(svg, layout):
    """Return a function from per cent (left, top) to numbers of the axes."""

    def value(side, share):
        start, end = _ends(svg, side)
        coordinate = start + share * (end - start)
        return 10**coordinate if _is_log(layout, side) else coordinate

    return lambda left, top: (value("x", float(left) / 100), value("y", 1 - float(top) / 100))


def drawn(chart, record):
    """Return {(trace, class of the mark): points in numbers of the axes} of lines, bands, dots and markers."""
    svg = svg_of(chart)
    to_values = _to_values(svg, record["layout"])
    points = {}
    for element in svg.iter():
        if element.get("class") in ("line", "band", "dots"):
            found = POINT.findall(element.get("d"))
        elif element.get("class") == "points":
            found = [(use.get("x").rstrip("%"), use.get("y").rstrip("%")) for use in element]
        else:
            continue
        points[int(element.get("data-trace")), element.get("class")] = [to_values(*point) for point in found]
    return points


def expected(record):
    """Return the same of the interactive figure, from plotly's data."""
    points = {}
    logs = {side: _is_log(record["layout"], side) for side in "xy"}
    for index, trace in enumerate(record["data"]):
        if trace["type"] != "scatter":
            continue
        shown = [
            pair
            for pair in zip(trace["x"], trace["y"], strict=True)
            if None not in pair and all(value > 0 for value, side in zip(pair, "xy", strict=True) if logs[side])
        ]
        if trace.get("fill"):
            points[index, "band"] = shown
            continue
        if "lines" in trace["mode"]:
            points[index, "line"] = shown
        if "markers" in trace["mode"]:
            symbol = trace["marker"].get("symbol", "circle")
            circles = symbol == "circle" or set(symbol) == {"circle"}
            points[index, "dots" if circles else "points"] = shown
    return points


def is_close(chart, found, wanted, layout):
    """Return whether two lists of points agree to a hundred-thousandth of each axis."""
    if len(found) != len(wanted):
        return False
    for place, side in enumerate("xy"):
        scale = math.log10 if _is_log(layout, side) else float
        start, end = _ends(svg_of(chart), side)
        for one, other in zip(found, wanted, strict=True):
            if abs(scale(one[place]) - scale(other[place])) > 1e-5 * abs(end - start):
                return False
    return True


def bars(chart, record):
    """Return {trace: lengths of its bars without those of length 0}, drawn and expected."""
    svg = svg_of(chart)
    start, end = _ends(svg, "x")
    lengths = {}
    for element in class_elements(svg, "bar"):
        width = float(element.get("width").rstrip("%")) / 100 * (end - start)
        lengths.setdefault(int(element.get("data-trace")), []).append(width)
    wanted = {}
    for index, trace in enumerate(record["data"]):
        if trace["type"] == "bar" and any(trace["x"]):
            wanted[index] = [length for length in trace["x"] if length]
    return lengths, wanted, 1e-4 * (end - start)


def cells(chart):
    """Return {(row, column): share of the colour scale} of a map."""
    svg = svg_of(chart)
    (x_start, x_end), (y_start, y_end) = _ends(svg, "x"), _ends(svg, "y")
    found = {}
    for path in class_elements(svg, "cells"):
        for left, top in POINT.findall(path.get("d")):
            column = round(x_start + float(left) / 100 * (x_end - x_start) + 0.5)
            row = round(y_start + (1 - float(top) / 100) * (y_end - y_start) + 0.5)
            assert (row, column) not in found
            found[row, column] = int(path.get("data-level")) / SVG_LEVELS
    return found
