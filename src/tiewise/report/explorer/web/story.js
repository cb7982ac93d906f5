// Shared parts of the story's steps: words, matrices stored in the address, and ways to show and ask.
import { button, editable, el, guess, heat, listing, panel, paragraph } from "./kit.js";
import { plain, product, transposed } from "./numbers.js";
import { follow, keep, readChoice, readNumbers } from "./state.js";

export const STORY_WORDS = ["New", "York", "City"];
export const STORY_AXES = ["1st number", "2nd number"];
/** Labels of a heat map: rows are the current word, columns the next word. */
export const STORY_NEXT = { rows: STORY_WORDS.map((word) => `${word} →`), columns: STORY_WORDS };

const tenths = { least: -9, most: 9, step: 0.1, draw: () => Math.round((2 * Math.random() - 1) * 20) / 10 };
/** Matrices that a reader can change: first values, limits, and the draw of a random number. */
const STORY_MATRICES = {
  W_E: { first: [[1, 0.5], [0.8, 0.9], [0.3, 1.2]], rows: STORY_WORDS, columns: STORY_AXES, ...tenths },
  W_U: { first: [[-1, 1], [2, -1], [0.2, 0.6]], rows: STORY_WORDS, columns: STORY_AXES, ...tenths },
  M: { first: [[1, 0.5], [-0.5, 1]], rows: STORY_AXES, columns: STORY_AXES, ...tenths },
  counts: { first: [[5, 85, 10], [10, 30, 60], [20, 10, 70]], rows: STORY_WORDS, columns: STORY_WORDS,
    least: 1, most: 99, step: 1, draw: () => Math.ceil(Math.exp(Math.random() * Math.log(99))) },
};

/** Return the current values of a matrix. */
export function storyMatrix(name) {
  const { first, least, most } = STORY_MATRICES[name], width = first[0].length;
  const flat = readNumbers(name, first.flat()), fits = flat.every((x) => x >= least && x <= most);
  return fits ? first.map((_, i) => flat.slice(width * i, width * (i + 1))) : first;
}

/** Make a place that redraws after every change of a stored choice. */
export function live(draw, place = el("div")) {
  const show = () => place.replaceChildren(...[draw()].flat(Infinity));
  show();
  follow(place, show);
  return place;
}

/** Make a panel to edit a matrix, with buttons for `others`, matrices by label. */
export function workbench(title, name, caption, others = {}) {
  const { first, draw, ...limits } = STORY_MATRICES[name], place = el("div");
  const set = (matrix) => { keep({ [name]: matrix && matrix.flat() }); fill(); };
  const fill = () => place.replaceChildren(
    editable(title, storyMatrix(name), { ...limits, change: (matrix) => keep({ [name]: matrix.flat() }) }));
  fill();
  return panel(title, el("div", {}, place, el("div", { class: "choice below" },
    Object.entries(others).map(([label, matrix]) => button(label, () => set(matrix))),
    button("Randomise", () => set(first.map((row) => row.map(draw)))),
    button("As at first", () => set(null)))), prose(caption));
}

/** Compute the logits of the reader's table at both ends. */
export const tiedLogits = () => { const table = storyMatrix("W_E"); return product(table, transposed(table)); };

/** Draw the logits of all pairs with frames, and both orders side by side. */
export function mirror(label, logits) {
  const pairs = [[0, 1], [0, 2], [1, 2]], framed = (k) => `pair pair-${k}`;
  const marked = (i, j) => (i === j ? null : framed(pairs.findIndex((pair) => pair.includes(i) && pair.includes(j))));
  const header = ["Pair", "→", el("span", { class: "hidden" }, "equal?"), "←"];
  return [heat(label, logits, { ...STORY_NEXT, marked }), listing(`${label}, both orders`, header,
    pairs.map(([a, b], k) => {
      const there = plain(logits[a][b]), back = plain(logits[b][a]);
      const name = el("span", { class: framed(k) }, `${STORY_WORDS[a]}, ${STORY_WORDS[b]}`);
      return [name, there, there === back ? "=" : "≠", back];
    }))];
}

/**
 * Draw a step: text, question, and the figures of `shown()` after an answer. `sentences` are texts or elements;
 * `picture` is open from the start, beside the text.
 */
export function predict(asked, sentences, question, options, right, because, shown, picture = null) {
  const name = `guess-${asked}`, place = el("div", { class: "revealed" }), all = { ...options, show: "Just show me" };
  const reveal = () => { if (readChoice(name) in all && !place.firstChild) place.append(...[shown()].flat(Infinity)); };
  follow(place, reveal);
  reveal();
  const told = sentences.map((each) => (typeof each === "string" ? paragraph(prose(each)) : each));
  const asking = guess(name, question, all, right, prose(because));
  const columns = picture ? [picture, el("div", {}, told, asking)] : [el("div", {}, told), asking];
  return [el("div", { class: picture ? "scene opens" : "scene" }, columns), place];
}

/** Format a sentence: *a defined word*, |code|, and W_E, W_U, MLP_0 with subscripts. */
export function prose(text) {
  return text.split(/(\*[^*]+\*|\|[^|]+\||\b(?:W_[EU]|MLP_0))/).map((part) => {
    if (part.startsWith("*")) return el("dfn", {}, part.slice(1, -1));
    if (part.startsWith("|")) return el("code", {}, part.slice(1, -1));
    const [name, below] = /^(W_[EU]|MLP_0)$/.test(part) ? part.split("_") : [part];
    return below ? el("span", { class: "symbol" }, name, el("sub", {}, below)) : part;
  });
}
