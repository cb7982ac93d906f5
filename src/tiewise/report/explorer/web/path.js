// The direct path of an opened checkpoint: which tables are multiplied, and what its class does between them
// (inspection/tables/open_path.py).
import { familyType, isObject, isOwn, modelLevels, moduleOf, scalarsOf } from "./claims.js";
import { TABLE_TYPES } from "./roles.js";
import { roundedTo } from "./scans.js";
import { short } from "./stored.js";
import { general } from "./verdict.js";

/**
 * A stored table as rows can be read of it: with its scales where it is quantised; a text that says why not, otherwise.
 */
function readableTable(tensor, parts, files, config) {
  const held = (one) => ({ ...one, file: files.get(one.where) });
  if (tensor.shape.length !== 2) return `${short(tensor.name)} has ${tensor.shape.length} axes and is no table of rows`;
  const beside = [...parts].filter(([part]) => part !== "weight" && part !== "weight_format");
  if (TABLE_TYPES.includes(tensor.dtype) && !beside.length) return held(tensor);
  const more = beside.length ? ` beside ${beside.map(([part]) => part).join(", ")}` : "";
  const packed = `${short(tensor.name)} is packed (${tensor.dtype}${more}) in a way that this page does not read`;
  if (!["I8", "F8_E4M3", "F8_E5M2"].includes(tensor.dtype) || beside.length > 1) return packed;
  if (!beside.length) return tensor.dtype === "I8" ? `${short(tensor.name)} is I8, and no scale is stored beside it`
    : held(tensor);
  const [[part, scale]] = beside, [rows, width] = tensor.shape,
    factor = { SCB: 1 / 127, weight_scale: 1, weight_scale_inv: 1 }[part];
  if (!factor || !TABLE_TYPES.includes(scale.dtype) || scale.shape.length > 2) return packed;
  const said = config?.quantization_config?.weight_block_size,
    [down, along] = scale.shape.length === 2 ? scale.shape : [scale.shape[0] ?? 1, 1];
  const block = (size, count, i) => {
    const asked = Array.isArray(said) ? said[i] : null;
    if (Math.ceil(size / asked) === count) return asked;
    return size % count === 0 ? size / count : null;
  };
  const blocks = [block(rows, down, 0), block(width, along, 1)];
  return blocks.every(Number.isSafeInteger) ? { ...held(tensor), scale: { table: held(scale), blocks, factor } }
    : packed;
}

/**
 * The two ends as they can be read: { input, output, tied, why }, each a table or null; `why` says what is missing.
 * `alike` as in verdict.js: equal tables are one.
 */
export function endsOf(facts, alike, files) {
  const { roles, claims, folder } = facts;
  if (isOwn(folder.config)) return { input: null, output: null, tied: false,
    why: "its boundary is one of tiewise's own, whose tables stand behind maps" };
  if (roles.input === null) return { input: null, output: null, tied: false, why: "no input table is stored" };
  const input = readableTable(roles.input, roles.inputEnd, files, folder.config);
  if (typeof input === "string") return { input: null, output: null, tied: false, why: input };
  if (roles.headless && roles.output === null) return { input, output: null, tied: false,
    why: "a model without a token head has one end only" };
  if (roles.output === null && claims.tied === false) return { input, output: null, tied: false,
    why: "it says untied and stores no head" };
  if (roles.output === null || alike?.kind === "identical" || alike?.kind === "zeros' signs") return { input,
    output: input, tied: true, why: "" };
  const output = readableTable(roles.output, roles.outputEnd, files, folder.config);
  if (typeof output === "string") return { input, output: null, tied: false, why: output };
  if (input.shape[1] !== output.shape[1]) return { input, output: null, tied: false,
    why: `its tables are ${input.shape[1]} and ${output.shape[1]} wide` };
  return { input, output, tied: false, why: "" };
}

/** √E as Gemma multiplies rows by it: rounded to the type of the table, so 34 for 1,152 in BF16. */
const rootOf = (width, dtype) =>
  TABLE_TYPES.includes(dtype) ? roundedTo(dtype, Math.sqrt(width)) : Math.sqrt(width);

/**
 * What the model does between its tables: { kind, eps, gain, plusOne, shift, inputScale, outputScale, bias, cap,
 * notes }; gain, shift and bias are stored tensors or null. Where `applied` is false, `notes` says why nothing is.
 */
export function pathOf(facts, ends, files, data) {
  const { folder, roles, text } = facts, config = isObject(folder.config) ? folder.config : {};
  const level = new Map(modelLevels(config)).get(text.level) ?? config, family = familyType(level);
  const path = { applied: false, kind: "none", eps: 0, gain: null, plusOne: false, shift: null, inputScale: 1,
    outputScale: 1, bias: null, cap: null, notes: [] };
  const not = (why) => ({ ...path, notes: [why] });
  if (roles.maps.length) return not(`${short(roles.maps[0].name)} stands between a table and the body`);
  if (ends.input.scale || ends.output.scale) return not("its tables are quantised");
  if (!family || !Object.hasOwn(data.norm_of, family)) return not("the final norm of its family is not known here");

  const ending = data.norms[data.norm_of[family]], [rows, width] = [ends.output.shape[0], ends.input.shape[1]];
  const held = (one) => (one ? { ...one, file: files.get(one.where) } : null);
  const fits = ({ shape, dtype }, size) =>
    [`${size}`, `1,${size}`].includes(String(shape)) && TABLE_TYPES.includes(dtype);
  if (ending.stored && level.do_layer_norm_before !== false) { // OPT-350M normalises inside its layers only
    const prefix = moduleOf(moduleOf(roles.input.name)[0])[0], name = prefix ? `${prefix}.${ending.norm}` : ending.norm;
    const [gain, shift] = ["weight", "bias"].map((part) =>
      folder.tensors.find((one) => one.name === `${name}.${part}`));
    if (!gain || !fits(gain, width) || (shift && !fits(shift, width)))
      return not(`its final norm ${short(name)}.weight is not stored as it should be`);
    Object.assign(path, { gain: held(gain), shift: held(shift) });
  }
  if (!ending.stored || path.gain) {
    const eps = ending.eps_key ? level[ending.eps_key] : null;
    Object.assign(path, { kind: ending.kind, eps: Number.isFinite(eps) && eps >= 0 ? eps : ending.eps,
      plusOne: ending.plus_one });
  }
  const scalars = scalarsOf(config, data), uses = (key) => (ending.scalars.includes(key) ? scalars[key] : undefined);
  const fitting = roles.biases.filter((bias) => fits(bias, rows)), own = moduleOf(roles.outputName ?? "")[0];
  Object.assign(path, {
    applied: true,
    inputScale: (ending.root_width ? rootOf(width, ends.input.dtype) : 1) * (uses("embedding_multiplier") ?? 1),
    outputScale: (uses("logit_scale") ?? 1) / (uses("logits_scaling") || 1),
    cap: uses("final_logit_softcapping") || null,
    bias: held(fitting.find((one) => one.name === `${own}.bias`) ?? fitting[0]),
  });
  const norm = `${path.kind === "rms" ? "RMS" : "layer"} norm, eps ${general(path.eps, 6)}`;
  path.notes = [
    path.kind === "none" ? "no final norm" : norm,
    path.inputScale !== 1 && `input rows times ${general(path.inputScale, 6)}`,
    path.outputScale !== 1 && `logits times ${general(path.outputScale, 6)}`,
    path.cap && `soft-cap ${general(path.cap, 6)}`,
    path.bias && `bias ${short(path.bias.name)}`,
    ...Object.keys(scalars).map((key) => !ending.scalars.includes(key) && `${key} of the config is not applied`),
  ].filter(Boolean);
  return path;
}

/** What stands before the head's rows of an input row: scaled, normalised, times gain and scale [E]. */
export function leftOf(row, path, gain) {
  const scaled = path.kind === "none" ? row : row.map((x) => x * path.inputScale), n = row.length;
  const mean = path.kind === "layer" ? scaled.reduce((a, b) => a + b, 0) / n : 0;
  const size = path.kind === "none" ? 1 : Math.sqrt(scaled.reduce((a, x) => a + (x - mean) ** 2, 0) / n + path.eps);
  const times = path.outputScale * (path.kind === "none" ? path.inputScale : 1);
  return scaled.map((x, j) => ((x - mean) / size) * (gain ? gain[j] + (path.plusOne ? 1 : 0) : 1) * times);
}
