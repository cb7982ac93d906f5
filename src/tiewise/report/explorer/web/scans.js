// Streams whole tables: compares two, and multiplies every row with a few vectors. Runs in a worker, like stored.js.
import { readBytes, eachRows } from "./stored.js";

/**
 * Compare the bytes of two tensors of equal type and shape. Stops at the first different piece.
 * → { equal, row }: first different row, or null
 */
export async function sameBytes(a, b, told) {
  const all = a.end - a.start, rowBytes = Math.max(1, all / Math.max(1, a.shape[0])), PIECE = 2 ** 22;
  for (let at = 0; at < all; at += PIECE) {
    const stop = Math.min(at + PIECE, all);
    const read = (table) => readBytes(table.file, table.start + at, table.start + stop, table.where);
    const [left, right] = (await Promise.all([read(a), read(b)])).map((data) => new Uint8Array(data));
    const first = left.findIndex((byte, i) => byte !== right[i]);
    if (first >= 0) return { equal: false, row: Math.floor((at + first) / rowBytes) };
    told(stop / all);
  }
  return { equal: true, row: null };
}

/** Read some rows of a table as fp64: [Float64Array]. A vector [V] has rows of one value. */
export async function rowsOf(table, wanted) {
  const made = [], matrix = table.shape.length === 2 ? table : { ...table, shape: [table.shape[0] ?? 1, 1] };
  for (const row of wanted) await eachRows(matrix, row, row + 1, (values) => made.push(Float64Array.from(values)));
  return made;
}

/** Multiply rows [from, to) with some vectors [E]. → { dots, lengths }: products, and lengths of rows */
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

/** Multiply `count` rows with two vectors at once. Reading a row costs more than the products. */
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
