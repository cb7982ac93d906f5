// Which stored tensor plays which part at the vocabulary's two ends: checkpoint/roles.py, on the table that Python
// gives the page.
import {
  architectureOf, configEnds, countOf, endsWith, familyEnds, familyType, inLayer, isObject, lastPart, loadedAs,
  modelLevels, moduleOf, renamed, spellings, withoutTokens
} from "./claims.js";

export const TABLE_TYPES = ["F64", "F32", "F16", "BF16"];
const isForeign = (name, data) => name.split(".").some((part) => data.usual.foreign.includes(part)
  || /^(vision_|audio_|mtp_)/.test(part));

/** A tensor's name without what torch.compile, DDP, FSDP and PEFT put around modules. */
function unwrapped(name, data) {
  const bare = name.startsWith("base_model.model.") ? name.slice(17) : name;
  const plain = bare.split(".").filter((part) => !data.usual.wrappers.includes(part)).join(".");
  return plain.replaceAll(".modules_to_save.default.", ".");
}

/** The smallest of some things by a list of keys, compared in turn; the first of equals; undefined of none. */
function leastBy(items, keys) {
  const before = (a, b) => { for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i]; return false; };
  return items.reduce((best, item) => (best === undefined || before(keys(item), keys(best)) ? item : best), undefined);
}

/** The tensors of a checkpoint by module, under names without wrappers. */
class StoredModules {
  constructor(tensors, data) {
    this.data = data;
    this.tensors = new Map();
    this.parts = new Map();
    this.tables = new Map();
    const names = tensors.map((tensor) => [unwrapped(tensor.name, data), tensor]);
    for (const [plain, tensor] of [...names.filter(([plain, t]) => plain === t.name),
      ...names.filter(([plain, t]) => plain !== t.name)]) {
      if (this.tensors.has(plain)) continue;
      this.tensors.set(plain, tensor);
      const [module, parameter] = moduleOf(plain);
      if (!this.parts.has(module)) this.parts.set(module, new Map());
      this.parts.get(module).set(parameter, tensor);
    }
    for (const [module, parts] of this.parts)
      for (const name of module ? ["weight", ...data.packed] : [])
        if (parts.has(name) && !this.tables.has(module) && (parts.get(name).shape.length === 2
          || parts.has(`${name}.absmax`))) this.tables.set(module, parts.get(name));
  }

  /** What is stored for the module of an end: {last part of its name: tensor}. */
  end(module) {
    const parts = new Map(), beside = new RegExp(`^(?:${this.data.beside})$`);
    for (const at of module === null ? [] : ["", "weight.", "weight.quant_state."])
      for (const [name, tensor] of this.parts.get(`${module}.${at}`.slice(0, -1)) ?? [])
        if (["weight", ...this.data.packed].includes(at + name) || beside.test(at + name)) parts.set(at + name, tensor);
    return parts;
  }

  hits(ends) { return [...ends.inputs, ends.output].filter((name) => this.tables.has(name)).length; }

  /** Modules outside layers whose last part is that of one of the paths. */
  called(paths) {
    const last = new Set([...paths].map(lastPart));
    return [...this.tables.keys()].filter((module) => last.has(lastPart(module)) && !inLayer(module));
  }

  /** The head that is stored under a usual name, the outermost of several. */
  usualOutput() {
    const { whole_outputs: whole, outputs: ending } = this.data.usual;
    const found = this.called([...ending, ...whole]).filter((m) => (whole.includes(m)
      || ending.some((name) => endsWith(m, name))) && !isForeign(m, this.data));
    return leastBy(found, (module) => [module.split(".").length, module]) ?? null;
  }
}

const noEnds = (given) => ({ inputs: [], output: null, bias: [], positions: [], maps: [], tied: {}, ...given });

/** The names of a class's ends in this file: of all that they may have, those under which most is stored. */
function byData(modules, ends) {
  if (ends === null) return noEnds();
  const loaded = new Map(), disk = (name) => ends.disk[name] ?? name;
  for (const module of modules.called(spellings(ends)).sort()) {
    const own = loadedAs(ends, moduleOf(modules.tables.get(module).name)[0]);
    if (!loaded.has(own)) loaded.set(own, module);
  }
  let styles = [renamed(ends, (name) => loaded.get(name) ?? disk(name)), renamed(ends, disk), ends];
  if (ends.prefix) styles.push(renamed(ends, (name) => (name.startsWith(`${ends.prefix}.`)
    ? name.slice(ends.prefix.length + 1) : name)));
  if (!styles.some((style) => modules.hits(style))) {
    styles = styles.flatMap((style) => {
      const names = [...style.inputs, ...(style.output ? [style.output] : [])];
      const before = (module) =>
        names.filter((name) => module.endsWith(`.${name}`)).map((name) => module.slice(0, -name.length));
      const found = new Set(modules.called(names).flatMap(before));
      const prefixes = [...found].filter((prefix) => !isForeign(prefix, modules.data)).sort((a,
        b) => a.length - b.length || (a < b ? -1 : 1));
      return prefixes.slice(0, 64).map((prefix) => renamed(style, (name) => prefix + name));
    });
  }
  return leastBy(styles, (style) => [-modules.hits(style)]) ?? ends;
}

/** The first of the usual pairs, behind any prefix, and the stacks' tables beside it. */
function byNames(modules) {
  const { data } = modules, pairs = data.usual.pairs, matches = [];
  const isStack = (m) => /(^|\.)(shared|(encoder|decoder)\.embed_tokens)$/.test(m) && !isForeign(m, data)
    && !inLayer(m);
  for (const module of modules.called(pairs.map(([path]) => path)))
    pairs.forEach(([path, output], rank) => {
      if (!endsWith(module, path)) return;
      const prefix = module.slice(0, module.length - path.length);
      matches.push([isForeign(prefix, data), rank, prefix.length, module, prefix + output]);
    });
  const stored = modules.usualOutput(), best = leastBy(matches, (match) => match);
  if (best === undefined) return noEnds({ output: stored });
  const module = best[3], output = !modules.tables.has(best[4]) && stored !== null
    && stored !== module ? stored : best[4];
  const stacks = isStack(module) ? [...modules.tables.keys()].filter((name) => isStack(name) && name !== module) : [];
  return noEnds({ inputs: [module, ...stacks], output });
}

/** The first two matrices with as many rows as a vocabulary of the config: one that sounds like a head, one not. */
function byShapes(modules, config) {
  const wanted = modelLevels(config).map(([, level]) => countOf(level.vocab_size)),
    position = new RegExp(modules.data.position);
  const found = [...modules.tables].filter(([module, table]) => table.shape.length === 2
    && wanted.includes(table.shape[0]) && !position.test(module)
    && !inLayer(module) && !isForeign(module, modules.data)).map(([module]) => module);
  const heads = found.filter((module) => /head|out|decoder|proj|logit/.test(module));
  return noEnds({ inputs: found.filter((module) => !heads.includes(module)).slice(0, 1), output: heads[0] ?? null });
}

/** The input table beside the head: of its shape, then the decoder's, then the one that the head may be tied to. */
function partner(modules, ends) {
  const source = moduleOf(ends.tied[`${ends.output}.weight`] ?? "")[0],
    stored = ends.inputs.filter((name) => modules.tables.has(name));
  const tying = ends.inputs.filter((name) => name === source),
    candidates = stored.length ? stored : tying.length ? tying : ends.inputs;
  const head = modules.tables.get(ends.output);
  const fits = (name) => modules.tables.has(name) && head !== undefined
    && String(modules.tables.get(name).shape) === String(head.shape);
  return leastBy(candidates, (name) => [!fits(name), !name.includes("decoder"), name !== source,
    candidates.indexOf(name)]) ?? null;
}

/**
 * The parts of the boundary that a checkpoint stores; fields as `Roles` of Python has them. `source` says how they were
 * found.
 */
export function findRoles(tensors, givenConfig, data) {
  const config = isObject(givenConfig) ? givenConfig : {}, modules = new StoredModules(tensors, data),
    { tables: at } = modules;
  const kind = familyType(config), name = architectureOf(config), known = configEnds(config, data),
    tokenless = withoutTokens(kind, name, data);
  let source = "architecture data", here = byData(modules, known ?? familyEnds(config, data));
  if (!modules.hits(here)) [source, here] = ["usual names", byNames(modules)];
  if (!modules.hits(here) && !tokenless) [source, here] = ["shapes", byShapes(modules, config)];

  const first = partner(modules, here), stored = here.inputs.filter((module) => at.has(module));
  const inputs = [...stored.filter((module) => module === first), ...stored.filter((module) => module !== first)],
    tables = inputs.map((module) => at.get(module));
  let { output } = here;
  if (source === "architecture data" && output !== null && !at.has(output)) {
    const other = modules.usualOutput(), fits = other !== null
      && tables.some((table) => table.shape[0] === at.get(other).shape[0]);
    if (fits && !here.inputs.includes(other)) output = other;
  }
  const head = at.get(output) ?? null;
  let headless = tokenless || (known !== null && known.output === null);
  if (known === null && name !== null
    && /(Model|Classification|Answering\w*|Choice|Prediction|Retrieval|Reward\w*|Encoder|Regression)$/.test(name)
    && (data.bodies.includes(name)
      || !/LMHead|LMModel|DoubleHeads|EncoderDecoderModel|MTModel/.test(name))) headless ||= head === null
      || !name.endsWith("Model");

  const all = [...modules.tensors], position = new RegExp(data.position),
    rowsOfTensor = (tensor) => tensor.shape[0] ?? 1;
  const rows = new Set([...tables, ...(head ? [head] : [])].map(rowsOfTensor)), named = new Set(here.bias);
  if (output !== null) named.add(`${output}.bias`).add(`${moduleOf(output)[0]}.bias`);
  const biases = all.filter(([one, tensor]) => (named.has(one) || data.usual.biases.some((bias) => endsWith(one, bias)))
    && tensor.shape.length <= 2
    && (!rows.size || (tensor.shape.length && (rows.has(tensor.shape.at(-1)) || here.bias.includes(one))))).map(([,
      tensor]) => tensor);
  const positions = [...at].filter(([module]) => (here.positions.includes(module) || position.test(module))
    && ![...inputs, output].includes(module)
    && !inLayer(module) && !isForeign(module, data)).map(([, tensor]) => tensor);
  const maps = all.filter(([one, tensor]) => {
    const [module, parameter] = moduleOf(one);
    return (here.maps.includes(module) || data.usual.maps.includes(lastPart(module)))
      && ["weight", "p", "q", "factor"].includes(parameter) && tensor.shape.length === 2 && !inLayer(module);
  }).map(([, tensor]) => tensor);
  const opaque = [...new Set(known === null ? [] : spellings(known))].filter((place) => !at.has(place))
    .flatMap((place) => [...(modules.parts.get(place) ?? [])].filter(([parameter]) => parameter !== "bias").map(([,
      tensor]) => tensor));
  const own = new Map(source === "architecture data" && known !== null
    ? here.inputs.map((module, i) => [module, known.inputs[i]]) : []), unread = new Map();
  for (const module of [...inputs, ...(at.has(output) ? [output] : [])]) {
    const place = moduleOf(at.get(module).name)[0];
    let wanted = module, lookedFor = place === module;
    if (known !== null) {
      lookedFor = loadedAs(known, place) !== null;
      const end = module === output ? known.output : own.get(module) ?? known.inputs[0] ?? null;
      wanted = known.disk[end ?? ""] ?? (end || module);
    }
    if (!lookedFor) unread.set(at.get(module).name, `${wanted}.weight`);
  }
  const inputEnd = modules.end(first), outputEnd = modules.end(headless && head === null ? null : output);
  const isQuantised = (parts) => [...parts].some(([part, tensor]) => part !== "weight"
    || !TABLE_TYPES.includes(tensor.dtype));
  return {
    source, input: tables[0] ?? null, inputName: first === null ? null : `${first}.weight`, inputs: tables,
      output: head,
    outputName: output === null || (headless && head === null) ? null : `${output}.weight`, biases, positions, maps,
      headless, inputEnd, outputEnd,
    inputQuantised: isQuantised(inputEnd), outputQuantised: isQuantised(outputEnd), ties: here.tied, known, unread,
      opaque,
    namedLikeHead: head !== null && here.tied[first === null ? "" : `${first}.weight`] === head.name,
    readInput: tables.find((table) => !unread.has(table.name)) ?? null,
      readOutput: head === null || unread.has(head.name) ? null : head,
    isForeign: (module) => isForeign(module, data),
  };
}
