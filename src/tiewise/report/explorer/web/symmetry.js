// Symmetry, a story in five steps: the limit of one table at both ends, and the price of a way out.
import { aim } from "./aim.js";
import { announce, bars, button, choice, el, heat, listing, panel, panels, paragraph, slider } from "./kit.js";
import { count, dot, plain, product, transposed } from "./numbers.js";
import { arrows } from "./arrows.js";
import { journey } from "./journey.js";
import { keep, readChoice, readNumbers } from "./state.js";
import { STORY_AXES, STORY_NEXT, STORY_WORDS, live, mirror, predict, prose } from "./story.js";
import { storyMatrix, tiedLogits, workbench } from "./story.js";
import { ownNumbers } from "./own_numbers.js";
import { straightPath } from "./straight_path.js";
import { trainedNeighbours, trainedOrders } from "./trained.js";

const STORY_STEPS = [
  ["New York, York New", wordToScores],
  ["The straight path", goStraight],
  ["A mirror", seeMirror],
  ["Two ways out", breakMirror],
  ["Chances", aim],
];

export const symmetry = { id: "symmetry", title: "Symmetry", draw: drawStory };

function drawStory(place) {
  const at = () => Math.min(STORY_STEPS.length, Math.max(1, Math.round(Number(readChoice("story"))) || 1)) - 1;
  const body = el("div", { class: "step" });
  const numbered = ([title], i) => el("li", {}, button([String(i + 1), el("span", {}, title)], () => go(i)));
  const steps = el("ol", { class: "steps" }, STORY_STEPS.map(numbered));
  const show = () => {
    const now = at(), [title, draw] = STORY_STEPS[now];
    const turn = (to, label) => to in STORY_STEPS && button(`${label}: ${STORY_STEPS[to][0]}`, () => go(to));
    steps.querySelector("[aria-current]")?.removeAttribute("aria-current");
    steps.children[now].firstChild.setAttribute("aria-current", "step");
    body.replaceChildren(el("h2", { tabindex: -1 }, `${now + 1}. ${title}`), ...draw(), ...ownNumbers(now + 1),
      el("p", { class: "turn" }, turn(now - 1, "Back"), turn(now + 1, "Next")));
  };
  const go = (i) => {
    keep({ story: i + 1 });
    show();
    body.firstChild.focus({ preventScroll: true });
    if (steps.getBoundingClientRect().top < 0) steps.scrollIntoView();
    announce(`Step ${i + 1} of ${STORY_STEPS.length}: ${STORY_STEPS[i][0]}`);
  };
  place.append(el("nav", { "aria-label": "Steps of the story" }, steps), body);
  show();
}

/** Return the place of the word that goes through the model in steps 1 and 2. */
const sentWord = () => Math.max(0, STORY_WORDS.indexOf(readChoice("word", "York")));
const chooseWord = () => choice("The word that goes in", Object.fromEntries(STORY_WORDS.map((word) => [word, word])),
  STORY_WORDS[sentWord()], (word) => keep({ word }));

function wordToScores() {
  const picture = panel("One word goes through the model", el("div", {}, chooseWord(), journey(sentWord)));
  return [
    el("div", { class: "opening" }, paragraph(`English says “New York” all the time, and “York New” hardly ever. The
      model in the picture gives both the same score. Is that an accident? Five steps, ten minutes: guess, then see.`),
    live(() => bothOrdersOfNewYork(tiedLogits()))),
    ...predict("rank", [
      `This model knows three words; a real one some 100,000 *tokens*, words and pieces of words. Its *embedding table*
      W_E has one row for each word: two numbers here, the *width*, and thousands in a real model. The *lookup* copies
      the row of the word that goes in.`,
      `The layers hand on the *residual*, two numbers again. The *head* gives every word a score, its *logit*: the
      residual times that word's row, number by number, added up (a *dot product*). If the head uses the rows of W_E,
      the model is *tied*: |residual @ embedding.weight.T|.`],
    "The rows are New (1, 0.5), York (0.8, 0.9), City (0.3, 1.2). New goes in. Which word gets the highest logit?",
    { New: "New", level: "New and York, equal", City: "City" }, "level",
    `New: 1·1 + 0.5·0.5 = 1.25. York: 1·0.8 + 0.5·0.9 = 1.25. A word's own row is not always its best match: a longer
    row in nearly the same direction scores as high.`,
    () => [arrows(), panels(oneHotProduct(), trainedNeighbours())], picture)];
}

/** Show the two scores of the opening example as bars. */
function bothOrdersOfNewYork(logits) {
  const [there, back] = [logits[0][1], logits[1][0]];
  return bars("Scores of both orders", [
    { name: "New, then York", value: there, colour: "var(--tied)" },
    { name: "York, then New", value: back, colour: "var(--tied)" }], { most: Math.max(1.6, there, back) });
}

function oneHotProduct() {
  return panel("The lookup as a product", live(() => {
    const at = sentWord(), table = storyMatrix("W_E"), hot = table.map((_, i) => Number(i === at));
    const same = { columns: STORY_AXES, top: Math.max(1, ...table.flat().map(Math.abs)) };
    const sum = (k) => `${hot.map((x, i) => `${x}·${plain(table[i][k])}`).join(" + ")} = ${plain(table[at][k])}`;
    return [el("div", { class: "equation" },
      heat("One-hot", [hot], { rows: [STORY_WORDS[at]], columns: STORY_WORDS, digits: 0, top: 2 }),
      el("span", {}, "×"),
      heat("Table", table, { rows: STORY_WORDS, marked: (i) => (i === at ? "picked" : null), ...same }),
      el("span", {}, "="),
      heat("Its row", [table[at]], { rows: [STORY_WORDS[at]], ...same })),
    el("p", { class: "note" }, `First number: ${sum(0)}. Second: ${sum(1)}.`)];
  }), prose(`The word's *one-hot* (a single 1, at its place) times W_E. Programs do not multiply: |nn.Embedding| reads
    the row.`));
}

function goStraight() {
  return predict("path", [
    `Between the two tables stand the model's *blocks*. *Attention* fetches numbers from earlier words; an *MLP*, two
    matrices with a bend between them, works on this word alone. Neither replaces the numbers that pass: each adds to
    them. That is a *residual connection*, in code |x = x + block(x)|.`,
    `So whatever the blocks add, one part of the result has gone straight from the first table to the last. This is the
    *direct path*. By itself it can only know what tends to follow the word it came from: which *bigrams*, pairs of
    words in a row, are common.`],
  "Let every block add nothing. What is then the logit of City after York?",
  {
    dot: "York's row times City's row",
    zero: "Zero: nothing was computed",
    attention: "It depends on the attention",
  }, "dot",
  "York's row comes in, arrives unchanged and meets City's row: with the story's first table 0.8·0.3 + 0.9·1.2 = "
    + "1.32.",
  () => [chooseWord(), panels(
    panel("One word, straight through", live(() => straightPath(sentWord(), storyMatrix("W_E"))),
      prose(`Dashed: the blocks, and ways not taken. Real models also rescale the numbers before the last table (a
        *norm*); this story leaves that out.`)),
    panel("All three words at once", live(() => {
      const table = storyMatrix("W_E"), row = table[sentWord()];
      const sum = (other) => row.map((x, k) => `${plain(x)}·${plain(other[k])}`).join(" + ");
      return [heat("Logits of the direct path", tiedLogits(),
        { ...STORY_NEXT, marked: (i) => (i === sentWord() ? "picked" : null) }),
      listing("Where the framed logits come from", ["Next", "both rows, multiplied", "Logit"],
        table.map((other, j) => [STORY_WORDS[j], sum(other), plain(dot(row, other))]))];
    }), prose(`Row: the word that went in. Column: the word that may come next. Each row is one trip down the picture;
      all of them together are one product of matrices, W_E W_Eᵀ.`)))]);
}

function seeMirror() {
  return predict("mirror", [
    `All nine logits of a tied direct path are one product, W_E W_Eᵀ. Row New, column York is the logit of York after
    New; row York, column New is that of New after York. English has “New York” everywhere and “York New” hardly
    ever, so the two should differ.`],
  "You may put any six numbers into the table. Can the two logits differ?",
  { negative: "With negative numbers, yes", long: "If one row is longer, yes", never: "Never" }, "never",
  `One is New's row times York's row, the other York's row times New's row: the same products, added up. A matrix that
  equals its own mirror image across the diagonal is called *symmetric*. Training chooses the six numbers; it cannot
  get around it either.`,
  () => panels(
    workbench("The table", "W_E", "Type any numbers. This is W_E in every step of the story."),
    panel("Its direct path", live(() => mirror("Logits, one table", tiedLogits())),
      prose(`W_E W_Eᵀ. The two places of a pair wear the same frame. Under →: the second word after the first;
        under ←: the first after the second.`)),
    trainedOrders()));
}

function breakMirror() {
  const path = (title, logits, caption) =>
    panel(title, live(() => mirror(`Logits, ${title.toLowerCase()}`, logits())), prose(caption));
  return predict("out", [
    `The mirror breaks if the two ends differ. Either the head has a second table, W_U: such a model is *untied*.
    Or there is one table, and something in between turns the numbers. The first MLP, MLP_0, can do that; a matrix M,
    two by two, stands for it here. What came in as x goes on as x·M. (A norm before the last table bends the
    mirror a little, too.)`],
  "One table at both ends, and M in between. Which M leave the logits symmetric?",
  { one: "Only the one that changes nothing", symmetric: "Every symmetric M", none: "None" }, "symmetric",
  `Stretching keeps the mirror, only turning breaks it: the two logits of a pair differ by M's upper right number less
  its lower left one, times the area that the two words' rows span.`,
  () => [panels(
    workbench("The table", "W_E", "W_E, as in the step before."),
    workbench("A second table", "W_U", "W_U, for the last end; again one row per word."),
    workbench("A matrix in between", "M", "M, instead of the first MLP.",
      { Nothing: [[1, 0], [0, 1]], Stretch: [[2, 0.5], [0.5, 0.5]], Turn: [[0, 1], [-1, 0]] }),
    path("One table", tiedLogits, "W_E W_Eᵀ, as before."),
    path("Two tables", () => product(storyMatrix("W_E"), transposed(storyMatrix("W_U"))),
      `W_E W_Uᵀ. With two numbers per row, one row of the product is always a mix of the others: its *rank* is 2.`),
    path("One table and M",
      () => product(storyMatrix("W_E"), product(storyMatrix("M"), transposed(storyMatrix("W_E")))),
      "W_E M W_Eᵀ.")), priceOfM()]);
}

function priceOfM() {
  const most = [300_000, 16_384], first = [50_000, 4096];
  const sizes = () => readNumbers("sizes", first).map((x, i) => Math.min(most[i], Math.max(2, Math.round(x))));
  const set = (i) => (x) => keep({ sizes: sizes().map((old, k) => (k === i ? x : old)) });
  const size = (label, i) => slider(label, sizes()[i], set(i), { least: 2, most: most[i], factors: true });
  return panel("What M costs, against what tying saved",
    el("div", {}, size("V, words", 0), size("D, numbers per row", 1), live(() => {
      const [V, D] = sizes(), saved = V * D, share = (x) => `${count(x)} (${plain((100 * x) / saved, 1)} %)`;
      return bars("Parameters", [{ name: "Tying saves V·D", value: saved, label: count(saved), colour: "var(--tied)" },
        { name: "A matrix M, D·D", value: D * D, label: share(D * D) },
        { name: "A whole MLP, 8·D·D", value: 8 * D * D, label: share(8 * D * D) }]);
    })),
    `In parameters, with their share of what tying saved. The MLP is in the model anyway: the price is
      the part of it that is busy undoing the mirror.`);
}
