// Picture of one word on its way through a tied model: lookup, body, logits. The word moves if motion is allowed.
import { button, choice, el, svg } from "./kit.js";
import { dot, plain } from "./numbers.js";
import { follow, keep, readChoice } from "./state.js";
import { STORY_WORDS, prose, storyMatrix } from "./story.js";

const STAGES = { word: "Word", lookup: "Lookup", body: "Body", logits: "Logits" };
const STAGE_NAMES = Object.keys(STAGES);
const STAGE_SECONDS = [1.2, 1.8, 1.8, 3.6];
const LAST_STAGE = STAGE_NAMES.length - 1;

// Pixels of the drawing: middle of the path and start of the notes; width and height of a cell; distances of columns
// and rows; tops of the parts.
const CENTER = 136, BESIDE = 208, CELL_WIDE = 56, CELL_TALL = 25, COLUMN = 60, ROW = 28;
const TOP = { word: 6, input: 54, residual: 156, body: 200, arrived: 252, output: 298, logits: 400 };

const rowMiddle = (part, row) => TOP[part] + ROW * row + CELL_TALL / 2;
const slotMiddle = (part) => TOP[part] + CELL_TALL / 2;

/**
 * Compute the picture when a `share` (0 to 1) of a stage is over; `at` is the word's place in the table.
 * → { y, moves, showsWord, inputRow, slots, outputRow, logits }: height of the moving token and whether it is drawn,
 * whether its row is marked, number of filled slots, row that the head multiplies, number of finished logits
 */
export function journeyFrame(stage, share, at) {
  const between = (from, to, part = share) => from + (to - from) * part;
  const words = STORY_WORDS.length, isOver = share >= 1;
  const slots = Math.max(0, stage - 1) + Number(isOver && (stage === 1 || stage === 2));
  const frame = { moves: true, showsWord: stage === 0, inputRow: stage > 0 || isOver, slots, outputRow: -1, logits: 0 };
  if (stage === 0) return { ...frame, y: between(slotMiddle("word"), rowMiddle("input", at)) };
  if (stage === 1) return { ...frame, y: between(rowMiddle("input", at), slotMiddle("residual")) };
  if (stage === 2) return { ...frame, y: between(slotMiddle("residual"), slotMiddle("arrived")) };
  const along = share * words, row = Math.min(words - 1, Math.floor(along));
  const before = row === 0 ? slotMiddle("arrived") : rowMiddle("output", row - 1);
  const moved = Math.min(1, 2 * (along - row)); // moves for half of the time, then waits at the row
  return { ...frame, y: between(before, rowMiddle("output", row), moved), moves: !isOver, outputRow: isOver ? -1 : row,
    logits: Math.min(words, Math.floor(along + 0.5)) };
}

const journeyLogits = (at, table) => table.map((row) => dot(table[at], row));

/** Describe a stage with the numbers of the table. */
export function stageText(stage, at, table) {
  const word = STORY_WORDS[at], numbers = table[at].map((x) => plain(x)).join(" and ");
  const logits = journeyLogits(at, table).map((x, j) => `${STORY_WORDS[j]} ${plain(x)}`).join(", ");
  return {
    word: `${word} goes in.`,
    lookup: `Lookup: the table has one row for each word. The model copies the row of ${word}: ${numbers}.`,
    body: `Body: layers add to these numbers. Here they add nothing: ${numbers} arrive.`,
    logits: `Head: these numbers times each row of the same table give the logits: ${logits}.`,
  }[stage];
}

/** Draw the picture with its buttons. It plays once if motion is allowed and the address names no stage. */
export function journey(at) {
  const frame = el("div"), text = el("p", { class: "stage" });
  const now = { stage: LAST_STAGE, share: 1 };
  let drawing = null, request = 0, before = 0;
  const hasMotion = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;
  const show = () => {
    drawing.move(journeyFrame(now.stage, now.share, at()));
    const sentence = stageText(STAGE_NAMES[now.stage], at(), storyMatrix("W_E"));
    if (text.textContent !== sentence) text.textContent = sentence;
    stages.querySelectorAll("button").forEach((each) =>
      each.setAttribute("aria-pressed", String(each.value === STAGE_NAMES[now.stage])));
  };
  const draw = () => {
    drawing = journeyDrawing(at(), storyMatrix("W_E"));
    frame.replaceChildren(drawing.picture);
    show();
  };
  const stop = () => {
    cancelAnimationFrame(request);
    request = 0;
    play.textContent = "Play";
  };
  const tick = (time) => {
    if (!frame.isConnected) return;
    now.share += before ? (time - before) / 1000 / STAGE_SECONDS[now.stage] : 0;
    before = time;
    const isOver = now.share >= 1;
    if (isOver && now.stage < LAST_STAGE) Object.assign(now, { stage: now.stage + 1, share: 0 });
    now.share = Math.min(1, now.share);
    show();
    if (isOver && now.stage === LAST_STAGE && now.share === 1) stop();
    else request = requestAnimationFrame(tick);
  };
  const start = () => {
    if (now.stage === LAST_STAGE && now.share === 1) Object.assign(now, { stage: 0, share: 0 });
    before = 0;
    play.textContent = "Pause";
    request = requestAnimationFrame(tick);
  };
  const play = button("Play", () => (request ? stop() : start()), { class: "play" });
  const open = (stage) => {
    stop();
    Object.assign(now, { stage: STAGE_NAMES.indexOf(stage), share: 1 });
    text.setAttribute("aria-live", "polite");
    show();
  };
  const stages = choice("Stage of the journey", STAGES, readChoice("stage", "logits"), (stage) => {
    open(stage);
    keep({ stage });
  });
  draw();
  follow(frame, draw);
  if (readChoice("stage") in STAGES) open(readChoice("stage"));
  else if (hasMotion()) setTimeout(() => { if (frame.isConnected && !request && !readChoice("stage")) start(); }, 500);
  return el("div", { class: "journey" }, frame, el("div", { class: "playing" }, play, stages), text);
}

const note = (x, y, kind, ...text) => svg("text", { x, y, class: kind }, text);

/** Draw cells side by side, centred on the path. */
function tableCells(top, texts, { kind = "", wide = CELL_WIDE } = {}) {
  const step = wide + COLUMN - CELL_WIDE, start = CENTER - (step * texts.length - (step - wide)) / 2;
  return texts.map((text, i) => svg("g", { class: `cell ${kind}` },
    svg("rect", { x: start + step * i, y: top, width: wide, height: CELL_TALL, rx: 5 }),
    note(start + step * i + wide / 2, top + 17, "middle", text)));
}

/** Draw a table: the name of each word, then its row. */
const tableRows = (part, texts) => STORY_WORDS.map((word, i) => svg("g", { class: "table-row" },
  note(CENTER - COLUMN - 8, TOP[part] + ROW * i + 17, "name", word),
  tableCells(TOP[part] + ROW * i, texts[i], { kind: "weight" })));

/** Draw a heading and lines beside a part. */
const noteBeside = (y, heading, ...lines) => [note(BESIDE, y, "heading", heading),
  lines.map((line, i) => note(BESIDE, y + 17 * (i + 1), "", line))];

/** Draw the whole picture. → { picture, move(frame) } */
function journeyDrawing(at, table) {
  const word = STORY_WORDS[at], texts = table.map((row) => row.map((x) => plain(x)));
  const logits = journeyLogits(at, table), best = logits.indexOf(Math.max(...logits));
  const inputRows = tableRows("input", texts), outputRows = tableRows("output", texts);
  const slots = ["residual", "arrived"].map((part) => ({
    empty: tableCells(TOP[part], ["", ""], { kind: "empty" }), full: svg("g", {}, tableCells(TOP[part], texts[at])),
  }));
  const scores = logits.map((x, j) => svg("g", { class: j === best ? "score best" : "score" },
    tableCells(TOP.logits, logits.map((_, k) => (k === j ? plain(x) : "")), { wide: 60 })[j],
    note(CENTER + (j - 1) * 64, TOP.logits + 42, "middle", STORY_WORDS[j])));
  const wordToken = tableCells(-CELL_TALL / 2, [word], { wide: 66 });
  const numberToken = svg("g", {}, tableCells(-CELL_TALL / 2, texts[at]));
  const token = svg("g", { class: "token" }, wordToken, numberToken);
  const arrow = (from, to) => svg("path", { class: "way", d: `M${CENTER} ${from}V${to}` });
  const picture = svg("svg", { class: "straight journey-picture", viewBox: "0 0 350 448", role: "img",
    "aria-label": `${stageText("lookup", at, table)} ${stageText("body", at, table)} `
      + stageText("logits", at, table) },
  arrow(31, 54), arrow(138, 156), arrow(181, 252), arrow(277, 298), arrow(382, 400),
  svg("path", { class: "same", d: "M30 94H16V338H30" }),
  note(0, 0, "middle shared", "one table"),
  tableCells(TOP.word, [word], { wide: 66, kind: "ghost" }), note(BESIDE, 23, "", "goes in"),
  inputRows, noteBeside(82, "Lookup", `copies the row`, `of ${word}`),
  slots.map(({ empty, full }) => [empty, full]), note(BESIDE, 173, "", "the residual"),
  svg("rect", { x: 74, y: TOP.body, width: 124, height: 32, rx: 6, class: "bypassed body" }),
  note(CENTER, TOP.body + 21, "middle", "layers"),
  noteBeside(213, "Body", "adds nothing here"), note(BESIDE, 269, "", "unchanged"),
  outputRows, noteBeside(326, "Head", "times each row", "of the same table"),
  scores, note(242, TOP.logits + 17, "heading", "Logits"), note(242, TOP.logits + 34, "", "of the next word"), token);
  picture.querySelector(".shared").setAttribute("transform", "translate(11 216) rotate(-90)");
  const mark = (rows, marked) => rows.forEach((row, i) => row.classList.toggle("marked", i === marked));
  const move = (frame) => {
    mark(inputRows, frame.inputRow ? at : -1);
    mark(outputRows, frame.outputRow);
    slots.forEach(({ full }, i) => full.classList.toggle("absent", i >= frame.slots));
    scores.forEach((score, j) => score.classList.toggle("absent", j >= frame.logits));
    token.classList.toggle("absent", !frame.moves);
    wordToken.forEach((part) => part.classList.toggle("absent", !frame.showsWord));
    numberToken.classList.toggle("absent", frame.showsWord);
    token.setAttribute("transform", `translate(0 ${frame.y.toFixed(1)})`);
  };
  return { picture, move };
}
