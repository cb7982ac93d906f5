// Building blocks of all sections: elements, fields, editable matrices, heat maps, bars, tables, guesses.
import { plain } from "./numbers.js";
import { keep, readChoice } from "./state.js";

/** Make an element with attributes (`on…`: listeners; `style`: map of CSS properties) and children. */
export function el(tag, attributes = {}, ...children) {
  return fillElement(document.createElement(tag), attributes, children);
}

/** Make an SVG element in the same way. */
export function svg(tag, attributes = {}, ...children) {
  return fillElement(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fillElement(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, to]) => made.style.setProperty(key, to));
    else if (value !== false && value !== null && value !== undefined)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

let numbered = 0;
export const uniqueId = (name) => `${name}-${(numbered += 1)}`;

export const paragraph = (...children) => el("p", {}, ...children);
export const button = (label, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, label);

/** Announce a text to screen readers. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Make a figure as in reports: heading, drawing, caption, and its numbers as a folded table. */
export function panel(title, drawn, caption, table = null) {
  return el("figure", { class: "panel" }, el("h2", {}, title), drawn, caption && el("figcaption", {}, caption),
    table && el("details", {}, el("summary", {}, "Data", el("span", { class: "hidden" }, ` of: ${title}`)), table));
}

export const panels = (...children) => el("div", { class: "panels maps" }, ...children);

/**
 * Make a table from a `header` of texts and `rows` of texts or elements. The first cell is the heading of its row; a
 * row of one cell is a heading of the rows below. Columns of long texts wrap as sentences.
 */
export function listing(caption, header, rows) {
  const sentence = header.map((_, i) =>
    rows.some((row) => i && String(row[i]).length > 24 && /\p{L}{3}/u.test(row[i])));
  const cell = (tag, more) => (text, i) => text === "" ? el("td") // an empty cell is no heading
    : el(i ? tag : "th", { class: sentence[i] && "sentence", ...more(i) }, text);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, el("table", {},
    el("thead", {}, el("tr", {}, header.map(cell("th", () => ({ scope: "col" }))))),
    el("tbody", {}, rows.map((row) => (row.length === 1 && header.length > 1 // heading of the rows below
      ? el("tr", { class: "head" }, el("th", { scope: "rowgroup", colspan: header.length }, row[0]))
      : el("tr", {}, row.map(cell("td", (i) => (i ? {} : { scope: "row" })))))))));
}

/** Make a box for a number. `change` gets each valid value: from least to most, an integer if step is 1. */
export function numberBox(label, value, change, asked = {}) {
  const { least = -Infinity, most = Infinity, step = "any", hide = false } = asked;
  const box = el("input", {
    type: "number", value, step, min: Number.isFinite(least) ? least : null, max: Number.isFinite(most) ? most : null,
    inputmode: "decimal", "aria-label": hide ? label : null,
    oninput: () => {
      const found = box.valueAsNumber;
      const fits = found >= least && found <= most && (step !== 1 || Number.isInteger(found));
      box.setAttribute("aria-invalid", String(!fits));
      if (fits) change(found);
    },
  });
  return hide ? box : el("label", { class: "field" }, el("span", {}, label), box);
}

/**
 * Make a slider with a box for exact values; `factors`: a logarithmic scale. Only dragging rounds to steps.
 */
export function slider(label, value, change, { least, most, step = 1, factors = false }) {
  const to = factors ? Math.log : Number, from = factors ? Math.exp : Number;
  const fit = (x) => Math.min(most, Math.max(least, Number((Math.round(x / step) * step).toFixed(9))));
  const range = el("input", {
    type: "range", min: to(least), max: to(most), step: factors ? "any" : step, value: to(value), "aria-label": label,
    oninput: () => { const x = fit(from(range.valueAsNumber)); exact.value = x; tell(x); change(x); },
  });
  const exact = numberBox(label, value, (x) => { range.value = to(x); tell(x); change(x); },
    { least, most, step: Number.isInteger(step) ? 1 : "any", hide: true });
  const tell = (x) => range.setAttribute("aria-valuetext", String(x));
  tell(value);
  return el("div", { class: "field" }, el("span", {}, label), el("div", { class: "slide" }, range, exact));
}

/** Make buttons of which one is pressed. `options` maps values to labels. */
export function choice(label, options, value, change) {
  const pressed = (of, made) => made.querySelectorAll("button").forEach((b) =>
    b.setAttribute("aria-pressed", String(b.value === of)));
  const made = el("div", { class: "choice", role: "group", "aria-label": label },
    Object.entries(options).map(([of, shown]) =>
      button(shown, () => { pressed(of, made); change(of); }, { value: of })));
  pressed(value, made);
  return made;
}

/** Make a drop-down list. `options` maps values to labels. */
export function pick(label, options, value, change) {
  const list = el("select", { onchange: () => change(list.value) }, Object.entries(options).map(([of, shown]) =>
    el("option", { value: of, selected: of === value }, shown)));
  return el("label", { class: "field" }, el("span", {}, label), list);
}

/** Show a command with a button that copies it. */
export function command(text) {
  const shown = el("pre", { tabindex: 0 }, text);
  return el("div", { class: "command" }, shown, button("Copy", async ({ currentTarget: pressed }) => {
    getSelection().selectAllChildren(shown); // fallback if the page cannot use the clipboard
    try {
      await navigator.clipboard.writeText(text);
      pressed.textContent = "Copied";
    } catch { pressed.textContent = "Selected"; }
    announce(pressed.textContent);
    setTimeout(() => { pressed.textContent = "Copy"; }, 2000);
  }));
}

const matrixTable = (label, kind, rows, columns, cells) => el("table", { class: kind, "aria-label": label },
  el("thead", {}, el("tr", {}, el("td"), columns.map((c) => el("th", { scope: "col" }, c)))),
  el("tbody", {}, cells.map((row, i) => el("tr", {}, el("th", { scope: "row" }, rows[i]), row))));

/** Make an editable matrix; arrow keys move between boxes. `change` gets the complete matrix. */
export function editable(label, matrix, { rows, columns, change, step = 0.1, least, most }) {
  const held = matrix.map((row) => [...row]);
  const boxes = held.map((row, i) => row.map((value, j) =>
    numberBox(`${label}, ${rows[i]}, ${columns[j]}`, value, (x) => {
      held[i][j] = x;
      change(held.map((each) => [...each]));
    }, { step, least, most, hide: true })));
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [1, 0] };
  const table = matrixTable(label, "matrix", rows, columns, boxes.map((row) => row.map((box) => el("td", {}, box))));
  table.addEventListener("keydown", (event) => {
    const move = moves[event.key], i = boxes.findIndex((row) => row.includes(event.target));
    if (!move || i < 0) return; // up and down change the number, as in all number boxes
    const next = boxes[i + move[0]]?.[boxes[i].indexOf(event.target) + move[1]];
    if (next) { event.preventDefault(); next.focus(); next.select(); }
  });
  return table;
}

/** Draw a small matrix as coloured numbers. `marked(i, j)` returns a class for a cell, or null. */
export function heat(label, matrix, { rows, columns = rows, digits = 2, top = null, marked = () => null }) {
  const most = top ?? Math.max(1e-9, ...matrix.flat().map(Math.abs));
  return matrixTable(label, "matrix heat", rows, columns, matrix.map((row, i) => row.map((x, j) =>
    el("td", { class: marked(i, j), style: shade(x / most) }, plain(x, digits)))));
}

/** Return CSS variables for the colour of a number from −1 to 1. The style sheet mixes them. */
export const shade = (x) => ({
  "--of": `${(100 * Math.min(1, Math.abs(x))).toFixed(1)}%`,
  "--end": x < 0 ? "var(--low)" : "var(--high)",
});

/**
 * Draw horizontal bars: [{ name, value, colour, label, from }]. `label` replaces the number; `from` is the start.
 */
export function bars(label, items, { most = null, digits = 2 } = {}) {
  const low = Math.min(0, ...items.map(({ value }) => value)); // negative bars are left of zero
  const across = (most ?? Math.max(1e-9, ...items.map(({ value }) => value))) - low;
  const share = (x) => `${(100 * Math.min(1, Math.max(0, x / across))).toFixed(2)}%`;
  const track = ({ value, colour, from = 0 }) => el("span", { style: {
    "margin-left": share(from + Math.min(0, value) - low),
    width: share(Math.abs(value)),
    background: colour ?? "var(--accent)",
  } });
  return el("div", { class: "bars", role: "group", "aria-label": label }, items.map((item) =>
    el("div", {}, el("span", {}, item.name),
      el("span", { class: "track", "aria-hidden": "true" }, track(item)),
      el("span", {}, item.label ?? plain(item.value, digits)))));
}

/** Ask a question with options, and show the right one with its reason after the answer. */
export function guess(name, question, options, right, because) {
  const answer = el("div", { class: "answer", "aria-live": "polite" });
  const show = (taken) => {
    const hit = taken === right;
    answer.replaceChildren(paragraph(el("strong", {}, hit ? "Right. " : `It is: ${options[right]}. `), because));
    buttons.querySelectorAll("button").forEach((each) => each.classList.toggle("right", each.value === right));
  };
  const buttons = choice(question, options, readChoice(name), (taken) => { keep({ [name]: taken }); show(taken); });
  if (readChoice(name) in options) show(readChoice(name));
  return el("div", { class: "guess" }, el("p", { class: "ask" }, question), buttons, answer);
}
