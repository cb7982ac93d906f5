// The page is readable as it is. This script fits tables, fills folded parts, and starts plotly for a figure on request.
["theme", "copy"].forEach((id) => { document.getElementById(id).hidden = false; });
document.getElementById("copy").addEventListener("click", async (event) => {
  const button = event.currentTarget;
  const command = document.getElementById("command");
  window.getSelection().selectAllChildren(command); // what remains where the clipboard is closed to pages
  try {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});

// a table that is wider than its place shows each row as a block of named values, so nothing scrolls sideways
const fits = new ResizeObserver((seen) => requestAnimationFrame(() => {
  const tables = seen.map(({ target }) => target.firstElementChild);
  tables.forEach((table) => table.classList.remove("stacked"));
  const wide = tables.filter((table) => table.parentElement.scrollWidth > table.parentElement.clientWidth + 1);
  wide.forEach(stack);
}));

/** Show the rows of a table as blocks; name each value by its column, and mark the values that are missing. */
function stack(table) {
  const [head, ...rows] = table.rows;
  const names = [...head.cells].map((cell) => cell.textContent);
  if (!table.dataset.named) rows.forEach((row) => [...row.cells].forEach((cell, i) => {
    cell.dataset.name = names[i];
    cell.classList.toggle("none", i > 0 && ["–", ""].includes(cell.textContent));
  }));
  table.dataset.named = "yes";
  table.classList.add("stacked");
}

/** Prepare the tables and buttons of a part of the page. */
function prepare(part) {
  part.querySelectorAll(".scroll").forEach((place) => fits.observe(place));
  if ("DecompressionStream" in window) part.querySelectorAll(".start").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => makeInteractive(button));
  });
}

// a folded part is a text in <noscript> until it is opened
document.querySelectorAll("details").forEach((place) => place.addEventListener("toggle", () => {
  const text = place.querySelector(":scope > noscript");
  if (!text) return;
  const part = document.createElement("div");
  part.innerHTML = text.textContent;
  text.replaceWith(part);
  prepare(part);
}));

let theme = "light", plotly, record;
const drawn = new Map(); // index of a figure → its element

/** Run plotly, which is compressed in the page until now; return when it has run. */
async function startPlotly() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const code = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(code).text();
  document.head.append(script);
  record = JSON.parse(document.getElementById("figures").textContent);
}

/** Replace a static chart by plotly's figure with the same data. */
async function makeInteractive(button) {
  const index = Number(button.dataset.figure), place = document.getElementById(`plot-${index}`);
  button.disabled = true;
  button.firstChild.textContent = "Starting";
  plotly ??= startPlotly();
  await plotly;
  place.textContent = "";
  place.style.height = `${figureForScreen(index).layout.height}px`;
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", button.closest("figure").querySelector("h3").textContent);
  place.tabIndex = -1;
  drawn.set(index, place);
  await draw(index);
  if (document.activeElement === button || document.activeElement === document.body) place.focus({ preventScroll: true });
  button.remove();
}

const narrow = window.matchMedia("(max-width: 600px)");
const LEGEND_LINE = 22, LEGEND_LETTERS = 34, TITLE_LETTERS = 24, TICKS = 4;

/** Return a figure's data and layout, on a narrow screen with short lines, few ticks, and room for the legend. */
function figureForScreen(index) {
  if (!narrow.matches) return record.figures[index];
  const { data, layout } = structuredClone(record.figures[index]);
  let lines = 0;
  for (const trace of data) {
    if (trace.colorbar) Object.assign(trace.colorbar, { nticks: TICKS, tickangle: 0 });
    if (!trace.name || trace.showlegend === false) continue;
    trace.name = inLines(trace.name, LEGEND_LETTERS);
    lines += trace.name.split("<br>").length;
  }
  layout.height += LEGEND_LINE * Math.max(0, lines - 2);
  for (const name of Object.keys(layout).filter((key) => key.startsWith("xaxis"))) {
    const axis = layout[name];
    if (axis.title?.text) axis.title.text = inLines(axis.title.text, TITLE_LETTERS);
    if (axis.tickvals || axis.type === "category") continue;
    delete axis.dtick;
    axis.nticks = TICKS;
  }
  return { data, layout };
}

/** Return a text in lines of at most so many letters, where its words allow it. */
function inLines(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (longer.length <= most) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.filter(Boolean).join("<br>");
}

/** Draw an interactive figure in the theme of the page. */
function draw(index) {
  const { data, layout } = figureForScreen(index);
  // a finger that scrolls must not zoom a figure by accident, nor buttons cover it where there is no room beside the legend
  const touched = window.matchMedia("(pointer: coarse)").matches;
  const bare = touched || narrow.matches;
  const config = {
    responsive: true, displayModeBar: bare ? false : "hover", displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], doubleClick: "reset",
  };
  const dragmode = touched ? false : "zoom";
  return Plotly.react(drawn.get(index), data, { ...layout, dragmode, template: record.themes[theme] }, config);
}

prepare(document);
startTheme((chosen) => {
  theme = chosen;
  drawn.forEach((_, index) => draw(index));
});
