// Last step of the story: logits become probabilities, compared with a target that one table may miss.
import { bestTied, bestUntied, chainOf, chancesOf, crossEntropy, irreversibility, roundTrips } from "./bigrams.js";
import { bars, el, heat, listing, panel, panels, paragraph } from "./kit.js";
import { count, minus, plain, softmax } from "./numbers.js";
import { STORY_NEXT, STORY_WORDS, live, predict, prose, storyMatrix, tiedLogits, workbench } from "./story.js";

/** Draw the last step of the story. */
export function aim() {
  return predict("softmax", [
    `Logits are not the answer yet. *Softmax* turns a row of them into chances: it raises e to the power of each logit
    and divides by the row's sum, its *normaliser*, so that the row adds up to 1.`],
  "The logits are symmetric. The chance of York after New, and that of New after York, are…",
  { equal: "Equal", different: "Different" }, "different",
  `The same logit is divided by two different sums: with the story's first table the chances are 0.37 and 0.30. So
  symmetric logits can call York likely after New, and New unlikely after York. What they cannot say comes next.`,
  () => [panels(
    panel("Logits", live(() => heat("Logits", tiedLogits(), STORY_NEXT)),
      prose("W_E W_Eᵀ of the table in step 3: symmetric.")),
    panel("Chances of the next word", live(() => heat("Chances", tiedLogits().map(softmax), { ...STORY_NEXT, top: 1 })),
      live(() => `Each row was divided by its own normaliser: ${tiedLogits().map((row, i) =>
        `${STORY_WORDS[i]} ${normaliser(row)}`).join(", ")}.`))),
  predict("reverse", [
    `Now let the direct path write a text without end: it draws the next word by these chances, then the next. Count
    the pairs in what it wrote.`],
  "The logits are symmetric. How often does “New York” come up in the text, against “York New”?",
  { table: "It depends on the table", same: "Exactly as often" }, "same",
  `The two chances may differ, but only by how common the two words are; both orders come up equally often.
  Played backwards, the text of a symmetric path looks the same. Such chances are called *reversible*. Language
  is not.`, aimAt)]);
}

const normaliser = (row) => {
  const sum = row.reduce((all, x) => all + Math.exp(x), 0);
  return sum < 1e9 ? plain(sum) : sum.toExponential(2);
};

/** Draw the editable target, the best paths of one and two tables, and their difference. */
function aimAt() {
  let solved = null, of = "";
  const picture = (draw) => live(() => {
    const counts = storyMatrix("counts");
    if (of !== String(counts)) { // solve once for all pictures
      const chain = chainOf(counts), tied = bestTied(chain), untied = bestUntied(chain);
      of = String(counts);
      solved = { ...chain, tied, untied, byTied: chancesOf(tied), byUntied: chancesOf(untied) };
    }
    return draw(solved);
  });
  const map = (title, chances, caption, top = 1) =>
    panel(title, picture((found) => heat(title, chances(found), { rows: STORY_WORDS, top })), caption);
  return [paragraph(prose(`So give the path a target: counts of how often each word came next in a text. The page finds
    the tables that come closest to it, one for both ends and then two; each row holds two numbers, and each word also
    gets a *bias*, a number added to its logit whatever came before. Closest means the lowest *cross-entropy*: the mean
    of −log of the chance given to the word that came, in *nats*. Certainty costs 0, blind guessing among three
    words 1.10.`)),
  panels(
    workbench("The target: counts of the next word", "counts",
      "Row: the word now. Column: the next. Whole numbers from 1 to 99.", {
        "Both ways alike": [[20, 30, 5], [30, 90, 15], [5, 15, 30]],
        "No word twice": [[1, 80, 19], [9, 1, 90], [80, 19, 1]],
      }),
    panel("New York and York New", picture(bothOrders))),
  el("div", { class: "panels four" },
    map("Target", ({ p }) => p, "Each row of the counts, divided by its sum."),
    map("Best tied", ({ byTied }) => byTied, "The best that one table can do."),
    map("Best untied", ({ byUntied }) => byUntied, "The best of two: the target itself."),
    map("What tied misses", ({ p, byTied }) => minus(p, byTied), "Target less best tied.", 0.5)),
  panels(
    panel("What it costs, in nats per word", picture(aimCosts), prose(`*Entropy*: what is left to guess when the
      chances are known. The mirror: the target's *irreversibility*, which every tied path pays, however wide. Squares:
      a word's logit after itself is a sum of squares, so it cannot be low.`)),
    panel("Why: a round trip through three words", picture(aimRounds), `Multiply the chances of a round trip:
      there (New, York, City, New) and back (New, City, York, New). If the two products are equal, the mirror
      costs nothing. Symmetric logits make them equal, whatever the numbers.`, picture(aimTables))),
  paragraph(prose(`That is the whole story. One table at both ends makes the direct path's logits a mirror. It cannot
    express the order of two words, and pays the text's irreversibility. A second table at the output expresses it, and
    so can the first MLP. To measure your text and model, run |tiewise inspect MODEL --text FILE --only bigrams|.`))];
}

const aimPaths = ({ p, byTied, byUntied }) =>
  [["Target", p, "var(--quiet)"], ["Best tied", byTied, "var(--tied)"], ["Best untied", byUntied, "var(--untied)"]];

const bothOrders = (found) => [["York after New", 0, 1], ["New after York", 1, 0]].map(([title, i, j]) => [
  el("h3", {}, title),
  bars(title, aimPaths(found).map(([name, p, colour]) => ({ name, value: p[i][j], colour })), { most: 1 })]);

function aimCosts({ p, q, byTied, byUntied }) {
  const entropy = crossEntropy(q, p), mirrored = irreversibility(q), whole = crossEntropy(q, byTied);
  const tied = "var(--tied)";
  return [paragraph(`The mirror alone costs every tied path ${plain(mirrored, 3)} nats per word on this target.`),
    bars("Nats per word", [
      { name: "Entropy", value: entropy, colour: "var(--quiet)" },
      { name: "+ mirror", value: mirrored, from: entropy, colour: tied },
      { name: "+ squares", value: Math.max(0, whole - entropy - mirrored), from: entropy + mirrored, colour: tied },
      { name: "= best tied", value: whole, colour: tied },
      { name: "Best untied", value: crossEntropy(q, byUntied), colour: "var(--untied)" },
    ], { most: Math.max(Math.log(3), whole), digits: 3 })];
}

/** List both round trips and the frequency of both orders, for the target and both paths. */
function aimRounds(found) {
  const pairs = (p, i, j) => count(1000 * found.often[i] * p[i][j]);
  return [listing("Round trips", ["Once round", "there", "back"],
    aimPaths(found).map(([name, p]) => [name, ...roundTrips(p).map((x) => plain(x, 4))])),
  listing("Pairs in the text", ["In 1,000 pairs", "New York", "York New"],
    aimPaths(found).map(([name, p]) => [name, pairs(p, 0, 1), pairs(p, 1, 0)]))];
}

const aimTables = ({ tied, untied }) =>
  listing("The tables that were found", ["Word", "one table: row", "bias", "two: first row", "last row", "bias"],
    STORY_WORDS.map((word, i) => {
      const rows = [tied.left[i], [tied.bias[i]], untied.left[i], untied.right[i], [untied.bias[i]]];
      return [word, ...rows.map((row) => row.map((x) => plain(x)).join(", "))];
    }));
