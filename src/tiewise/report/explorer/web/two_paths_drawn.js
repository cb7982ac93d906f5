// Pictures of both gradients at one step: rows in the plane, rows in numbers, one row term by term.
import { fitToWidth, stroke } from "./curves.js";
import { el, heat, listing, panel, svg } from "./kit.js";
import { MINUS, plain } from "./numbers.js";
import { lengthOf } from "./two_paths.js";

export const PATHS = { lookup: "lookup path", head: "head path" };
export const COLOUR = { lookup: "var(--lookup-path)", head: "var(--head-path)" };
const LONGEST = 0.7; // longest arrow; initial rows are between −1 and 1

/** Draw rows as points of the plane with an arrow for each path. */
export function plane({ rows, row: picked, alpha }, { W, lookup, head }) {
  const longest = Math.max(1e-9, ...head.map(lengthOf), ...lookup.map((row) => alpha * lengthOf(row)));
  const moved = (matrix, factor) => matrix.map((row, j) =>
    row.map((x, i) => W[j][i] - (LONGEST * factor * x) / longest));
  const tips = { head: moved(head, 1), lookup: moved(lookup, alpha) };
  const far = 1.12 * Math.max(1, ...[W, tips.head, tips.lookup].flat(2).map(Math.abs));
  const where = rows.map((row, j) => `${row} at ${W[j].map((x) => plain(x)).join(", ")}`).join("; ");
  const draw = (size) => {
    const put = ([x, y]) => [(size / 2) * (1 + x / far), (size / 2) * (1 - y / far)];
    const path = (points) => `M${points.map((xy) => xy.map((x) => x.toFixed(1)).join(" ")).join("L")}`;
    const arrow = (row, end, colour) => {
      const [from, tip] = [put(row), put(end)], d = [tip[0] - from[0], tip[1] - from[1]], long = Math.hypot(...d);
      const [ux, uy] = d.map((x) => (x / long) * Math.min(8, long));
      const barb = (side) => [tip[0] - ux - side * 0.5 * uy, tip[1] - uy + side * 0.5 * ux];
      return long > 1 && svg("path", { d: `${path([from, tip])}${path([barb(1), tip, barb(-1)])}`, stroke: colour,
        fill: "none", "stroke-width": 2.2, "stroke-linejoin": "round" });
    };
    const one = (row, j) => {
      const [cx, cy] = put(row);
      return [arrow(row, tips.head[j], COLOUR.head), arrow(row, tips.lookup[j], COLOUR.lookup),
        svg("circle", { cx, cy, r: j === picked ? 6 : 4, class: "row" }),
        svg("text", { x: cx + 9, y: cy - 8, class: "name" }, rows[j])];
    };
    return svg("svg", { class: "curves", width: size, height: size, viewBox: `0 0 ${size} ${size}`, role: "img",
      "aria-label": `Rows of W as points: ${where}` },
    svg("path", { class: "grid", d: `M0 ${size / 2}H${size}M${size / 2} 0V${size}` }), W.map(one));
  };
  const legend = Object.entries(PATHS).map(([path, name]) => el("span", {}, stroke(COLOUR[path]), ` ${name}`));
  return panel("Where each row is pushed",
    el("div", {}, el("div", { class: "legend", "aria-hidden": "true" }, legend), fitToWidth(400, draw)),
    "Each point is a row of W. Arrows: where each path pushes it; the longest has always one length.");
}

/** Draw both gradients and their sum for all rows, on one scale of colours. */
export function rowTables({ rows, inputs, alpha }, { lookup, head, whole }) {
  const scaled = lookup.map((row) => row.map((x) => alpha * x)), a = alpha === 1 ? "A" : `${alpha}·A`;
  const top = Math.max(1e-9, ...[scaled, head, whole].flat(2).map(Math.abs));
  const untouched = rows.filter((_, j) => !inputs.includes(j));
  const grid = (name, matrix, path) => el("div", {},
    el("h3", { style: path ? { "border-bottom": `3px solid ${COLOUR[path]}` } : {} }, name),
    heat(name, matrix, { rows, columns: ["dim 0", "dim 1"], digits: 3, top }));
  const zero = untouched.length ? `The lookup path is zero for ${untouched.join(", ")}: never read.`
    : "Every word is read here.";
  return panel("What each path asks of each row", el("div", { class: "equation" },
    grid(`lookup path, ${a}`, scaled, "lookup"), "+", grid("head path, B", head, "head"), "=",
    grid(`the sum, ${a} + B`, whole)), `${zero} The head path is zero for no row: each word has some probability at `
    + "each position. The optimizer receives the sum.");
}

/** Draw ∂L/∂w of one row: the formula, and its terms one by one. */
export function terms({ rows, row: j, inputs, targets, alpha }, { positions, lookup, head, whole }) {
  const word = rows[j], factor = alpha === 1 ? "" : `${alpha}·`;
  const vector = (row) => `(${row.map((x) => plain(x, 4)).join(", ")})`;
  const low = (name, t) => [name, el("sub", {}, String(t + 1))];
  const path = (of, ...inside) => el("span", { style: { "--of": COLOUR[of] } }, "[ ", inside, " ]");
  const joined = (parts, most = 6) => parts.slice(0, most).flatMap((part, i) => (i ? [" + ", part] : [part]))
    .concat(parts.length > most ? " + …" : []);
  const reads = positions.flatMap((each, t) => (inputs[t] === j ? [{ ...each, t }] : []));
  const residual = (t) => [targets[t] === j ? ["(", low("p", t), `(${word}) ${MINUS} 1)`] : [low("p", t), `(${word})`],
    "·", low("h", t)].flat();
  const those = reads.length === 1 ? "the one position that reads" : `the ${reads.length} positions that read`;
  const pushed = (p, t) => (targets[t] === j ? `${word} comes next and had p = ${plain(p, 4)}: pulled to h`
    : `${rows[targets[t]]} comes next, ${word} had p = ${plain(p, 4)}: pushed from h`);
  return [
    el("p", { class: "formula" }, `∂L/∂w(${word}) = ${factor}`,
      path("lookup", reads.length ? joined(reads.map(({ t }) => low("h̄", t))) : "0"), " + ",
      path("head", joined(positions.map((_, t) => residual(t))))),
    listing(`Terms of the gradient of the row of ${word}`, ["term", "where it comes from", "value"], [
      ...reads.map(({ back, t }) => [el("span", {}, low("h̄", t)), `position ${t + 1} reads ${word}`, vector(back)]),
      ["lookup path, A", reads.length ? `sum over ${those} ${word}` : `zero: no position reads ${word}`,
        vector(lookup[j])],
      ...positions.map(({ p, h, error }, t) => [el("span", {}, residual(t)), `position ${t + 1}: ${pushed(p[j], t)}`,
        vector(h.map((x) => x * error[j]))]),
      ["head path, B", "sum over all positions", vector(head[j])],
      [`${factor}A + B`, "what the optimizer sees", vector(whole[j])],
    ])];
}
