// Runs: comparisons side by side, with verdict, differences with intervals, and curves.
import { curves, curveTable } from "./curves.js";
import { choice, command, el, listing, panel, panels } from "./kit.js";
import { plain } from "./numbers.js";
import { facts, follow, keep, readChoice } from "./state.js";

const MEASURE_NAMES = {
  tuning: "Loss on tuning text", ahead: "Minus the reference", training: "Training loss", share: "Head path's share",
  cosine: "Cosine of both paths",
};
const SCALES = { one: "One scale for all", own: "A scale for each" };
export const runs = { id: "runs", title: "Runs", draw: drawRuns };

function drawRuns(place) {
  const { runs: shown } = facts.runs, several = shown.length > 1;
  const measured = Object.entries(MEASURE_NAMES).filter(([name]) => shown.some(({ measures }) => measures[name]));
  const figures = el("div"), told = shown.some(({ differences }) => differences.length), first = measured[0]?.[0];
  const asked = () => (measured.some(([name]) => name === readChoice("r.measure")) ? readChoice("r.measure") : first);
  place.append(...[
    shown.map(({ name, verdict }) =>
      el("p", { class: "finding" }, several && el("strong", {}, `${name}: `), verdict)),
    told && panels(panel("Validation loss minus the reference's, in nats per token", intervals(shown),
      "A dot is the mean over pairs of seeds, its line the 95 % interval. Left of the middle line: better than the "
        + "reference.", differenceTable(shown))),
    first && el("div", { class: "chosen" },
      choice("What the curves show", Object.fromEntries(measured), asked(), (name) => keep({ "r.measure": name })),
      several && choice("Scale of the curves", SCALES, readChoice("r.scale", "one"), (of) => keep({ "r.scale": of }))),
    figures, shown.map(drawDetails)].flat().filter(Boolean));
  const draw = () => first && figures.replaceChildren(
    panels(shown.filter(({ measures }) => measures[asked()]).map((run) => drawChart(run, asked()))));
  draw();
  let drawn = "";
  follow(figures, () => { if (drawn !== (drawn = asked() + readChoice("r.scale"))) draw(); });
}

/** Draw the curves of one comparison, on a common scale unless the reader chose separate ones. */
function drawChart({ name, measures }, measure) {
  const { title, unit, caption, level, range, lines } = measures[measure], { colours, runs: all } = facts.runs;
  const values = all.flatMap((run) => run.measures[measure]?.lines ?? [])
    .flatMap(({ points }) => points.map(([, y]) => y));
  const hasOneScale = readChoice("r.scale", "one") === "one" && all.length > 1;
  const one = hasOneScale ? [Math.min(...values), Math.max(...values)] : null;
  const drawn = lines.map(({ arm, points, thin }) => ({ name: arm, points, thin, colour: colours[arm] }));
  const heading = all.length > 1 ? `${title}: ${name}` : title, more = { x: "training step", digits: 4 };
  const figure = curves(heading, drawn, { ...more, y: unit, level, range: range ?? one });
  return panel(heading, figure, caption, curveTable(heading, drawn, more));
}

const rowName = (run, arm) => (facts.runs.runs.length > 1 ? `${run.name}: ${arm}` : `${arm} − ${run.reference}`);

/** Draw differences as dots with intervals around a line at zero. */
function intervals(shown) {
  const rows = shown.flatMap((run) => run.differences.map((each) => ({ ...each, name: rowName(run, each.arm) })));
  const reached = rows.flatMap(({ mean, low, high }) => [mean, low ?? 0, high ?? 0]);
  const far = 1.05 * Math.max(1e-9, ...reached.map(Math.abs));
  const put = (x) => `${(50 + (50 * x) / far).toFixed(2)}%`;
  const wide = (low, high) => `${((50 * (high - low)) / far).toFixed(2)}%`;
  const one = ({ arm, name, mean, low, high, said }) => el("div", {}, el("span", {}, name),
    el("span", { class: "span", "aria-hidden": "true", style: { "--of": facts.runs.colours[arm] } },
      el("i", { class: "zero" }),
      low !== null && el("i", { class: "reach", style: { left: put(low), width: wide(low, high) } }),
      el("i", { class: "dot", style: { left: put(mean) } })),
    el("span", {}, said));
  return el("div", { class: "bars intervals", role: "group", "aria-label": "Differences" }, rows.map(one));
}

function differenceTable(shown) {
  const rows = shown.flatMap((run) => run.differences.map(({ arm, said, seeds, detected }) =>
    [rowName(run, arm), said, plain(seeds, 0), detected ? "yes" : "no"]));
  return listing("Differences of validation loss", ["arm", "difference [95 %]", "pairs of seeds", "detected"], rows);
}

/** Draw table, notes and command of a comparison. */
function drawDetails({ name, results, notes, command: line }) {
  return el("section", { class: "about" }, el("h2", {}, facts.runs.runs.length > 1 ? name : "Results"),
    results && listing(`Results of ${name}`, results.header, results.rows),
    notes.map((note) => el("p", {}, note)), command(line));
}
