// What a reader has chosen, in the address behind the #, so that every picture can be sent. Prose and figures read it.

/** What Python told the page, by section. */
export const facts = typeof document === "undefined" ? {} : JSON.parse(document.getElementById("facts").textContent);

let held = null;
const watchers = new Set();

const read = () => new URLSearchParams(location.hash.slice(1));

/** The text kept under a name, or what stands there at first. */
export function kept(name, fallback = "") {
  held ??= read();
  return held.get(name) ?? fallback;
}

/** A whole list of numbers kept under a name, or `fallback` where there is none of its length. */
export function keptNumbers(name, fallback) {
  const found = kept(name).split(",").map(Number);
  return found.length === fallback.length && kept(name) && found.every(Number.isFinite) ? found : fallback;
}

// Of the address: ten changes at once and three a second, which all browsers allow
let room = 10, since = 0, waiting = 0;

function write() {
  room = Math.min(10, room + (Date.now() - since) / 350);
  since = Date.now();
  clearTimeout(waiting);
  if (room < 1) { waiting = setTimeout(write, 350); return; }
  room -= 1;
  // an address of its own would break Back for a slider that is dragged; a frame without one keeps it here alone
  try { history.replaceState(null, "", `#${held.toString().replaceAll("%2C", ",")}`); } catch { /* about:srcdoc */ }
}

/** Keep texts under names (null: as at first), and tell whoever watches. */
export function keep(values) {
  held ??= read();
  for (const [name, value] of Object.entries(values))
    value === null ? held.delete(name) : held.set(name, String(value));
  write();
  for (const watcher of [...watchers]) watcher();
}

/** Call `draw` whenever anything kept changes, as long as `place` is in the page. */
export function follow(place, draw) {
  const watcher = () => (place.isConnected ? draw() : watchers.delete(watcher));
  watchers.add(watcher);
}

/** Take the address as it stands now: somebody has pasted another into this page. */
export function reread() {
  held = read();
}
