// What a config claims of its vocabulary's ends: checkpoint/claims.py, on the table that Python gives the page
// (page.py).

export const FLAG = "tie_word_embeddings";

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const countOf = (value) => (Number.isSafeInteger(value) && value > 0 ? value : null);
export const endsWith = (module, path) => `.${module}`.endsWith(`.${path}`);
export const lastPart = (name) => name.slice(name.lastIndexOf(".") + 1);
export const inLayer = (name) => /\.\d+\./.test(`.${name}.`);
/** [module, parameter] of a tensor's name. */
export const moduleOf = (name) => { const at = name.lastIndexOf(".");
  return at < 0 ? ["", name] : [name.slice(0, at), name.slice(at + 1)]; };
const without = (text, prefix) => (prefix && text.startsWith(prefix) ? text.slice(prefix.length) : text);

/** Whether this package saved it, with a boundary of its own. */
export const isOwn = (config) => config?.model_type === "tiewise";

export function familyType(level) {
  const kind = level.model_type === "tiewise" ? level.base_model_type : level.model_type;
  return typeof kind === "string" ? kind : null;
}

export function architectureOf(config) {
  const name = Array.isArray(config.architectures) ? config.architectures[0] : undefined;
  if (typeof name !== "string") return null;
  return isOwn(config) ? without(name, "Tiewise") : name;
}

const familyOf = (kind, data) => (kind !== null && kind !== undefined
  && Object.hasOwn(data.families, kind) ? data.families[kind] : {});

/** One class's two ends, with what its entry leaves out. */
function filled(entry) {
  return { inputs: [], output: null, bias: [], positions: [], maps: [], tied: {}, disk: {}, prefix: "", loads: null,
    decides: [""], always: false, never: false, joined: false, parts: {}, ...entry };
}

/** What is known of a class; of the family's own main class where no class is named; null where nothing is. */
export function classEnds(kind, name, data) {
  const classes = familyOf(kind, data).classes ?? {};
  if (name === null) {
    const main = ["ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "MTModel", "ForPreTraining",
      ""];
    const sorted = Object.keys(classes).sort();
    for (const end of main) for (const one of sorted) if (one.endsWith(end)) return filled(data.ends[classes[one]]);
    return null;
  }
  const home = [classes, ...Object.values(data.families).map((family) => family.classes
    ?? {})].find((those) => Object.hasOwn(those, name));
  return home ? filled(data.ends[home[name]]) : null;
}

/** What is known of the class that a config names, with the parts that it chooses; null if unknown. */
export const configEnds = (config, data) =>
  withParts(config, classEnds(familyType(config), architectureOf(config), data), data);

/** The same, of the family's main class if the class that the config names is unknown. */
export const familyEnds = (config, data) => withParts(config, defaultEnds(config, data), data);

function defaultEnds(config, data) {
  const kind = familyType(config);
  return classEnds(kind, architectureOf(config), data) ?? classEnds(kind, null, data);
}

/** A composite's ends with the classes that its config chooses for its parts; null if one of these is unknown. */
function withParts(config, given, data) {
  const levels = new Map(modelLevels(config)), defaults = familyOf(familyType(config), data).levels ?? {};
  let ends = given;
  for (const [path, [module, how]] of Object.entries(given?.parts ?? {})) {
    const usual = defaults[path] ?? null, chosen = familyType(levels.get(path) ?? {}) ?? usual;
    if (usual === null || chosen === usual) continue;
    const [before, after] = [partEnds(usual, how, data), partEnds(chosen, how, data)];
    if (after === null && !data.tokenless.includes(chosen)) return null;
    ends = exchanged(ends, `${module}.`, path, before ?? filled({}), after ?? filled({}));
  }
  return ends;
}

/** The ends of a family's class as a part of a composite: "lm" with its head, "body" without. */
function partEnds(kind, how, data) {
  const { classes = {}, auto = {} } = familyOf(kind, data), name = auto[how];
  const ends = Object.hasOwn(classes, name) ? filled(data.ends[classes[name]]) : classEnds(kind, null, data);
  if (ends === null || how === "lm") return ends;
  const bare = renamed(ends, (one) => without(one, `${ends.prefix}.`));
  const inputs = bare.inputs.filter((one) => !Object.hasOwn(bare.tied, `${one}.weight`));
  return filled({ inputs, positions: bare.positions, maps: bare.maps });
}

/** A composite's ends with the class `after` instead of `before` at the modules `at` and the level `path`. */
function exchanged(ends, at, path, before, after) {
  const stays = (name) => !name.startsWith(at), made = { ...ends };
  for (const key of ["inputs", "bias", "positions", "maps"])
    made[key] = [...new Set([...ends[key].filter(stays), ...after[key].map((name) => at + name)])];
  made.tied = Object.fromEntries([...Object.entries(ends.tied).filter(([, source]) => stays(source)),
    ...Object.entries(after.tied).map(([target, source]) => [at + target, at + source])]);
  Object.assign(made, namesInFiles(ends, at, before, after));
  if (ends.output !== null && !stays(ends.output)) {
    const inner = after.decides.map((level) => (level ? `${path}.${level}` : path));
    made.output = after.output === null ? null : at + after.output;
    made.decides = [...new Set([...ends.decides.filter((level) => level !== path), ...inner])];
    for (const key of ["always", "never", "joined"]) made[key] = after[key];
  } else if (ends.output !== null && !stays(ends.tied[`${ends.output}.weight`] ?? "") && after.inputs.length)
    made.tied[`${ends.output}.weight`] = `${at}${after.inputs[0]}.weight`;
  return made;
}

/** `disk` and `loads` of a composite with another class at the modules `at`. */
function namesInFiles(ends, at, before, after) {
  const zipped = (a, b) => a.slice(0, b.length).map((name, i) => [name, b[i]]);
  const pairs = new Map([...zipped(before.inputs, after.inputs), ...zipped(before.bias, after.bias)]);
  if (before.output !== null && after.output !== null) pairs.set(before.output, after.output);
  const respelt = (own, others) => {
    const old = own.slice(at.length), now = pairs.get(old);
    return [at + now, others.filter((other) => other.endsWith(old)).map((other) =>
      other.slice(0, other.length - old.length) + now)];
  };
  const moves = (own) => own.startsWith(at) && pairs.has(own.slice(at.length));
  const disk = {}, loads = {};
  for (const [own, name] of Object.entries(ends.disk)) {
    const [now, [moved]] = moves(own) ? respelt(own, [name]) : [own, [name]];
    if (moved !== undefined && (moves(own) || !own.startsWith(at))) disk[now] = moved;
  }
  if (!ends.loads && !after.loads) return { disk, loads: null };
  for (const [own, names] of Object.entries(ends.loads ?? {}))
    if (!own.startsWith(at)) loads[own] = names;
    else if (moves(own)) { const [now, moved] = respelt(own, names); loads[now] = moved; }
  for (const name of [...after.inputs, ...after.bias, ...(after.output === null ? [] : [after.output])]) {
    const inner = (after.loads?.[name] ?? []).map((other) => at + other);
    const outer = ends.prefix ? [`${ends.prefix}.${at}${name}`] : [];
    loads[at + name] = [...new Set([...loads[at + name] ?? [], ...inner, ...outer])];
  }
  return { disk, loads };
}

/** Whether a known class has no table of tokens at all. */
export function withoutTokens(kind, name, data) {
  if (data.tokenless.includes(kind)) return true;
  if (kind === null || !Object.hasOwn(data.families, kind) || familyOf(kind, data).classes
    || name === null) return false;
  return !data.not_built.includes(name) && classEnds(kind, name, data) === null;
}

/** The same ends under other names. */
export function renamed(ends, rename) {
  const tensor = (name) => { const [module, parameter] = moduleOf(name);
    if (parameter !== "weight" && rename(name) !== name) return rename(name); // a bias has a name of its own
    return module ? `${rename(module)}.${parameter}` : rename(name); };
  const several = Object.fromEntries(["inputs", "bias", "positions",
    "maps"].map((key) => [key, ends[key].map(rename)]));
  const tied = Object.fromEntries(Object.entries(ends.tied).map(([target, source]) => [tensor(target),
    tensor(source)]));
  return { ...ends, ...several, tied, output: ends.output === null ? null : rename(ends.output) };
}

/** The module at an end, or the bias, that transformers loads what a file calls `name` into; null for none. */
export function loadedAs(ends, name) {
  const known = new Set([...ends.inputs, ...ends.bias, ...(ends.output === null ? [] : [ends.output])]);
  if (ends.loads) {
    const spelt = new Map(Object.entries(ends.loads).flatMap(([own, names]) => [own,
      ...names].map((other) => [other, own])));
    return spelt.get(name) ?? (ends.prefix ? null : spelt.get(name.slice(1)) ?? null);
  }
  const bare = name.replace(new RegExp(`^${ends.prefix}.`), "");
  if (name.startsWith(ends.prefix) && known.has(bare)) return bare;
  return [`${ends.prefix}.${name}`, name].find((own) => known.has(own)) ?? null;
}

export const spellings = (ends) => [...ends.inputs, ...(ends.output === null ? [] : [ends.output]),
  ...Object.values(ends.loads ?? {}).flat()];

/** [dotted path, mapping] of every level that configures a model of tokens, the root first. */
export function modelLevels(config) {
  const FOREIGN = ["vision", "visual", "audio", "image", "speech", "video", "codec", "vq_", "backbone_config",
    "quantization"];
  const PARTS = ["decoder", "encoder", "generator", "question_encoder", "llm_config", "language_config"];
  const found = [];
  let waiting = [["", config, 0]];
  while (waiting.length && found.length < 64) {
    const [path, level, depth] = waiting.shift(), below = [];
    found.push([path, level]);
    for (const [key, part] of depth < 4 ? Object.entries(level) : []) {
      if (!isObject(part) || FOREIGN.some((word) => key.includes(word))) continue;
      const speaks = FLAG in part || "vocab_size" in part || Boolean(part.model_type);
      if (PARTS.includes(key) || (key.endsWith("_config") && speaks)) below.push([path ? `${path}.${key}` : key, part,
        depth + 1]);
    }
    waiting = [...below, ...waiting];
  }
  return found;
}

/**
 * Every level of a config and what they decide.
 * → { levels: [{ level, written, default, decides, vocab, hidden, effective }],
 * deciding, tied, fixed, t5Like, known }
 */
export function readClaims(config, data) {
  const nothing = { level: "", written: null, default: null, decides: false, vocab: null, hidden: null,
    effective: null };
  if (!isObject(config)) return { levels: [], deciding: nothing, tied: null, fixed: null, t5Like: false, known: false };
  const kind = familyType(config), ends = familyEnds(config, data), usual = defaultEnds(config, data);
  const found = new Map(modelLevels(config)), first = (level,
    keys) => keys.map((key) => countOf(level[key])).find((n) => n !== null) ?? null;
  const outermost = [...found].find(([, level]) => FLAG in level)?.[0] ?? "";
  const deciding = usual === null ? [outermost] : (ends ?? usual).decides; // the composite's own, of an unknown part
  const levels = [...new Set([...found.keys(), ...deciding])].map((path) => {
    const level = found.get(path) ?? {}, own = familyOf(familyType(level) ?? (familyOf(kind, data).levels ?? {})[path]
      ?? null, data), flag = level[FLAG];
    const written = typeof flag === "boolean" ? flag : null, sizes = own.sizes ?? {};
    const fallback = own.loose && FLAG in level && flag === null ? false : own.tie ?? null;
    const widths = [sizes.hidden_size ?? "", "hidden_size", "d_model", "n_embd", "model_dim", "dim", "n_embed"];
    return { level: path, written, default: fallback, decides: deciding.includes(path),
      vocab: first(level, [sizes.vocab_size ?? "", "vocab_size"]),
      hidden: first(level, widths), effective: written === null ? fallback : written };
  });
  const those = levels.some((claim) => claim.decides) ? levels.filter((claim) => claim.decides) : levels.slice(0, 1);
  const decided = those.find((claim) => claim.effective) ?? those[0] ?? nothing;
  const fixed = ends === null || !(ends.always || ends.never) ? null : ends.always;
  const t5Like = ["mt5", "switch_transformers"].includes(kind) || Boolean(fixed
    && ends.inputs.some((name) => endsWith(name, "shared")));
  return { levels, deciding: decided, tied: fixed === null ? decided.effective : fixed, fixed, t5Like,
    tiesOthers: ends?.joined || fixed ? true : decided.effective,
    known: kind !== null && Object.hasOwn(data.families, kind) && (ends !== null || usual === null) };
}

/** {key: value} of the config's numbers that act at the boundary, as written, else by the family's default. */
export function scalarsOf(config, data) {
  const found = {}, number = (value) => (typeof value === "boolean" ? Number(value) : Number.isFinite(value) ? value
    : null);
  for (const [, level] of modelLevels(config)) {
    const defaults = familyOf(familyType(level), data).scalars ?? {};
    for (const [key, nothing] of Object.entries(data.scalars)) {
      const value = number(key in level ? level[key] : defaults[key]);
      if (value !== null && value !== nothing) found[key] = value;
    }
  }
  return found;
}
