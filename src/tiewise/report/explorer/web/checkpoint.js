// Your checkpoint: dropped or chosen, read here and nowhere else. The verdict first, then what its two tables say of
// words.
import { answers } from "./answers.js";
import { announce, button, command, el, fresh, paragraph } from "./kit.js";
import { count } from "./numbers.js";
import { gathered, openDropped, openEmbedded } from "./opened.js";
import { facts, keep, kept } from "./state.js";
import { Refusal } from "./stored.js";
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
  place.append(paragraph("Do the two ends of your model share one table? The config says one thing; only the bytes ",
    "are evidence. Then ask the two tables about words of your own."), zone, busy, shown);

  const show = () => {
    zone.classList.toggle("small", dropped.opened !== null);
    if (dropped.opened) shown.replaceChildren(...verdictOf(dropped.opened), wordsOf(dropped.opened, job));
  };
  const take = async (files) => {
    Object.assign(dropped, { opened: null, result: null });
    [busy, shown].forEach((each) => each.replaceChildren());
    const opened = await job.told(async () => openDropped(gathered(await files()), facts.checkpoint.table, job.run));
    if (!opened) return;
    dropped.opened = opened;
    show();
    announce(opened.verdict.sentence);
  };
  const { embedded, table } = facts.checkpoint;
  if (!dropped.opened && embedded) dropped.opened = openEmbedded(embedded, table);
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

function verdictOf(opened) {
  const { verdict, name, embedded } = opened, mark = { fatal: "✕", error: "✕", warning: "!",
    info: "i" }[verdict.severity] ?? "✓";
  const known = (label, text) => el("div", {}, el("dt", {}, label), el("dd", {}, text));
  const findings = verdict.findings.map((finding) => el("li", {},
    el("p", {}, el("strong", {}, `${finding.rule}, ${finding.severity}: `), `${finding.evidence}.`),
    el("p", { class: "note" }, "Fix: ", el("code", {}, finding.repair))));
  return [
    embedded && el("p", { class: "banner" }, embedded.note),
    el("h2", { id: "verdict", tabindex: -1, class: `verdict ${verdict.severity ?? "fine"}` },
      el("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${verdict.sentence}`),
    el("dl", { class: "said" }, known("Folder", name), known("Tied by config?", verdict.config),
      known("Tied by bytes?", verdict.bytes),
      known("Rules B010–B016", findings.length
        ? `${findings.length === 1 ? "one finding" : `${findings.length} findings`}` : "nothing found")),
    findings.length > 0 && el("ul", { class: "findings" }, findings),
    opened.faults.length > 0 && el("ul", { class: "findings" },
      opened.faults.map((fault) => el("li", {}, `${fault}.`))),
    command(opened.command("check")),
    el("p", { class: "note" }, "Seven rules are decided here, by tensors and config alone. ",
      el("code", {}, "tiewise check"), " runs all of its rules and says what each loader will make of it."),
  ].filter(Boolean);
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
  if (!ends.input) return el("p", { class: "note" }, `Its rows cannot be multiplied here: ${ends.why}.`);
  const help = el("p", { class: "note", id: fresh("help"), role: "status" }), drawn = el("div", { id: "answer" });
  const box = el("input", { id: "words", type: "text", autocomplete: "off", spellcheck: "false",
    "aria-describedby": help.id, value: firstWords(opened) });
  const ask = async () => {
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
  ask();
  return el("section", {}, el("h2", {}, "What its two tables say of words"),
    ends.why && el("p", { class: "note" }, `Scores need both ends: ${ends.why}.`),
    el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); ask(); } },
      el("label", { for: "words" }, "Words, with commas between"), box, el("button", {}, "Score them")), help, drawn);
}

function unknown(opened, word) {
  const near = likely(opened, word), where = opened.embedded ? "of those that this page holds" : "here";
  const instead = near.length ? `there are ${near.join(", ")}` : "#1234 names a row by its number";
  return `“${word}” is not one token ${where}; ${instead}.`;
}
