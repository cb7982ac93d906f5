// Factoring and sharing: four pictures of storing less, from the table's rank to the layers, and ALBERT's question.
import { drawCell } from "./cell.js";
import { drawPairs } from "./pairs.js";
import { drawSharing } from "./shared_layers.js";
import { drawSpectrum } from "./spectrum.js";

export const factoring = { id: "factoring", title: "Factoring and sharing", draw: drawFactoring };

function drawFactoring(place) {
  for (const draw of [drawSpectrum, drawSharing, drawCell, drawPairs]) draw(place);
}
