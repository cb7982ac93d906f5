// Budget: parameters after tying, factoring and sharing at any sizes, with the digits of `tiewise plan`.
import { choice, command, el, guess, listing, panel, paragraph, pick, slider } from "./kit.js";
import { bodyCount, choiceName, choices, countParameters, neighbourRows, neighbours } from "./counting.js";
import { planCommand, planRows } from "./counting.js";
import { partCount, preset, refusalOf, savedShareText, tableParameters, totalOf } from "./counting.js";
import { count, plain } from "./numbers.js";
import { sharesByScale } from "./scale.js";
import { facts, follow, keep, readChoice, readNumbers } from "./state.js";

export const budget = { id: "budget", title: "Budget", draw: drawBudget };

const SIZE_NAMES = {
  V: "Vocabulary V, tokens", D: "Width D", L: "Layers L",
  F: "Feed-forward width", H: "Attention heads", K: "Key-value heads",
};
const LARGEST = { V: 1_000_000, D: 32_768, L: 200, F: 131_072, H: 256, K: 256 };
const DRAG_STEPS = { V: 256, F: 64 }; // steps of dragging; typed numbers are not rounded
const BAR_PARTS = {
  "input table": ["input_table"], "output table": ["output_table"], "maps at the ends": ["maps"],
  attention: ["attention", "cross_attention", "mixer"], "feed-forward": ["ffn", "experts", "shared_experts", "router"],
};
const SHARE_NAMES = { none: "nothing", attention: "attention", ffn: "feed-forward", all: "whole layers" };

/** Read the chosen model. → { name, at, kinds, dtype }: sizes by letter, kinds of sharing */
export function chosenModel(first = "gpt2") {
  const name = preset(readChoice("like", first)) ? readChoice("like", first) : first;
  const { sizes } = preset(name), letters = Object.keys(sizes);
  const whole = (x, most) => Number.isInteger(x) && x >= 1 && x <= most;
  const asked = readNumbers("sizes", Object.values(sizes));
  const held = letters.every((letter, i) => whole(asked[i], LARGEST[letter])) ? asked : Object.values(sizes);
  const at = Object.fromEntries(letters.map((letter, i) => [letter, held[i]]));
  const form = facts.counts.forms[preset(name).form], wide = form.table_width[""] ?? sizes.D;
  [at.k] = readNumbers("k", [Math.min(128, wide)]).map((k) => (whole(k, LARGEST.D) ? k : 128));
  [at.g] = readNumbers("groups", [1]).map((g) => (whole(g, LARGEST.L) ? g : 1));
  const kind = readChoice("share", "all") in SHARE_NAMES ? readChoice("share", "all") : "all";
  const dtype = readChoice("dtype") in facts.counts.training ? readChoice("dtype") : "float32";
  return { name, at, kinds: kind === "none" ? ["none"] : ["none", kind], dtype };
}

/** Store sizes that a reader changed. */
export function keepSizes(name, at) {
  const { sizes } = preset(name), moved = Object.keys(sizes).map((letter) => at[letter]);
  keep({ like: name, sizes: String(moved) === String(Object.values(sizes)) ? null : moved });
}

/** List the presets by name, sizes without a model first. */
export const presetNames = () => Object.fromEntries(facts.counts.presets.map(({ name, tied }) =>
  [name, tied === null ? name : `${name} (${tied ? "tied" : "untied"})`]));

function drawBudget(place) {
  const sliders = el("div"), finding = el("div", { class: "finding", "aria-live": "polite" });
  const figure = el("div"), rest = el("div");
  const offer = () => {
    const { name, at } = chosenModel(), { sizes } = preset(name);
    const heads = "H" in sizes && facts.counts.forms[preset(name).form].divided.some(([what]) => what === "D");
    sliders.replaceChildren(...Object.keys(sizes).map((letter) => slider(SIZE_NAMES[letter], at[letter], (x) => {
      const now = chosenModel().at;
      keepSizes(name, { ...now, [letter]: x });
    }, {
      least: 1, most: LARGEST[letter], factors: "VDFL".includes(letter),
      step: letter === "D" ? (heads ? sizes.H : 64) : DRAG_STEPS[letter] ?? 1,
    })),
    slider("Factored table, its width k", at.k, (k) => keep({ k }), { least: 1, most: 8192, factors: true }));
  };
  const show = () => {
    const { name, at, kinds, dtype } = chosenModel(), wrong = refusalOf(name, at);
    if (wrong) {
      finding.replaceChildren(paragraph(wrong));
      figure.replaceChildren();
      rest.replaceChildren();
      return;
    }
    const found = choices(name, at, kinds), near = neighbours(at, isPlainPreset(name, at) ? name : null);
    const tied = found.find(({ boundary, kind }) => boundary === "tied" && kind === "none");
    finding.replaceChildren(paragraph(
      `One table at both ends leaves ${bodyCount(tied, tied.total)} parameters, ${savedShareText(tied)} `
        + "fewer than two. ",
      `Of the ${near.length} models of the catalogue nearest in size, ${near.filter((row) => row[4]).length} tie.`));
    figure.replaceChildren(stackedBars(found, at, kinds));
    rest.replaceChildren(
      el("div", { class: "scale" }, sharesByScale(name, at)),
      el("h2", {}, "Every figure"),
      listing("Costs by choice", ["", ...found.map((each) => choiceName(each, at, kinds))], planRows(found, dtype)),
      el("p", { class: "note" },
        "Saved: compared with the same model untied, without sharing. Training: weights, gradients and the optimizer's "
          + "state. ",
        "Tying changes no work: the head multiplies by a table of the same size."),
      command(planCommand(name, at, kinds, dtype)),
      el("h2", {}, "Nearest in V, D and L, and what they chose"),
      listing("Nearest models", facts.counts.header, neighbourRows(near)),
      el("p", { class: "note" },
        "A factor counts the same in each of the three, up or down. A catalogue repeats what others wrote: ",
        el("code", {}, "tiewise check PATH"), " on the files themselves is better evidence."));
  };
  const { name, kinds, dtype } = chosenModel();
  place.append(
    paragraph("A vocabulary is expensive: two tables of V rows, each as wide as the model. Choose a model, or drag its "
      + "sizes."),
    askGrowth(), finding,
    el("div", { class: "panels maps" },
      panel("Sizes", el("div", {},
        pick("Like this model", presetNames(), name, (like) => { keep({ like, sizes: null, k: null }); offer(); }),
        sliders), "Sliders move in steps; a number that you type is used as it is."),
      panel("What each choice holds", el("div", {},
        el("div", { class: "asked" }, el("span", {}, "Layers share "),
          choice("Layers share", SHARE_NAMES, kinds.at(-1), (share) => keep({ share }))),
        slider("In this many groups", chosenModel().at.g, (groups) => keep({ groups }), { least: 1, most: 24 }),
        el("div", { class: "asked" }, el("span", {}, "Weights and gradients in "),
          choice("dtype", { float32: "float32", bfloat16: "bfloat16" }, dtype, (to) => keep({ dtype: to }))),
        figure),
      "Bars are on one scale. A table at both ends is counted once; a shared layer too, though it is applied as "
        + "often.")),
    rest);
  offer();
  follow(rest, show);
  show();
}

const isPlainPreset = (name, at) => Object.entries(preset(name).sizes).every(([letter, value]) => at[letter] === value);

/** Ask a question whose answer comes from the same counts. */
function askGrowth() {
  const share = (name) => {
    const { sizes } = preset(name), at = { ...sizes, k: 1, g: 1 };
    const [untied, tied] = ["untied", "tied"].map((of) => totalOf(countParameters(name, at, of, "none")));
    return (untied - tied) / untied;
  };
  const [small, large] = ["gpt2", "llama-3-8b"].map((name) => `${plain(100 * share(name), 1)} %`);
  const times = plain(preset("llama-3-8b").sizes.V / preset("gpt2").sizes.V, 1);
  return guess("grown",
    `GPT-2 small ties, and would save ${small} of its untied self. What would tying save of Llama 3 8B, whose `
      + `vocabulary is ${times} times as large?`,
    { more: "more than that", same: "about the same", less: "much less" }, "less",
    `It would save ${large}. A table grows with V·D, the layers with L·D²: the wider and deeper a model, the less `
      + "its tables weigh. Choose llama-3-8b below and drag D.");
}

/** Draw a bar per choice in parts: tables in the colour of the boundary, the body in greys. */
function stackedBars(found, at, kinds) {
  const most = Math.max(...found.map((each) => each.total)), named = Object.values(BAR_PARTS).flat();
  const split = (parameters) => {
    const parts = Object.entries(BAR_PARTS).map(([label, of]) =>
      [label, of.reduce((sum, part) => sum + (parameters[part] ?? 0), 0)]);
    const others = Object.entries(parameters).filter(([part]) => !named.includes(part));
    return [...parts, ["all else", totalOf(Object.fromEntries(others))]].filter(([, held]) => held);
  };
  const tone = (label) => label.replaceAll(" ", "-");
  const bar = (each) => {
    const parts = split(each.parameters), about = each.estimated ? "≈ " : "",
      share = (held) => `${about}${plain((100 * held) / each.total, 1)} %`;
    const said = parts.map(([label, held]) => `${label} ${share(held)}`).join(", ");
    return el("div", { class: "row" }, el("span", {}, choiceName(each, at, kinds)),
      el("span", { class: "whole", role: "img", "aria-label": said },
        parts.map(([label, held]) => el("span", {
          class: tone(label), title: `${label}: ${partCount(each, BAR_PARTS[label]?.[0] ?? label, held)}`,
          style: { width: `${(100 * held) / most}%`, "--of": `var(--${each.boundary})` },
        }))),
      el("span", {}, el("b", {}, bodyCount(each, each.total)),
        el("small", {}, `tables ${share(tableParameters(each.parameters))}`)));
  };
  const legend = ["tables", "maps at the ends", "attention", "feed-forward", "all else"];
  return el("div", { class: "stack" },
    el("div", { class: "legend", "aria-hidden": "true" }, legend.map((label) =>
      el("span", {}, el("i", { class: tone(label === "tables" ? "input table" : label) }), ` ${label}`))),
    found.map(bar));
}
