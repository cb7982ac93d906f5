// Do the two ends share one table: by config, by bytes, and by rules B010 to B016 of `tiewise check`
// (checkpoint/rules/tying.py), word for word.
import {
  FLAG, architectureOf, countOf, inLayer, isObject, isOwn, lastPart, loadedAs, modelLevels, moduleOf, readClaims
} from "./claims.js";
import { count } from "./numbers.js";
import { TABLE_TYPES, findRoles } from "./roles.js";
import { short } from "./stored.js";

/** A number as Python's :.{digits}g writes it. */
export function general(value, digits) {
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e"), power = Number(exponent);
  if (power >= -4 && power < digits) return String(Number(value.toPrecision(digits)));
  return `${Number(mantissa)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

/** 12.3 MB, in powers of ten as disks and checkpoints are sold. */
export function sized(bytes) {
  let left = bytes;
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (left < 999.5) return unit === "bytes" ? `${left} ${unit}` : `${general(left, 3)} ${unit}`;
    left /= 1000;
  }
  return left < 999.5 ? `${general(left, 3)} TB` : `${count(Math.round(left))} TB`;
}

/** A word of a command line, in quotes where a shell needs them. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

/** A command line of tiewise for a checkpoint. */
export const commandLine = (name, verb, ...options) => ["tiewise", verb, quoted(name), ...options].join(" ");

/** How alike two tables are, with numbers. */
export function difference(alike) {
  const nan = alike.nan ? ", and some values are NaN, which no loader finds equal" : "", { kind, relative: by } = alike;
  if (kind === "identical") return `identical, byte by byte${nan}`;
  const equal = {
    "zeros' signs": "but for the signs of zeros",
    "same values": "once both have the narrower type",
  }[kind];
  if (equal) return `equal in all ${count(alike.rows)} rows ${equal}${nan}`;
  const first = alike.first.join(", ") + (alike.differing > alike.first.length ? ", …" : "");
  const share = `${count(alike.differing)} of ${count(alike.rows)} rows differ (first: ${first})`;
  const far = !Number.isFinite(by) ? (Number.isFinite(alike.largest) ? "from zeros" : "some values are NaN or infinite")
    : by < 1 ? `by ${general(100 * by, 2)} % of their length` : `by ${general(by, 2)} times their length`;
  return `${share}, ${far}; ${kind === "unrelated" ? "two tables of their own" : "once one table"}`;
}

const listed = (names) => names.slice(0, 4).map((name) => short(name)).join(", ")
  + (names.length > 4 ? ` and ${count(names.length - 4)} more` : "");
const described = (tensor) => `${short(tensor.name, 100)} ${tensor.dtype} [${tensor.shape.join(", ")}]`;
const KEEP_ANY = "--keep input (or output, or mean)";
const flagAt = (level) => (level ? `${short(level)}.${FLAG}` : FLAG);

/** Stored matrices with the rows of a vocabulary that play no known part: one may be an end under a new name. */
function unplacedOf(folder, roles, data) {
  const beside = new RegExp(data.beside_ends); // per-layer and n-gram tables: roles.py
  const EXTRA = { mllama: 8, moshi: 1, musicgen: 1, imagegpt: -1 }; // rows of the input table: an image, a start
  const rows = new Set([roles.input, roles.output].filter(Boolean).map((table) => table.shape[0]));
  for (const [, level] of isObject(folder.config) ? modelLevels(folder.config) : [["", {}]]) {
    const number = (key) => countOf(level[key]) ?? 0, kind = String(level.model_type);
    const extra = [0, number("additional_vocab_size"), number("prompt_types") * number("prompt_length")];
    if (kind === "kyutai_speech_to_text") extra.push(number("num_codebooks") * number("codebook_vocab_size") + 1);
    for (const [name, more] of Object.entries(EXTRA)) if (kind.startsWith(name)) extra.push(more);
    for (const [key, value] of Object.entries(level)) {
      const counts = key.includes("vocab") && !/type_vocab|multiple/.test(key) && countOf(value) !== null;
      for (const more of counts ? extra : []) rows.add(value + more);
    }
  }
  const placed = [...roles.inputs, roles.output, ...roles.positions, ...roles.biases].filter(Boolean);
  const known = new Set(placed.map((tensor) => tensor.name));
  return folder.tensors.filter(({ name, shape }) => shape.length === 2 && shape.some((size) => rows.has(size))
    && !known.has(name) && !inLayer(name) && !roles.isForeign(name) && !beside.test(name.replace(/\.weight$/, "")));
}

/** What is known before any table is read: { folder, claims, roles, quantised, text, missing, unplaced }. */
export function factsOf(folder, data) {
  const claims = readClaims(folder.config, data), roles = findRoles(folder.tensors, folder.config, data);
  const quantised = (isObject(folder.config) && "quantization_config" in folder.config) || roles.inputQuantised
    || roles.outputQuantised;
  const parts = ["text_config", "decoder", "generator", "llm_config", "language_config"];
  const text = claims.levels.find((claim) => parts.includes(lastPart(claim.level)) && claim.vocab !== null)
    ?? claims.deciding;
  const missing = missingTables({ claims, roles, folder }, data);
  return { folder, claims, roles, quantised, text, missing, unplaced: unplacedOf(folder, roles, data) };
}

/** Whether the two stored tables can be compared byte by byte. */
export const comparable = ({ roles: { input, output } }) => Boolean(input && output)
  && String(input.shape) === String(output.shape)
  && input.shape.length === 2 && TABLE_TYPES.includes(input.dtype) && TABLE_TYPES.includes(output.dtype);

/** Names of input tables that start anew beside a stored one: neither stored nor tied to a stored tensor. */
function missingTables({ claims, roles, folder }, data) {
  const { known } = roles;
  if (known === null || roles.headless || isOwn(folder.config) || !folder.complete || roles.opaque.length) return [];
  if (roles.readInput === null || roles.inputs.some((table) => roles.unread.has(table.name))) return [];
  const there = new Set();
  for (const { name } of folder.tensors) {
    const [module, parameter] = moduleOf(name), bias = loadedAs(known, name);
    const end = ["weight", ...data.packed].includes(parameter) ? loadedAs(known, module) : null;
    if (end !== null && !known.bias.includes(end)) there.add(`${end}.weight`);
    if (bias !== null) there.add(bias);
  }
  const ties = Object.entries(known.tied).filter(([target]) =>
    (target === `${known.output}.weight` ? claims.tied : claims.tiesOthers) !== false);
  for (const _ of ties) // a tie fills the one from the other, in both directions
    for (const pair of ties) if (pair.some((one) => there.has(one))) pair.forEach((one) => there.add(one));
  const stored = new Set([...roles.inputs, ...roles.biases].map((tensor) => tensor.name));
  const told = new Set(claims.tiesOthers === false
    ? Object.entries(roles.ties).filter(([target, source]) => !stored.has(target) && stored.has(source))
      .map(([target]) => target) : []);
  return known.inputs.filter((module) => !there.has(`${module}.weight`))
    .map((module) => `${known.disk[module] ?? module}.weight`).filter((name) => !told.has(name));
}

/**
 * Findings of B010 to B016, the most severe first: [{ rule, severity, where, evidence, repair, safe }].
 * `alike`: the two tables compared (scans.js), null where they cannot be.
 */
export function tyingFindings(name, facts, alike) {
  const { claims, roles, folder, quantised, text, unplaced } = facts, found = [];
  const say = (rule, severity, where, evidence, repair, safe = false) =>
    found.push({ rule, severity, where, evidence, repair, safe });
  const to = (verb, ...options) => commandLine(name, verb, ...options, "--to NEW_DIR");
  const like = unplaced.map((tensor) => tensor.name), tied = claims.tied;

  const strange = (table, wanted) =>
    `${short(table.name)} is not a name that its class is loaded from, which looks for ${wanted}`;

  const inputTable = () => {
    if (roles.input !== null && roles.readInput === null) {
      const wanted = roles.unread.get(roles.input.name), lost = tied !== true || roles.readOutput === null;
      const how = lost ? "the table is drawn at random" : "the head takes its place";
      const own = roles.input.name, others = !own.endsWith(`.${wanted}`) ? [] : folder.tensors.map((one) => one.name)
        .filter((one) => one.endsWith(`.${wanted}`) && one !== own);
      const several = others.length
        ? `; ${listed(others)} is such a table too, so that the file holds several models` : "";
      say("B010", lost ? "fatal" : "error", wanted, `${strange(roles.input, wanted)}: ${how}${several}`,
        `${several && "write each model to a folder of its own; "}store it as ${wanted}, and every tensor that is `
        + "named like it likewise");
    }
    for (const table of roles.readInput === null ? [] : roles.inputs.filter((one) => roles.unread.has(one.name))) {
      const wanted = roles.unread.get(table.name);
      say("B010", "error", wanted, strange(table, wanted), `store it as ${wanted}`);
    }
    const names = [...roles.inputs, ...roles.biases].map((tensor) => tensor.name);
    const stored = new Set(names.filter((one) => !roles.unread.has(one)));
    const head = [roles.outputName, roles.unread.get(roles.outputName ?? "")];
    const anew = claims.tiesOthers === false && !roles.headless && folder.complete;
    for (const [target, source] of anew ? Object.entries(roles.ties) : [])
      if (!head.includes(target) && !stored.has(target) && stored.has(source) && !target.endsWith("bias"))
        say("B010", "error", target,
          `${source} is stored alone, and an untied model of this class draws ${target} at random`,
          `store it as ${target} too, or write the flag as true if it was trained so`);
    for (const lost of facts.missing)
      say("B010", "fatal", lost, `${lost} is not stored, and nothing ties it to ${short(roles.inputs[0].name)}`
        + ": this second input table is drawn at random", `take ${lost} from the source of the checkpoint`);
    if (text.vocab === null || !folder.complete || roles.input !== null) return;
    if ((roles.headless && roles.known === null) || (quantised && roles.opaque.length)) return;
    if (roles.output !== null && (!like.length || roles.namedLikeHead)) return;
    const what = `vocab_size is ${count(text.vocab)}, and none of ${count(folder.count)} tensors is its input table`;
    say("B010", "fatal", roles.inputName ?? "input table", what
      + (like.length ? `; one of these may be: ${listed(like)}` : ""),
      roles.inputName ? `store it as ${roles.inputName}` : "store it under the name that its class gives it");
  };

  const outputHead = () => {
    if (tied !== false || claims.t5Like || roles.headless || !folder.complete) return;
    if (roles.input === null || roles.readOutput !== null || (quantised && roles.opaque.length)) return;
    if (!claims.known && (like.length || quantised)) return;
    const { deciding, fixed } = claims, how = deciding.written === false ? "false"
      : "absent, which this class reads as false";
    const why = fixed === false ? "this class never ties" : `${flagAt(deciding.level)} is ${how}`;
    if (roles.output !== null) {
      const wanted = roles.unread.get(roles.output.name);
      say("B011", "fatal", wanted,
        `${why}, and the head is stored as ${short(roles.output.name)}: transformers looks for ${wanted}`,
        `store it as ${wanted}`);
      return;
    }
    const below = claims.levels.find((claim) => claim.written === true && fixed === null);
    const what = `${why}, and no output head is stored: transformers draws it at random`
      + (like.length ? `; one of these may be it: ${listed(like)}` : "");
    say("B011", "fatal", roles.outputName ?? "output head", what + (below ? `; ${flagAt(below.level)} is true` : ""),
      below ? to("repair") : `if it was trained tied: ${to("tie", "--keep input")}; else take the head from its source`,
        Boolean(below));
  };

  const pair = () => {
    const [table, head] = [roles.input, roles.output], where = short(head.name), size = sized(head.end - head.start);
    const equal = { identical: "byte for byte", "zeros' signs": "but for the signs of zeros" }[alike.kind];
    const twice = `${described(head)} is ${short(table.name)} ${equal}`;
    if (roles.headless) {
      const architecture = short(architectureOf(folder.config ?? {}) ?? "its class");
      const notRead = `${where} is stored, and ${architecture} has no token head: transformers does not read it`;
      const differs = tied === true && alike.differing && !(claims.t5Like && claims.deciding.written === false);
      if (differs || (tied === true && equal))
        say(differs ? "B012" : "B013", "info", where, notRead, "none needed: the tensor can be left out");
      return;
    }
    if (tied === true && alike.differing && !(claims.t5Like && claims.deciding.written === false)) {
      const UNTRAINED = 10; // facts.py: a head that is so much shorter than the table, and unrelated to it
      const untrained = alike.kind === "unrelated" && alike.length_ratio * UNTRAINED < 1;
      const layerTies = claims.fixed === null ? roles.known?.layer_ties ?? [] : [];
      const safe = claims.fixed === null && !claims.t5Like && !layerTies.length && !untrained;
      const one = `choose one: ${to("tie", "--keep input")}`;
      let differ = difference(alike), fix = safe ? `keep both tables: ${to("repair")}; or ${one}` : one;
      if (untrained) {
        const shorter = count(Math.round(1 / Math.max(alike.length_ratio, 1e-9)));
        differ += `; the head's rows are ${shorter} times shorter, as those of a head that was never trained`;
        fix = `if it was never trained: ${to("tie", "--keep input")}; to use it all the same: ${to("untie")}`;
      } else if (layerTies.length)
        fix += `; the flag also ties ${layerTies.join(", ")}, so that it must stay true`;
      say("B012", "error", where, `the config ties, and ${where} is not ${short(table.name)}: ${differ}`, fix, safe);
    }
    if (tied === true && equal)
      say("B013", "warning", where, `${twice}, ${size} stored twice`
        + (alike.nan ? "; some values are NaN, so that transformers 5 keeps both" : ""), to("dedupe"), true);
    if (tied !== true && equal) {
      const how = claims.levels.length ? `the config says ${tied === null ? "absent" : tied}`
        : "no config says whether they tie";
      say("B014", "info", where, `${twice}, and ${how}: ${size} twice`,
        `nothing if training shall part them; else ${to("tie", "--keep input")}`);
    }
    if (["same values", "some rows", "close"].includes(alike.kind) && !(tied === true && alike.differing)) {
      const types = table.dtype === head.dtype ? "" : ` (${table.dtype} and ${head.dtype})`;
      say("B015", "warning", where, `${short(table.name)} and ${short(head.name)}${types}: ${difference(alike)}`,
        `nothing if meant; else ${to("tie", alike.kind === "same values" ? "--keep input" : KEEP_ANY)}`);
    }
  };

  const onlyHead = () => {
    if (roles.output === null || roles.input !== null || !folder.complete || unplaced.length
      || roles.namedLikeHead) return;
    if (roles.headless && roles.inputName === null) return; // a CTC head has no lookup beside it
    const wanted = short(roles.inputName ?? "the input table's own name");
    const what = `only ${described(roles.output)} is stored, and no input table: loaders look for ${wanted}`;
    const safe = roles.inputName !== null && !roles.outputQuantised && tied === true && !claims.t5Like;
    say("B016", "error", short(roles.output.name), what, safe ? to("repair")
      : `if it was trained tied: ${to("tie")}; else take the input table from its source`, safe);
  };

  inputTable();
  outputHead();
  if (alike) pair();
  onlyHead();
  const order = ["fatal", "error", "warning", "info"];
  return found.sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)
    || (a.rule < b.rule ? -1 : a.rule > b.rule ? 1 : 0));
}
