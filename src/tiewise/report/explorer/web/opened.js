// A checkpoint as this page has opened it: dropped, chosen, or embedded in part by `tiewise explore CKPT`.
import { ask } from "./ask.js";
import { count } from "./numbers.js";
import { vectorOf } from "./path.js";
import { commandLine } from "./repeat.js";
import { Refusal, short } from "./stored.js";
import { offered, readable, suggested } from "./tables.js";

/** Of dropped or chosen files those directly inside one folder: { name, files: [{ name, file }] }. */
export function gathered(list) {
  const given = list.map((one) => (one instanceof File ? { path: one.webkitRelativePath || one.name, file: one }
    : one));
  const paths = given.map(({ path, file }) => ({ parts: path.split("/"), file }));
  const folder = paths.find(({ parts }) => parts.length > 1)?.parts[0] ?? null, depth = folder === null ? 1 : 2;
  const inside = paths.filter(({ parts }) => parts.length === depth);
  const files = inside.map(({ parts, file }) => ({ name: parts.at(-1), file }));
  const single = files.length === 1 && files[0].name.endsWith(".safetensors") ? files[0].name : "CHECKPOINT";
  return { name: folder ?? single, files };
}

/** Open it: `job(label, run)` shows how far it is and lets a person stop it. Rejects with a Refusal of one sentence. */
export async function openDropped({ name, files }, { names, embedded }, job) {
  if (!files.length || files.length > 100_000)
    throw new Refusal(`${count(files.length)} files are no checkpoint; give the checkpoint's own folder`);
  const folder = await job(`Reading the headers of ${short(name)}`, (run) => ask("openFolder", [files], run));
  const wrong = folder.tensors.length ? "" : notTensors(name, files, folder);
  if (wrong) throw new Refusal(wrong);
  const known = isSame(embedded, name, folder.tensors) ? embedded : null;
  return opening(name, folder, {
    files: new Map(files.map((entry) => [entry.name, entry.file])), names, known, ranks: null, embedded: null });
}

/** Why there are no tensors, and what reads what is there. */
function notTensors(name, files, { adapter, faults, pickles }) {
  const gguf = files.find((entry) => entry.name.endsWith(".gguf"))?.name, check = commandLine(gguf ?? name, "check");
  if (adapter) return `${short(name)} is an adapter, which changes another checkpoint; ${check} --base BASE reads it`;
  if (faults.length) return faults[0];
  if (gguf) return `${short(gguf)} is a GGUF file, which this page does not read; ${check} does`;
  if (!pickles.length)
    return `${short(name)} has no file of tensors; give a checkpoint's folder, or one .safetensors file`;
  return `${short(name)} holds pickled weights alone (${short(pickles[0])}), which can run code and are opened neither `
    + "here nor by tiewise; save it again with save_pretrained, which writes safetensors";
}

/** Whether a dropped folder has the name and the tensors of the checkpoint that Python embedded a part of. */
function isSame(embedded, name, tensors) {
  if (!embedded || embedded.name !== name) return false;
  const kinds = new Map(tensors.map((one) => [one.name, `${one.dtype} ${one.shape}`]));
  return embedded.tensors.every((one) => kinds.get(one.name) === `${one.dtype} ${one.shape}`);
}

/** What the section asks of a checkpoint that is open; `known` is what Python found in it, or null. */
function opening(name, folder, { files, names, known, ranks, embedded }) {
  const { texts, pieces, lower, faults, tensors } = folder, tables = offered(tensors);
  const choice = known?.choice ?? suggested(tables, names);
  return { name, folder, files, tables, choice, texts, pieces, lower, faults, ranks, embedded,
    total: known?.count ?? tensors.length, verdict: known?.verdict ?? null, known,
    ends: { input: null, output: null, tied: false, why: "" }, path: null,
    command: (verb, ...options) => commandLine(name, verb, ...options) };
}

/** Two chosen tables that can be compared byte by byte: [input, output], or null. */
export function comparable({ folder, files, embedded }, { input, output }) {
  if (embedded || input === output) return null;
  const [one, other] = [input, output].map((name) => folder.tensors.find((tensor) => tensor.name === name));
  if (!one || !other || one.dtype !== other.dtype || String(one.shape) !== String(other.shape)) return null;
  return [one, other].map((tensor) => ({ ...tensor, file: files.get(tensor.where) }));
}

/**
 * Take two tensors by name as the two tables, "" for no output head; `equal`: they hold the same bytes. Sets `choice`,
 * `ends` and `path`.
 */
export function choose(opened, { input: inputName, output: outputName }, equal) {
  const { folder, known } = opened, tied = equal || inputName === outputName;
  const table = (name) => {
    if (name === "") return null;
    const tensor = folder.tensors.find((one) => one.name === name);
    if (!tensor) return "no table is chosen";
    const found = readable(tensor, folder, opened.files);
    return typeof found === "string" ? found : partOf(opened, found);
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
  opened.path = known?.path && isPythons && !why && output ? pathOf(known.path) : null;
}

/** A table of a page that holds some of its rows; others as they are. */
function partOf({ embedded }, table) {
  if (!embedded) return table;
  if (!table.file || table.scale) return `the rows of ${short(table.name)} are not in this page; drop the folder`;
  if (!embedded.note) return table;
  return { ...table, shape: [embedded.ids.length, table.shape[1]], end: table.file.size, ids: embedded.ids };
}

/** What the model does between its tables, as Python has it, with its vectors as numbers. */
const pathOf = ({ gain, shift, bias, input_scale: inputScale, output_scale: outputScale, ...rest }) =>
  ({ ...rest, inputScale, outputScale, gain: vectorOf(gain), shift: vectorOf(shift), bias: vectorOf(bias) });

/** What Python embedded of a checkpoint (embedded.py), opened: as if it were dropped, with the rows that are there. */
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
  return opening(given.name, folder, { files, names, known: given, ranks, embedded: given });
}
