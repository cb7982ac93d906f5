// Sharing of layers: sublayers as boxes, equal letters for shared ones, with the parameters that remain.
import { chosenModel, keepSizes, presetNames } from "./budget.js";
import { planCommand, preset, refusalOf, termsAt } from "./counting.js";
import { command, el, guess, panel, paragraph, pick, slider, svg } from "./kit.js";
import { count, plain } from "./numbers.js";
import { facts, follow, keep } from "./state.js";

const SHARED_KINDS = {
  none: "Nothing is shared",
  attention: "Attention is shared",
  ffn: "The feed-forward part is shared",
  all: "Whole layers are shared",
};
const SUBLAYER_NAMES = { attention: "attention", ffn: "feed-forward" };

/** Count the parameters of the layers: terms that grow with layers or groups. */
export function layerParameters(name, at, kind) {
  const body = facts.counts.forms[preset(name).form].body[kind];
  const ofLayers = (terms) => Object.fromEntries(Object.entries(terms).filter(([of]) => /[Lg]/.test(of)));
  return Object.values(body).reduce((sum, terms) => sum + termsAt(ofLayers(terms), at), 0);
}

/** Return the group of layer i of L: consecutive layers, evenly divided by ALBERT's rule. */
export const groupOf = (i, L, groups) => Math.floor((i * groups) / L);

/** Draw the section into `place`. */
export function drawSharing(place) {
  const first = "bert-base-uncased", drawn = el("div"), sliders = el("div", { class: "controls" });
  const offer = () => {
    const { name, at } = chosenModel(first);
    sliders.replaceChildren(
      slider("Layers L", at.L, (L) => keepSizes(name, { ...chosenModel(first).at, L }),
        { least: 1, most: Math.max(48, at.L) }),
      slider("Groups, each with a layer of its own", at.g, (groups) => keep({ groups }), { least: 1, most: 24 }));
  };
  const show = () => {
    const { name, at, dtype } = chosenModel(first), wrong = refusalOf(name, at);
    const own = layerParameters(name, at, "none");
    if (wrong) {
      drawn.replaceChildren(el("p", { class: "banner" }, wrong));
      return;
    }
    const box = ([kind, title]) => {
      const held = layerParameters(name, at, kind), score = facts.counts.scores.find(([of]) => of === kind)[1];
      const fewer = kind === "none" ? "" : `, ${plain((100 * (own - held)) / own, 1)} % fewer`;
      return panel(title, el("div", {}, layerBoxes(kind, at),
        el("p", { class: "held" }, el("b", {}, count(held)), ` in the layers${fewer}`)),
      `ALBERT-base of this kind scored ${plain(score, 1)}.`);
    };
    drawn.replaceChildren(
      el("div", { class: "panels" }, Object.entries(SHARED_KINDS).map(box)),
      el("p", { class: "note" },
        "Boxes of one letter are one set of numbers, applied again; an empty one is its layer's own. ",
        "A norm goes with the part that it belongs to. Sharing saves no work: all layers are applied. Scores: the "
          + "average of five tasks in Table 4 of arXiv:1909.11942, E = 128, one group: there sharing attention cost "
          + "nothing, sharing the feed-forward part did."),
      command(planCommand(name, at, Object.keys(SHARED_KINDS), dtype)));
  };
  place.append(
    el("h2", {}, "What layers share"),
    paragraph("The same layer can be applied again and again. ALBERT stores one and applies it twelve times; less can "
      + "be shared too."),
    guess("costly", "Of attention and the feed-forward part, which saves more when it is shared?",
      { attention: "attention", ffn: "the feed-forward part", same: "both the same" }, "ffn",
      "At its usual width of 4·D it has two matrices of 4·D², attention four of D²: twice as much. In ALBERT's own "
        + "table it is also what sharing costs more quality."),
    pick("Layers of this model, the one of Budget", presetNames(), chosenModel(first).name,
      (like) => { keep({ like, sizes: null, k: null }); offer(); }),
    sliders, drawn);
  offer();
  follow(drawn, show);
  show();
}

function layerBoxes(kind, { L, g }) {
  const side = 22, left = 92, high = 30;
  const shared = (part) => kind === "all" || kind === part;
  return svg("svg", {
    class: "boxes", viewBox: `0 0 ${left + side * Math.max(L, 12)} ${2 * high + 18}`, role: "img",
    "aria-label": `${SHARED_KINDS[kind]}: ${L} layers in ${kind === "none" ? L : g} groups`,
  },
  Object.entries(SUBLAYER_NAMES).map(([part, label], row) => [
    svg("text", { x: 0, y: row * high + 20 }, label),
    Array.from({ length: L }, (_, i) => {
      const group = groupOf(i, L, g), x = left + i * side, look = shared(part) ? `one tone${group % 2}` : "own";
      return [
        svg("rect", { x: x + 1.5, y: row * high + 3, width: side - 3, height: high - 6, rx: 4, class: look }),
        shared(part) && svg("text", { x: x + side / 2, y: row * high + 20, "text-anchor": "middle", class: "letter" },
          String.fromCharCode(65 + (group % 26))),
      ];
    })]),
  Array.from({ length: L }, (_, i) => (i === 0 || (i + 1) % 6 === 0) && svg("text",
    { x: left + (i + 0.5) * side, y: 2 * high + 13, "text-anchor": "middle", class: "small" }, i + 1)));
}
