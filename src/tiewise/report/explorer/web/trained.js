// Rows that training made: nearest words, and scores of both orders of a pair (data/trained_tables.json).
import { choice, el, listing, panel, pick } from "./kit.js";
import { count, dot, plain } from "./numbers.js";
import { facts, keep, readChoice } from "./state.js";
import { decoderOf } from "./stored.js";
import { live, prose } from "./story.js";

const NEAREST_WORDS = 6;
const SUGGESTED_WORDS = ["must", "list", "False", "first", "class"];
const FIRST_PAIR = "must be";
const TRAINED_TABLES = { tied: "One table", input: "Two tables: lookup", output: "Two tables: head" };

let decodedTables = null;

/** Return the trained tables by name, each a list of rows; decoded from fp16 at the first call. */
export function trainedTables() {
  decodedTables ??= decodeTables(facts.trained);
  return decodedTables;
}

function decodeTables({ width, words, tables }) {
  const decode = decoderOf("F16");
  return Object.fromEntries(Object.entries(tables).map(([name, text]) => {
    const flat = Array.from(decode(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer));
    return [name, words.map((_, i) => flat.slice(width * i, width * (i + 1)))];
  }));
}

/** Find the rows with the smallest angle to a row: [{ place, cosine }], nearest first. */
export function nearestRows(table, place, most = NEAREST_WORDS) {
  const lengths = table.map((row) => Math.hypot(...row));
  return table.map((row, i) => ({ place: i, cosine: dot(row, table[place]) / (lengths[i] * lengths[place]) }))
    .filter((each) => each.place !== place)
    .sort((a, b) => b.cosine - a.cosine)
    .slice(0, most);
}

/** Compute the scores of a pair in both orders: { tied: [there, back], untied: [there, back] }. */
export function pairScores(first, second) {
  const { tied, input, output } = trainedTables(), score = (left, right, i, j) => dot(left[i], right[j]);
  return {
    tied: [score(tied, tied, first, second), score(tied, tied, second, first)],
    untied: [score(input, output, first, second), score(input, output, second, first)],
  };
}

/** Draw the nearest words of a word in all three tables. */
export function trainedNeighbours() {
  const { words, source } = facts.trained, isKnown = (word) => words.includes(word);
  const chosen = () => (isKnown(readChoice("trained")) ? readChoice("trained") : SUGGESTED_WORDS[0]);
  const offered = Object.fromEntries(SUGGESTED_WORDS.filter(isKnown).map((word) => [word, word]));
  const suggestions = choice("Words to try", offered, chosen(), (word) => {
    keep({ trained: word });
    box.value = word;
  });
  const box = el("input", { list: "trained-words", value: chosen(), autocomplete: "off", spellcheck: "false",
    oninput: () => {
      box.setAttribute("aria-invalid", String(!isKnown(box.value)));
      if (!isKnown(box.value)) return;
      keep({ trained: box.value });
      suggestions.querySelectorAll("button").forEach((each) =>
        each.setAttribute("aria-pressed", String(each.value === box.value)));
    } });
  const names = Object.values(TRAINED_TABLES);
  const drawNearest = () => {
    const place = words.indexOf(chosen()), tables = trainedTables();
    const nearest = Object.keys(TRAINED_TABLES).map((name) => nearestRows(tables[name], place));
    const cell = ({ place: other, cosine }) => el("span", {}, words[other], el("small", {}, plain(cosine)));
    return listing(`Nearest words of ${chosen()}`, ["", ...names], nearest[0].map((_, i) =>
      [String(i + 1), ...nearest.map((list) => cell(list[i]))]));
  };
  return panel("Rows that training made", el("div", { class: "trained" },
    el("div", { class: "asked" }, suggestions,
      el("label", {}, "or any of these: ", box),
      el("datalist", { id: "trained-words" }, words.map((word) => el("option", { value: word })))),
    live(drawNearest)),
  prose(`Nearest words by the cosine between rows. Words with the same use get similar rows. ${trainingOf(source)}`));
}

const trainingOf = ({ tokens, python }) => `Two small models, tied and untied, were trained on ${count(tokens)} tokens
  of Python ${python}'s documentation.`;

/** Draw counts and scores of both orders of a pair. */
export function trainedOrders() {
  const { words, pairs } = facts.trained, named = ([first, second]) => `${words[first]} ${words[second]}`;
  const chosen = () => pairs.find((pair) => named(pair) === readChoice("pair", FIRST_PAIR)) ?? pairs[0];
  const options = Object.fromEntries(pairs.map((pair) => [named(pair), named(pair)]));
  const drawOrders = () => {
    const [first, second, there, back] = chosen(), scores = pairScores(first, second);
    const both = ([a, b]) => [plain(a), plain(b)];
    return listing("Both orders of the pair", ["", named([first, second]), named([second, first])], [
      ["Times in the text", count(there), count(back)],
      ["Score with one table", ...both(scores.tied)],
      ["Score with two tables", ...both(scores.untied)],
    ]);
  };
  return panel("The same in trained tables", el("div", { class: "trained" },
    pick("A pair of words", options, named(chosen()), (pair) => keep({ pair })), live(drawOrders)),
  prose(`The score is the first word's row times the second word's row. With one table, training could not make both
    orders differ; the layers have to make up for it. With two tables it could.`));
}
