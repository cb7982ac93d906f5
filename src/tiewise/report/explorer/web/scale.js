// Share of the tables in public models of three sizes, and in the reader's model.
import { bars, el, listing, panel } from "./kit.js";
import { countParameters, preset, tableParameters, totalOf } from "./counting.js";
import { abbreviated, count, plain, rounded } from "./numbers.js";
import { facts } from "./state.js";

/**
 * Compute the share of the tables at some sizes.
 * → { V, D, L, parameters, ships, shares: { tied, untied }, estimated }; `ships` is the choice of the published model
 */
export function tableShares(name, at) {
  const byChoice = Object.fromEntries(["tied", "untied"].map((boundary) =>
    [boundary, countParameters(name, at, boundary, "none")]));
  const share = (parameters) => tableParameters(parameters) / totalOf(parameters);
  const ships = preset(name).tied === true ? "tied" : "untied";
  return { V: at.V, D: at.D, L: at.L, parameters: totalOf(byChoice[ships]), ships,
    shares: { tied: share(byChoice.tied), untied: share(byChoice.untied) }, estimated: name in facts.counts.plain };
}

/** List the public models of the comparison, then the reader's: [label, shares]. */
export function scaleRows(name, at) {
  const known = facts.counts.scale.map(({ name: model }) =>
    [model, tableShares(model, { ...preset(model).sizes, k: 1, g: 1 })]);
  return [...known, [`yours: ${name}`, tableShares(name, at)]];
}

/** Draw the shares as bars, and the sizes behind them as a table. */
export function sharesByScale(name, at) {
  const rows = scaleRows(name, at), sources = [...new Set(facts.counts.scale.map(({ source }) => source))];
  const percent = ({ estimated, shares }, choice) => {
    const share = 100 * (estimated ? rounded(shares[choice]) : shares[choice]);
    return `${estimated ? "≈ " : ""}${plain(share, 1)} %`;
  };
  const bar = ([label, of]) => ({ name: `${label}, ${of.ships}`, value: of.shares[of.ships],
    label: percent(of, of.ships), colour: `var(--${of.ships})` });
  const row = ([label, of]) => [label, count(of.V), count(of.D), count(of.L),
    `${of.estimated ? "≈ " : ""}${abbreviated(of.parameters)}`, percent(of, "tied"), percent(of, "untied")];
  return panel("The larger the model, the smaller the share of its tables",
    el("div", {}, bars("Share of the tables", rows.map(bar), { most: 1 }),
      listing("Tables in models of three sizes", ["", "V", "D", "L", "parameters", "one table", "two tables"],
        rows.map(row))),
    "Public models of about 1, 7 and 70 billion parameters, as published, next to your sizes. One table, two tables: "
      + `share of all parameters under each choice. Sizes of the public models: ${sources.join(", ")} `
      + "(repository@commit).");
}
