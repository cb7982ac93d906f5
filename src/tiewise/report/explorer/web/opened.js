// A checkpoint as this page has opened it: dropped, chosen, or embedded in part by `tiewise explore CKPT`. And what
// is said of it first.
import { ask } from "./ask.js";
import { isOwn } from "./claims.js";
import { count } from "./numbers.js";
import { endsOf, pathOf } from "./path.js";
import { Refusal, short } from "./stored.js";
import { commandLine, comparable, difference, factsOf, sized, tyingFindings } from "./verdict.js";

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
export async function openDropped({ name, files }, data, job) {
  if (!files.length || files.length > 100_000)
    throw new Refusal(`${count(files.length)} files are no checkpoint; give the checkpoint's own folder`);
  const folder = await job(`Reading the headers of ${short(name)}`, (run) => ask("openFolder", [files], run));
  const wrong = folder.tensors.length ? "" : notTensors(name, files, folder);
  if (wrong) throw new Refusal(wrong);
  const facts = factsOf(folder, data), by = new Map(files.map((entry) => [entry.name, entry.file])), { roles } = facts;
  const held = (tensor) => ({ ...tensor, file: by.get(tensor.where) });
  let alike = null, stopped = false;
  if (comparable(facts)) {
    const label = `Comparing ${short(roles.input.name)} with ${short(roles.output.name)}`;
    const both = [held(roles.input), held(roles.output)];
    alike = await job(label, (run) => ask("likeness", both, run)).catch((error) => {
      if (error.name !== "AbortError") throw error;
      stopped = true;
      return null;
    });
  }
  return finished({ name, folder, facts, alike, stopped, by, data });
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

/** What was found, put together: what the section asks of a checkpoint that is open. */
function finished({ name, folder, facts, alike, stopped, by, data }) {
  const { texts, pieces, lower, faults } = folder, ends = endsOf(facts, alike, by);
  const findings = isOwn(folder.config) ? [] : tyingFindings(name, facts, alike);
  const verdict = { sentence: headline(facts, alike, findings, stopped), config: byConfig(facts.claims),
    bytes: byBytes(facts, alike, stopped), findings, severity: findings[0]?.severity ?? null };
  return { name, embedded: null, texts, pieces, lower, faults, ends, verdict,
    path: ends.output ? pathOf(facts, ends, by, data) : null, command: (verb, ...options) => commandLine(name, verb,
      ...options) };
}

function byConfig({ levels, deciding, tied, fixed }) {
  const flag = `${deciding.level ? `${short(deciding.level)}.` : ""}tie_word_embeddings`,
    word = tied ? "tied" : "untied";
  if (!levels.length) return "no config.json, so nothing is said";
  if (fixed !== null) return `${word}: its class ${fixed ? "always" : "never"} ties, whatever the flag says`;
  if (tied === null) return `not known: ${flag} is absent, and its class is not known here`;
  const read = deciding.written === null ? "is absent, which its class reads so" : `is ${deciding.written}`;
  return `${word}: ${flag} ${read}`;
}

function byBytes({ roles: { input, output, headless }, folder }, alike, stopped) {
  const stored = ({ name, dtype, shape, start, end }) =>
    `${short(name)} (${dtype} [${shape.join(", ")}], ${sized(end - start)})`;
  if (input === null && output === null) return `no table of tokens among ${count(folder.count)} tensors`;
  if (input === null) return `a head alone, ${stored(output)}`;
  const lack = headless ? "this class has no token head" : "no head of its own";
  if (output === null) return `one table, ${stored(input)}; ${lack}`;
  const not = stopped ? "not compared, as it was cancelled" : "of other shapes or packed, so they are not compared";
  return `two tables, ${stored(input)} and ${stored(output)}: ${alike ? difference(alike) : not}`;
}

const HEADLINES = {
  B010: "A loader does not find the input table under its name.",
  B011: "It says untied, and no output head that a loader reads is stored.",
  B012: "It says tied, and stores two different tables: one folder, two models.",
  B013: "It is tied, and stores its one table twice.",
  B014: "Its two tables are the same, and nothing says that they are tied.",
  B015: "Its two tables were one table not long ago.",
  B016: "It stores the output head alone, and no input table.",
};

function headline({ claims, roles: { input, output, headless }, folder }, alike, findings, stopped) {
  if (isOwn(folder.config)) return "Its boundary is one of tiewise's own: tiewise check decides on it.";
  if (!folder.complete) return "A part of it could not be read, so what is missing cannot be told.";
  if (findings.length) return HEADLINES[findings[0].rule];
  if (headless) return "It has no token head, so there is nothing to tie.";
  if (stopped) return "Its two tables were not compared.";
  if (input === null) return output ? "It stores one table, under the head's name."
    : "No table of tokens was found in it.";
  const told = claims.tied === false || claims.deciding.written === false ? "untied" : claims.tied ? "tied" : null;
  const silent = "and nothing says whether it is tied.";
  if (output === null && told === "tied") return "Tied, by config and by bytes: one table serves both ends.";
  if (output === null) return told ? "It says untied, and which tensor is its head is not known here."
    : `It stores one table, ${silent}`;
  if (alike === null)
    return `It says ${told ?? "nothing of tying"}; its two tables cannot be compared as they are stored.`;
  return told ? "Untied, by config and by bytes: two tables of their own."
    : `It stores two tables of their own, ${silent}`;
}

/** What Python embedded of a checkpoint (embedded.py), opened: as if it were dropped, with the rows that are there. */
export function openEmbedded(given, data) {
  const by = new Map(), tensors = given.tensors.map(({ name, dtype, shape, bytes, data: text, file: saved }) => {
    if (text !== undefined) by.set(name, new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]));
    return { name, where: name, saved, dtype, shape, start: 0, end: bytes };
  });
  const texts = [], ranks = given.ranks.length ? new Map(given.ids.map((id, i) => [id, given.ranks[i]])) : null;
  given.ids.forEach((id, i) => { if (given.texts.length) texts[id] = given.texts[i]; });
  const named = given.texts.length ? Array.from(texts, (text) => text ?? null) : null;
  const folder = { ...given, tensors, texts: named, pieces: named, lower: false }, facts = factsOf(folder, data);
  const opened = finished({ name: given.name, folder, facts, alike: given.alike, stopped: false, by, data });
  const part = (table) => {
    const rows = [given.ids.length, table?.shape[1]];
    return table?.file && !table.scale ? { ...table, shape: rows, end: table.file.size, ids: given.ids } : null;
  };
  const { input, output, tied, why } = opened.ends, [one, other] = [part(input), part(output)];
  opened.ends = { input: one, output: tied ? one : other, tied,
    why: why || (one && (tied || other) ? "" : "its rows are not embedded; drop the folder") };
  return { ...opened, ranks, embedded: given.note ? given : null, path: opened.ends.output ? opened.path : null };
}
