// Numbers of the reader's comparisons for a step of the story. Each links to its report.
import { button, el } from "./kit.js";
import { facts, keep } from "./state.js";

/** Draw the numbers that Python computed for a step (story_numbers.py): [element], or [] without results. */
export function ownNumbers(step) {
  const runs = facts.runs?.runs ?? [];
  const lists = runs.map((run) => [run, run.story.filter((each) => each.step === step)])
    .filter(([, numbers]) => numbers.length);
  if (!lists.length) return [];
  const named = (run) => runs.length > 1 && el("h3", {}, run.name);
  return [el("aside", { class: "own", "aria-labelledby": "own-numbers" },
    el("h2", { id: "own-numbers" }, "The same in your comparison"),
    lists.map(([run, numbers]) => [named(run),
      el("ul", {}, numbers.map(({ sentence }) => el("li", {}, sentence))),
      el("p", {}, reportLink(run, numbers[0].section))]))];
}

/** Link to a section of a report. A page in a notebook does not know where it is, and opens the tab Runs. */
function reportLink({ report }, section) {
  const isKnown = report && !report.startsWith("report-of-comparison:");
  if (!isKnown) return button("Open the tab Runs", () => keep({ at: "runs" }));
  return el("a", { href: `${report}#:~:text=${encodeURIComponent(section)}` }, `Your report, “${section}”`);
}
