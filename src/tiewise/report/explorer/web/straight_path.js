// Drawing of the straight path: one word's numbers in a model whose blocks add nothing.
import { svg } from "./kit.js";
import { dot, plain } from "./numbers.js";
import { STORY_WORDS } from "./story.js";

const STREAM = 122; // x of the residual stream

const lettering = (x, y, kind, ...text) => svg("text", { x, y, class: kind }, text);
const lowered = (name, below, behind = "") =>
  [name, svg("tspan", { dy: 4, "font-size": 10 }, below), svg("tspan", { dy: -4 }, behind)];

/** Draw boxes side by side, centred on the stream, with their name to the right. */
function boxRow(y, wide, texts, { marked = -1, kind = "", named = "" } = {}) {
  const start = STREAM - ((wide + 6) * texts.length - 6) / 2;
  return [texts.map((text, i) => {
    const x = start + i * (wide + 6), on = i === marked ? " marked" : "";
    return [svg("rect", { x, y, width: wide, height: 28, rx: 6, class: `box ${kind}${on}` }),
      lettering(x + wide / 2, y + 19, `middle${on}`, text)];
  }), lettering(start + (wide + 6) * texts.length + 6, y + 19, "", named)];
}

/** Draw a block next to the stream, with its unused way in and out. */
const besideStream = (name, y) => [
  svg("path", { d: `M${STREAM} ${y - 28}h84v14m0 28v14H${STREAM + 9}`, class: "bypassed" }),
  svg("rect", { x: STREAM + 34, y: y - 14, width: 100, height: 28, rx: 6, class: "bypassed" }),
  lettering(STREAM + 84, y + 5, "middle", name), lettering(STREAM + 142, y + 5, "", "adds 0"),
  svg("circle", { cx: STREAM, cy: y + 28, r: 9, class: "box" }), lettering(STREAM, y + 33, "middle", "+"),
];

/** Draw the picture for a word's place and a table [3, 2]. */
export function straightPath(at, table) {
  const numbers = table[at].map((x) => plain(x)), logits = table.map((other) => dot(table[at], other));
  const best = logits.indexOf(Math.max(...logits));
  const label = `${STORY_WORDS[at]} picks the row ${numbers.join(", ")}. Attention and MLP add nothing, so it arrives
    unchanged. Logits: ${STORY_WORDS.map((word, j) => `${word} ${plain(logits[j])}`).join(", ")}.`;
  return svg("svg", { class: "straight", viewBox: "0 0 340 560", role: "img", "aria-label": label },
    svg("path", { d: `M${STREAM} 60V504`, class: "stream" }),
    lettering(STREAM, 20, "middle word", STORY_WORDS[at]),
    boxRow(32, 30, table.map((_, j) => String(Number(j === at))), { marked: at, named: "its one-hot" }),
    boxRow(84, 96, [["times ", lowered("W", "E")]], { kind: "table", named: "picks its row" }),
    boxRow(136, 62, numbers, { named: "the residual" }),
    besideStream("attention", 218), besideStream("MLP", 306), lettering(STREAM + 34, 364, "", "… more blocks"),
    boxRow(388, 62, numbers, { named: "unchanged" }),
    boxRow(446, 96, [["times ", lowered("W", "E", "ᵀ")]], { kind: "table", named: "the same table" }),
    boxRow(500, 62, logits.map((x) => plain(x)), { marked: best }), lettering(STREAM + 112, 519, "", "logits"),
    STORY_WORDS.map((word, j) => lettering(STREAM + (j - 1) * 68, 548, j === best ? "middle marked" : "middle", word)));
}
