// Content of a dropped Hugging Face folder: config, headers and texts of tokens. Runs in a worker, like stored.js.
import { count } from "./numbers.js";
import { Refusal, shorten, readBytes, readJson, readHeader } from "./stored.js";

/**
 * Read headers, index, config and tokenizer of a folder. `files` is [{ name, file }].
 * A fault in one file does not hide the others. Pickled files are never opened.
 * → { config, tensors, faults, pickles, adapter, texts, pieces, lower }
 */
export async function openFolder(files) {
  const by = new Map(files.map((entry) => [entry.name, entry.file])), faults = [],
    INDEX = "model.safetensors.index.json";
  const tried = async (job) => {
    try { return await job(); } catch (error) { if (!(error instanceof Refusal)) throw error;
      faults.push(error.message); return null; }
  };
  const objectOf = async (name, most, unique) => {
    const found = await readJson(by.get(name), name, most, unique);
    if (typeof found !== "object" || found === null
      || Array.isArray(found)) throw new Refusal(`${name}: no JSON object; take it from its source again`);
    return found;
  };
  const config = by.has("config.json") ? await tried(() => objectOf("config.json", 8 * 2 ** 20)) : null;
  const stored = [...by.keys()].filter((name) => name.endsWith(".safetensors") && !name.startsWith("adapter_")).sort();
  let map = null, wanted = stored.includes("model.safetensors") ? ["model.safetensors"] : stored;
  if (by.has(INDEX)) map = await tried(async () => {
    const found = (await objectOf(INDEX, undefined, true)).weight_map,
      again = "take it from its source again, or delete it where all tensors are in one file";
    const files = typeof found === "object" && found !== null && !Array.isArray(found) ? Object.values(found) : [0];
    if (!files.every((file) => typeof file === "string"))
      throw new Refusal(`${INDEX}: it has no weight_map from tensors to files; ${again}`);
    const outside = files.find((file) => file === "" || file === ".." || file.includes("/"));
    if (outside !== undefined)
      throw new Refusal(`${INDEX}: names the file ${shorten(outside)}, which does not lie in the folder; ${again}`);
    return new Map(Object.entries(found));
  });
  if (map) wanted = [...new Set(map.values())].sort();
  if (wanted.length > 30_000)
    throw new Refusal(`${count(wanted.length)} shards are no checkpoint; give the checkpoint's own folder`);
  const tensors = new Map();
  let seen = 0;
  for (const name of wanted) {
    const found = await tried(async () => {
      if (!by.has(name))
        throw new Refusal(`${name}: the index names it, and it was not dropped; choose the whole folder`);
      return readHeader(by.get(name), name);
    });
    seen += found?.length ?? 0;
    if (seen > 160_000)
      throw new Refusal(`More than 160,000 tensors are no checkpoint; give the checkpoint's own folder`);
    for (const tensor of found ?? []) if (!tensors.has(tensor.name)
      || map?.get(tensor.name) === name) tensors.set(tensor.name, tensor);
  }
  const read = await tried(() => readTexts(by, objectOf));
  const pickles = [...by.keys()].filter((name) => /\.(bin|pt|pth|ckpt|pkl|msgpack|h5)$/.test(name)
    && !name.startsWith("training_args"));
  const adapter = by.has("adapter_config.json") && tensors.size === 0;
  return { config, tensors: [...tensors.values()], faults, pickles, adapter,
    ...(read ?? { texts: null, pieces: null, lower: false }) };
}

/**
 * Read the texts of tokens from tokenizer.json, vocab.json or vocab.txt. → { texts, pieces, lower }, arrays by id
 * A piece is the token as stored, a text as `tiewise inspect` shows it. `lower`: the tokenizer lowers case.
 */
export async function readTexts(by, objectOf) {
  const pieces = [], added = new Map(), MOST = 1_500_000;
  const put = (id, text) => { if (Number.isSafeInteger(id) && id >= 0 && id < MOST) pieces[id] = String(text); };
  const entries = (vocabulary) => {
    if (Array.isArray(vocabulary)) vocabulary.forEach((entry, id) => put(id,
      Array.isArray(entry) ? entry[0] : `#${id}`)); // Unigram
    else for (const [text, id] of Object.entries(vocabulary ?? {})) put(id, text);
  };
  let decoder = "", byteFallback = false, lower = false;
  if (by.has("tokenizer.json")) {
    const record = await objectOf("tokenizer.json");
    entries(record.model?.vocab);
    const kinds = (part) => (part ? [part.type, ...(part.decoders ?? part.normalizers ?? []).flatMap(kinds)] : []);
    decoder = kinds(record.decoder).includes("ByteLevel") ? "ByteLevel" : "";
    byteFallback = kinds(record.decoder).includes("ByteFallback");
    lower = kinds(record.normalizer).includes("Lowercase") || (record.normalizer?.type === "BertNormalizer"
      && record.normalizer.lowercase === true);
    for (const one of Array.isArray(record.added_tokens) ? record.added_tokens
      : []) if (Number.isSafeInteger(one?.id)) added.set(one.id, String(one.content ?? ""));
  } else if (by.has("vocab.json")) {
    entries(await objectOf("vocab.json"));
    decoder = by.has("merges.txt") ? "ByteLevel" : "";
  } else if (by.has("vocab.txt")) {
    const file = by.get("vocab.txt");
    if (file.size > 64 * 2 ** 20)
      throw new Refusal(`vocab.txt: ${count(file.size)} bytes; no vocabulary is that large`);
    const lines = new TextDecoder().decode(await readBytes(file, 0, file.size, "vocab.txt")).replace(/\n$/,
      "").split("\n");
    lines.slice(0, MOST).forEach((line, id) => put(id, line.replace(/\r$/, "")));
  } else return { texts: null, pieces: null, lower };
  // byte-level tokenizers write a printable byte as itself, any other as the next letter from 256 on
  const bytes = new Map();
  for (let byte = 0, next = 256; byte < 256; byte++)
    bytes.set(String.fromCharCode((byte > 32 && byte < 127) || (byte > 160 && byte !== 173) ? byte : next++), byte);
  const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  const text = (piece) => {
    if (piece.startsWith("▁")) return piece.replaceAll("▁", " ");
    if (byteFallback && /^<0x[0-7][0-9A-F]>$/.test(piece)) return String.fromCharCode(parseInt(piece.slice(3, 5), 16));
    if (decoder !== "ByteLevel") return piece;
    const codes = [];
    for (const letter of piece) { if (!bytes.has(letter)) return piece; codes.push(bytes.get(letter)); }
    try { return utf8.decode(Uint8Array.from(codes)) || piece; } catch { return piece; }
  };
  const texts = Array.from(pieces, (piece) => (piece === undefined ? null : text(piece)));
  for (const [id, name] of added) if (id < MOST) texts[id] = pieces[id] = name;
  return { texts: Array.from(texts, (one) => one ?? null), pieces: Array.from(pieces, (one) => one ?? null), lower };
}
