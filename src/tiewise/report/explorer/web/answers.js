// Results of measured words (words.js) as figures and as a report in Markdown. Each number has the command that
// repeats it.
import { curves } from "./curves.js";
import { bars, button, command, el, heat, listing, panel, panels } from "./kit.js";
import { count, plain } from "./numbers.js";
import { bandsCode, highestCode, nearestCode, python, quoted, storedCode, waysCode } from "./repeat.js";
import { NEAREST, findToken, tokenName } from "./words.js";

/** Draw all figures of a result. */
export function drawAnswers(opened, result) {
  const scores = [storedScores(opened, result), appliedScores(opened, result)].filter(Boolean);
  return [el("div", { class: "panels" }, scores), panels(...nearestPanels(opened, result)),
    el("div", { class: "panels" }, [matrixOf(opened, result), lengthsOf(opened, result)].filter(Boolean)),
    drawReport(opened, result)];
}

const wayName = (opened, { from, to }) => `${tokenName(opened, from)} → ${tokenName(opened, to)}`;
const isPart = ({ embedded }) => Boolean(embedded?.note);
const amongOf = (opened) => `of ${count(opened.ends.output.shape[0])}${isPart(opened) ? " embedded rows" : ""}`;

/** Fold the commands that repeat the numbers above them. */
const foldCommands = (...lines) =>
  el("details", {}, el("summary", {}, "Repeat it"), lines.filter(Boolean).map(command));

/** Draw one bar for each order of the pair, with its number and rank. */
function wayBars(label, opened, ways, value, rank) {
  const colour = opened.ends.tied ? "var(--tied)" : "var(--untied)";
  return bars(label, ways.map((way) => ({ name: wayName(opened, way), value: way[value], colour,
    label: [plain(way[value], 4), el("br"), el("small", {}, `rank ${count(way[rank])}`)] })));
}

function storedScores(opened, result) {
  const { ways } = result, title = "Scores both ways", among = ways.length && amongOf(opened);
  if (!ways.length) return null;
  const note = opened.ends.tied ? "One table: two of its rows have one product, whichever comes first."
    : "Two tables: each way is a product of two other rows.";
  const caption = [
    `${note} Input row of the first word · output row of the second, as they are stored; norm, scales and bias are `,
    `left out. Rank 1 is the highest ${among}.`, isPart(opened) && " The command ranks among all rows.",
    foldCommands(pairCode(opened, result.ids), opened.path ? null : inspectCommand(opened, result.ids)),
  ].filter(Boolean);
  return panel(title, wayBars(title, opened, ways, "score", "rank"), caption, listing(title, ["Words", "Score", "Rank"],
    ways.map((way) => [wayName(opened, way), plain(way.score, 6), `${count(way.rank)} ${among}`])));
}

function appliedScores(opened, { ways, ids }) {
  const title = "As the model applies it", inspect = inspectCommand(opened, ids);
  if (!ways.length || !opened.path) return null;
  const notes = opened.path.notes.join(", "), caption = [
    `The straight path with what this class does between its tables, as tiewise found it: ${notes}.`,
    inspect && foldCommands(inspect)];
  const chance = ({ log }) => (Number.isNaN(log) ? "–" : Math.exp(log).toPrecision(4));
  return panel(title, wayBars(title, opened, ways, "logit", "modelRank"), caption,
    listing(title, ["Words", "Logit", "Probability", "Rank"], ways.map((way) =>
      [wayName(opened, way), plain(way.logit, 6), chance(way), `${count(way.modelRank)} ${amongOf(opened)}`])));
}

/** List nearest rows at both ends, and the highest scores after each word. */
function nearestPanels(opened, { ids, near, after }) {
  const pair = ids.slice(0, 2).map((id) => tokenName(opened, id));
  const cells = (one) => (one ? [tokenName(opened, one.id), plain(one.value, 3)] : ["", ""]);
  const list = (title, header, before, found, caption, code) => panel(title, listing(title,
    pair.flatMap((text) => [`${before}${text}`, header]),
    found[0].map((_, i) => found.flatMap((each) => cells(each[i])))), [caption, foldCommands(python(opened, ...code))]);
  const asked = ids.slice(0, 2);
  const first = opened.ends.tied ? "Nearest rows, at both ends" : "Nearest rows at the input";
  const angle = `By the angle between rows${isPart(opened) ? ", among the embedded ones" : ""}.`;
  return [
    list(first, "cosine", "", near.input, angle, nearestCode("E", asked, NEAREST)),
    near.output && list("Nearest rows at the output", "cosine", "", near.output, angle,
      nearestCode("U", asked, NEAREST)),
    after.length > 0 && list("Highest scores after each word", "score", "after ", after,
      "Of the stored rows.", [...storedCode(asked), highestCode(NEAREST)]),
  ].filter(Boolean);
}

function matrixOf(opened, { ids, plain: products }) {
  const title = "Direct path of all words";
  if (!products || ids.length < 3) return null;
  const drawn = heat(title, products, { rows: ids.map((id) => tokenName(opened, id)) });
  return panel(title, el("div", { class: "scroll plainly", tabindex: 0, role: "region", "aria-label": title }, drawn),
    ["Row: the word before. Column: the word after. Products of the stored rows.",
      foldCommands(python(opened, `print((E[[${ids}]] @ U[[${ids}]].T).tolist())`))]);
}

function lengthsOf(opened, { ids, bands, lengths }) {
  const { tied } = opened.ends, title = "Lengths of rows", ends = ["input", "output"].filter((end) => lengths[end]);
  const parts = tied ? { high: "95 % are shorter", middle: "median", low: "5 % are shorter" } : { middle: "median" };
  const colours = { input: tied ? "var(--tied)" : "var(--accent)", output: "var(--untied)" };
  const lines = ends.flatMap((end) => Object.entries(parts).map(([part, said]) => ({
    name: `${tied ? "the table" : end}: ${said}`, colour: colours[end],
    points: bands[end].map((band) => [band.token, band[part]]) })));
  const { ranks } = opened, across = ranks ? "frequency rank" : "token number";
  const axes = { x: `${across} (logarithmic)`, y: "length", factors: true };
  const seen = (id) => (ranks ? [ranks.get(id) ? count(ranks.get(id)) : "not in the text"] : []);
  const caption = [ranks ? "Rank 1 is the text's most frequent token. Tokens that it does not have are left out."
    : "Tokenizers mostly number tokens in the order in which they learned them: a small number is mostly a frequent "
      + "token.",
  foldCommands(...ends.flatMap((end) => {
    const table = end === "input" ? "E" : "U";
    return [python(opened, `print(${table}[[${ids}]].norm(dim=1).tolist())`),
      !ranks && python(opened, ...bandsCode(table))];
  }))];
  return panel(title, curves(`Lengths of rows against ${across}`, lines, axes), caption,
    listing("Lengths of the words' rows", ["Word", ...(ranks ? ["rank in the text"] : []), ...ends],
      ids.map((id, i) => [tokenName(opened, id), ...seen(id), ...ends.map((end) => plain(lengths[end][i], 4))])));
}

/** Return the command that repeats the applied logits; null if a row has no word, which the command needs. */
function inspectCommand(opened, ids) {
  const words = ids.slice(0, 2).map((id) => opened.texts?.[id]?.trim());
  const known = words.length === 2
    && words.every((word, i) => word && !/[,;]/.test(word) && findToken(opened, word) === ids[i]);
  return known ? opened.command("inspect", "--only", "direct_path", "--tokens", quoted(words.join(", "))) : null;
}

/** Return the command that repeats the scores of a pair in both orders. */
const pairCode = (opened, ids) => python(opened, ...storedCode(ids.slice(0, 2)), waysCode(ids.slice(0, 2)));

function drawReport(opened, result) {
  const text = markdown(opened, result), copied = el("span", { role: "status" });
  const area = el("textarea", { readonly: true, rows: 12, "aria-label": "The report as Markdown", id: "issue" }, text);
  const copy = async () => {
    try { await navigator.clipboard.writeText(text); } catch {
      area.closest("details").open = true;
      area.select();
      document.execCommand("copy");
    }
    copied.textContent = " Copied.";
  };
  return el("div", { class: "issue" }, button("Copy as issue", copy, { id: "copy-issue" }), copied,
    el("details", {}, el("summary", {}, "The report as Markdown"), area));
}

/** Write the report: tables, verdict if there is one, scores, and the commands that repeat them. */
function markdown(opened, result) {
  const { verdict, faults, choice, ends } = opened, { ways, ids } = result, applied = opened.path && ways.length > 0;
  const safe = (text) => `\`${String(text).replaceAll("`", "ˋ")}\``, inspect = inspectCommand(opened, ids);
  const found = (verdict?.findings ?? []).map(({ rule, severity, where, evidence, repair: fix }) =>
    `- **${rule}** (${severity}) at ${safe(where)}: ${evidence}. Fix: ${safe(fix)}`);
  const row = (cells) => `| ${cells.join(" | ")} |`, columns = ["words", "score of stored rows", "rank"];
  const cells = (way) => [safe(wayName(opened, way)), plain(way.score, 6), count(way.rank),
    ...(applied ? [plain(way.logit, 6), count(way.modelRank)] : [])];
  const table = [row([...columns, ...(applied ? ["logit as applied", "rank"] : [])]),
    row(["---", ...Array(applied ? 4 : 2).fill("---:")]), ...ways.map((way) => row(cells(way)))];
  const stored = !ways.length ? [] : [...table, "", "Scores of stored rows, repeated:", "", "```",
    pairCode(opened, ids), "```"];
  const told = applied ? `Logits as applied (${opened.path.notes.join(", ")})` : "Logits as the model applies them";
  return [
    `### Tying of ${safe(opened.name)}`, "", verdict?.sentence ?? "Its verdict: run the first command below.", "",
    `- input embedding: ${safe(choice.input)}`,
    `- output head: ${ends.tied ? "the same table" : safe(choice.output)}`, ...found,
    ...faults.map((fault) => `- ${fault}`), "", `Repeat: ${safe(opened.command("check"))}`, "", ...stored,
    ...(inspect ? ["", `${told}: ${safe(inspect)}`] : applied ? ["", told] : []),
  ].join("\n");
}
