// The page: a tab per section, the theme, and the address.
import { budget } from "./budget.js";
import { checkpoint } from "./checkpoint.js";
import { factoring } from "./factoring.js";
import { gradients } from "./gradients.js";
import { announce, button, el } from "./kit.js";
import { runs } from "./runs.js";
import { facts, follow, keep, readChoice, readAddress } from "./state.js";
import { symmetry } from "./symmetry.js";

// the tab of comparisons exists if the page has any
export const SECTIONS = [symmetry, budget, gradients, factoring, checkpoint, ...(facts.runs ? [runs] : [])];

function start() {
  const tabs = document.getElementById("tabs"), place = document.getElementById("place");
  const at = () => SECTIONS.find(({ id }) => id === readChoice("at", facts.at)) ?? SECTIONS[0];
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
  window.addEventListener("hashchange", () => { readAddress(); shown = null; show(); });
  startTheme(() => {});
  show();
}

// a worker runs the same script and has no document
if (typeof document !== "undefined") start();
