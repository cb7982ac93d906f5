// Pairs for sentence order (SOP) and next sentence (NSP) from a reader's text. Rules are those of
// `tiewise.training.data.sentence_pairs`, with words as tokens. A line of three dashes separates documents.
import { button, el, guess, listing, panel, panels, paragraph, slider } from "./kit.js";
import { count, plain, random } from "./numbers.js";
import { facts, keep, readNumbers } from "./state.js";

const SAMPLE = [
  "The kettle had been on the stove for an hour. Nobody had noticed that the water was gone. When Ada came in, the "
    + "kitchen smelled of hot metal. She took the kettle off with a towel and opened the window.",
  "",
  "Then she went to find her brother. He was asleep over a book about kettles.",
  "---",
  "A bridge carries its own weight before it carries anything else. The longer the span, the more of the steel holds "
    + "up steel. Beyond some two thousand metres a plain beam cannot even bear itself. Cables move that limit, but "
    + "they do not remove it.",
].join("\n");

const BYTE_WHITE = " \\t\\n\\r\\f\\v"; // only ASCII white space ends a sentence
const SENTENCE_END = new RegExp(
  `(?<mark>[.!?]+|…)(?:["')\\]*_’”])*(?=[${BYTE_WHITE}]+[^${BYTE_WHITE}a-z])`
    + `|(?<=[^${BYTE_WHITE}])(?=[ \\t\\r\\f\\v]*\\n[ \\t\\r\\f\\v]*\\n)`, "gu");
const NO_ENDS = new Set("mr mrs ms dr st prof rev gen col capt lieut messrs vs no e.g i.e cf viz".split(" "));

/** Split a document into sentences, which end at . ! ? … before white space and no small letter, or at a blank line. */
export function sentencesOf(text) {
  const ends = [];
  for (const found of text.matchAll(SENTENCE_END)) {
    const [before] = /[A-Za-z.]*$/.exec(text.slice(Math.max(0, found.index - 12), found.index));
    const abbreviates = NO_ENDS.has(before.toLowerCase()) || (before.length === 1 && before !== "I");
    if (found.groups.mark !== "." || !abbreviates) ends.push(found.index + found[0].length);
  }
  const outer = new RegExp(`^[${BYTE_WHITE}]+|[${BYTE_WHITE}]+$`, "g");
  return [0, ...ends].map((start, i) => text.slice(start, ends[i]).replace(outer, "")).filter(Boolean);
}

export const documentsOf = (text) => text.split(/^---+[ \t]*$/m).map(sentencesOf).filter((each) => each.length);

const spacedWords = (text) => text.split(/\s+/).filter(Boolean);

/**
 * Make pairs of at most `room` words: { a, b, stranger }. `stranger` is b from another document, or null if there is
 * only one. A document is packed from its start or its end and cut at random. Long parts lose their start or end.
 */
export function pairsOf(documents, room, seed) {
  const draw = random(seed), below = (n) => Math.floor(draw() * n), found = [];
  const torn = (words, keep) => {
    if (words.length <= keep) return words;
    return draw() < 0.5 ? words.slice(0, keep) : words.slice(words.length - keep);
  };
  documents.forEach((sentences, own) => {
    const words = sentences.map(spacedWords), backwards = draw() < 0.5;
    for (let at = 0; at + 2 <= words.length;) {
      const from = (i) => words[backwards ? words.length - 1 - i : i];
      let last = at + 2, held = from(at).length + from(at + 1).length;
      while (last < words.length && held + from(last).length <= room) held += from(last++).length;
      const row = backwards ? words.slice(words.length - last, words.length - at) : words.slice(at, last);
      const middle = 1 + below(row.length - 1);
      found.push(fitted(row.slice(0, middle).flat(), row.slice(middle).flat(), stranger(own)));
      at = last;
    }
  });
  return found;

  function stranger(own) {
    const others = documents.flatMap((sentences, i) =>
      (i === own ? [] : sentences.map((_, start) => sentences.slice(start))));
    return others.length ? others[below(others.length)].map(spacedWords) : null;
  }

  function fitted(a, b, other) {
    const size = b.length;
    let theirs = null;
    if (other) {
      theirs = [...other[0]];
      other = other.slice(1);
      while (other.length && theirs.length + other[0].length <= size) theirs.push(...other.shift());
    }
    const both = (x, y) => {
      if (x.length + y.length <= room) return [x, y];
      const keepX = Math.min(x.length, Math.max(room - y.length, Math.floor((room + below(2)) / 2)));
      return [torn(x, keepX), torn(y, room - keepX)];
    };
    const [first, second] = both(a, b), strange = theirs && both(a, theirs);
    const join = (words) => words.join(" ");
    return { a: join(first), b: join(second), stranger: strange && { a: join(strange[0]), b: join(strange[1]) } };
  }
}

/** Compute the share of words that two texts have in common, without regard to order. */
export function inCommon(a, b) {
  const [one, two] = [a, b].map((text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []));
  return [...two].filter((word) => one.has(word)).length / new Set([...one, ...two]).size;
}

/** Draw the section into `place`. */
export function drawPairs(place) {
  const [firstRoom, firstSeed] = readNumbers("pairs", [40, 1]);
  let room = firstRoom >= 4 && firstRoom <= 128 ? Math.round(firstRoom) : 40, seed = Math.round(firstSeed);
  const { judged } = facts.counts, drawn = el("div", { "aria-live": "polite" });
  const box = el("textarea", { rows: 8, "aria-label": "Your text", oninput: () => show() }, SAMPLE);
  const set = () => { keep({ pairs: [room, seed] }); show(); };
  const show = () => {
    const documents = documentsOf(box.value), made = pairsOf(documents, room, seed), some = made[0];
    if (!some) {
      drawn.replaceChildren(paragraph("No document here has two sentences. A sentence ends with . ! or ?, followed by "
        + "a space."));
      return;
    }
    const segment = (letter, text) => el("blockquote", {}, el("span", {}, letter), text);
    const two = (label, a, b, says) => el("div", { class: "pair" },
      el("b", {}, label), segment("A", a), segment("B", b), el("small", {}, says));
    const seen = (a, b) => `${plain(100 * inCommon(a, b), 0)} % of their words stand in both.`;
    const { a, b, stranger } = some;
    drawn.replaceChildren(
      paragraph(`${count(documents.length)} document${documents.length === 1 ? "" : "s"}, `
        + `${count(documents.flat().length)} sentences, ${count(made.length)} pair${made.length === 1 ? "" : "s"} `
        + `of up to ${room} words. The first:`),
      panels(
        panel("Sentence order, ALBERT's SOP", el("div", {},
          two("1: as in the text", a, b, seen(a, b)),
          two("0: the same two, swapped", b, a, seen(b, a))),
        "Both labels have the same words: only the order tells."),
        panel("Next sentence, BERT's NSP", el("div", {},
          two("1: as in the text", a, b, seen(a, b)),
          stranger ? two("0: B from another document", stranger.a, stranger.b, seen(stranger.a, stranger.b))
            : paragraph("No second document lends a B: a line of three dashes begins one.")),
        "Another document has another topic: its words tell, and nothing need be read in order.")),
      el("details", {}, el("summary", {}, "All pairs"),
        listing("All pairs", ["", "A", "B", "B under NSP's 0"], made.map((pair, i) =>
          [String(i + 1), pair.a, pair.b, pair.stranger?.b ?? "–"].map((text) =>
            el("span", { class: "long" }, text))))));
  };
  place.append(
    el("h2", {}, "Two questions about two segments"),
    paragraph("Pretraining of BERT's kind also asks whether segment B follows A. What a wrong B is decides what can be "
      + "learnt."),
    guess("harder", "A model is trained on sentence order. How well does it answer the next-sentence question, where "
      + "chance is 50 %?",
    { half: "about 50 %", most: `about ${plain(judged.sop, 0)} %`, all: "100 %" }, "most",
    `${plain(judged.sop, 1)} % in Table 5 of arXiv:1909.11942. The other way round it is ${plain(judged.nsp, 1)} %: a `
      + "model trained on next sentences has learnt topics, and hardly any order."),
    el("label", { class: "field" }, el("span", {}, "Your text; a line of three dashes begins another document. It "
      + "stays in this page, and out of its address."), box),
    el("div", { class: "controls" },
      slider("Words of a row, A and B together", room, (to) => { room = to; set(); }, { least: 4, most: 128 }),
      el("div", {}, button("Draw again", () => { seed += 1; set(); }))),
    drawn);
  show();
}
