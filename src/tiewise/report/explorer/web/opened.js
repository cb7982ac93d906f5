// An open checkpoint: dropped, chosen, or partly embedded by `tiewise explore CKPT`.
import { runJob } from "./ask.js";
import { count } from "./numbers.js";
import { vectorOf } from "./path.js";
import { commandLine } from "./repeat.js";
import { Refusal, shorten } from "./stored.js";
import { candidateTables, readableTable, suggestTables } from "./tables.js";

/** Select the files directly inside one folder: { name, files: [{ name, file }] }. */
export function selectFiles(list) {
  const given = list.map((one) => (one instanceof File ? { path: one.webkitRelativePath || one.name, file: one }
    : one));
  const paths = given.map(({ path, file }) => ({ parts: path.split("/"), file }));
  const folder = paths.find(({ parts }) => parts.length > 1)?.parts[0] ?? null, depth = folder === null ? 1 : 2;
  const inside = paths.filter(({ parts }) => parts.length === depth);
  const files = inside.map(({ parts, file }) => ({ name: parts.at(-1), file }));
  const single = files.length === 1 && files[0].name.endsWith(".safetensors") ? files[0].name : "CHECKPOINT";
  return { name: folder ?? single, files };
}

/** Open dropped files; `job(label, run)` shows progress and a Cancel button. Rejects with a Refusal. */
export async function openDropped({ name, files }, { names, embedded }, job) {
  if (!files.length || files.length > 100_000)
    throw new Refusal(`${count(files.length)} files are no checkpoint; give the checkpoint's own folder`);
  const folder = await job(`Reading the headers of ${shorten(name)}`, (run) => runJob("openFolder", [files], run));
  const wrong = folder.tensors.length ? "" : explainNoTensors(name, files, folder);
  if (wrong) throw new Refusal(wrong);
  const known = isSame(embedded, name, folder.tensors) ? embedded : null;
  return makeOpened(name, folder, {
    files: new Map(files.map((entry) => [entry.name, entry.file])), names, known, ranks: null, embedded: null });
}

/** Explain why there are no tensors, and name the command that reads the files. */
function explainNoTensors(name, files, { adapter, faults, pickles }) {
  const gguf = files.find((entry) => entry.name.endsWith(".gguf"))?.name, check = commandLine(gguf ?? name, "check");
  if (adapter) return `${shorten(name)} is an adapter, which changes another checkpoint; ${check} --base BASE reads it`;
  if (faults.length) return faults[0];
  if (gguf) return `${shorten(gguf)} is a GGUF file, which this page does not read; ${check} does`;
  if (!pickles.length)
    return `${shorten(name)} has no file of tensors; give a checkpoint's folder, or one .safetensors file`;
  return `${shorten(name)} holds pickled weights alone (${shorten(pickles[0])}), which can run code and are opened `
    + "neither here nor by tiewise; save it again with save_pretrained, which writes safetensors";
}

/** Return true if a dropped folder has name and tensors of the embedded checkpoint. */
function isSame(embedded, name, tensors) {
  if (!embedded || embedded.name !== name) return false;
  const kinds = new Map(tensors.map((one) => [one.name, `${one.dtype} ${one.shape}`]));
  return embedded.tensors.every((one) => kinds.get(one.name) === `${one.dtype} ${one.shape}`);
}

/** Make the record of an open checkpoint. `known` is the embedded record of Python, or null. */
function makeOpened(name, folder, { files, names, known, ranks, embedded }) {
  const { texts, pieces, lower, faults, tensors } = folder, tables = candidateTables(tensors);
  const choice = known?.choice ?? suggestTables(tables, names);
  return { name, folder, files, tables, choice, texts, pieces, lower, faults, ranks, embedded,
    total: known?.count ?? tensors.length, verdict: known?.verdict ?? null, known,
    ends: { input: null, output: null, tied: false, why: "" }, path: null,
    command: (verb, ...options) => commandLine(name, verb, ...options) };
}

/** Return [input, output] if both tables can be compared byte by byte, or null. */
export function comparableTables({ folder, files, embedded }, { input, output }) {
  if (embedded || input === output) return null;
  const [one, other] = [input, output].map((name) => folder.tensors.find((tensor) => tensor.name === name));
  if (!one || !other || one.dtype !== other.dtype || String(one.shape) !== String(other.shape)) return null;
  return [one, other].map((tensor) => ({ ...tensor, file: files.get(tensor.where) }));
}

/**
 * Use two tensors as the tables, "" for no output head; `equal`: their bytes are equal. Sets `choice`, `ends`, `path`.
 */
export function chooseTables(opened, { input: inputName, output: outputName }, equal) {
  const { folder, known } = opened, tied = equal || inputName === outputName;
  const table = (name) => {
    if (name === "") return null;
    const tensor = folder.tensors.find((one) => one.name === name);
    if (!tensor) return "no table is chosen";
    const found = readableTable(tensor, folder, opened.files);
    return typeof found === "string" ? found : limitToEmbedded(opened, found);
  };
  const [input, output] = [table(inputName), table(outputName)];
  const why = [input, output].find((one) => typeof one === "string")
    ?? (!output || input.shape[1] === output.shape[1] ? ""
      : `they are ${count(input.shape[1])} and ${count(output.shape[1])} wide`);
  opened.choice = { input: inputName, output: outputName };
  opened.ids = null;
  opened.ends = { input: typeof input === "string" ? null : input, output: why ? null : tied ? input : output,
    tied: tied && !why, why };
  const isPythons = known?.choice?.input === inputName && known.choice.output === (tied ? inputName : outputName);
  opened.path = known?.path && isPythons && !why && output ? decodePath(known.path) : null;
}

/** Limit an embedded table to the rows in the page; return any other table unchanged. */
function limitToEmbedded({ embedded }, table) {
  if (!embedded) return table;
  if (!table.file || table.scale) return `the rows of ${shorten(table.name)} are not in this page; drop the folder`;
  if (!embedded.note) return table;
  return { ...table, shape: [embedded.ids.length, table.shape[1]], end: table.file.size, ids: embedded.ids };
}

/** Decode the operations between the tables that Python embedded. */
const decodePath = ({ gain, shift, bias, input_scale: inputScale, output_scale: outputScale, ...rest }) =>
  ({ ...rest, inputScale, outputScale, gain: vectorOf(gain), shift: vectorOf(shift), bias: vectorOf(bias) });

/** Open the part of a checkpoint that Python embedded (embedded.py), as if it were dropped. */
export function openEmbedded(given, { names }) {
  const files = new Map(), tensors = given.tensors.map(({ name, dtype, shape, bytes, data: text, file: saved }) => {
    if (text !== undefined) files.set(name, new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]));
    return { name, where: name, saved, dtype, shape, start: 0, end: bytes };
  });
  const ranks = given.ranks.length ? new Map(given.ids.map((id, i) => [id, given.ranks[i]])) : null;
  const named = given.texts.length ? [] : null;
  given.texts.forEach((text, i) => { named[given.ids[i]] = text; });
  const texts = named && Array.from(named, (text) => text ?? null);
  const folder = { tensors, config: null, faults: given.faults, texts, pieces: texts, lower: false };
  return makeOpened(given.name, folder, { files, names, known: given, ranks, embedded: given });
}
