// A recurrent cell between two ends. One table needs projections if widths E and H differ.
import { bars, choice, el, guess, listing, paragraph, slider } from "./kit.js";
import { count, plain } from "./numbers.js";
import { follow, keep, readChoice, readNumbers } from "./state.js";

const CELL_MOST = [1_000_000, 4096, 4096];

/**
 * List the matrices of a cell: [symbol, use, rows, columns].
 * h' = f(P_in e + W h + b), s = table · P_out h' + c
 */
export function cellParts(V, E, H, ends) {
  return [
    ["U", "looks a word up", V, E],
    E === H && ends === "one" ? null : ["P_in", "makes e as wide as h", H, E],
    ["W", "carries the state on", H, H],
    ["b", "", H, 1],
    ends === "one" && E !== H ? ["P_out", "makes h as narrow as e", E, H] : null,
    ends === "two" ? ["U_out", "scores every word", V, H] : null,
    ["c", "", V, 1],
  ].filter(Boolean);
}

export const partsTotal = (parts) => parts.reduce((sum, [, , rows, columns]) => sum + rows * columns, 0);

/** Draw the section into `place`. */
export function drawCell(place) {
  const now = () => {
    const found = readNumbers("rnn", [10_000, 300, 650]);
    const fits = found.every((x, i) => Number.isInteger(x) && x >= 1 && x <= CELL_MOST[i]);
    const [V, E, H] = fits ? found : [10_000, 300, 650];
    return { V, E, H, ends: readChoice("ends") === "two" ? "two" : "one" };
  };
  const change = (more) => { const { V, E, H } = { ...now(), ...more }; keep({ rnn: [V, E, H] }); };
  const drawn = el("div");
  const show = () => {
    const { V, E, H, ends } = now(), parts = cellParts(V, E, H, ends);
    const shapes = Object.fromEntries(parts.map(([symbol, , rows, columns]) => [symbol, [rows, columns]]));
    const box = (symbol, of, says, look = "") => el("div", { class: `matrix-box ${look}` },
      el("i", { style: { width: `${drawnSide(of[1])}px`, height: `${drawnSide(of[0])}px` }, "aria-hidden": "true" }),
      el("b", {}, symbol), el("span", {}, `${count(of[0])} × ${count(of[1])}`), el("small", {}, says));
    const vector = (symbol, width) =>
      el("div", { class: "vector" }, el("b", {}, symbol), el("small", {}, count(width)));
    const arrow = () => el("span", { class: "arrow", "aria-hidden": "true" }, "→");
    const between = (symbol, says) => (symbol in shapes ? [arrow(), box(symbol, shapes[symbol], says, "map")] : []);
    const total = (...sizes) => partsTotal(cellParts(...sizes));
    drawn.replaceChildren(
      el("div", { class: "flow" }, vector("word", 1), arrow(),
        box("U", shapes.U, "table", ends === "one" ? "tied" : "untied"), arrow(), vector("e", E),
        between("P_in", "projection"), arrow(),
        box("W ↺", shapes.W, "f(… + W h + b)", "state"), arrow(), vector("h", H),
        between("P_out", "projection"), arrow(),
        ends === "one" ? box("U", shapes.U, "the same table, + c", "tied")
          : box("U_out", shapes.U_out, "another table, + c", "untied"), arrow(), vector("scores", V)),
      el("p", { class: "said" }, cellSaid(V, E, H, ends)),
      bars("Parameters of three cells", [
        { name: "two tables", value: total(V, E, H, "two"), colour: "var(--untied)" },
        { name: E === H ? "one table" : "one table, projected", value: total(V, E, H, "one"), colour: "var(--tied)" },
        { name: `one table, H = ${count(E)} too`, value: total(V, E, E, "one"), colour: "var(--tied)" },
      ].map((each) => ({ ...each, label: count(each.value) }))),
      el("details", {}, el("summary", {}, "Every matrix"),
        listing("Matrices of the cell", ["matrix", "rows", "columns", "numbers"], [
          ...parts.map(([symbol, says, rows, columns]) =>
            [says ? `${symbol}, ${says}` : symbol, count(rows), count(columns), count(rows * columns)]),
          ["total", "", "", count(partsTotal(parts))],
        ])));
  };
  const { V, E, H, ends } = now();
  place.append(
    el("h2", {}, "A recurrent cell whose widths differ"),
    paragraph("The lookup reads rows of width E. A tied head multiplies them by the state of width H. If E and H "
      + "differ, the cell needs a projection on each side."),
    guess("stuck", "Must a tied recurrent model have E = H?",
      { yes: "yes: one matrix, one shape", no: "no: a small matrix makes up for it" }, "no",
      "P_in [H, E] takes the row to the state and P_out [E, H] takes the state back. Pretrained vectors of 50 or 300 "
        + "numbers then do not decide how much the cell can remember."),
    el("div", { class: "controls" },
      slider("Words V", V, (to) => change({ V: to }), { least: 2, most: CELL_MOST[0], factors: true, step: 100 }),
      slider("Width of the table E", E, (to) => change({ E: to }),
        { least: 1, most: CELL_MOST[1], factors: true, step: 10 }),
      slider("Width of the state H", H, (to) => change({ H: to }),
        { least: 1, most: CELL_MOST[2], factors: true, step: 10 }),
      el("div", { class: "asked" }, el("span", {}, "Ends "),
        choice("Ends", { one: "one table", two: "two tables" }, ends, (to) => keep({ ends: to })))),
    drawn,
    el("p", { class: "note" }, "One bias per cell, and no input matrix where E = H and one table is used, as the "
      + "equations are written. torch.nn.RNN always has that matrix, and two biases: 2·H² + 2·H in place of "
      + "H² + H."));
  follow(drawn, show);
  show();
}

const drawnSide = (size) => 8 + 9 * Math.log2(size + 1);

function cellSaid(V, E, H, ends) {
  const two = partsTotal(cellParts(V, E, H, "two")), one = partsTotal(cellParts(V, E, H, "one"));
  if (ends === "two")
    return `Two tables: ${count(two)} parameters, of which the second table, ${count(V)} × ${count(H)}, holds `
      + `${plain((100 * V * H) / two, 1)} %.`;
  const fewer = `${plain((100 * (two - one)) / two, 1)} % fewer than with two tables`;
  return E === H ? `E = H: no projection is needed. ${count(one)} parameters, ${fewer}.`
    : `E ≠ H: P_out, ${count(E)} × ${count(H)}, costs ${count(E * H)} parameters and replaces a table of `
      + `${count(V * H)}. ${count(one)} in all, ${fewer}.`;
}
