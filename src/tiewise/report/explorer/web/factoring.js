// Factoring and sharing: rank of a table, shared layers, a recurrent cell, and ALBERT's sentence order.
import { drawCell } from "./cell.js";
import { drawPairs } from "./pairs.js";
import { drawSharing } from "./shared_layers.js";
import { drawSpectrum } from "./spectrum.js";

export const factoring = { id: "factoring", title: "Factoring and sharing", draw: drawFactoring };

function drawFactoring(place) {
  for (const draw of [drawSpectrum, drawSharing, drawCell, drawPairs]) draw(place);
}
