// A tied model small enough to train in the page, and both gradients of its table. Computes only, draws nothing.
//   e = W[x]   h = e + tanh(e·M)   p = softmax(W·h)   L = −Σ log p(next token), summed over the positions
import { dot, product, random, softmax, transposed } from "./numbers.js";

const zerosLike = (a) => a.map((row) => row.map(() => 0));
const addTo = (row, other, factor = 1) => other.forEach((x, i) => { row[i] += factor * x; });
export const lengthOf = (a) => Math.hypot(...a.flat());

/**
 * Compute the loss and the gradients of W by path and of M.
 * Shapes: W [V, D], M [D, D]. `back` of a position is h̄, the gradient at its lookup.
 */
export function bothPaths({ W, M }, inputs, targets) {
  const lookup = zerosLike(W), head = zerosLike(W), body = zerosLike(M);
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

/** Add both paths: α·lookup + head [V, D], the gradient that the optimizer receives. */
export const addPaths = ({ lookup, head }, alpha) => head.map((row, j) => row.map((x, i) => x + alpha * lookup[j][i]));

/** Draw the initial W [V, width] and M [width, width] of a seed. */
export function initialModel(vocab, width, seed) {
  const draw = random(seed), row = (size) => Array.from({ length: width }, () => size * (2 * draw() - 1));
  const table = (rows, size) => Array.from({ length: rows }, () => row(size));
  return { W: table(vocab, 1), M: table(width, 0.5) };
}

/** Train by gradient descent. → for each step: model, loss, gradients, and their lengths */
export function trainingSteps(start, inputs, targets, { rate, alpha, steps }) {
  const run = [];
  let model = start;
  while (run.length <= steps) {
    const found = bothPaths(model, inputs, targets), whole = addPaths(found, alpha);
    const lookup = alpha * lengthOf(found.lookup), head = lengthOf(found.head);
    const cosine = lookup && head ? (alpha * dot(found.lookup.flat(), found.head.flat())) / (lookup * head) : null;
    run.push({ ...model, ...found, whole, lengths: { lookup, head }, cosine });
    const moved = (a, by) => a.map((row, i) => row.map((x, k) => x - rate * by[i][k]));
    model = { W: moved(model.W, whole), M: moved(model.M, found.body) };
  }
  return run;
}
