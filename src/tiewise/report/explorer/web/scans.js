// Whole tables, streamed: how alike two of them are, and products of every row with a few vectors. Runs in a worker,
// as stored.js does.
import { bytesOf, decoderOf, eachRows } from "./stored.js";

/** A number in the stored type `dtype`, rounded to the nearest and of two to the even. */
export function roundedTo(dtype, x) {
  const even = (t) => { const low = Math.floor(t), rest = t - low;
    return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low; };
  if (dtype === "F64" || x === 0 || !Number.isFinite(x)) return x;
  if (dtype === "F32") return Math.fround(x);
  const [digits, lowest, largest] = dtype === "F16" ? [10, -14, 65504] : [7, -126, 2 ** 128 - 2 ** 120];
  const value = dtype === "F16" ? x : Math.fround(x); // numpy reaches BF16 by way of fp32
  let exponent = Math.floor(Math.log2(Math.abs(value)));
  if (2 ** (exponent + 1) <= Math.abs(value)) exponent++;
  else if (2 ** exponent > Math.abs(value)) exponent--;
  const unit = 2 ** (Math.max(exponent, lowest) - digits), made = even(Math.abs(value) / unit) * unit;
  return Math.sign(x) * (made > largest ? Infinity : made);
}

/**
 * How alike two tables [V, E] are, as `tiewise check` compares them (table_scans.py); null where shapes or types allow
 * no comparison.
 * → { kind, rows, differing, first, relative, largest, nan, length_ratio }
 */
export async function likeness(a, b, told) {
  const BITS = { F64: 64, F32: 32, F16: 16, BF16: 16 }, [rows, width] = a.shape;
  if (a.shape.length !== 2 || b.shape.length !== 2 || a.shape[1] !== b.shape[1] || rows !== b.shape[0]
    || !(a.dtype in BITS) || !(b.dtype in BITS)) return null;
  const found = { kind: "identical", rows, differing: 0, first: [], relative: 0, largest: 0, nan: false,
    length_ratio: 1 };
  const exponents = { F64: 0x7ff0, F32: 0x7f80, F16: 0x7c00, BF16: 0x7f80 }[a.dtype], words = BITS[a.dtype] / 16;
  let same = a.dtype === b.dtype;
  for (let at = 0, all = a.end - a.start, PIECE = 2 ** 22; same && at < all; at += PIECE) {
    const stop = Math.min(at + PIECE, all);
    const [left, right] = await Promise.all([a, b].map((t) => bytesOf(t.file, t.start + at, t.start + stop, t.where)));
    const [x, y] = [left, right].map((data) => (data.byteLength % 4 ? new Uint8Array(data) : new Uint32Array(data)));
    for (let i = 0; same && i < x.length; i++) same = x[i] === y[i];
    const halves = new Uint16Array(left);
    for (let i = words - 1; !found.nan && i < halves.length; i += words) {
      if ((halves[i] & exponents) !== exponents) continue;
      let rest = halves[i] & (0x7fff - exponents); // a NaN is an infinity with something behind it
      for (let j = 1; j < words; j++) rest |= halves[i - j];
      found.nan = rest !== 0;
    }
    told(stop / all);
  }
  if (same) return found;
  found.nan = false;
  const narrow = BITS[a.dtype] === BITS[b.dtype] ? [a.dtype, b.dtype].sort()[0] : BITS[a.dtype] < BITS[b.dtype]
    ? a.dtype : b.dtype;
  const rounds = (dtype) => (dtype === narrow ? null : (x) => roundedTo(narrow, x)),
    [one, other] = [rounds(a.dtype), rounds(b.dtype)];
  const step = Math.max(1, Math.floor((4 * 2 ** 20) / Math.max(1, (a.end - a.start) / rows))),
    decoders = [a, b].map((t) => decoderOf(t.dtype)), MEASURED = 4096;
  const read = (from) => Promise.all([a, b].map((t) => {
    const rowBytes = (t.end - t.start) / rows;
    return bytesOf(t.file, t.start + from * rowBytes, t.start + Math.min(from + step, rows) * rowBytes, t.where);
  }));
  let measured = 0, error = 0, norm = 0, otherNorm = 0, next = rows ? read(0) : null;
  for (let from = 0; from < rows; from += step) {
    const both = await next, [left, right] = both.map((data, i) => decoders[i](data)),
      count = Math.min(step, rows - from);
    if (from + step < rows) (next = read(from + step)).catch(() => 0); // said when it is awaited
    let largest = 0;
    for (let row = 0, i = 0; row < count; row++) {
      const begin = i, seen = rowDiffers(left, right, i, (i += width), one, other);
      found.nan ||= seen.nan;
      if (!seen.differs) continue;
      if (found.first.length < 8) found.first.push(from + row);
      found.differing++;
      if (measured++ >= MEASURED) continue;
      for (let j = begin; j < begin + width; j++) {
        error += (left[j] - right[j]) ** 2;
        norm += left[j] ** 2;
        otherNorm += right[j] ** 2;
        largest = Math.max(largest, Math.abs(left[j] - right[j]));
      }
    }
    if (largest > found.largest) found.largest = largest;
    told((from + count) / rows);
  }
  if (!found.differing) return { ...found, kind: a.dtype === b.dtype ? "zeros' signs" : "same values" };
  found.relative = norm > 0 ? Math.sqrt(error / norm) : Infinity;
  found.length_ratio = norm > 0 ? Math.sqrt(otherNorm / norm) : Infinity;
  found.kind = found.differing <= 0.5 * rows ? "some rows" : found.relative <= 0.1 ? "close" : "unrelated";
  return found;
}

/**
 * Whether numbers [from, to) of two arrays differ, after rounding where there is a function for it; whether the left
 * ones hold NaN.
 */
function rowDiffers(left, right, from, to, one, other) {
  let differs = false, nan = false;
  for (let i = from; i < to; i++) {
    const x = one ? one(left[i]) : left[i], y = other ? other(right[i]) : right[i];
    if (x !== x) nan = true;
    if (x !== y && (x === x || y === y)) differs = true;
  }
  return { differs, nan };
}

/** Some rows of a table, each whole, as fp64: [Float64Array]. A vector [V] has rows of one value. */
export async function rowsOf(table, wanted) {
  const made = [], matrix = table.shape.length === 2 ? table : { ...table, shape: [table.shape[0] ?? 1, 1] };
  for (const row of wanted) await eachRows(matrix, row, row + 1, (values) => made.push(Float64Array.from(values)));
  return made;
}

/** Dot products of rows [from, to) with each of some vectors [E], and the rows' lengths: { dots, lengths }. */
export async function scan(table, queries, from, to, told) {
  const lengths = new Float64Array(to - from), dots = queries.map(() => new Float64Array(to - from)),
    width = table.shape[1];
  await eachRows(table, from, to, (values, first, count) => {
    for (let q = 0; q < queries.length; q += 2) twoProducts(values, width, count, first - from, queries[q],
      queries[q + 1] ?? queries[q], dots[q], dots[q + 1] ?? dots[q]);
    for (let row = 0, at = 0; row < count; row++) {
      let a = 0, b = 0, j = 1;
      for (; j < width; j += 2, at += 2) { a += values[at] * values[at]; b += values[at + 1] * values[at + 1]; }
      if (j === width) { a += values[at] * values[at]; at++; }
      lengths[first - from + row] = Math.sqrt(a + b);
    }
    told((first + count - from) / (to - from));
  });
  return { dots, lengths };
}

/** Products of `count` rows with two vectors at once: what costs is to fetch and widen a row's numbers. */
function twoProducts(values, width, count, place, x, y, ofX, ofY) {
  for (let row = 0, at = 0; row < count; row++) {
    let a = 0, b = 0, c = 0, d = 0, j = 1;
    for (; j < width; j += 2, at += 2) {
      const one = values[at], two = values[at + 1];
      a += one * x[j - 1]; b += two * x[j];
      c += one * y[j - 1]; d += two * y[j];
    }
    if (j === width) { a += values[at] * x[j - 1]; c += values[at] * y[j - 1]; at++; }
    ofX[place + row] = a + b;
    ofY[place + row] = c + d;
  }
}
