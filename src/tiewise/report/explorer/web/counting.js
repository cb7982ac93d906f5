// Parameters of a model at any sizes: evaluates the terms that Python counted (planning/resized.py). Letters: V tokens,
// D width, L layers, F feed-forward width, H heads, K key-value heads, k width of a factored table, g groups of layers
// that share.
import { abbreviated, count, plain, rounded, size } from "./numbers.js";
import { facts } from "./state.js";

export const preset = (name) => facts.counts.presets.find((each) => each.name === name);

/** Evaluate a sum of products of sizes: { "DDL": 4, "DDK/H": 2 } is 4·D²·L + 2·D²·K/H, an integer. */
export function termsAt(terms, at) {
  const product = (letters) => [...letters].reduce((found, letter) => found * at[letter], 1);
  return Object.entries(terms ?? {}).reduce((sum, [letters, times]) => {
    const [over, under = ""] = letters.split("/");
    return sum + (times * product(over)) / product(under);
  }, 0);
}

/** Count parameters by component, in the order of display. */
export function countParameters(name, at, boundary, kind) {
  const form = facts.counts.forms[preset(name).form], terms = { ...form.ends[boundary], ...form.body[kind] };
  const parts = Object.keys(facts.counts.components).map((part) => [part, termsAt(terms[part], at)]);
  return Object.fromEntries(parts.filter(([, held]) => held));
}

export const totalOf = (parameters) => Object.values(parameters).reduce((a, b) => a + b, 0);
export const tableParameters = (parameters) => (parameters.input_table ?? 0) + (parameters.output_table ?? 0);
export const boundaryText = (boundary, at) => (boundary === "factored" ? `factored:${at.k}` : boundary);
export const shareText = (kind, at) => (kind !== "none" && at.g > 1 ? `${kind}:groups=${at.g}` : kind);

/** Count every boundary with every kind of sharing, and savings against the untied, unshared model. */
export function choices(name, at, kinds) {
  const plainest = totalOf(countParameters(name, at, "untied", "none"));
  return facts.counts.boundaries.flatMap((boundary) => kinds.map((kind) => {
    const parameters = countParameters(name, at, boundary, kind), whole = totalOf(parameters);
    const saved = plainest - whole, estimated = name in facts.counts.plain;
    return { boundary, kind, parameters, total: whole, saved, savedShare: saved / plainest, estimated };
  }));
}

// Components that are exact even if the body is an estimate (planning/certainty.py).
const AT_TABLES = ["input_table", "output_table", "other_tables", "maps", "head_bias"];
const percent = (share) => `${plain(100 * share, 1)} %`;

/** Format parameters of the model or body: all digits, or ≈ and three digits of an estimate. */
export const bodyCount = ({ estimated }, value) => (estimated ? `≈ ${abbreviated(rounded(value))}` : count(value));

/** Format the parameters of a component. */
export const partCount = (of, part, value) => (AT_TABLES.includes(part) ? count(value) : bodyCount(of, value));

/** Format the share that a choice saves. The untied, unshared model saves exactly nothing. */
export function savedShareText({ estimated, kind, saved, savedShare }) {
  const exact = !estimated || (kind === "none" && saved === 0);
  return exact ? percent(savedShare) : `≈ ${percent(rounded(savedShare))}`;
}

const savedCount = (of) => (of.kind === "none" ? count(of.saved) : bodyCount(of, of.saved));
const bytesText = ({ estimated }, bytes) => (estimated ? `≈ ${size(rounded(bytes))}` : size(bytes));

/** Name a choice in one line, as columns of a plan do. */
export function choiceName({ boundary, kind }, at, kinds) {
  return boundaryText(boundary, at) + (kinds.length > 1 ? `, share ${shareText(kind, at)}` : "");
}

/** Return the rows of `tiewise plan`: parameters, checkpoint, training. A row of one cell is a heading. */
export function planRows(found, dtype) {
  const { components, checkpoint, training, optimizers } = facts.counts;
  const each = (name, show) => [name, ...found.map(show)];
  const held = ([part]) => found.some(({ parameters }) => part in parameters);
  return [
    ["parameters"],
    ...Object.entries(components).filter(held).map(([part, label]) =>
      each(label, (of) => (part in of.parameters ? partCount(of, part, of.parameters[part]) : "–"))),
    each("total", (of) => bodyCount(of, of.total)),
    each("saved", savedCount),
    each("saved, share", savedShareText),
    ["checkpoint"],
    ...Object.entries(checkpoint).map(([type, bytes]) => each(type, (of) => bytesText(of, of.total * bytes))),
    [`training, ${dtype}`],
    ...Object.entries(optimizers).map(([optimizer, label]) =>
      each(label, (of) => bytesText(of, of.total * training[dtype][optimizer]))),
  ];
}

/** Explain why the sizes are invalid and how to fix them; null if they are valid. */
export function refusalOf(name, at) {
  const { forms, options } = facts.counts, form = forms[preset(name).form], wide = termsAt(form.table_width, at);
  for (const [what, by] of form.divided) {
    if (at[what] % at[by] === 0) continue;
    const divides = (of) => at[what] % of === 0;
    const below = nextFrom(at[by], -1, divides), above = nextFrom(at[by], 1, divides);
    const near = [below, above].filter((of) => of >= 1 && of <= at[what]).map(count).join(" or ");
    return `${what} = ${count(at[what])} is not a multiple of ${by} = ${count(at[by])} (${options[by]}). `
      + `Choose ${by} = ${near}, or another ${what}.`;
  }
  if (at.k > wide)
    return `A factored table of k = ${count(at.k)} is wider than this model's own, which is ${count(wide)}. `
      + `Choose k ≤ ${count(wide)}.`;
  if (at.g > at.L) return `${at.g} groups of ${at.L} layers cannot be. Choose ${at.L} groups or fewer.`;
  return null;
}

function nextFrom(start, step, fits) {
  let at = start;
  while (at >= 1 && !fits(at)) at += step;
  return at;
}

/**
 * Find the catalogue's nearest models by √(ln²(V/V') + ln²(D/D') + ln²(L/L')), smallest first.
 * Of models with equal sizes and tying only the first counts.
 */
export function neighbours(at, but) {
  const away = ([, V, D, L]) => Math.hypot(Math.log(V / at.V), Math.log(D / at.D), Math.log(L / at.L));
  const { models } = facts.counts, choice = ([, V, D, L, tied]) => [V, D, L, tied].join();
  const counted = new Set(models.filter(([name]) => name === but).map(choice));
  const isNew = (row) => !counted.has(choice(row)) && Boolean(counted.add(choice(row)));
  return models.filter(isNew)
    .map((row) => [away(row), row])
    .sort(([a], [b]) => a - b)
    .slice(0, 6)
    .map(([, row]) => row);
}

/** Return the rows of neighbours as `tiewise plan` prints them. */
export const neighbourRows = (near) => near.map(([name, V, D, L, tied, checked]) => [
  name, count(V), count(D), String(L), plain(V / D, 1),
  tied === null ? "not known" : tied ? "tied" : "untied", checked,
]);

/** Return the command that prints the same figures. */
export function planCommand(name, at, kinds, dtype) {
  const { plain: alone, options, boundaries } = facts.counts, { sizes } = preset(name);
  const moved = name in alone || Object.entries(sizes).some(([letter, value]) => value !== at[letter]);
  return ["tiewise plan", name in alone ? null : `--like ${name}`, name in alone && alone[name] ? "--gated" : null,
    ...(moved ? Object.keys(sizes).map((letter) => `${options[letter]} ${at[letter]}`) : []),
    `--boundary ${boundaries.map((boundary) => boundaryText(boundary, at)).join(",")}`,
    `--share ${kinds.map((kind) => shareText(kind, at)).join(",")}`,
    dtype === "float32" ? null : `--dtype ${dtype}`].filter(Boolean).join(" ");
}
