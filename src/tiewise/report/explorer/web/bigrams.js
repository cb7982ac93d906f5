// What two words in a row make a direct path pay: the objective and the exact parts of
// tiewise.inspection.tables.bigram_paths, for a handful of words. No part of the page.
import { dot, product, random, softmax, transposed } from "./numbers.js";

const sumOf = (row) => row.reduce((sum, x) => sum + x, 0);
const overPairs = (q, f) => sumOf(q.map((row, i) => sumOf(row.map((share, j) => share * f(i, j)))));

/**
 * Of counts [n, n] above zero (row: the word now, column: the next): the chances `p` of the next word, how `often` each
 * word comes up in an endless text of these chances, and the shares of pairs `q` in it, rows and columns of equal sums.
 */
export function chainOf(counts) {
  const p = counts.map((row) => row.map((x) => x / sumOf(row)));
  const often = stationary(p);
  return { p, often, q: p.map((row, i) => row.map((x) => often[i] * x)) };
}

/** The left eigenvector of chances without a subtraction (Grassmann, Taksar & Heyman 1985). */
function stationary(p) {
  const a = p.map((row) => [...row]), found = [1];
  for (let k = a.length - 1; k > 0; k -= 1) {
    const left = sumOf(a[k].slice(0, k));
    for (let i = 0; i < k; i += 1) {
      a[i][k] /= left;
      for (let j = 0; j < k; j += 1) a[i][j] += a[i][k] * a[k][j];
    }
  }
  for (let k = 1; k < a.length; k += 1) found.push(sumOf(found.map((x, i) => x * a[i][k])));
  return found.map((x) => x / sumOf(found));
}

/** Cross entropy in nats per word of chances [n, n] on shares of pairs: −Σ q log p. */
export const crossEntropy = (q, p) => -overPairs(q, (i, j) => Math.log(p[i][j]));

/** What symmetric logits pay beyond the target's entropy, at any width: Σ q log(2q / (q + qᵀ)). */
export const irreversibility = (q) =>
  Math.max(0, overPairs(q, (i, j) => Math.log((2 * q[i][j]) / (q[i][j] + q[j][i]))));

/** The chances of going once round three words, and round the other way. */
export const roundTrips = (p) => [p[0][1] * p[1][2] * p[2][0], p[0][2] * p[2][1] * p[1][0]];

/** Chances of a path of two tables (or one, twice) and a bias. */
export const chancesOf = ({ left, right, bias }) =>
  product(left, transposed(right)).map((row) => softmax(row.map((x, j) => x + bias[j])));

/**
 * The best path of two tables. Less what a row or a column has in common, which normaliser and bias make up for, log p
 * of n words has rank n − 1: tables of that width hold it. Rows of the first are then n − 1 axes, and minus their
 * sum.
 */
export function bestUntied({ p }) {
  const logs = p.map((row) => row.map(Math.log)), n = p.length;
  const bias = transposed(logs).map((column) => sumOf(column) / n);
  const rest = logs.map((row) => row.map((x, j) => x - sumOf(row) / n - bias[j] + sumOf(bias) / n));
  const left = rest.map((_, i) => rest.slice(1).map((_, k) => (i === n - 1 ? -1 : Number(i === k))));
  return { left, right: transposed(rest.slice(0, -1)), bias };
}

/**
 * The best path of one table at both ends and a bias. A width of n − 1 is again as good as any; and as the loss is
 * convex in the logits, and such a table can make all that one table can, every valley of it is the lowest.
 */
export function bestTied({ q }) {
  const n = q.length, width = n - 1, draw = random(1), often = q.map(sumOf);
  const tables = (x) => q.map((_, i) => x.slice(i * width, (i + 1) * width));
  const loss = (x) => {
    const table = tables(x), bias = x.slice(n * width);
    const p = chancesOf({ left: table, right: table, bias });
    const error = p.map((row, i) => row.map((chance, j) => often[i] * chance - q[i][j])), back = transposed(error);
    const slopes = product(error.map((row, i) => row.map((e, j) => e + back[i][j])), table);
    return [crossEntropy(q, p), [...slopes.flat(), ...back.map(sumOf)]];
  };
  const start = Array.from({ length: n * width }, () => draw() - 0.5);
  const x = lowest(loss, [...start, ...often.map(Math.log)]);
  const table = tables(x);
  return { left: table, right: table, bias: x.slice(n * width) };
}

/** Where a walk downhill from `x` ends: BFGS, steps halved until they lower the value. `loss` gives [value, slope]. */
function lowest(loss, x) {
  const unit = () => x.map((_, i) => x.map((_, j) => Number(i === j)));
  let [value, slope] = loss(x), inverse = unit();
  for (let step = 0; step < 2000 && Math.max(...slope.map(Math.abs)) > 1e-12; step += 1) {
    let direction = inverse.map((row) => -dot(row, slope));
    if (dot(direction, slope) >= 0) { inverse = unit(); direction = slope.map((g) => -g); }
    let size = 1, moved, there, turned;
    do {
      moved = x.map((a, i) => a + size * direction[i]);
      [there, turned] = loss(moved);
      size /= 2;
      // where the value is flat to the last bit the slope still says which way is down
    } while (size > 1e-12 && !(there < value || (there <= value + 1e-15 && dot(turned, turned) < dot(slope, slope))));
    if (size <= 1e-12) break;
    const s = moved.map((a, i) => a - x[i]), y = turned.map((g, i) => g - slope[i]), curvature = dot(s, y);
    if (curvature > 0) {
      const bent = inverse.map((row) => dot(row, y)), scale = (1 + dot(y, bent) / curvature) / curvature;
      inverse = inverse.map((row, i) =>
        row.map((h, j) => h + scale * s[i] * s[j] - (bent[i] * s[j] + s[i] * bent[j]) / curvature));
    }
    x = moved; value = there; slope = turned;
  }
  return x;
}
