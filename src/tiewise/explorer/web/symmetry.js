// Symmetry, a story in six steps: what one table at both ends cannot say, and what it costs to say it anyway.
import { el, editable, heat, panel, panels, paragraph } from "./kit.js";
import { plain, product, transposed } from "./numbers.js";
import { keep, keptNumbers } from "./state.js";

const WORDS = ["New", "York", "City"];
const TABLE = [1, 0.5, 0.8, 0.9, 0.3, 1.2];

export const symmetry = { id: "symmetry", title: "Symmetry", draw: drawSymmetry };

function drawSymmetry(place) {
  const rowsOf = (flat) => WORDS.map((_, i) => flat.slice(2 * i, 2 * i + 2));
  const result = el("div");
  const show = (table) => {
    const scores = product(table, transposed(table));
    result.replaceChildren(heat("Scores of the direct path", scores, { rows: WORDS }),
      paragraph(`New → York ${plain(scores[0][1], 3)} = York → New ${plain(scores[1][0], 3)}`));
  };
  const table = rowsOf(keptNumbers("W", TABLE));
  place.append(panels(
    panel("The table, a row per word", editable("Table", table, { rows: WORDS, columns: ["dim 0", "dim 1"],
      change: (found) => { keep({ W: found.flat() }); show(found); } }), "Type any numbers."),
    panel("What the direct path scores", result, "Row: the word before. Column: the word after.")));
  show(table);
}
