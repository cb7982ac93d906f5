// The page: a tab per section, the theme, and the address. Everything above is a section or a piece of one.
import { budget } from "./budget.js";
import { checkpoint } from "./checkpoint.js";
import { factoring } from "./factoring.js";
import { gradients } from "./gradients.js";
import { announce, button, el } from "./kit.js";
import { runs } from "./runs.js";
import { facts, follow, keep, kept, reread } from "./state.js";
import { symmetry } from "./symmetry.js";

// comparisons have a part where the page was given some
export const SECTIONS = [symmetry, budget, gradients, factoring, checkpoint, ...(facts.runs ? [runs] : [])];

function start() {
  const tabs = document.getElementById("tabs"), place = document.getElementById("place");
  const at = () => SECTIONS.find(({ id }) => id === kept("at", facts.at)) ?? SECTIONS[0];
  let shown = null;
  const show = () => {
    tabs.querySelectorAll("button").forEach((tab) => {
      const on = tab.value === at().id;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    });
    if (shown === at()) return;
    shown = at();
    place.replaceChildren(
      el("section", { role: "tabpanel", id: shown.id, "aria-labelledby": `tab-${shown.id}`, tabindex: -1 },
        el("h1", {}, shown.title)));
    shown.draw(place.firstElementChild);
    document.title = `${shown.title}: tiewise explore`;
  };
  const open = (id) => { keep({ at: id }); announce(at().title); };
  tabs.append(...SECTIONS.map(({ id, title }) => button(title, () => open(id),
    { role: "tab", value: id, id: `tab-${id}`, "aria-controls": id })));
  tabs.addEventListener("keydown", ({ key, target }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!step) return;
    const all = [...tabs.children], next = all[(all.indexOf(target) + step + all.length) % all.length];
    next.focus();
    open(next.value);
  });
  follow(place, show);
  window.addEventListener("hashchange", () => { reread(); shown = null; show(); });
  startTheme(() => {});
  show();
}

// the same script is what a worker runs, which has no page
if (typeof document !== "undefined") start();
