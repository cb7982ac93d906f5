// Two gradients: a tiny tied model trains in the page and shows both paths of its table on every row.
import { curves, curveTable } from "./curves.js";
import { announce, button, choice, el, guess, numberBox, panel, panels, slider } from "./kit.js";
import { plain } from "./numbers.js";
import { follow, keep, readChoice } from "./state.js";
import { initialModel, trainingSteps } from "./two_paths.js";
import { COLOUR, PATHS, plane, rowTables, terms } from "./two_paths_drawn.js";

const STEPS = 200, WIDTH = 2, TEXT_WORDS = 24, TEXT_ROWS = 12, TICK = 250;
const STARTS = { // the example has four tokens; the last never occurs
  example: { shown: "Worked example: 2, 1, 2 → 1, 2, 3", text: "2 1 2 3", more: "4", rate: 0.1 },
  sentence: {
    shown: "A sentence", text: "the cat sat on the mat and the dog sat on the rug", more: "bird fish", rate: 0.05,
  },
};
export const gradients = { id: "gradients", title: "Two gradients", draw: drawGradients };

/** Read the reader's settings: text as ids, words, and training. */
export function readSettings() {
  const split = (text) => text.trim().split(/[\s,]+/).filter(Boolean);
  const number = (name, first, least, most) => {
    const found = Number(readChoice(name) || first);
    return Number.isFinite(found) ? Math.min(most, Math.max(least, found)) : first;
  };
  const every = split(readChoice("g.text", STARTS.example.text)), words = every.slice(0, TEXT_WORDS);
  const each = [...new Set([...words, ...split(readChoice("g.more", STARTS.example.more))])];
  const rows = each.slice(0, TEXT_ROWS).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const ids = words.map((word) => rows.indexOf(word)).filter((id) => id >= 0);
  return {
    rows, inputs: ids.slice(0, -1), targets: ids.slice(1),
    cut: words.length < every.length || rows.length < each.length,
    row: Math.max(0, rows.indexOf(readChoice("g.row", rows.includes("2") ? "2" : words[0]))),
    alpha: number("g.alpha", 1, 0, 4), rate: number("g.rate", 0.1, 0.001, 1),
    seed: Math.round(number("g.seed", 1, 0, 1e6)), step: Math.round(number("g.step", 0, 0, STEPS)),
  };
}

const training = { key: "", run: [] };
function trainWith({ rows, inputs, targets, alpha, rate, seed }) {
  const key = JSON.stringify([rows, inputs, targets, alpha, rate, seed]);
  if (training.key !== key) {
    const how = { rate, alpha, steps: STEPS };
    training.run = inputs.length ? trainingSteps(initialModel(rows.length, WIDTH, seed), inputs, targets, how) : [];
    training.key = key;
  }
  return training.run;
}

function drawGradients(place) {
  const player = makePlayer(place), boxes = makeControls(player);
  const answer = el("p", { class: "finding" }), drawn = el("div"), rows = el("div", { class: "field" });
  const words = el("div", { class: "terms" }), charts = el("div");
  let of = "", row = "", moved = [];
  const draw = () => {
    const at = readSettings(), run = trainWith(at);
    boxes.show(at.step);
    if (!run.length) {
      answer.replaceChildren("Write at least two words: the first is read, the second predicted.");
      return;
    }
    const found = run[at.step], label = at.rows[at.row];
    answer.replaceChildren(...sentence(at, found));
    drawn.replaceChildren(el("div", { class: "panels beside" }, plane(at, found), rowTables(at, found)));
    words.replaceChildren(...terms(at, found));
    // draw buttons and curves again only for another text or training, so that the focus stays
    if (row !== (row = `${at.rows} ${label}`)) {
      const pressed = (word) => { row = `${at.rows} ${word}`; keep({ "g.row": word }); };
      const options = Object.fromEntries(at.rows.map((word) => [word, word]));
      rows.replaceChildren(el("span", {}, "The row of"), choice("The row of", options, label, pressed));
    }
    if (of !== (of = training.key)) charts.replaceChildren(panels(moved = drawOverSteps(at, run)));
    moved.forEach((each) => each.mark(at.step));
  };
  place.append(
    el("p", {}, "A tied table is pulled from two sides. ", el("strong", {}, "A lookup touches only the rows of tokens "
      + "that are read. The head pushes every row, at every position"), ": towards the hidden state where its token "
      + "comes next, away from it where it does not."),
    guess("g.guess", "One word of this vocabulary never occurs in the text. Which gradient moves its row?", {
      neither: "None: it is never used", lookup: "The lookup path's", head: "The head path's", both: "Both",
    }, "head", "The softmax gives every word some probability, and training takes it away from those that did not "
      + "come. Untied, the input row of such a word would stay where it began; tied, the head moves it at every step."),
    boxes.drawn, answer, drawn,
    panel("One row, term by term", el("div", {}, rows, words), "h: the hidden state at a position. h̄: the gradient "
      + "that comes back to its lookup. p(word): the probability that the model gave. L: the sum of −log p over the "
      + "positions."), charts);
  draw();
  follow(charts, draw);
}

/** Make the button that plays steps, four a second, until its place leaves the page. */
function makePlayer(place) {
  let ticking = 0;
  const to = (step) => keep({ "g.step": Math.min(STEPS, step) || null });
  const say = () => {
    play.textContent = ticking ? "Pause" : "Play";
    play.setAttribute("aria-pressed", String(Boolean(ticking)));
  };
  const rest = () => { clearInterval(ticking); ticking = 0; say(); };
  const go = () => {
    if (readSettings().step === STEPS) to(0);
    ticking = setInterval(() => {
      const { step } = readSettings();
      if (place.isConnected && step < STEPS) to(step + 1);
      else rest();
    }, TICK);
    say();
  };
  const play = button("Play", () => (ticking ? rest() : go()), { "aria-pressed": "false" });
  return { play, rest, to, on: () => Boolean(ticking) };
}

/** Draw all controls. `show` moves the slider to the current step. */
function makeControls({ play, rest, to, on }) {
  const now = readSettings();
  const field = (label, name, first) => el("label", { class: "field" }, el("span", {}, label), el("input", {
    type: "text", name, value: readChoice(name, first), maxlength: 300,
    oninput: ({ target }) => keep({ [name]: target.value, "g.step": null }),
  }));
  const text = field("The text: every word is followed by the next", "g.text", STARTS.example.text);
  const more = field("Words of the vocabulary that it does not use", "g.more", STARTS.example.more);
  const rate = numberBox("Learning rate", now.rate, (x) => keep({ "g.rate": x }), { least: 0.001, most: 1 });
  const alpha = slider("α: what the lookup path's gradient is multiplied by", now.alpha, (x) => keep({ "g.alpha": x }),
    { least: 0, most: 4, step: 0.05 });
  const step = slider("Step", now.step, to, { least: 0, most: STEPS });
  const preset = (of) => {
    const start = STARTS[of];
    keep({ "g.text": start.text, "g.more": start.more, "g.rate": start.rate, "g.step": null, "g.row": null });
    for (const [made, value] of [[text, start.text], [more, start.more], [rate, start.rate]])
      made.lastChild.value = value;
  };
  const start = Object.keys(STARTS).find((of) => STARTS[of].text === readChoice("g.text", STARTS.example.text));
  const names = Object.fromEntries(Object.entries(STARTS).map(([of, { shown }]) => [of, shown]));
  const drawn = el("div", { class: "panel controls" },
    choice("What it learns", names, start, preset), text, more, alpha, rate, step,
    el("div", { class: "choice" },
      button("One step", () => to(readSettings().step + 1)), play,
      button("Reset", () => { rest(); to(0); announce("Step 0"); }),
      button("Other first numbers", () => keep({ "g.seed": (readSettings().seed + 1) % 1e6, "g.step": null }))));
  const show = (at) => step.querySelectorAll("input").forEach((box) => {
    if (box !== document.activeElement || on()) box.value = at; // do not overwrite a box while the reader types
  });
  return { drawn, show };
}

function sentence({ step, rows, inputs, cut }, { lengths: { lookup, head }, cosine }) {
  const ratio = lookup ? `${plain(head / lookup, 2)} times as long as the lookup's` : "all there is";
  const way = cosine < 0 ? "against each other" : "the same way";
  return [`Step ${step}: the lookup path reaches ${new Set(inputs).size} of ${rows.length} rows, the head path all of `
    + `them. The head's gradient is ${ratio}`,
  cosine === null ? "." : `, and the two pull ${way} (cosine ${plain(cosine, 3)}).`,
  cut ? ` Only the first ${TEXT_WORDS} words, and ${TEXT_ROWS} different ones, are taken.` : ""];
}

/** Draw curves over all steps, one panel each, with a movable `mark`. */
function drawOverSteps({ inputs }, run) {
  const line = (name, value, colour) => {
    const points = run.map((each, k) => [k, value(each)]);
    return { name, colour, points: points.filter(([, y]) => y !== null && Number.isFinite(y)) };
  };
  const chart = (title, y, caption, lines, more = {}) => {
    const drawn = curves(title, lines, { x: "step", y, digits: 4, height: 220, ...more });
    const made = panel(title, drawn, caption, curveTable(title, lines, { x: "step", digits: 4 }));
    return Object.assign(made, { mark: drawn.mark });
  };
  return [
    chart("Loss", "nats per token", `All ${STEPS} steps of plain gradient descent, M trained too.`,
      [line("loss", ({ loss }) => loss / inputs.length, "var(--ink)")]),
    chart("Length of each gradient", "length", "Frobenius norms over the whole table, the lookup path's with α.",
      Object.keys(PATHS).map((path) => line(PATHS[path], ({ lengths }) => lengths[path], COLOUR[path]))),
    chart("Do both paths pull the same way?", "cosine", "Above zero they agree.",
      [line("cosine", ({ cosine }) => cosine, "var(--accent)")], { level: 0, range: [-1, 1] }),
  ];
}
