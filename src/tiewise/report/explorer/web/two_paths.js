// A tied model small enough to train in the page, and both gradients of its one table. No part of the page.
//   e = W[x]   h = e + tanh(e·M)   p = softmax(W·h)   L = −Σ log p(next token), summed over the positions
import { dot, product, random, softmax, transposed } from "./numbers.js";

const blank = (a) => a.map((row) => row.map(() => 0));
const addTo = (row, other, factor = 1) => other.forEach((x, i) => { row[i] += factor * x; });
export const lengthOf = (a) => Math.hypot(...a.flat());

/**
 * Loss, gradients of W [V, D] by both paths and of M [D, D], and what each position gave: `back` is h̄, at its lookup.
 */
export function bothPaths({ W, M }, inputs, targets) {
  const lookup = blank(W), head = blank(W), body = blank(M);
  let loss = 0;
  const positions = inputs.map((x, t) => {
    const e = W[x], bent = product([e], M)[0].map(Math.tanh), h = e.map((value, i) => value + bent[i]);
    const p = softmax(W.map((row) => dot(row, h))), error = p.map((value, j) => value - (j === targets[t] ? 1 : 0));
    const up = transposed(W).map((column) => dot(column, error));
    const inside = up.map((value, i) => value * (1 - bent[i] ** 2));
    const back = up.map((value, i) => value + dot(M[i], inside));
    loss -= Math.log(p[targets[t]]);
    error.forEach((value, j) => addTo(head[j], h, value));
    addTo(lookup[x], back);
    e.forEach((value, i) => addTo(body[i], inside, value));
    return { h, p, error, back };
  });
  return { loss, lookup, head, body, positions };
}

/** α·lookup + head [V, D]: what the table's optimizer sees. */
export const summed = ({ lookup, head }, alpha) => head.map((row, j) => row.map((x, i) => x + alpha * lookup[j][i]));

/** Where a seed starts: W [V, width] and M [width, width]. */
export function begun(vocab, width, seed) {
  const draw = random(seed), row = (size) => Array.from({ length: width }, () => size * (2 * draw() - 1));
  const table = (rows, size) => Array.from({ length: rows }, () => row(size));
  return { W: table(vocab, 1), M: table(width, 0.5) };
}

/** A run of so many steps of gradient descent: at every step the model, its loss, gradients, and their lengths. */
export function trained(start, inputs, targets, { rate, alpha, steps }) {
  const run = [];
  let model = start;
  while (run.length <= steps) {
    const found = bothPaths(model, inputs, targets), whole = summed(found, alpha);
    const lookup = alpha * lengthOf(found.lookup), head = lengthOf(found.head);
    const cosine = lookup && head ? (alpha * dot(found.lookup.flat(), found.head.flat())) / (lookup * head) : null;
    run.push({ ...model, ...found, whole, lengths: { lookup, head }, cosine });
    const moved = (a, by) => a.map((row, i) => row.map((x, k) => x - rate * by[i][k]));
    model = { W: moved(model.W, whole), M: moved(model.M, found.body) };
  }
  return run;
}
