// Draws every figure, and draws it again in the other theme when the theme changes.
const { figures, themes } = JSON.parse(document.getElementById("figures").textContent);
// a finger that scrolls must not zoom a figure by accident
const dragmode = window.matchMedia("(pointer: coarse)").matches ? false : "zoom";
// nor cover a figure with buttons where there is no pointer to wake them, or no room beside the legend
const bare = window.matchMedia("(pointer: coarse), (max-width: 600px)").matches;
const config = {
  responsive: true, displayModeBar: bare ? false : "hover", displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], doubleClick: "reset",
};
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
const fits = new ResizeObserver((seen) => requestAnimationFrame(() => seen.forEach(({ target }) => {
  const table = target.firstElementChild;
  table.classList.remove("stacked");
  table.classList.toggle("stacked", target.scrollWidth > target.clientWidth + 1);
})));
document.querySelectorAll(".scroll").forEach((place) => {
  const [head, ...rows] = place.firstElementChild.rows;
  const names = [...head.cells].map((cell) => cell.textContent);
  rows.forEach((row) => [...row.cells].forEach((cell, i) => { cell.dataset.name = names[i]; }));
  fits.observe(place);
});

// a figure that was drawn while folded away has had no width
document.querySelectorAll("details").forEach((place) => place.addEventListener("toggle", () => {
  if (place.open) place.querySelectorAll(".plot").forEach((plot) => Plotly.Plots.resize(plot));
}));

startTheme((theme) => figures.forEach(({ data, layout }, i) => {
  Plotly.react(`plot-${i}`, data, { ...layout, dragmode, template: themes[theme] }, config);
}));
