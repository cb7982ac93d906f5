// What a model does between its two tables, on numbers that Python embedded (inspection/tables/open_path.py).

/** The numbers of a base64 text, fp64; null of null. */
export const vectorOf = (text) => (text === null ? null
  : new Float64Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer));

/** What the head multiplies of an input row: scaled, normalised, times gain and scale [E]. */
export function leftOf(row, { kind, eps, gain, inputScale, outputScale }) {
  const scaled = kind === "none" ? row : row.map((x) => x * inputScale), n = row.length;
  const mean = kind === "layer" ? scaled.reduce((a, b) => a + b, 0) / n : 0;
  const size = kind === "none" ? 1 : Math.sqrt(scaled.reduce((a, x) => a + (x - mean) ** 2, 0) / n + eps);
  const times = outputScale * (kind === "none" ? inputScale : 1);
  return scaled.map((x, j) => ((x - mean) / size) * (gain ? gain[j] : 1) * times);
}
