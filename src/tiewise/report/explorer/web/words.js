// Measurements of words in two tables: scores in both orders, ranks, nearest rows at both ends, lengths.
import { runJob, scanAll } from "./ask.js";
import { leftOf } from "./path.js";

export const MOST_WORDS = 8;
export const NEAREST = 8;

/** Make white space and control characters visible: " York" becomes ␣York. */
export function visibleText(text) {
  const shown = text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  return shown.replace(/[\p{C}\p{Z}]/gu, (c) => `\\x${c.codePointAt(0).toString(16).padStart(2, "0")}`) || "(empty)";
}

/** Return the visible text of a token, or #1234 without a tokenizer. */
export const tokenName = (opened, id) => { const text = opened.texts?.[id];
  return text === null || text === undefined ? `#${id}` : visibleText(text); };

/**
 * Find the token of a word: #1234 by number, after a space, as typed, or as the vocabulary writes it; null if none.
 */
export function findToken(opened, word) {
  const { input, output } = opened.ends, has = (table, id) => (table.ids ? table.ids.includes(id)
    : id < table.shape[0]);
  const fits = (id) => (id !== undefined && has(input, id) && has(output ?? input, id) ? id : null);
  if (/^#\d+$/.test(word)) return fits(Number(word.slice(1)));
  if (!opened.texts) return null;
  if (!opened.ids) {
    opened.ids = new Map();
    for (const list of [opened.texts, opened.pieces]) list.forEach((text,
      id) => { if (text !== null && !opened.ids.has(text)) opened.ids.set(text, id); });
  }
  const small = opened.lower ? [word.toLowerCase()] : [];
  for (const one of [` ${word}`, word, ...small,
    visibleSpace(word)]) if (opened.ids.has(one)) return fits(opened.ids.get(one));
  return null;
}

const visibleSpace = (word) => word.replace(/␣/g, " ");

/** List tokens that start like a word that is not a token. */
export function similarTokens(opened, word, most = 5) {
  const wanted = word.toLowerCase(), found = [];
  for (const text of opened.texts ?? []) {
    if (text !== null && wanted && text.trim().toLowerCase().startsWith(wanted)) found.push(text.trim());
    if (found.length === most) break;
  }
  return [...new Set(found)];
}

const dotted = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };

/** Return the places of the largest values, largest first. */
function largestOf(values, most) {
  const top = [];
  values.forEach((value, i) => {
    if (Number.isNaN(value) || (top.length === most && value <= values[top[most - 1]])) return;
    let at = top.length;
    while (at > 0 && values[top[at - 1]] < value) at--;
    top.splice(at, 0, i);
    if (top.length > most) top.pop();
  });
  return top;
}

/** Return the rank of a value: one plus the number of values that are larger by more than rounding. */
function rankOf(values, own) {
  const beyond = own + 1e-12 * Math.max(1, Math.abs(own));
  let rank = 1;
  for (const value of values) if (value > beyond) rank++;
  return rank;
}

/**
 * Compute median, 5th and 95th percentile of lengths in 48 logarithmic bins of places (from 1; 0 for none).
 * → [{ token, low, middle, high }]; `token` is the place in the middle of a bin
 */
function lengthBands(lengths, places) {
  const bins = new Map(), last = Math.log(places.reduce((a, b) => Math.max(a, b), 1) + 1);
  lengths.forEach((length, row) => {
    if (!places[row]) return;
    const bin = Math.floor((48 * Math.log(places[row])) / last);
    if (!bins.has(bin)) bins.set(bin, []);
    if (Number.isFinite(length)) bins.get(bin).push(length);
  });
  const inOrder = [...bins].sort(([a], [b]) => a - b);
  return inOrder.filter(([, held]) => held.length).map(([bin, held]) => {
    held.sort((a, b) => a - b);
    const at = (share) => held[Math.min(held.length - 1, Math.floor(share * held.length))];
    const token = Math.round(Math.exp(((bin + 0.5) * last) / 48));
    return { token, low: at(0.05), middle: at(0.5), high: at(0.95) };
  });
}

/**
 * Measure some tokens, the first two in both orders.
 * → { ids, names, plain [n, n], ways: [{ from, to, score, rank, logit, log, modelRank }], after: [[id…]…],
 * near: { input, output }, lengths, bands }
 * Ranks and neighbours of a partly embedded table count embedded rows only.
 */
export async function measureWords(opened, ids, { signal, progress = () => {} }) {
  const idOf = (table) => (row) => (table.ids ? table.ids[row] : row), { ends, path } = opened,
    { input, output, tied } = ends, place = (table, id) => (table.ids ? table.ids.indexOf(id) : id);
  const take = (table, rows) => runJob("rowsOf", [table, rows], { signal });
  const ins = await take(input, ids.map((id) => place(input, id))),
    outs = tied || !output ? ins : await take(output, ids.map((id) => place(output, id)));
  const pair = ids.slice(0, 2);
  const { shift, bias } = path ?? {};
  const lefts = path ? pair.map((_, i) => leftOf(ins[i], path)) : [];
  const heads = output ? [...pair.map((_, i) => ins[i]), ...lefts, ...(tied ? [] : pair.map((_, i) => outs[i])),
    ...(shift && lefts.length ? [shift] : [])] : [];
  const share = tied || !output ? 1 : 0.5, last = output ? await scanAll(output, heads,
    { signal, progress: (x) => progress(x * share) }) : null;
  const first = tied ? last : await scanAll(input, pair.map((_, i) => ins[i]),
    { signal, progress: (x) => progress(output ? share + x * share : x) });

  const nearest = (table, dots, lengths, i) => {
    const own = place(table, pair[i]), angles = dots.map((x, row) => (lengths[row] > 0
      && row !== own ? x / (lengths[row] * lengths[own]) : NaN));
    return largestOf(angles, NEAREST).map((row) => ({ id: idOf(table)(row), value: angles[row] }));
  };
  const n = pair.length, found = { ids, near: { input: pair.map((_, i) => nearest(input, first.dots[i], first.lengths,
    i)), output: null }, ways: [], after: [] };
  found.lengths = { input: ids.map((id) => first.lengths[place(input, id)]),
    output: output && !tied ? ids.map((id) => last.lengths[place(output, id)]) : null };
  const places = (table, lengths) => Array.from(lengths, (_, row) => {
    const id = idOf(table)(row);
    return opened.ranks ? opened.ranks.get(id) : id + 1;
  });
  found.bands = { input: lengthBands(first.lengths, places(input, first.lengths)),
    output: output && !tied ? lengthBands(last.lengths, places(output, last.lengths)) : null };
  if (!output) return found;
  found.plain = ids.map((_, i) => ids.map((__, j) => dotted(ins[i], outs[j])));
  const outAt = n + lefts.length; // first of the pair's output rows among the vectors
  if (!tied) found.near.output = pair.map((_, i) => nearest(output, last.dots[outAt + i], last.lengths, i));
  const shifts = shift && lefts.length ? last.dots[heads.length - 1] : null;
  const logits = lefts.map((_, i) => last.dots[n + i].map((x, row) => {
    const whole = x + (shifts ? shifts[row] * path.outputScale : 0) + (bias ? bias[idOf(output)(row)] : 0);
    return path.cap ? path.cap * Math.tanh(whole / path.cap) : whole;
  }));
  pair.forEach((_, i) => {
    found.after.push(largestOf(last.dots[i], NEAREST).map((row) => ({ id: idOf(output)(row),
      value: last.dots[i][row] })));
    pair.forEach((__, j) => {
      if (n > 1 && i === j) return;
      const row = place(output, pair[j]), way = { from: pair[i], to: pair[j], score: found.plain[i][j],
        rank: rankOf(last.dots[i], last.dots[i][row]) };
      if (logits[i]) {
        const top = logits[i].reduce((a, b) => Math.max(a, b), -Infinity),
          sum = logits[i].reduce((a, b) => a + Math.exp(b - top), 0);
        Object.assign(way, { logit: logits[i][row], log: output.ids ? NaN : logits[i][row] - top - Math.log(sum),
          modelRank: rankOf(logits[i], logits[i][row]) });
      }
      found.ways.push(way);
    });
  });
  return found;
}
