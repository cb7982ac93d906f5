// Tensors of an untrusted safetensors file: limits, header, types, rows. Runs in a worker only.
import { count } from "./numbers.js";

/** Fault of a file, as one sentence with a remedy. */
export class Refusal extends Error {}

/** Shorten a text from a file to printable letters. */
export function shorten(text, most = 60) {
  const plain = Array.from(String(text).slice(0, 2 * most + 2)).slice(0,
    most + 1).join("").replace(/(?! )[\p{C}\p{Z}]/gu, "?");
  const letters = Array.from(plain);
  return letters.length <= most ? plain : `${letters.slice(0, most - 1).join("")}…`;
}

/** Read part of a file; refuse a file that is gone or became shorter. */
export async function readBytes(file, start, end, where) {
  let data;
  try { data = await file.slice(start, end).arrayBuffer(); } catch { data = new ArrayBuffer(0); }
  if (data.byteLength === end - start) return data;
  throw new Refusal(`${where}: it cannot be read, or became shorter while it was read; choose it again`);
}

/** Parse JSON in UTF-8. `unique` refuses repeated keys, which JSON.parse accepts. */
export function parseJson(data, where, unique = false) {
  const MOST_VALUES = 6_000_000, again = "the file is damaged or is no JSON: take it from its source again";
  const bytes = new Uint8Array(data);
  let values = 0;
  if (bytes.length > 2 ** 20) for (const byte of bytes) if (byte === 44 || byte === 58 || byte === 91
    || byte === 123) values++;
  if (values > MOST_VALUES)
    throw new Refusal(`${where}: more than ${count(MOST_VALUES)} values; no file of this kind is that long`);
  let text, found;
  try { text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch { throw new Refusal(`${where}: not readable as JSON; ${again}`); }
  try { found = JSON.parse(text); } catch {
    // transformers writes NaN and Infinity (Mamba's configs do)
    const plain = text.replace(/"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g, (token) => (token[0] === '"' ? token : "null"));
    try { found = JSON.parse(plain); } catch { throw new Refusal(`${where}: not readable as JSON; ${again}`); }
  }
  if (!unique) return found;
  const open = [];
  for (let at = 0; at < text.length; at++) {
    const letter = text[at];
    if (letter === "{") open.push(new Set());
    else if (letter === "[") open.push(null);
    else if (letter === "}" || letter === "]") open.pop();
    else if (letter === '"') {
      const from = at;
      for (at++; text[at] !== '"'; at++) if (text[at] === "\\") at++;
      let next = at + 1;
      while (text[next] === " " || text[next] === "\n" || text[next] === "\r" || text[next] === "\t") next++;
      const keys = open[open.length - 1];
      if (text[next] !== ":" || !keys) continue;
      const key = JSON.parse(text.slice(from, at + 1));
      if (keys.has(key)) throw new Refusal(`${where}: names ${shorten(key)} twice; one of the two must go`);
      keys.add(key);
    }
  }
  return found;
}

/** Read a JSON file of at most `most` bytes. */
export async function readJson(file, where, most = 256 * 2 ** 20, unique = false) {
  if (file.size > most)
    throw new Refusal(`${where}: ${count(file.size)} bytes; no file of this kind is that large`);
  return parseJson(await readBytes(file, 0, file.size, where), where, unique);
}

/**
 * Read the tensors of a safetensors file within the format's limits, in order of their bytes.
 * → [{ name, where, dtype, shape, start, end }]
 */
export async function readHeader(file, where) {
  const BITS = { BOOL: 8, U8: 8, I8: 8, U16: 16, I16: 16, U32: 32, I32: 32, U64: 64, I64: 64, F16: 16, BF16: 16,
    F32: 32, F64: 64, C64: 64,
    F8_E8M0: 8, F8_E5M2: 8, F8_E5M2FNUZ: 8, F8_E4M3: 8, F8_E4M3FNUZ: 8, F4: 4, F6_E2M3: 6, F6_E3M2: 6 };
  const again = "the file is damaged or was cut short: download or write it again",
    comma = (n) => count(n);
  if (file.size < 8) throw new Refusal(`${where}: ${file.size} bytes are no safetensors file; ${again}`);
  const length = new DataView(await readBytes(file, 0, 8, where)).getBigUint64(0, true);
  if (length > 100_000_000n || length > BigInt(file.size - 8))
    throw new Refusal(`${where}: its header claims ${count(Number(length))} bytes, and the file has `
      + `${count(file.size)}; if it is a safetensors file, it ${again.slice(9)}`);
  const data = 8 + Number(length), record = parseJson(await readBytes(file, 8, data, where), `${where}: header`, true);
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  if (!isObject(record)) throw new Refusal(`${where}: its header is no JSON object; ${again}`);
  const said = record.__metadata__ ?? {};
  if (!isObject(said) || !Object.values(said).every((value) => typeof value === "string"))
    throw new Refusal(`${where}: __metadata__ is no map from text to text; ${again}`);
  const sizes = (values) => Array.isArray(values) && values.every((value) => Number.isSafeInteger(value) && value >= 0);
  const tensors = [];
  for (const [name, entry] of Object.entries(record)) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {};
    let wrong = "";
    if (!isObject(entry)) wrong = "its entry is no JSON object";
    else if (typeof dtype !== "string" || !Object.hasOwn(BITS, dtype)) wrong = `unknown dtype ${shorten(dtype)}`;
    else if (!sizes(shape) || shape.length > 64) wrong = `its shape ${shorten(JSON.stringify(shape))} is none`;
    else if (!sizes(offsets) || offsets.length !== 2
      || offsets[0] > offsets[1]) wrong = `its data_offsets ${shorten(JSON.stringify(offsets))} are none`;
    else if (shape.reduce((n, size) => n * BigInt(size), BigInt(BITS[dtype])) !== 8n * BigInt(offsets[1] - offsets[0]))
      wrong = `${count(offsets[1] - offsets[0])} bytes do not hold ${shorten(`${dtype} [${shape.join(", ")}]`)}`;
    if (wrong) throw new Refusal(`${where}: tensor ${shorten(name)}: ${wrong}; ${again}`);
    tensors.push({ name, where, dtype, shape, start: data + offsets[0], end: data + offsets[1] });
  }
  tensors.sort((a, b) => a.start - b.start || a.end - b.end);
  let end = data;
  for (const tensor of tensors) {
    const how = tensor.start < end ? "overlaps the tensor before it" : `leaves ${count(tensor.start - end)} bytes free`;
    if (tensor.start !== end) throw new Refusal(`${where}: tensor ${shorten(tensor.name)} ${how}; ${again}`);
    end = tensor.end;
  }
  if (end !== file.size) {
    const how = end > file.size ? `ends ${count(end - file.size)} bytes before its tensors do`
      : `has ${count(file.size - end)} bytes after its tensors`;
    throw new Refusal(`${where}: the file ${how}; ${again}`);
  }
  return tensors;
}

/**
 * Decode a float of one sign bit, `e` exponent bits and `m` mantissa bits; `finite`: e4m3fn, which has no infinity.
 */
export function decodeFloat(code, e, m, finite = false) {
  const sign = code >> (e + m) ? -1 : 1, exponent = (code >> m) & ((1 << e) - 1), mantissa = code & ((1 << m) - 1);
  const bias = (1 << (e - 1)) - 1, top = exponent === (1 << e) - 1;
  if (top && !finite) return mantissa ? NaN : sign * Infinity;
  if (top && mantissa === (1 << m) - 1) return NaN;
  return sign * (exponent ? 2 ** (exponent - bias) * (1 + mantissa / 2 ** m) : 2 ** (1 - bias) * (mantissa / 2 ** m));
}

/**
 * Make a decoder from stored bytes to exact fp32 numbers (F64: fp64). Its next call overwrites the result.
 */
export function decoderOf(dtype) {
  if (dtype === "F32") return (data) => new Float32Array(data);
  if (dtype === "F64") return (data) => new Float64Array(data);
  let bits = new Uint32Array(0);
  const room = (count) => { if (bits.length < count) bits = new Uint32Array(count); return bits; };
  if (dtype === "BF16")
    return (data) => {
      const from = new Uint16Array(data), to = room(from.length);
      for (let i = 0; i < from.length; i++) to[i] = from[i] << 16;
      return new Float32Array(to.buffer, 0, from.length);
    };
  const rule = { F16: [16, 5, 10], F8_E4M3: [8, 4, 3, true], F8_E5M2: [8, 5, 2], I8: [8] }[dtype];
  const [width, ...kind] = rule;
  const value = dtype === "I8" ? (code) => (code << 24) >> 24 : (code) => decodeFloat(code, ...kind);
  const table = new Uint32Array(Float32Array.from({ length: 2 ** width }, (_, code) => value(code)).buffer);
  return (data) => {
    const from = width === 16 ? new Uint16Array(data) : new Uint8Array(data), to = room(from.length);
    for (let i = 0; i < from.length; i++) to[i] = table[from[i]];
    return new Float32Array(to.buffer, 0, from.length);
  };
}

/**
 * Read rows [from, to) of a table [V, E], a few MB at a time.
 * Calls each(values, first row, count), and reads the next piece during the call. Codes of a quantised table are
 * multiplied by its `scale`:
 * { table, blocks: [rows, columns], factor }.
 */
export async function eachRows(table, from, to, each, pieceBytes = 4 * 2 ** 20) {
  const width = table.shape[1], rowBytes = (table.end - table.start) / Math.max(1, table.shape[0]);
  const step = Math.max(1, Math.floor(pieceBytes / Math.max(1, rowBytes))), decode = decoderOf(table.dtype);
  const read = (row) => readBytes(table.file, table.start + row * rowBytes,
    table.start + Math.min(row + step, to) * rowBytes, table.where);
  let scales = null, across = 1;
  if (table.scale) {
    const { table: beside, factor } = table.scale;
    scales = Float64Array.from(decoderOf(beside.dtype)(await readBytes(beside.file, beside.start, beside.end,
      beside.where)), (x) => x * factor);
    across = Math.ceil(width / table.scale.blocks[1]);
  }
  let next = from < to ? read(from) : null;
  for (let row = from; row < to; row += step) {
    const data = await next, count = Math.min(step, to - row);
    if (row + step < to) (next = read(row + step)).catch(() => 0); // the error appears at its await
    const values = decode(data);
    if (scales) {
      const [down, along] = table.scale.blocks;
      for (let i = 0, at = 0; i < count; i++) {
        const line = Math.floor((row + i) / down) * across;
        for (let j = 0; j < width; j++, at++) values[at] *= scales[line + Math.floor(j / along)];
      }
    }
    each(values, row, count);
  }
}
