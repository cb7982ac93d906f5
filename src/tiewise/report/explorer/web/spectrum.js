// Factoring of a table: singular values, the part that rank k keeps, and the cost of k.
import { button, el, guess, panel, panels, paragraph, shade, slider, svg } from "./kit.js";
import { count, minus, plain, product, random, transposed } from "./numbers.js";
import { follow, keep, readNumbers } from "./state.js";

const GRAIN_TOKENS = 48, GRAIN_WIDTH = 16;

/** Draw a standard normal number from two uniform ones (Box and Muller). */
export function normalNumber(draw) {
  return Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
}

/** Make a table [GRAIN_TOKENS, GRAIN_WIDTH] of rank `rank` with unit entries, plus `noise` in every entry. */
export function noisyTable(rank, noise, seed) {
  const draw = random(seed);
  const block = (n, m) => Array.from({ length: n }, () => Array.from({ length: m }, () => normalNumber(draw)));
  const known = product(block(GRAIN_TOKENS, rank), block(rank, GRAIN_WIDTH)), added = block(GRAIN_TOKENS, GRAIN_WIDTH);
  return known.map((row, i) => row.map((x, j) => x / Math.sqrt(rank) + noise * added[i][j]));
}

/**
 * Compute the singular value decomposition of a matrix [n, m] by Jacobi rotations of its columns.
 * → { us, values, v }: U·S [n, m], singular values, V [m, m], largest first
 */
export function decompose(matrix) {
  const a = transposed(matrix), v = a.map((_, i) => a.map((_, j) => Number(i === j)));
  for (let sweep = 0, turned = true; turned && sweep < 60; sweep += 1) {
    turned = false;
    for (let p = 0; p < a.length; p += 1) {
      for (let q = p + 1; q < a.length; q += 1) {
        const sum = (x, y) => x.reduce((total, one, i) => total + one * y[i], 0);
        const pp = sum(a[p], a[p]), qq = sum(a[q], a[q]), pq = sum(a[p], a[q]);
        if (Math.abs(pq) <= 1e-15 * Math.sqrt(pp * qq)) continue;
        turned = true;
        const tau = (qq - pp) / (2 * pq), t = (tau < 0 ? -1 : 1) / (Math.abs(tau) + Math.hypot(1, tau));
        const c = 1 / Math.hypot(1, t);
        for (const pair of [a, v]) {
          const [first, second] = [pair[p], pair[q]];
          pair[p] = first.map((x, i) => c * (x - t * second[i]));
          pair[q] = first.map((x, i) => c * (t * x + second[i]));
        }
      }
    }
  }
  const sizes = a.map((column) => Math.hypot(...column));
  const order = sizes.map((_, i) => i).sort((i, j) => sizes[j] - sizes[i]);
  return {
    us: transposed(order.map((i) => a[i])),
    values: order.map((i) => sizes[i]),
    v: transposed(order.map((i) => v[i])),
  };
}

/** Compute the nearest table of rank k (Eckart and Young). */
export const tableOfRank = ({ us, v }, k) =>
  product(us.map((row) => row.slice(0, k)), transposed(v.map((row) => row.slice(0, k))));

/** Compute the share of the sum of squares in the first k singular values. */
export const energyShare = (values, k) => {
  const squares = (some) => some.reduce((sum, x) => sum + x * x, 0);
  return squares(values.slice(0, k)) / squares(values);
};

/** Draw the section into `place`. */
export function drawSpectrum(place) {
  const within = (x, least, most, first) => (Number.isFinite(x) && x >= least && x <= most ? x : first);
  const now = () => {
    const [rank, noise, k, seed] = readNumbers("spectrum", [4, 0.3, 4, 1]);
    return {
      rank: Math.round(within(rank, 1, GRAIN_WIDTH, 4)),
      noise: within(noise, 0, 2, 0.3),
      k: Math.round(within(k, 1, GRAIN_WIDTH, 4)),
      seed: Math.round(within(seed, 1, 1e6, 1)),
    };
  };
  const change = (more) => {
    const { rank, noise, k, seed } = { ...now(), ...more };
    keep({ spectrum: [rank, noise, k, seed] });
  };
  const answer = el("div", { class: "finding", "aria-live": "polite" }), steps = el("div"), pictures = el("div");
  const show = () => {
    const { rank, noise, k, seed } = now(), table = noisyTable(rank, noise, seed);
    const parts = decompose(table), near = tableOfRank(parts, k), left = minus(table, near);
    const held = k * (GRAIN_TOKENS + GRAIN_WIDTH), plainly = GRAIN_TOKENS * GRAIN_WIDTH;
    answer.replaceChildren(paragraph(
      `Rank ${k} keeps ${plain(100 * energyShare(parts.values, k), 1)} % of this table in ${count(held)} numbers; `
        + `the table itself has ${count(plainly)}.`
        + (held >= plainly ? " That is no saving: one table and a map of this width hold as much." : "")));
    steps.replaceChildren(valueSteps(parts.values, k));
    const most = Math.max(...table.flat().map(Math.abs));
    const shown = [["the table", table], [`the best of rank ${k}`, near], ["what is lost", left]];
    pictures.replaceChildren(...shown.map(([name, matrix]) =>
      el("div", { class: "grain" }, el("span", {}, name), grain(name, matrix, most))));
  };
  const { rank, noise, k } = now(), own = 50257 * 768, narrow = 128 * (50257 + 2 * 768);
  place.append(
    el("h2", {}, "What a narrow table keeps"),
    paragraph("A factored table is a narrow one, [V, k], and a map, [k, D]: together a table of rank k. How much of a "
      + "wide table that keeps is written in its singular values."),
    guess("narrow", "A table of 50,257 × 768 is factored at k = 128, with a map at each end. How much smaller is it?",
      { third: "a third smaller", five: "5 to 6 times smaller", sixty: "60 times smaller" }, "five",
      `k·V + 2·k·D is ${count(narrow)}, and V·D is ${count(own)}: ${plain(own / narrow, 2)} times smaller. V is so `
        + "much larger than D that the maps hardly count. Up to k = "
        + `${count(Math.floor((own - 1) / (50257 + 2 * 768)))} it is smaller at all.`),
    answer,
    panels(
      panel("A table made here", el("div", {},
        slider("Directions that it truly has", rank, (to) => change({ rank: to }), { least: 1, most: GRAIN_WIDTH }),
        slider("Noise in every entry", noise, (to) => change({ noise: to }), { least: 0, most: 2, step: 0.05 }),
        slider("Rank k that is kept", k, (to) => change({ k: to }), { least: 1, most: GRAIN_WIDTH }),
        button("Another table", () => change({ seed: now().seed + 1 })), steps),
      "Bars: singular values, largest first; green ones are kept. Without noise, all others are "
        + "0."),
      panel("The same, as pictures", pictures, `A column per token (${GRAIN_TOKENS}), a row per dimension `
        + `(${GRAIN_WIDTH}); colours are numbers below and above 0, on one scale.`)));
  follow(answer, show);
  show();
}

function valueSteps(values, k) {
  const wide = 28, tall = 110, most = values[0];
  return svg("svg", { class: "spectrum", viewBox: `0 0 ${wide * values.length} ${tall + 34}`, role: "img",
    "aria-label": `Singular values: ${values.map((x) => plain(x, 2)).join(", ")}; ${k} are kept` },
  values.map((x, i) => [
    svg("rect", {
      x: i * wide + 3, y: tall - (tall * x) / most + 16, width: wide - 6, height: Math.max(0.5, (tall * x) / most),
      rx: 3, class: i < k ? "kept" : "lost",
    }),
    svg("text", { x: (i + 0.5) * wide, y: tall - (tall * x) / most + 12, "text-anchor": "middle" }, plain(x, 1)),
    svg("text", { x: (i + 0.5) * wide, y: tall + 31, "text-anchor": "middle" }, i + 1)]));
}

function grain(label, matrix, most) {
  const side = 8;
  return svg("svg", {
    viewBox: `0 0 ${side * GRAIN_TOKENS} ${side * GRAIN_WIDTH}`, role: "img", "aria-label": `Picture of ${label}`,
  },
  matrix.map((row, i) => row.map((x, j) => svg("rect",
    { x: i * side, y: j * side, width: side + 0.3, height: side + 0.3, style: shade(x / most) }))));
}
