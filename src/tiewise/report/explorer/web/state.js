// Choices of the reader, stored in the address after the #. A link restores every picture.

/** Facts that Python embedded in the page, by section. */
export const facts = typeof document === "undefined" ? {} : JSON.parse(document.getElementById("facts").textContent);

let held = null;
const watchers = new Set();

const read = () => new URLSearchParams(location.hash.slice(1));

/** Return the stored text of a name, or `fallback`. */
export function readChoice(name, fallback = "") {
  held ??= read();
  return held.get(name) ?? fallback;
}

/** Return the stored numbers of a name, or `fallback` if they are invalid. */
export function readNumbers(name, fallback) {
  const found = readChoice(name).split(",").map(Number);
  return found.length === fallback.length && readChoice(name) && found.every(Number.isFinite) ? found : fallback;
}

// Limit changes of the address to ten at once and three a second, which all browsers allow.
let room = 10, since = 0, waiting = 0;

function write() {
  room = Math.min(10, room + (Date.now() - since) / 350);
  since = Date.now();
  clearTimeout(waiting);
  if (room < 1) { waiting = setTimeout(write, 350); return; }
  room -= 1;
  // replace the address, because a new entry per slider move would break Back; a frame has no address
  try { history.replaceState(null, "", `#${held.toString().replaceAll("%2C", ",")}`); } catch { /* about:srcdoc */ }
}

/** Store texts under names (null removes one), and redraw everything that follows them. */
export function keep(values) {
  held ??= read();
  for (const [name, value] of Object.entries(values))
    value === null ? held.delete(name) : held.set(name, String(value));
  write();
  for (const watcher of [...watchers]) watcher();
}

/** Call `draw` after every change of a stored choice while `place` is in the page. */
export function follow(place, draw) {
  const watcher = () => (place.isConnected ? draw() : watchers.delete(watcher));
  watchers.add(watcher);
}

/** Read the address again after a reader has changed it. */
export function readAddress() {
  held = read();
}
