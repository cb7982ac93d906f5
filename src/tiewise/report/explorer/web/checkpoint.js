// Your checkpoint: dropped or chosen, read here and nowhere else. The reader chooses its two tables; the page shows
// what they say of words. A verdict is Python's, where it embedded one.
import { answers } from "./answers.js";
import { ask } from "./ask.js";
import { announce, button, command, el, fresh, listing, paragraph, pick } from "./kit.js";
import { count, size } from "./numbers.js";
import { choose, comparable, gathered, openDropped, openEmbedded } from "./opened.js";
import { facts, keep, kept } from "./state.js";
import { Refusal, short } from "./stored.js";
import { MOST_OFFERED } from "./tables.js";
import { MOST_WORDS, findToken, likely, measure, tokenName } from "./words.js";

export const checkpoint = { id: "checkpoint", title: "Your checkpoint", draw: drawCheckpoint };

/** What is open, however often the tab is drawn: { opened, result }. */
export const dropped = { opened: null, result: null };

function drawCheckpoint(place) {
  const chooser = (label, more) => {
    const chosen = () => { take(async () => [...box.files]); };
    const box = el("input", { type: "file", multiple: true, class: "hidden", tabindex: -1, "aria-hidden": "true",
      onchange: chosen, onclick: () => { box.value = ""; }, ...more });
    return [button(label, () => box.click()), box];
  };
  const over = (on) => (event) => { event.preventDefault(); zone.classList.toggle("over", on); };
  const release = (event) => { over(false)(event); take(() => inDrop(event)); };
  const zone = el("div", { class: "drop", ondragover: over(true), ondragleave: over(false), ondrop: release },
    el("p", {}, el("strong", {}, "Drop a Hugging Face folder here"), ", or one .safetensors file"),
    el("div", { class: "choice" }, chooser("Choose a folder…", { webkitdirectory: true, id: "folder" }),
      chooser("Choose files…", { id: "files", accept: ".safetensors,.json,.txt" })),
    el("p", { class: "note" }, "It is read here, a few MB at a time. Nothing leaves this machine: this page may not ",
      "reach any network."));
  const busy = el("div"), shown = el("div"), job = runner(busy);
  place.append(paragraph("Choose the two tables of your model, its input embedding and its output head, and ask them ",
    "about words of your own. If both are one table, a pair of words has one score both ways."), zone, busy, shown);

  const show = () => {
    zone.classList.toggle("small", dropped.opened !== null);
    if (dropped.opened) shown.replaceChildren(...summaryOf(dropped.opened), ...tablesOf(dropped.opened, job));
  };
  const take = async (files) => {
    Object.assign(dropped, { opened: null, result: null });
    [busy, shown].forEach((each) => each.replaceChildren());
    const opened = await job.told(async () => openDropped(gathered(await files()), facts.checkpoint, job.run));
    if (!opened) return;
    dropped.opened = opened;
    announce(`${count(opened.total)} tensors are listed.`);
    show();
  };
  const { embedded } = facts.checkpoint;
  if (!dropped.opened && embedded) dropped.opened = openEmbedded(embedded, facts.checkpoint);
  show();
}

/** The files directly in what was dropped: [{ path, file }]. */
async function inDrop({ dataTransfer: { items } }) {
  // All is asked of the items now: a browser empties them at the first wait. Chromium lets a page that was opened from
  // the disk read a folder by its handle alone; Firefox and Safari have no handle here, and their entry does.
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

/** How long work shows itself in `place`: a bar with a button that stops it; a refusal as a sentence. */
function runner(place) {
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
    current?.abort(); // what is under way is of no use any more, and says nothing
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

/** What is known of a checkpoint before a table is read: Python's verdict or where to get one, faults, its tensors. */
function summaryOf(opened) {
  const { verdict, embedded, faults } = opened;
  return [
    embedded?.note && el("p", { class: "banner" }, embedded.note),
    ...(verdict ? verdictOf(opened) : [el("h2", { tabindex: -1 }, short(opened.name)),
      el("p", { class: "note", id: "no-verdict" }, "This page lists tensors and reads tables. It does not judge the ",
        "checkpoint: for a verdict, run ", el("code", {}, "tiewise check"), ".")]),
    faults.length > 0 && el("ul", { class: "findings" }, faults.map((fault) => el("li", {}, `${fault}.`))),
    command(opened.command("check")),
    tensorList(opened),
  ].filter(Boolean);
}

function verdictOf({ verdict, name }) {
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

/** Every tensor with its type and shape, behind a line that opens; of very many the first. */
function tensorList({ folder: { tensors }, total, verdict }) {
  const rows = tensors.slice(0, MOST_LISTED).map(({ name, dtype, shape, start, end }) =>
    [short(name, 120), dtype, `[${shape.map(count).join(", ")}]`, size(end - start)]);
  const rest = total - rows.length;
  return el("details", { id: "tensors", open: verdict === null }, el("summary", {}, `${count(total)} tensors`),
    listing("Tensors", ["Name", "Type", "Shape", "Size"], rows),
    rest > 0 && el("p", { class: "note" }, `and ${count(rest)} more`));
}

/** The choice of both tables, and below it what they say of words. */
function tablesOf(opened, job) {
  const words = el("div"), said = el("p", { class: "note", id: "tables", role: "status" });
  if (!opened.tables.length)
    return [el("p", { class: "note", id: "tables" }, "None of its tensors is a matrix: there is no table to choose.")];
  const choice = { ...opened.choice }, known = new Set(opened.tables.map(({ name }) => name));
  for (const end of ["input", "output"]) if (known.has(kept(`${end}-table`))) choice[end] = kept(`${end}-table`);
  const take = async () => {
    words.replaceChildren();
    said.textContent = "";
    const found = await compared(opened, choice, job);
    if (!found) return;
    choose(opened, choice, found.equal);
    said.textContent = describedChoice(opened, choice, found);
    words.replaceChildren(...wordsOf(opened, job));
  };
  const options = Object.fromEntries(opened.tables.map(({ name, dtype, shape }) =>
    [name, `${short(name, 80)}  ${dtype} [${shape.map(count).join(", ")}]`]));
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

/** Whether two chosen tables hold the same bytes: { equal, row, how }; null where reading failed. */
async function compared(opened, choice, job) {
  const both = comparable(opened, choice), label = `Comparing ${short(choice.input)} with ${short(choice.output)}`;
  if (!both) return { equal: false, row: null, how: "not compared" };
  return job.told(() => job.run(label, (run) => ask("sameBytes", both, run)).catch((error) => {
    if (error.name !== "AbortError") throw error;
    return { equal: false, row: null, how: "cancelled" };
  }));
}

/** One sentence on the two chosen tables. */
function describedChoice({ ends, embedded }, { input, output }, { equal, row, how }) {
  if (output === "") return ends.why ? `It cannot be read: ${ends.why}.` : "No output head: only rows are shown.";
  if (input === output) return `One tensor at both ends: tied.${ends.why && ` But ${ends.why}.`}`;
  if (ends.why) return `These two cannot be multiplied: ${ends.why}.`;
  if (equal) return "The two tensors are equal, byte for byte: one table, stored twice.";
  if (how === "cancelled") return "Two tensors. They were not compared, as you cancelled it.";
  if (embedded) return "Two tables that are not equal: untied.";
  if (how) return "Two tensors of different types or shapes: untied.";
  return `Two tensors that differ, first in row ${count(row)}: untied.`;
}

/** The words that were asked last, else two that most vocabularies have, else two rows. */
function firstWords(opened) {
  const fits = (pair) => pair.split(",").every((word) => findToken(opened, word.trim()) !== null);
  const { ids, shape } = opened.ends.input, rows = [shape[0] / 3, shape[0] / 2].map(Math.floor);
  const usual = [kept("words", "New, York"), "New, York", "San, Francisco", "of, the", "a, b"];
  return usual.find(fits) ?? rows.map((row) => `#${ids ? ids[row] : row}`).join(", ");
}

function wordsOf(opened, job) {
  const { ends } = opened;
  if (!ends.input) return [];
  const help = el("p", { class: "note", id: fresh("help"), role: "status" }), drawn = el("div", { id: "answer" });
  const box = el("input", { id: "words", type: "text", autocomplete: "off", spellcheck: "false",
    "aria-describedby": help.id, value: firstWords(opened) });
  const score = async () => {
    const words = box.value.split(",").map((word) => word.trim()).filter(Boolean).slice(0, MOST_WORDS);
    const ids = words.map((word) => findToken(opened, word)), wrong = words.find((_, i) => ids[i] === null);
    const fine = wrong === undefined && words.length > 0;
    box.setAttribute("aria-invalid", String(!fine));
    help.textContent = wrong !== undefined ? unknown(opened, wrong)
      : !fine ? "Write one word or more, with commas between."
        : `${ids.map((id) => `${tokenName(opened, id)} is token ${count(id)}`).join("; ")}.`;
    if (!fine) return;
    keep({ words: words.join(", ") });
    const label = `Reading ${count(ends.input.shape[0])} × ${count(ends.input.shape[1])} numbers`;
    const result = await job.told(() => job.run(label, (run) => measure(opened, ids, run)));
    if (!result) return;
    dropped.result = result;
    drawn.replaceChildren(...answers(opened, result));
    announce("Scores are drawn.");
  };
  score();
  return [el("section", {}, el("h2", {}, "What its two tables say of words"),
    ends.why && el("p", { class: "note" }, `Scores need both tables: ${ends.why}.`),
    el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); score(); } },
      el("label", { for: "words" }, "Words, with commas between"), box, el("button", {}, "Score them")), help, drawn)];
}

function unknown(opened, word) {
  const near = likely(opened, word), where = opened.embedded?.note ? "of those that this page holds" : "here";
  const instead = near.length ? `there are ${near.join(", ")}` : "#1234 names a row by its number";
  return `“${word}” is not one token ${where}; ${instead}.`;
}
