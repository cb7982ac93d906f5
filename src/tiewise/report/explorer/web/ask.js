// Long work on files in workers, with progress and cancellation, so that the page stays responsive.
import { openFolder } from "./folder.js";
import { rowsOf, sameBytes, scan } from "./scans.js";
import { Refusal } from "./stored.js";

/** Serve jobs in a worker. A message { job, given } names a function and its arguments. */
function serveJobs() {
  const jobs = { openFolder, rowsOf, sameBytes, scan };
  globalThis.onmessage = async ({ data: { job, given } }) => {
    try {
      globalThis.postMessage({ made: await jobs[job](...given, (share) => globalThis.postMessage({ share })) });
    } catch (error) {
      globalThis.postMessage({ wrong: error instanceof Refusal ? error.message
        : `this page failed on it (${error.message}); tiewise check reads it` });
    }
  };
}

/** Run one job in a new worker. Rejects with a Refusal, or with an AbortError if `signal` aborts. */
export function runJob(job, given, { signal, progress = () => {} } = {}) {
  // the worker runs the script of the page, which draws nothing without a document
  const url = URL.createObjectURL(new Blob([document.getElementById("code").textContent, "\nserveJobs();"],
    { type: "text/javascript" }));
  const worker = new Worker(url);
  const asked = new Promise((done, fail) => {
    const cancel = () => fail(new DOMException("cancelled", "AbortError"));
    if (signal?.aborted) cancel();
    signal?.addEventListener("abort", cancel);
    worker.onerror = (event) => fail(new Refusal(`this page failed on it (${event.message}); tiewise check reads it`));
    worker.onmessage = ({ data }) => {
      if (data.share !== undefined) progress(data.share);
      else if (data.wrong !== undefined) fail(new Refusal(data.wrong));
      else done(data.made);
    };
    worker.postMessage({ job, given });
  });
  return asked.finally(() => { worker.terminate(); URL.revokeObjectURL(url); });
}

/** Scan a whole table with its rows divided among the processor's cores. → { dots, lengths } of all rows */
export async function scanAll(table, queries, { signal, progress = () => {} } = {}) {
  const rows = table.shape[0], parts = Math.max(1, Math.min(4, navigator.hardwareConcurrency || 1,
    Math.ceil(rows / 4096)));
  const bounds = Array.from({ length: parts + 1 }, (_, i) => Math.floor((rows * i) / parts)),
    shares = new Array(parts).fill(0);
  const told = (i) => (share) => { shares[i] = share; progress(shares.reduce((a, b) => a + b) / parts); };
  const stop = new AbortController(), either = signal ? AbortSignal.any([signal, stop.signal]) : stop.signal;
  const jobs = shares.map((_, i) => runJob("scan", [table, queries, bounds[i], bounds[i + 1]],
    { signal: either, progress: told(i) }));
  const found = await Promise.all(jobs).catch((error) => { stop.abort(); throw error; });
  const joined = (pick) => { const whole = new Float64Array(rows);
    found.forEach((part, i) => whole.set(pick(part), bounds[i])); return whole; };
  return { dots: queries.map((_, q) => joined((part) => part.dots[q])), lengths: joined((part) => part.lengths) };
}
