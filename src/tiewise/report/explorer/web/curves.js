// Curves over one axis, readable by pointer, arrow keys and table; and drawings that adapt to their width.
import { el, listing, svg } from "./kit.js";
import { plain } from "./numbers.js";

const DASHES = ["", "7 4", "2 3", "8 3 2 3"];

/** Choose about `many` round numbers between a and b. → { at, digits } */
function ticks(a, b, many = 5) {
  const rough = (b - a) / many, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((of) => of * power >= rough) ?? 10), first = Math.ceil(a / step - 1e-9);
  const at = Array.from({ length: Math.floor(b / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
  return { at, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

/** Choose ticks of a logarithmic axis: 1, 2 and 5 times each power of ten, or the powers alone. */
function factorTicks(a, b, many) {
  const powers = Array.from({ length: Math.ceil(b) - Math.floor(a) + 1 }, (_, i) => 10 ** (Math.floor(a) + i));
  const inside = (of) => Math.log10(of) >= a && Math.log10(of) <= b;
  const every = powers.flatMap((power) => [1, 2, 5].map((of) => of * power)).filter(inside);
  return every.length > many ? powers.filter(inside) : every;
}

/** Draw again whenever the width changes, at most `most` wide, so that letters keep their size. */
export function fitToWidth(most, draw) {
  const box = el("div", {}, draw(most));
  let drawn = most;
  const watch = new ResizeObserver(([{ contentRect }]) => {
    const width = Math.min(most, contentRect.width);
    if (!box.isConnected) watch.disconnect();
    else if (width && Math.abs(width - drawn) > 4) box.replaceChildren(draw(drawn = width));
  });
  watch.observe(box);
  return box;
}

/** Draw the line of a legend. */
export const stroke = (colour, dash = "") => svg("svg", { width: 26, height: 8 },
  svg("path", { d: "M0 4H26", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash }));

function rangeOf(values) {
  const a = Math.min(...values), b = Math.max(...values);
  return a === b ? [a - 0.5, b + 0.5] : [a, b];
}
const placesOf = (lines) => [...new Set(lines.flatMap(({ points }) => points.map(([at]) => at)))].sort((a, b) => a - b);
const namedLines = (lines) => lines.filter(({ thin }) => !thin);
const formatPlace = (at) => plain(at, Number.isInteger(at) ? 0 : 2);

/**
 * Draw curves over one axis: [{ name, points: [[x, y]…], colour, thin }]. Thin ones are behind the others, unnamed.
 * The legend has the values at one x: the last, the pointer's, the arrow keys', or `mark`. The result's `.mark(x)`
 * moves the mark. `level`: horizontal line; `range`: range of y; `factors`: logarithmic x.
 */
export function curves(label, lines, asked) {
  const { x, y, width: most = 760, height = 260, digits = 2, factors = false, level = null, range = null } = asked;
  const all = lines.flatMap(({ points }) => points), to = factors ? Math.log10 : Number;
  if (!all.length) return Object.assign(el("p", { class: "note" }, "Nothing to draw yet."), { mark() {} });
  const own = namedLines(lines), dash = (line) => DASHES[own.indexOf(line) % DASHES.length] ?? "";
  const values = own.map(({ points }) => new Map(points)), said = own.map(() => el("b"));
  const where = el("span", { class: "where" }), stops = placesOf(own), far = Math.max(1, Math.round(stops.length / 10));
  const [x0, x1] = rangeOf(all.map(([at]) => to(at)));
  const [y0, y1] = range ?? rangeOf(all.map(([, of]) => of).concat(level ?? []));
  const apart = (i, at) => Math.abs(to(stops[i]) - at);
  const nearest = (at) => stops.reduce((best, _, i) => (apart(i, at) < apart(best, at) ? i : best), 0);
  let mark = asked.mark ?? null, stop = 0, show = () => {};
  const tell = (next) => {
    stop = Math.max(0, Math.min(stops.length - 1, next));
    values.forEach((of, i) => { said[i].textContent = plain(of.get(stops[stop]), digits); });
    where.textContent = `${x} ${formatPlace(stops[stop])}`;
    show();
  };
  const home = () => tell(mark === null ? stops.length - 1 : nearest(to(mark)));
  const keys = {
    ArrowLeft: () => stop - 1, ArrowRight: () => stop + 1, PageDown: () => stop - far, PageUp: () => stop + far,
    Home: () => 0, End: () => stops.length - 1,
  };
  const draw = (width) => {
    const many = Math.max(2, Math.floor(width / 70)), rises = ticks(y0, y1);
    const steps = factors ? factorTicks(x0, x1, many) : ticks(x0, x1, many).at;
    const left = 30 + 7 * Math.max(...rises.at.map((of) => plain(of, rises.digits).length));
    const right = 18, above = 10, below = 42, foot = height - below;
    const across = (at) => left + ((to(at) - x0) / (x1 - x0)) * (width - left - right);
    const up = (of) => foot - ((of - y0) / (y1 - y0)) * (foot - above);
    const cursor = svg("path", { class: "cursor" });
    const dots = own.map(({ colour }) => svg("circle", { r: 4, fill: colour }));
    const under = (px) => nearest(x0 + ((px - left) / (width - left - right)) * (x1 - x0));
    const curve = (line) => svg("path", {
      d: line.points.map(([at, of], k) => `${k ? "L" : "M"}${across(at).toFixed(1)} ${up(of).toFixed(1)}`).join(""),
      fill: "none", stroke: line.colour,
      ...(line.thin ? { "stroke-width": 1, opacity: 0.35 } : { "stroke-width": 2, "stroke-dasharray": dash(line) }),
    });
    const drawn = svg("svg", {
      class: "curves", width, height, viewBox: `0 0 ${width} ${height}`, role: "slider", tabindex: 0,
      "aria-label": `${label}: values along the curves`, "aria-valuemin": stops[0], "aria-valuemax": stops.at(-1),
      onpointermove: ({ clientX }) => tell(under(clientX - drawn.getBoundingClientRect().left)),
      onpointerleave: home, onblur: home,
      onkeydown: (event) => {
        const next = keys[event.key];
        if (next) { event.preventDefault(); tell(next()); }
      },
    },
    rises.at.map((of) => [svg("path", { d: `M${left} ${up(of)}H${width - right}`, class: "grid" }),
      svg("text", { x: left - 6, y: up(of) + 4, "text-anchor": "end" }, plain(of, rises.digits))]),
    steps.map((of) => svg("text", { x: across(of), y: foot + 17, "text-anchor": "middle" }, formatPlace(of))),
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
    svg("text", { transform: `translate(12 ${(above + foot) / 2}) rotate(-90)`, "text-anchor": "middle" }, y),
    level === null ? null : svg("path", { d: `M${left} ${up(level)}H${width - right}`, class: "level" }),
    lines.filter(({ thin }) => thin).map(curve), own.map(curve), cursor, dots);
    show = () => {
      const at = stops[stop], found = values.map((of) => of.get(at));
      cursor.setAttribute("d", `M${across(at)} ${above}V${foot}`);
      dots.forEach((dot, i) => dot.setAttribute("transform",
        found[i] === undefined ? "translate(-99 0)" : `translate(${across(at)} ${up(found[i])})`));
      const each = own.map(({ name }, i) => `${name} ${plain(found[i], digits)}`).join(", ");
      drawn.setAttribute("aria-valuenow", at);
      drawn.setAttribute("aria-valuetext", `${x} ${formatPlace(at)}: ${each}`);
    };
    show();
    return drawn;
  };
  home();
  const legend = own.map((line, i) => el("span", {}, stroke(line.colour, dash(line)), ` ${line.name} `, said[i]));
  const heading = el("div", { class: "legend", "aria-hidden": "true" }, legend, where);
  const made = el("div", {}, heading, fitToWidth(most, draw));
  return Object.assign(made, { mark(at) { mark = at; home(); } });
}

/** List the numbers of named curves, at most about `most` evenly spaced points. */
export function curveTable(label, lines, { x, digits = 2, most = 60 }) {
  const own = namedLines(lines), values = own.map(({ points }) => new Map(points)), stops = placesOf(own);
  const every = Math.ceil(stops.length / most) || 1;
  const shown = stops.filter((_, i) => i % every === 0 || i === stops.length - 1);
  return listing(label, [x, ...own.map(({ name }) => name)],
    shown.map((at) => [formatPlace(at), ...values.map((of) => plain(of.get(at), digits))]));
}
