// Two gradients: a tiny tied model trains in the page, and both paths of its table are seen on every row.
import { announce, button, choice, curves, curveTable, el, fitted, guess, heat, listing, numberBox, panel, panels, slider, stroke, svg } from "./kit.js";
import { MINUS, plain } from "./numbers.js";
import { follow, keep, kept } from "./state.js";
import { begun, lengthOf, trained } from "./two_paths.js";

const STEPS = 200, WIDTH = 2, TEXT_WORDS = 24, TEXT_ROWS = 12, TICK = 250;
const STARTS = { // the worked example has four tokens, of which the last never occurs
  example: { shown: "Worked example: 2, 1, 2 → 1, 2, 3", text: "2 1 2 3", more: "4", rate: 0.1 },
  sentence: { shown: "A sentence", text: "the cat sat on the mat and the dog sat on the rug", more: "bird fish", rate: 0.05 },
};
const PATHS = { lookup: "lookup path", head: "head path" };
const COLOUR = { lookup: "var(--lookup-path)", head: "var(--head-path)" };
export const gradients = { id: "gradients", title: "Two gradients", draw: drawGradients };

/** What a reader asked for: the text as ids, its words, and the run of the model that learns it. */
export function asked() {
  const split = (text) => text.trim().split(/[\s,]+/).filter(Boolean), number = (name, first, least, most) => {
    const found = Number(kept(name) || first);
    return Number.isFinite(found) ? Math.min(most, Math.max(least, found)) : first;
  };
  const every = split(kept("g.text", STARTS.example.text)), words = every.slice(0, TEXT_WORDS);
  const each = [...new Set([...words, ...split(kept("g.more", STARTS.example.more))])], rows = each.slice(0, TEXT_ROWS);
  rows.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const ids = words.map((word) => rows.indexOf(word)).filter((id) => id >= 0);
  const alpha = number("g.alpha", 1, 0, 4), rate = number("g.rate", 0.1, 0.001, 1), seed = Math.round(number("g.seed", 1, 0, 1e6));
  const step = Math.round(number("g.step", 0, 0, STEPS));
  const row = Math.max(0, rows.indexOf(kept("g.row", rows.includes("2") ? "2" : words[0])));
  return { rows, inputs: ids.slice(0, -1), targets: ids.slice(1), alpha, rate, seed, step, row, cut: words.length < every.length || rows.length < each.length };
}

const training = { key: "", run: [] };
function runOf({ rows, inputs, targets, alpha, rate, seed }) {
  const key = JSON.stringify([rows, inputs, targets, alpha, rate, seed]);
  if (training.key !== key) Object.assign(training, { key, run: !inputs.length ? [] : trained(begun(rows.length, WIDTH, seed), inputs, targets, { rate, alpha, steps: STEPS }) });
  return training.run;
}

function drawGradients(place) {
  let ticking = 0;
  const play = button("Play", () => (ticking ? rest() : go()), { "aria-pressed": "false" });
  const say = () => { play.textContent = ticking ? "Pause" : "Play"; play.setAttribute("aria-pressed", String(Boolean(ticking))); };
  const rest = () => { clearInterval(ticking); ticking = 0; say(); };
  const to = (step) => keep({ "g.step": Math.min(STEPS, step) || null });
  const go = () => {
    if (asked().step === STEPS) to(0);
    ticking = setInterval(() => { place.isConnected && asked().step < STEPS ? to(asked().step + 1) : rest(); }, TICK);
    say();
  };
  const field = (label, name, first) => el("label", { class: "field" }, el("span", {}, label),
    el("input", { type: "text", name, value: kept(name, first), maxlength: 300, oninput: ({ target }) => keep({ [name]: target.value, "g.step": null }) }));
  const text = field("The text: every word is followed by the next", "g.text", STARTS.example.text);
  const more = field("Words of the vocabulary that it does not use", "g.more", STARTS.example.more);
  const preset = (of) => {
    const start = STARTS[of];
    keep({ "g.text": start.text, "g.more": start.more, "g.rate": start.rate, "g.step": null, "g.row": null });
    [[text, start.text], [more, start.more], [rate, start.rate]].forEach(([made, value]) => { made.lastChild.value = value; });
  };
  const now = asked(), rate = numberBox("Learning rate", now.rate, (x) => keep({ "g.rate": x }), { least: 0.001, most: 1 });
  const start = Object.keys(STARTS).find((of) => STARTS[of].text === kept("g.text", STARTS.example.text));
  const another = () => keep({ "g.seed": (asked().seed + 1) % 1e6, "g.step": null });
  const step = slider("Step", now.step, to, { least: 0, most: STEPS });
  const controls = el("div", { class: "panel controls" },
    choice("What it learns", Object.fromEntries(Object.entries(STARTS).map(([of, each]) => [of, each.shown])), start, preset), text, more,
    slider("α: what the lookup path's gradient is multiplied by", now.alpha, (x) => keep({ "g.alpha": x }), { least: 0, most: 4, step: 0.05 }),
    rate, step,
    el("div", { class: "choice" }, button("One step", () => to(asked().step + 1)), play, button("Reset", () => { rest(); to(0); announce("Step 0"); }),
      button("Other first numbers", another)));
  const answer = el("p", { class: "finding" }), drawn = el("div"), rows = el("div", { class: "field" }), words = el("div", { class: "terms" }), charts = el("div");
  let of = "", row = "", moved = [];
  const draw = () => {
    const at = asked(), run = runOf(at);
    step.querySelectorAll("input").forEach((box) => { if (box !== document.activeElement || ticking) box.value = at.step; });
    if (!run.length) return void answer.replaceChildren("Write at least two words: the first is read, the second predicted.");
    const found = run[at.step], label = at.rows[at.row];
    answer.replaceChildren(...sentence(at, found));
    drawn.replaceChildren(pictures(at, found));
    words.replaceChildren(...terms(at, found));
    if (row !== (row = `${at.rows} ${label}`)) rows.replaceChildren(el("span", {}, "The row of"),
      choice("The row of", Object.fromEntries(at.rows.map((word) => [word, word])), label, (word) => { row = `${at.rows} ${word}`; keep({ "g.row": word }); }));
    if (of !== (of = training.key)) charts.replaceChildren(panels(moved = overSteps(at, run)));
    moved.forEach((each) => each.mark(at.step));
  };
  place.append(
    el("p", {}, "A tied table is pulled from two sides. ", el("strong", {}, "A lookup touches only the rows of tokens that are read. The head pushes every row, at every position"),
      ": towards the hidden state where its token comes next, away from it where it does not."),
    guess("g.guess", "One word of this vocabulary never occurs in the text. Which gradient moves its row?",
      { neither: "None: it is never used", lookup: "The lookup path's", head: "The head path's", both: "Both" }, "head",
      "The softmax gives every word some probability, and training takes it away from those that did not come. Untied, the "
      + "input row of such a word would stay where it began; tied, the head moves it at every step."),
    controls, answer, drawn,
    panel("One row, term by term", el("div", {}, rows, words),
      "h: the hidden state at a position. h̄: the gradient that comes back to its lookup. p(word): the probability that the model gave. L: the sum of −log p over the positions."), charts);
  draw();
  follow(charts, draw);
}

function sentence({ step, rows, inputs, cut }, { lengths: { lookup, head }, cosine }) {
  const reached = new Set(inputs).size, ratio = lookup ? `${plain(head / lookup, 2)} times as long as the lookup's` : "all there is";
  const turn = cosine === null ? "." : `, and the two pull ${cosine < 0 ? "against each other" : "the same way"} (cosine ${plain(cosine, 3)}).`;
  return [`Step ${step}: the lookup path reaches ${reached} of ${rows.length} rows, the head path all of them. The head's gradient is ${ratio}${turn}`,
    cut && ` Only the first ${TEXT_WORDS} words, and ${TEXT_ROWS} different ones, are taken.`].filter(Boolean);
}

function pictures(at, found) {
  const scaled = found.lookup.map((row) => row.map((x) => at.alpha * x)), untouched = at.rows.filter((_, j) => !at.inputs.includes(j));
  const top = Math.max(1e-9, ...[scaled, found.head, found.whole].flat(2).map(Math.abs)), a = at.alpha === 1 ? "A" : `${at.alpha}·A`;
  const grid = (name, matrix, path) => el("div", {}, el("h3", { style: path ? { "border-bottom": `3px solid ${COLOUR[path]}` } : {} }, name),
    heat(name, matrix, { rows: at.rows, columns: ["dim 0", "dim 1"], digits: 3, top }));
  return el("div", { class: "panels beside" },
    panel("Where each row is pushed", plane(at, found), "Each point is a row of W. Arrows: where each path pushes it; the longest has always one length."),
    panel("What each path asks of each row", el("div", { class: "equation" }, grid(`lookup path, ${a}`, scaled, "lookup"), "+",
      grid("head path, B", found.head, "head"), "=", grid(`the sum, ${a} + B`, found.whole)),
    `${untouched.length ? `The lookup path is zero for ${untouched.join(", ")}: never read.` : "Every word is read here."} Of the head path no row is: each word has some probability at each position. The optimizer sees the sum.`));
}

/** Curves over all steps, a panel each, whose `mark` moves. */
function overSteps({ inputs }, run) {
  const line = (name, value, colour) => ({ name, colour, points: run.map((each, k) => [k, value(each)]).filter(([, y]) => Number.isFinite(y) && y !== null) });
  const chart = (title, y, caption, lines, more = {}) => {
    const drawn = curves(title, lines, { x: "step", y, digits: 4, height: 220, ...more });
    return Object.assign(panel(title, drawn, caption, curveTable(title, lines, { x: "step", digits: 4 })), { mark: drawn.mark });
  };
  return [
    chart("Loss", "nats per token", `All ${STEPS} steps of plain gradient descent, M trained too.`, [line("loss", ({ loss }) => loss / inputs.length, "var(--ink)")]),
    chart("Length of each gradient", "length", "Frobenius norms over the whole table, the lookup path's with α.",
      Object.keys(PATHS).map((path) => line(PATHS[path], ({ lengths }) => lengths[path], COLOUR[path]))),
    chart("Do both paths pull the same way?", "cosine", "Above zero they agree.", [line("cosine", ({ cosine }) => cosine, "var(--accent)")], { level: 0, range: [-1, 1] }),
  ];
}

/** ∂L/∂w of one row: the formula, and its terms one by one. */
function terms({ rows, row: j, inputs, targets, alpha }, { positions, lookup, head, whole }) {
  const word = rows[j], vector = (row) => `(${row.map((x) => plain(x, 4)).join(", ")})`, low = (name, t) => [name, el("sub", {}, String(t + 1))];
  const joined = (parts, most = 6) => parts.slice(0, most).flatMap((part, i) => (i ? [" + ", part] : [part])).concat(parts.length > most ? " + …" : []);
  const reads = positions.flatMap((each, t) => (inputs[t] === j ? [{ ...each, t }] : []));
  const residual = (t) => [...(targets[t] === j ? ["(", low("p", t), `(${word}) ${MINUS} 1)`] : [low("p", t), `(${word})`]), "·", low("h", t)];
  const whence = reads.length ? `sum over ${reads.length === 1 ? "the one position that reads" : `the ${reads.length} positions that read`} ${word}` : `zero: no position reads ${word}`;
  const factor = alpha === 1 ? "" : `${alpha}·`, path = (of, ...inside) => el("span", { style: { "--of": COLOUR[of] } }, "[ ", inside, " ]");
  return [
    el("p", { class: "formula" }, `∂L/∂w(${word}) = ${factor}`, path("lookup", reads.length ? joined(reads.map(({ t }) => low("h̄", t))) : "0"), " + ",
      path("head", joined(positions.map((_, t) => residual(t))))),
    listing(`Terms of the gradient of the row of ${word}`, ["term", "where it comes from", "value"], [
      ...reads.map(({ back, t }) => [el("span", {}, low("h̄", t)), `position ${t + 1} reads ${word}`, vector(back)]),
      ["lookup path, A", whence, vector(lookup[j])],
      ...positions.map(({ p, h, error }, t) => [el("span", {}, residual(t)), targets[t] === j
        ? `position ${t + 1}: ${word} comes next and had p = ${plain(p[j], 4)}: pulled to h`
        : `position ${t + 1}: ${rows[targets[t]]} comes next, ${word} had p = ${plain(p[j], 4)}: pushed from h`, vector(h.map((x) => x * error[j]))]),
      ["head path, B", "sum over all positions", vector(head[j])],
      [`${factor}A + B`, "what the optimizer sees", vector(whole[j])],
    ])];
}

/** Rows as points of the plane with an arrow for each path. */
function plane(at, { W, lookup, head }) {
  const longest = Math.max(1e-9, ...head.map(lengthOf), ...lookup.map((row) => at.alpha * lengthOf(row)));
  const moved = (matrix, factor) => matrix.map((row, j) => row.map((x, i) => W[j][i] - (0.7 * factor * x) / longest));
  const tips = { head: moved(head, 1), lookup: moved(lookup, at.alpha) };
  const far = 1.12 * Math.max(1, ...[W, tips.head, tips.lookup].flat(2).map(Math.abs)), where = at.rows.map((row, j) => `${row} at ${W[j].map((x) => plain(x)).join(", ")}`);
  const draw = (size) => {
    const put = ([x, y]) => [(size / 2) * (1 + x / far), (size / 2) * (1 - y / far)], path = (points) => `M${points.map((xy) => xy.map((x) => x.toFixed(1)).join(" ")).join("L")}`;
    const arrow = (row, end, stroke) => {
      const [from, tip] = [put(row), put(end)], d = [tip[0] - from[0], tip[1] - from[1]], long = Math.hypot(...d), [ux, uy] = d.map((x) => (x / long) * Math.min(8, long));
      const barb = (side) => [tip[0] - ux - side * 0.5 * uy, tip[1] - uy + side * 0.5 * ux];
      return long > 1 && svg("path", { d: `${path([from, tip])}${path([barb(1), tip, barb(-1)])}`, stroke, fill: "none", "stroke-width": 2.2, "stroke-linejoin": "round" });
    };
    return svg("svg", { class: "curves", width: size, height: size, viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `Rows of W as points: ${where.join("; ")}` },
      svg("path", { class: "grid", d: `M0 ${size / 2}H${size}M${size / 2} 0V${size}` }),
      W.map((row, j) => [arrow(row, tips.head[j], COLOUR.head), arrow(row, tips.lookup[j], COLOUR.lookup),
        svg("circle", { cx: put(row)[0], cy: put(row)[1], r: j === at.row ? 6 : 4, class: "row" }),
        svg("text", { x: put(row)[0] + 9, y: put(row)[1] - 8, class: "name" }, at.rows[j])]));
  };
  return el("div", {}, el("div", { class: "legend", "aria-hidden": "true" }, Object.entries(PATHS).map(([path, name]) => el("span", {}, stroke(COLOUR[path]), ` ${name}`))), fitted(400, draw));
}
