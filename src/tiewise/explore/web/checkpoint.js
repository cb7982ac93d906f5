// Your checkpoint: dropped or chosen, read here and nowhere else. The verdict first, then what its two tables say of words.
import { announce, bars, button, curves, el, fresh, heat, listing, panel, panels, paragraph } from "./kit.js";
import { count, plain } from "./numbers.js";
import { gathered, openDropped, openEmbedded } from "./opened.js";
import { facts, keep, kept } from "./state.js";
import { Refusal } from "./stored.js";
import { quoted } from "./verdict.js";
import { MOST_WORDS, findToken, likely, measure, tokenName } from "./words.js";

export const checkpoint = { id: "checkpoint", title: "Your checkpoint", draw: drawCheckpoint };

/** What is open, however often the tab is drawn: { opened, result }. */
export const dropped = { opened: null, result: null };

function drawCheckpoint(place) {
  const chooser = (label, more) => {
    const box = el("input", { type: "file", multiple: true, class: "hidden", tabindex: -1, "aria-hidden": "true", ...more, onchange: () => { take([...box.files]); box.value = ""; } });
    return [button(label, () => box.click()), box];
  };
  const zone = el("div", { class: "drop", ondragover: (event) => { event.preventDefault(); zone.classList.add("over"); },
    ondragleave: () => zone.classList.remove("over"), ondrop: async (event) => { event.preventDefault(); zone.classList.remove("over"); take(await inDrop(event)); } },
  el("p", {}, el("strong", {}, "Drop a Hugging Face folder here"), ", or one .safetensors file"),
  el("div", { class: "choice" }, chooser("Choose a folder…", { webkitdirectory: true, id: "folder" }), chooser("Choose files…", { id: "files", accept: ".safetensors,.json,.txt" })),
  el("p", { class: "note" }, "It is read here, a few MB at a time. Nothing leaves this machine: this page may not reach any network."));
  const busy = el("div"), shown = el("div");
  place.append(paragraph("Do the two ends of your model share one table? The config says one thing; only the bytes are evidence. ",
    "Then ask the two tables about words of your own."), zone, busy, shown);
  const job = runner(busy);

  const show = () => { zone.classList.toggle("small", dropped.opened !== null); if (dropped.opened) shown.replaceChildren(...verdictOf(dropped.opened), wordsOf(dropped.opened, job)); };
  const take = async (list) => {
    if (!list.length) return;
    Object.assign(dropped, { opened: null, result: null });
    [busy, shown].forEach((each) => each.replaceChildren());
    const opened = await job.told(() => openDropped(gathered(list), facts.checkpoint.table, job.run));
    if (!opened) return;
    dropped.opened = opened;
    show();
    announce(opened.verdict.sentence);
  };
  if (!dropped.opened && facts.checkpoint.embedded) dropped.opened = openEmbedded(facts.checkpoint.embedded, facts.checkpoint.table);
  show();
}

/** The files directly in what was dropped: [{ path, file }]. */
async function inDrop(event) {
  const { items, files } = event.dataTransfer, entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), found = [];
  if (!entries.length) return [...files];
  const fileOf = (entry) => new Promise((done, fail) => { entry.file(done, fail); });
  for (const entry of entries) {
    if (entry.isFile) { found.push({ path: entry.name, file: await fileOf(entry) }); continue; }
    const reader = entry.createReader();
    for (let some = [null]; some.length;) {
      some = await new Promise((done, fail) => { reader.readEntries(done, fail); });
      for (const inside of some) if (inside.isFile) found.push({ path: `${entry.name}/${inside.name}`, file: await fileOf(inside) });
    }
  }
  return found;
}

/** How long work shows itself in `place`: a bar with a button that stops it; a refusal as a sentence. */
function runner(place) {
  let current = null, latest = 0;
  const run = async (label, work) => {
    const stop = new AbortController(), bar = el("progress", { max: 1, "aria-label": label });
    current = stop;
    place.replaceChildren(el("div", { class: "busy" }, el("span", {}, `${label}…`), bar, button("Cancel", () => stop.abort(), { id: "cancel" })));
    announce(`${label}…`);
    try { return await work({ signal: stop.signal, progress: (share) => { bar.value = share; } }); } finally { if (current === stop) { current = null; place.replaceChildren(); } }
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

/** A command line, to be repeated where the checkpoint lies. */
const repeat = (...lines) => el("p", { class: "note repeat" }, "Repeat it: ", lines.map((line, i) => [i ? " or " : "", el("code", {}, line)]));

function verdictOf(opened) {
  const { verdict, name, embedded } = opened, mark = { fatal: "✕", error: "✕", warning: "!", info: "i" }[verdict.severity] ?? "✓";
  const known = (label, text) => el("div", {}, el("dt", {}, label), el("dd", {}, text));
  const findings = verdict.findings.map((finding) => el("li", {}, el("p", {}, el("strong", {}, `${finding.rule}, ${finding.severity}: `), `${finding.evidence}.`),
    el("p", { class: "note" }, "Fix: ", el("code", {}, finding.repair))));
  return [
    embedded && el("p", { class: "banner" }, embedded.note),
    el("h2", { id: "verdict", tabindex: -1, class: `verdict ${verdict.severity ?? "fine"}` }, el("span", { class: "mark", "aria-hidden": "true" }, mark), ` ${verdict.sentence}`),
    el("dl", { class: "said" }, known("Folder", name), known("Tied by config?", verdict.config), known("Tied by bytes?", verdict.bytes),
      known("Rules B010–B016", findings.length ? `${findings.length === 1 ? "one finding" : `${findings.length} findings`}` : "nothing found")),
    findings.length > 0 && el("ul", { class: "findings" }, findings),
    opened.faults.length > 0 && el("ul", { class: "findings" }, opened.faults.map((fault) => el("li", {}, `${fault}.`))),
    repeat(opened.command("check")),
    el("p", { class: "note" }, "Seven rules are decided here, by tensors and config alone. ", el("code", {}, "tiewise check"), " runs all of its rules and says what each loader will make of it."),
  ].filter(Boolean);
}

/** The words that were asked last, else two that most vocabularies have, else two rows. */
function firstWords(opened) {
  for (const pair of [kept("words", "New, York"), "New, York", "San, Francisco", "of, the", "a, b"]) if (pair.split(",").map((word) => word.trim()).every((word) => findToken(opened, word) !== null)) return pair;
  const { ids, shape } = opened.ends.input, rows = ids ?? { at: (i) => Math.max(0, i) };
  return [Math.floor(shape[0] / 3), Math.floor(shape[0] / 2)].map((row) => `#${rows.at(row)}`).join(", ");
}

function wordsOf(opened, job) {
  if (!opened.ends.input) return el("p", { class: "note" }, `Its rows cannot be multiplied here: ${opened.ends.why}.`);
  const help = el("p", { class: "note", id: fresh("help"), role: "status" }), drawn = el("div", { id: "answer" });
  const box = el("input", { id: "words", type: "text", autocomplete: "off", spellcheck: "false", "aria-describedby": help.id, value: firstWords(opened) });
  const ask = async () => {
    const words = box.value.split(",").map((word) => word.trim()).filter(Boolean).slice(0, MOST_WORDS), ids = words.map((word) => findToken(opened, word));
    const wrong = words.find((_, i) => ids[i] === null), near = wrong && likely(opened, wrong);
    box.setAttribute("aria-invalid", String(wrong !== undefined || !words.length));
    help.textContent = wrong !== undefined ? `“${wrong}” is not one token ${opened.embedded ? "of those that this page holds" : "here"}${near.length ? `; there are ${near.join(", ")}` : ", and #1234 names a row by its number"}.`
      : !words.length ? "Write one word or more, with commas between." : ids.map((id) => `${tokenName(opened, id)} is token ${count(id)}`).join("; ") + ".";
    if (wrong !== undefined || !words.length) return;
    keep({ words: words.join(", ") });
    const table = `${count(opened.ends.input.shape[0])} × ${count(opened.ends.input.shape[1])}`;
    const result = await job.told(() => job.run(`Reading ${table} ${opened.ends.tied ? "numbers" : "numbers at each end"}`, (run) => measure(opened, ids, run)));
    if (!result) return;
    dropped.result = result;
    drawn.replaceChildren(...answers(opened, result));
    announce("Scores are drawn.");
  };
  ask();
  return el("section", {}, el("h2", {}, "What its two tables say of words"), opened.ends.why && el("p", { class: "note" }, `Scores need both ends: ${opened.ends.why}.`),
    el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); ask(); } }, el("label", { for: "words" }, "Words, with commas between"), box, el("button", {}, "Score them")), help, drawn);
}

/** The command that repeats what the model applies; it takes words, so null where a row has only a number. */
function inspection(opened, ids) {
  const words = ids.slice(0, 2).map((id) => opened.texts?.[id]?.trim());
  const known = words.length === 2 && words.every((word, i) => word && !/[,;]/.test(word) && findToken(opened, word) === ids[i]);
  return known ? opened.command("inspect", "--only", "direct_path", "--tokens", quoted(words.join(", "))) : null;
}

function answers(opened, result) {
  const { ends, path, embedded } = opened, name = (id) => tokenName(opened, id), { ways, ids } = result, scores = [], lists = [], drawings = [];
  const among = `of ${count(ends.output?.shape[0] ?? 0)}${embedded ? " embedded rows" : ""}`, pair = ids.slice(0, 2).map(name), inspect = inspection(opened, ids);
  const colour = ends.tied ? "var(--tied)" : "var(--untied)", label = (way) => `${name(way.from)} → ${name(way.to)}`;
  const ranked = (value, rank) => [plain(value, 4), el("br"), el("small", {}, `rank ${count(rank)}`)];
  if (ways.length) {
    const note = ends.tied ? "One table: two of its rows have one product, whichever comes first." : "Two tables: each way is a product of two other rows.";
    scores.push(panel("Scores both ways", bars("Scores both ways", ways.map((way) => ({ name: label(way), value: way.score, colour, said: ranked(way.score, way.rank) }))),
      [`${note} Input row of the first word · output row of the second, as they are stored; norm, scales and bias are left out. Rank 1 is the highest ${among}.`,
        el("details", {}, el("summary", {}, "Repeat it"), el("pre", {}, snippet(opened, result)))],
      listing("Scores both ways", ["Words", "Score", "Rank"], ways.map((way) => [label(way), plain(way.score, 6), `${count(way.rank)} ${among}`]))));
    if (path?.applied) scores.push(panel("As the model applies it", bars("Logits both ways", ways.map((way) => ({ name: label(way), value: way.logit, colour, said: ranked(way.logit, way.modelRank) }))),
      [`The straight path with all that this class does between its tables: ${path.notes.join(", ")}.`, inspect && repeat(inspect)],
      listing("Logits both ways", ["Words", "Logit", "Probability", "Rank"], ways.map((way) => [label(way), plain(way.logit, 6), Number.isNaN(way.log) ? "–" : Math.exp(way.log).toPrecision(4), `${count(way.modelRank)} ${among}`]))));
  }
  const side = (title, header, ofWord, more) => lists.push(panel(title, listing(title, pair.flatMap((text, i) => [`${more}${text}`, header]), ofWord[0].map((_, i) =>
    ofWord.flatMap((list) => (list[i] ? [name(list[i].id), plain(list[i].cosine ?? list[i].score, 3)] : ["", ""])))), header === "score" ? (path?.applied ? "As the model applies it." : "Of the stored rows.") : `By the angle between rows${embedded ? ", among the embedded ones" : ""}.`));
  side(ends.tied ? "Nearest rows, at both ends" : "Nearest rows at the input", "cosine", result.near.input, "");
  if (result.near.output) side("Nearest rows at the output", "cosine", result.near.output, "");
  if (result.after.length) side("Highest scores behind each word", "score", result.after, "behind ");
  if (result.plain && ids.length > 2) drawings.push(panel("Direct path of all words", el("div", { class: "scroll plainly" }, heat("Direct path of all words", result.plain, { rows: ids.map(name) })), "Row: the word before. Column: the word after. Products of the stored rows."));
  const parts = ends.tied ? { high: "95 % are shorter", middle: "median", low: "5 % are shorter" } : { middle: "median" };
  const lines = Object.entries(result.bands).filter(([, bands]) => bands).flatMap(([end, bands]) => Object.entries(parts).map(([part, said]) => ({
    name: `${ends.tied ? "the table" : end}: ${said}`, colour: ends.tied ? "var(--tied)" : end === "input" ? "var(--accent)" : "var(--untied)", points: bands.map((band) => [band.id + 1, band[part]]) })));
  const lengths = ["input", "output"].filter((end) => result.lengths[end]);
  drawings.push(panel("Lengths of rows", curves("Lengths of rows against token number", lines, { x: "token number, on a scale of factors", y: "length", factors: true }),
    ["Tokenizers mostly number tokens in the order in which they learned them: a small number is mostly a frequent token.", repeat(opened.command("inspect", "--only", "tokens"))],
    listing("Lengths of the words' rows", ["Word", ...lengths], ids.map((id, i) => [name(id), ...lengths.map((end) => plain(result.lengths[end][i], 4))]))));
  const text = markdown(opened, result, inspect), copied = el("span", { role: "status" });
  const area = el("textarea", { readonly: true, rows: 12, "aria-label": "The report as Markdown", id: "issue" }, text);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); } catch { area.closest("details").open = true; area.select(); document.execCommand("copy"); }
    copied.textContent = " Copied.";
  };
  return [el("div", { class: "panels" }, scores), panels(...lists), el("div", { class: "panels" }, drawings),
    el("div", { class: "issue" }, button("Copy as issue", copy, { id: "copy-issue" }), copied, el("details", {}, el("summary", {}, "The report as Markdown"), area))];
}

/** A line of Python that repeats the products of stored rows, with nothing of tiewise. */
function snippet(opened, { ids: [a, b = a] }) {
  const { input, output } = opened.ends;
  if (input.scale || output.scale) return opened.command("check");
  const row = (table, id) => `t(${JSON.stringify(table.where)}, ${JSON.stringify(table.name)})[${id}].double()`;
  return `python -c 'from safetensors import safe_open as o; t = lambda f, n: o(f, "pt").get_slice(n); print(${row(input, a)} @ ${row(output, b)}, ${row(input, b)} @ ${row(output, a)})'`;
}

function markdown(opened, result, inspect) {
  const { verdict, path } = opened, name = (id) => tokenName(opened, id), safe = (text) => `\`${String(text).replaceAll("`", "ˋ")}\``;
  const line = (way) => `| ${safe(`${name(way.from)} → ${name(way.to)}`)} | ${plain(way.score, 6)} | ${count(way.rank)} |${path?.applied ? ` ${plain(way.logit, 6)} | ${count(way.modelRank)} |` : ""}`;
  return [
    `### Tying of ${safe(opened.name)}`, "", verdict.sentence, "",
    `- by config: ${verdict.config}`, `- by bytes: ${verdict.bytes}`,
    ...verdict.findings.map((finding) => `- **${finding.rule}** (${finding.severity}) at ${safe(finding.where)}: ${finding.evidence}. Fix: ${safe(finding.repair)}`),
    ...opened.faults.map((fault) => `- ${fault}`), "", `Repeat: ${safe(opened.command("check"))}`, "",
    ...(result.ways.length ? [`| words | score of stored rows | rank |${path?.applied ? " logit as applied | rank |" : ""}`, `|---|---:|---:|${path?.applied ? "---:|---:|" : ""}`, ...result.ways.map(line), "",
      "Scores of stored rows, repeated:", "", "```", snippet(opened, result), "```", ...(path?.applied ? ["", `Logits as applied (${path.notes.join(", ")})${inspect ? `: ${safe(inspect)}` : ""}`] : [])] : []),
  ].join("\n");
}
