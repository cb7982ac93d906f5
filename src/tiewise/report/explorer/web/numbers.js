// Small matrices as arrays of rows, and numbers formatted as in Python. Computes only, draws nothing.

export const MINUS = "−";

/** Format 1,234.50 as Python's `plain` does: true minus sign, no sign of zero, a dash for no number. */
export function plain(value, digits = 2, sign = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value), exact = size.toFixed(digits + 30);
  // toFixed rounds the exact binary number, as Python does, but halves up; Python rounds halves to even
  const down = exact.slice(0, -30).replace(/\.$/, ""), half = /^50*$/.test(exact.slice(-30));
  const [whole, part] = (half && "02468".includes(down.at(-1)) ? down : size.toFixed(digits)).split(".");
  const text = whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? `.${part}` : "");
  return /[1-9]/.test(text) ? (value < 0 ? MINUS : sign) + text : text;
}

/** Format an integer with commas. */
export const count = (value) => plain(value, 0);

/** Round to three significant digits; halves of integers to even, as in Python. */
export function rounded(value) {
  if (!Number.isInteger(value) || Math.abs(value) < 1000) return Number(value.toPrecision(3));
  const unit = 10 ** (Math.floor(Math.log10(Math.abs(value))) - 2), low = Math.floor(value / unit);
  const twice = 2 * (value - low * unit);
  return (low + (twice > unit || (twice === unit && low % 2 !== 0) ? 1 : 0)) * unit;
}

/** Format as 7.24 B or 494 M, with three digits, as plan_rows.short does. */
export function abbreviated(value) {
  const units = ["", " k", " M", " B", " T"];
  let place = 0;
  for (; Math.abs(value) >= 999.5 && place < units.length - 1; place += 1) value /= 1000;
  return `${String(Number(value.toPrecision(3))).replace("-", MINUS)}${units[place]}`;
}

/** Format bytes as 12.3 MB, in powers of ten, as core/files.format_bytes does. */
export function size(bytes) {
  for (const unit of ["bytes", "kB", "MB", "GB", "TB"]) {
    if (bytes < 999.5 || unit === "TB") {
      const text = plain(bytes, unit === "bytes" || bytes >= 99.95 ? 0 : bytes < 9.995 ? 2 : 1);
      return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text} ${unit}`;
    }
    bytes /= 1000;
  }
}

export const transposed = (a) => a[0].map((_, j) => a.map((row) => row[j]));
export const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
/** Multiply matrices: a [n, k] · b [k, m] → [n, m]. */
export const product = (a, b) => {
  const columns = transposed(b);
  return a.map((row) => columns.map((c) => dot(row, c)));
};
export const minus = (a, b) => a.map((row, i) => row.map((x, j) => x - b[i][j]));

/** Compute the probabilities of a row of logits. */
export function softmax(row) {
  const top = Math.max(...row), e = row.map((x) => Math.exp(x - top)), sum = e.reduce((a, b) => a + b, 0);
  return e.map((x) => x / sum);
}

/** Make a generator of random numbers in [0, 1) from a seed (mulberry32). */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
