// Loss of direct paths on pairs of words: the objective and exact parts of
// tiewise.inspection.tables.bigram_paths, for a few words. Computes only, draws nothing.
import { dot, product, random, softmax, transposed } from "./numbers.js";

const sumOf = (row) => row.reduce((sum, x) => sum + x, 0);
const overPairs = (q, f) => sumOf(q.map((row, i) => sumOf(row.map((share, j) => share * f(i, j)))));

/**
 * Turn counts [n, n] above zero (row: current word, column: next word) into a Markov chain.
 * → { p, often, q }: probabilities of the next word, stationary probability of each word, and of each pair
 */
export function chainOf(counts) {
  const p = counts.map((row) => row.map((x) => x / sumOf(row)));
  const often = stationary(p);
  return { p, often, q: p.map((row, i) => row.map((x) => often[i] * x)) };
}

/** Compute the stationary distribution without a subtraction (Grassmann, Taksar & Heyman 1985). */
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

/** Compute the cross-entropy in nats per word: −Σ q log p, for shares of pairs q and probabilities p. */
export const crossEntropy = (q, p) => -overPairs(q, (i, j) => Math.log(p[i][j]));

/** Compute the irreversibility, which symmetric logits pay at any width: Σ q log(2q / (q + qᵀ)). */
export const irreversibility = (q) =>
  Math.max(0, overPairs(q, (i, j) => Math.log((2 * q[i][j]) / (q[i][j] + q[j][i]))));

/** Compute the probabilities of a round trip through three words, in both directions. */
export const roundTrips = (p) => [p[0][1] * p[1][2] * p[2][0], p[0][2] * p[2][1] * p[1][0]];

/** Compute the probabilities of a path with two tables (or one, twice) and a bias. */
export const chancesOf = ({ left, right, bias }) =>
  product(left, transposed(right)).map((row) => softmax(row.map((x, j) => x + bias[j])));

/**
 * Compute the best path of two tables. Softmax and bias absorb the means of rows and columns of log p. The rest has
 * rank n − 1, so tables of that width represent it: rows of the first are n − 1 axes and minus their sum.
 */
export function bestUntied({ p }) {
  const logs = p.map((row) => row.map(Math.log)), n = p.length;
  const bias = transposed(logs).map((column) => sumOf(column) / n);
  const rest = logs.map((row) => row.map((x, j) => x - sumOf(row) / n - bias[j] + sumOf(bias) / n));
  const left = rest.map((_, i) => rest.slice(1).map((_, k) => (i === n - 1 ? -1 : Number(i === k))));
  return { left, right: transposed(rest.slice(0, -1)), bias };
}

/**
 * Fit the best path of one table at both ends and a bias. Width n − 1 is as good as any. The loss is convex in the
 * logits and this table reaches all logits that one table can, so every local minimum is global.
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
  const x = minimise(loss, [...start, ...often.map(Math.log)]);
  const table = tables(x);
  return { left: table, right: table, bias: x.slice(n * width) };
}

/** Minimise from `x` by BFGS; steps are halved until the value falls. `loss` returns [value, gradient]. */
function minimise(loss, x) {
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
      // if the value does not change in the last bit, the gradient still gives the direction
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
