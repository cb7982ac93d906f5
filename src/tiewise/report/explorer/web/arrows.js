// Rows of the table and the residual as arrows in a plane, and their logits.
import { bars, el, panel, panels, slider, svg } from "./kit.js";
import { dot, plain } from "./numbers.js";
import { keep, readNumbers } from "./state.js";
import { STORY_AXES, STORY_WORDS, live, storyMatrix } from "./story.js";

const REACH = 2; // largest absolute value of the residual's numbers
const SIDE = 200; // side of the picture

/** Draw both panels. A reader drags the residual or sets it by sliders. */
export function arrows() {
  const within = (x) => Math.max(-REACH, Math.min(REACH, Math.round(x * 20) / 20));
  const residual = () => readNumbers("residual", [1, 0.5]).map(within), table = () => storyMatrix("W_E");
  const most = () => 1.15 * Math.max(REACH, ...table().flat().map(Math.abs));
  const logits = () => table().map((row) => dot(row, residual()));
  const sliders = el("div", { class: "below" });
  const fill = () => sliders.replaceChildren(...STORY_AXES.map((axis, k) => slider(`Residual, ${axis}`, residual()[k],
    (x) => keep({ residual: residual().map((old, i) => (i === k ? x : old)) }),
    { least: -REACH, most: REACH, step: 0.05 })));
  fill();
  const drag = (event) => {
    if (!event.buttons) return;
    const box = frame.getBoundingClientRect(), along = (at) => within((2 * at - 1) * most());
    keep({
      residual: [along((event.clientX - box.left) / box.width), along((box.bottom - event.clientY) / box.height)],
    });
    fill();
  };
  const frame = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", role: "img",
    "aria-label": "The three rows and the residual as arrows; the sliders move the residual", onpointermove: drag,
    onpointerdown: (event) => { frame.setPointerCapture(event.pointerId); drag(event); } });
  live(() => arrowPlane(table(), residual(), most()), frame);
  return panels(
    panel("Rows and residual as arrows", frame, `Drag the residual. A dashed line falls from each row's tip onto the
      residual's direction: the further out it lands, the higher the logit.`),
    panel("Logits, highest first", el("div", {}, live(() => bars("Logits", logits().map((value, i) => ({
      name: STORY_WORDS[i], value, label: plain(value), colour: value < 0 ? "var(--low)" : "var(--tied)" }))
      .sort((a, b) => b.value - a.value), { most: Math.max(3, ...logits().map(Math.abs)) })), sliders),
    "A bar is as long as its logit is large, of either sign."));
}

function arrowPlane(table, residual, most) {
  const middle = SIDE / 2, place = ([x, y]) => [middle + (middle * x) / most, middle - (middle * y) / most];
  const line = (from, to, kind) => svg("path", { d: `M${from.join(" ")}L${to.join(" ")}`, class: kind });
  const length = dot(residual, residual), tip = place(residual);
  const named = (name, of, kind, further) => {
    const [x, y] = place(of.map((at) => at + (further * most * at) / (Math.hypot(...of) || 1)));
    return svg("text", { x, y: y + 3, class: kind, "text-anchor": of[0] < 0 ? "end" : "start" }, name);
  };
  return [svg("path", { d: `M0 ${middle}H${SIDE}M${middle} 0V${SIDE}`, class: "grid" }),
    table.map((row, i) => [
      line(place(row), place(residual.map((x) => (length ? (x * dot(row, residual)) / length : 0))), "fall"),
      line([middle, middle], place(row), "arrow"), svg("circle", { cx: place(row)[0], cy: place(row)[1], r: 2.5 }),
      named(STORY_WORDS[i], row, "", 0.05)]),
    line([middle, middle], tip, "residual"), svg("circle", { cx: tip[0], cy: tip[1], r: 5, class: "residual" }),
    svg("text", { x: tip[0] + 4, y: tip[1] + 14, class: "residual" }, "residual")];
}
