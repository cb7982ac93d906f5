// Operations between the two tables of a model, from numbers that Python embedded (inspection/tables/open_path.py).

/** Decode fp64 numbers from base64; null stays null. */
export const vectorOf = (text) => (text === null ? null
  : new Float64Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer));

/** Apply scale, norm, gain and output scale to an input row [E]. */
export function leftOf(row, { kind, eps, gain, inputScale, outputScale }) {
  const scaled = kind === "none" ? row : row.map((x) => x * inputScale), n = row.length;
  const mean = kind === "layer" ? scaled.reduce((a, b) => a + b, 0) / n : 0;
  const size = kind === "none" ? 1 : Math.sqrt(scaled.reduce((a, x) => a + (x - mean) ** 2, 0) / n + eps);
  const times = outputScale * (kind === "none" ? inputScale : 1);
  return scaled.map((x, j) => ((x - mean) / size) * (gain ? gain[j] : 1) * times);
}
