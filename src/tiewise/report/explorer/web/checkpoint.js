// Your checkpoint: dropped or chosen, and read in this page only. The reader chooses two tables, and the page shows
// scores of words. The verdict, if there is one, comes from Python.
import { drawAnswers } from "./answers.js";
import { runJob } from "./ask.js";
import { announce, button, command, el, uniqueId, listing, paragraph, pick } from "./kit.js";
import { count, size } from "./numbers.js";
import { chooseTables, comparableTables, selectFiles, openDropped, openEmbedded } from "./opened.js";
import { facts, keep, readChoice } from "./state.js";
import { Refusal, shorten } from "./stored.js";
import { MOST_OFFERED } from "./tables.js";
import { MOST_WORDS, findToken, similarTokens, measureWords, tokenName } from "./words.js";

export const checkpoint = { id: "checkpoint", title: "Your checkpoint", draw: drawCheckpoint };

/** Open checkpoint and last result, which survive a change of tab: { opened, result }. */
export const dropped = { opened: null, result: null };

function drawCheckpoint(place) {
  const chooser = (label, more) => {
    const chosen = () => { take(async () => [...box.files]); };
    const box = el("input", { type: "file", multiple: true, class: "hidden", tabindex: -1, "aria-hidden": "true",
      onchange: chosen, onclick: () => { box.value = ""; }, ...more });
    return [button(label, () => box.click()), box];
  };
  const over = (on) => (event) => { event.preventDefault(); zone.classList.toggle("over", on); };
  const release = (event) => { over(false)(event); take(() => readDrop(event)); };
  const zone = el("div", { class: "drop", ondragover: over(true), ondragleave: over(false), ondrop: release },
    el("p", {}, el("strong", {}, "Drop a Hugging Face folder here"), ", or one .safetensors file"),
    el("div", { class: "choice" }, chooser("Choose a folder…", { webkitdirectory: true, id: "folder" }),
      chooser("Choose files…", { id: "files", accept: ".safetensors,.json,.txt" })),
    el("p", { class: "note" }, "It is read here, a few MB at a time. Nothing leaves this machine: this page may not ",
      "reach any network."));
  const busy = el("div"), shown = el("div"), job = makeRunner(busy);
  place.append(paragraph("Choose the two tables of your model, its input embedding and its output head, and ask them ",
    "about words of your own. If both are one table, a pair of words has one score both ways."), zone, busy, shown);

  const show = () => {
    zone.classList.toggle("small", dropped.opened !== null);
    if (dropped.opened) shown.replaceChildren(...drawSummary(dropped.opened), ...drawTables(dropped.opened, job));
  };
  const take = async (files) => {
    Object.assign(dropped, { opened: null, result: null });
    [busy, shown].forEach((each) => each.replaceChildren());
    const opened = await job.told(async () => openDropped(selectFiles(await files()), facts.checkpoint, job.run));
    if (!opened) return;
    dropped.opened = opened;
    announce(`${count(opened.total)} tensors are listed.`);
    show();
  };
  const { embedded } = facts.checkpoint;
  if (!dropped.opened && embedded) dropped.opened = openEmbedded(embedded, facts.checkpoint);
  show();
}

/** Read the files directly inside a dropped folder, or dropped alone: [{ path, file }]. */
async function readDrop({ dataTransfer: { items } }) {
  // Take everything before the first await, because the browser then empties the items. In a page opened from disk,
  // Chromium reads a folder only through its handle; Firefox and Safari have no handle here and read the entry.
  const given = [...items].filter(({ kind }) => kind === "file").map((item) => {
    const entry = item.webkitGetAsEntry?.();
    return entry?.isDirectory ? { entry, handle: item.getAsFileSystemHandle?.() } : { file: item.getAsFile() };
  });
  const found = [], put = (folder, file) => found.push({ path: `${folder}${file.name}`, file });
  try {
    for (const { entry, handle, file } of given) {
      if (file) put("", file);
      else if (handle) for await (const inside of (await handle).values()) {
        if (inside.kind === "file") put(`${entry.name}/`, await inside.getFile());
      } else {
        const reader = entry.createReader();
        for (let some = [null]; some.length;) {
          some = await new Promise((done, fail) => { reader.readEntries(done, fail); }); // a hundred at a time
          for (const inside of some) if (inside.isFile)
            put(`${entry.name}/`, await new Promise((done, fail) => { inside.file(done, fail); }));
        }
      }
    }
  } catch { throw new Refusal("What was dropped cannot be read; choose it with the button instead"); }
  return found;
}

/** Show long work in `place`: a progress bar with a Cancel button, or the sentence of a refusal. */
function makeRunner(place) {
  let current = null, latest = 0;
  const run = async (label, work) => {
    const stop = new AbortController(), bar = el("progress", { max: 1, "aria-label": label });
    current = stop;
    place.replaceChildren(el("div", { class: "busy" }, el("span", {}, `${label}…`), bar,
      button("Cancel", () => stop.abort(), { id: "cancel" })));
    announce(`${label}…`);
    try { return await work({ signal: stop.signal, progress: (share) => { bar.value = share; } });
      } finally { if (current === stop) { current = null; place.replaceChildren(); } }
  };
  const told = async (work) => {
    const mine = (latest += 1);
    current?.abort(); // cancel the earlier job silently
    try { const made = await work(); return mine === latest ? made : null; } catch (error) {
      if (mine !== latest) return null;
      if (error.name !== "AbortError" && !(error instanceof Refusal)) throw error;
      const text = error.name === "AbortError" ? "Cancelled." : `${error.message}.`;
      place.replaceChildren(el("p", { class: "banner", role: "alert", id: "refused" }, text));
      return null;
    }
  };
  return { run, told };
}

/** Draw the summary before a table is read: verdict or the command for one, faults, tensors. */
function drawSummary(opened) {
  const { verdict, embedded, faults } = opened;
  return [
    embedded?.note && el("p", { class: "banner" }, embedded.note),
    ...(verdict ? drawVerdict(opened) : [el("h2", { tabindex: -1 }, shorten(opened.name)),
      el("p", { class: "note", id: "no-verdict" }, "This page lists tensors and reads tables. It does not judge the ",
        "checkpoint: for a verdict, run ", el("code", {}, "tiewise check"), ".")]),
    faults.length > 0 && el("ul", { class: "findings" }, faults.map((fault) => el("li", {}, `${fault}.`))),
    command(opened.command("check")),
    tensorList(opened),
  ].filter(Boolean);
}

function drawVerdict({ verdict, name }) {
  const mark = { fatal: "✕", error: "✕", warning: "!", info: "i" }[verdict.severity] ?? "✓";
  const known = ([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text));
  const findings = verdict.findings.map((finding) => el("li", { class: finding.severity },
    el("p", {}, el("strong", {}, `${finding.rule}, ${finding.severity}: `), `${finding.evidence}.`),
    el("p", { class: "note" }, "Fix: ", el("code", {}, finding.repair))));
  return [
    el("h2", { id: "verdict", tabindex: -1, class: `verdict ${verdict.severity ?? "fine"}` },
      el("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${verdict.sentence}`),
    el("dl", { class: "said" }, [["checkpoint", name], ...verdict.rows].map(known)),
    findings.length > 0 && el("ul", { class: "findings" }, findings),
    el("p", { class: "note" }, verdict.made),
  ].filter(Boolean);
}

const MOST_LISTED = 200;

/** List the tensors with type and shape in a fold, at most the first MOST_LISTED. */
function tensorList({ folder: { tensors }, total, verdict }) {
  const rows = tensors.slice(0, MOST_LISTED).map(({ name, dtype, shape, start, end }) =>
    [shorten(name, 120), dtype, `[${shape.map(count).join(", ")}]`, size(end - start)]);
  const rest = total - rows.length;
  return el("details", { id: "tensors", open: verdict === null }, el("summary", {}, `${count(total)} tensors`),
    listing("Tensors", ["Name", "Type", "Shape", "Size"], rows),
    rest > 0 && el("p", { class: "note" }, `and ${count(rest)} more`));
}

/** Draw the choice of both tables, and the scores of words below it. */
function drawTables(opened, job) {
  const words = el("div"), said = el("p", { class: "note", id: "tables", role: "status" });
  if (!opened.tables.length)
    return [el("p", { class: "note", id: "tables" }, "None of its tensors is a matrix: there is no table to choose.")];
  const choice = { ...opened.choice }, known = new Set(opened.tables.map(({ name }) => name));
  for (const end of ["input", "output"]) {
    const name = readChoice(`${end}-table`);
    if (known.has(name)) choice[end] = name;
  }
  const take = async () => {
    words.replaceChildren();
    said.textContent = "";
    const found = await compareTables(opened, choice, job);
    if (!found) return;
    chooseTables(opened, choice, found.equal);
    said.textContent = describeChoice(opened, choice, found);
    words.replaceChildren(...drawWords(opened, job));
  };
  const options = Object.fromEntries(opened.tables.map(({ name, dtype, shape }) =>
    [name, `${shorten(name, 80)}  ${dtype} [${shape.map(count).join(", ")}]`]));
  const list = (label, end, more = {}) => pick(label, { ...options, ...more }, choice[end], (name) => {
    choice[end] = name;
    keep({ [`${end}-table`]: name });
    take();
  });
  take();
  return [el("h2", {}, "Its two tables"),
    el("div", { class: "controls tables" }, list("Input embedding", "input"),
      list("Output head", "output", { "": "none: show rows alone" })),
    opened.tables.length === MOST_OFFERED && el("p", { class: "note" },
      `The lists have ${count(MOST_OFFERED)} matrices, those outside layers first.`),
    said, words].filter(Boolean);
}

/** Compare the bytes of the two chosen tables. → { equal, row, how }; null if reading failed */
async function compareTables(opened, choice, job) {
  const both = comparableTables(opened, choice);
  const label = `Comparing ${shorten(choice.input)} with ${shorten(choice.output)}`;
  if (!both) return { equal: false, row: null, how: "not compared" };
  return job.told(() => job.run(label, (run) => runJob("sameBytes", both, run)).catch((error) => {
    if (error.name !== "AbortError") throw error;
    return { equal: false, row: null, how: "cancelled" };
  }));
}

/** Describe the two chosen tables in one sentence. */
function describeChoice({ ends, embedded }, { input, output }, { equal, row, how }) {
  if (output === "") return ends.why ? `It cannot be read: ${ends.why}.` : "No output head: only rows are shown.";
  if (input === output) return `One tensor at both ends: tied.${ends.why && ` But ${ends.why}.`}`;
  if (ends.why) return `These two cannot be multiplied: ${ends.why}.`;
  if (equal) return "The two tensors are equal, byte for byte: one table, stored twice.";
  if (how === "cancelled") return "Two tensors. They were not compared, as you cancelled it.";
  if (embedded) return "Two tables that are not equal: untied.";
  if (how) return "Two tensors of different types or shapes: untied.";
  return `Two tensors that differ, first in row ${count(row)}: untied.`;
}

/** Return the last words of the reader, or two that the vocabulary has, or two rows. */
function firstWords(opened) {
  const fits = (pair) => pair.split(",").every((word) => findToken(opened, word.trim()) !== null);
  const { ids, shape } = opened.ends.input, rows = [shape[0] / 3, shape[0] / 2].map(Math.floor);
  const usual = [readChoice("words", "New, York"), "New, York", "San, Francisco", "of, the", "a, b"];
  return usual.find(fits) ?? rows.map((row) => `#${ids ? ids[row] : row}`).join(", ");
}

function drawWords(opened, job) {
  const { ends } = opened;
  if (!ends.input) return [];
  const help = el("p", { class: "note", id: uniqueId("help"), role: "status" }), drawn = el("div", { id: "answer" });
  const box = el("input", { id: "words", type: "text", autocomplete: "off", spellcheck: "false",
    "aria-describedby": help.id, value: firstWords(opened) });
  const score = async () => {
    const words = box.value.split(",").map((word) => word.trim()).filter(Boolean).slice(0, MOST_WORDS);
    const ids = words.map((word) => findToken(opened, word)), wrong = words.find((_, i) => ids[i] === null);
    const fine = wrong === undefined && words.length > 0;
    box.setAttribute("aria-invalid", String(!fine));
    help.textContent = wrong !== undefined ? unknownWordText(opened, wrong)
      : !fine ? "Write one word or more, with commas between."
        : `${ids.map((id) => `${tokenName(opened, id)} is token ${count(id)}`).join("; ")}.`;
    if (!fine) return;
    keep({ words: words.join(", ") });
    const label = `Reading ${count(ends.input.shape[0])} × ${count(ends.input.shape[1])} numbers`;
    const result = await job.told(() => job.run(label, (run) => measureWords(opened, ids, run)));
    if (!result) return;
    dropped.result = result;
    drawn.replaceChildren(...drawAnswers(opened, result));
    announce("Scores are drawn.");
  };
  score();
  return [el("section", {}, el("h2", {}, "Scores of words in its two tables"),
    ends.why && el("p", { class: "note" }, `Scores need both tables: ${ends.why}.`),
    el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); score(); } },
      el("label", { for: "words" }, "Words, with commas between"), box, el("button", {}, "Score them")), help, drawn)];
}

function unknownWordText(opened, word) {
  const near = similarTokens(opened, word), where = opened.embedded?.note ? "of those that this page holds" : "here";
  const instead = near.length ? `there are ${near.join(", ")}` : "#1234 names a row by its number";
  return `“${word}” is not one token ${where}; ${instead}.`;
}
