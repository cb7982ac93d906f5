// A checkpoint as this page has opened it: dropped, chosen, or embedded in part by `tiewise explore CKPT`. And what is said of it first.
import { ask } from "./ask.js";
import { isOwn } from "./claims.js";
import { endsOf, pathOf } from "./path.js";
import { Refusal, short } from "./stored.js";
import { command, comparable, difference, factsOf, sized, tyingFindings } from "./verdict.js";

/** Of dropped or chosen files those directly inside one folder: { name, files: [{ name, file }], single }. */
export function gathered(list) {
  const paths = list.map((file) => [file.path ?? file.webkitRelativePath ?? "", file.file ?? file]).map(([path, file]) => [(path || file.name).split("/"), file]);
  const top = paths.find(([parts]) => parts.length > 1)?.[0][0] ?? null;
  const inside = paths.filter(([parts]) => parts.length === (top === null ? 1 : 2)), files = inside.map(([parts, file]) => ({ name: parts.at(-1), file }));
  const only = files.filter(({ name }) => name.endsWith(".safetensors")), single = top === null && files.length === 1 && only.length === 1;
  return { name: top ?? (single ? files[0].name : "CHECKPOINT"), files, single };
}

/** Open it: `job(label, run)` shows how far it is and lets a person stop it. Rejects with a Refusal of one sentence. */
export async function openDropped({ name, files, single }, data, job) {
  const many = files.length > 100_000 ? `${files.length.toLocaleString("en-US")} files are no checkpoint; give the checkpoint's own folder` : "";
  const gguf = files.find((entry) => entry.name.endsWith(".gguf"));
  if (many || !files.length) throw new Refusal(many || "There is no file directly in it; give the checkpoint's own folder");
  const folder = await job(`Reading the headers of ${short(name)}`, (run) => ask("openFolder", [files], run));
  const says = (verb, ...options) => command(name, verb, ...options);
  if (folder.adapter) throw new Refusal(`${short(name)} is an adapter, which changes another checkpoint; ${says("check", "--base BASE")} reads it`);
  if (!folder.tensors.length && folder.faults.length) throw new Refusal(folder.faults[0]);
  if (!folder.tensors.length && gguf) throw new Refusal(`${short(gguf.name)} is a GGUF file, which this page does not read; ${command(gguf.name, "check")} does`);
  if (!folder.tensors.length && folder.pickles.length)
    throw new Refusal(`${short(name)} holds pickled weights alone (${short(folder.pickles[0])}), which can run code and are opened neither here nor by tiewise; save it again with save_pretrained, which writes safetensors`);
  if (!folder.tensors.length) throw new Refusal(`${short(name)} has no file of tensors; give a checkpoint's folder, or one .safetensors file`);
  const facts = factsOf(folder, data), by = new Map(files.map((entry) => [entry.name, entry.file])), { roles } = facts;
  const held = (tensor) => ({ ...tensor, file: by.get(tensor.where) });
  let alike = null, stopped = false;
  if (comparable(facts)) {
    const label = `Comparing ${short(roles.input.name)} with ${short(roles.output.name)}`;
    alike = await job(label, (run) => ask("likeness", [held(roles.input), held(roles.output)], run)).catch((error) => {
      if (error.name !== "AbortError") throw error;
      stopped = true;
      return null;
    });
  }
  return finished({ name, single, folder, facts, alike, stopped, by, data });
}

/** What was found, put together: what sections ask of a checkpoint that is open. */
function finished({ name, single, folder, facts, alike, stopped, by, data }) {
  const own = isOwn(folder.config), ends = endsOf(facts, alike, by), named = (verb, ...options) => command(name, verb, ...options);
  return { name, single, embedded: null, texts: folder.texts, pieces: folder.pieces, lower: folder.lower, ends,
    path: ends.output ? pathOf(facts, ends, by, data) : null, verdict: said(name, facts, alike, own, stopped), faults: folder.faults, command: named };
}

/** The verdict: { sentence, config, bytes, findings, severity }. */
function said(name, facts, alike, own, stopped) {
  const { claims, roles, folder } = facts, { deciding, fixed } = claims, findings = own ? [] : tyingFindings(name, facts, alike);
  const at = deciding.level ? `${deciding.level}.` : "", word = { true: "tied", false: "untied" }[claims.tied] ?? "not known";
  const wrote = deciding.written === null ? "is absent, which its class reads so" : `is ${deciding.written}`;
  let config = claims.levels.length ? `${word}: ${at}tie_word_embeddings ${wrote}` : "no config.json, so nothing is said";
  if (fixed !== null) config = `${word}: its class ${fixed ? "always" : "never"} ties, whatever the flag says`;
  if (claims.levels.length && claims.tied === null) config = "not known: tie_word_embeddings is absent, and its class is not known here";
  const bytesIn = (tensor) => `${short(tensor.name)} (${tensor.dtype} [${tensor.shape.join(", ")}], ${sized(tensor.end - tensor.start)})`;
  let bytes = `two tables, ${bytesIn(roles.input ?? roles.output ?? { name: "", shape: [], start: 0, end: 0 })}`;
  if (roles.input && roles.output) {
    const how = alike ? difference(alike) : stopped ? "not compared, as it was cancelled" : "of other shapes or packed, so they are not compared";
    bytes = `two tables, ${bytesIn(roles.input)} and ${bytesIn(roles.output)}: ${how}`;
  } else if (roles.input) bytes = `one table, ${bytesIn(roles.input)}; ${roles.headless ? "this class has no token head" : "no head of its own"}`;
  else if (roles.output) bytes = `a head alone, ${bytesIn(roles.output)}`;
  else bytes = `no table of tokens among ${folder.count.toLocaleString("en-US")} tensors`;
  return { sentence: headline(facts, alike, findings, own, stopped), config, bytes, findings, severity: findings[0]?.severity ?? null };
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

function headline({ claims, roles, folder }, alike, findings, own, stopped) {
  if (own) return "Its boundary is one of tiewise's own: tiewise check decides on it.";
  if (!folder.complete) return "A part of it could not be read, so what is missing cannot be told.";
  if (findings.length) return HEADLINES[findings[0].rule];
  if (roles.headless) return "It has no token head, so there is nothing to tie.";
  if (stopped) return "Its two tables were not compared.";
  if (roles.input === null) return "No table of tokens was found in it.";
  if (roles.output === null) return claims.tied === null ? "It stores one table, and nothing says whether it is tied." : "Tied, by config and by bytes: one table serves both ends.";
  if (alike === null) return `The config says ${claims.tied ? "tied" : "untied"}; its two tables cannot be compared as they are stored.`;
  return "Untied, by config and by bytes: two tables of their own.";
}

/** What Python embedded of a checkpoint (embedded.py), opened: as if it were dropped, with the rows that are there. */
export function openEmbedded(given, data) {
  const by = new Map(), tensors = given.tensors.map(({ name, dtype, shape, bytes, data: text }) => {
    if (text !== undefined) by.set(name, new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]));
    return { name, where: name, dtype, shape, start: 0, end: bytes };
  });
  const texts = [];
  given.ids.forEach((id, i) => { if (given.texts.length) texts[id] = given.texts[i]; });
  const listed = given.texts.length ? Array.from(texts, (text) => text ?? null) : null, folder = { ...given, tensors, texts: listed, pieces: listed, lower: false };
  const opened = finished({ name: given.name, single: false, folder, facts: factsOf(folder, data), alike: given.alike, stopped: false, by, data });
  const part = (table) => {
    if (!table?.file || table.scale) return null;
    const { size } = table.file, rows = given.ids.length;
    return { ...table, shape: [rows, table.shape[1]], end: size, ids: given.ids };
  };
  const { input, output, tied, why } = opened.ends, [one, other] = [part(input), part(output)];
  const whole = given.note === "";
  opened.ends = { input: one, output: tied ? one : other, tied, why: why || (one && (tied || other) ? "" : "its rows are not embedded; drop the folder") };
  return { ...opened, embedded: whole ? null : given, path: opened.ends.output ? opened.path : null };
}
