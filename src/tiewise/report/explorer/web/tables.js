// Candidates for the two tables: matrices that a reader can choose, suggestions by name, and readable rows.
import { shorten } from "./stored.js";

/** Types whose numbers are the values themselves. */
const PLAIN_TYPES = ["F64", "F32", "F16", "BF16"];
const CODE_TYPES = ["I8", "F8_E4M3", "F8_E5M2"];
/** Factor of each kind of stored scale, by name. */
const SCALE_FACTORS = { SCB: 1 / 127, weight_scale: 1, weight_scale_inv: 1 };
export const MOST_OFFERED = 500;

const moduleOf = (name) => name.replace(/\.?[^.]*$/, "");
const inLayer = (name) => /\.\d+\./.test(`.${name}.`);

/** List matrices that can be a table, at most `MOST_OFFERED`: outside layers first, then by rows. */
export function candidateTables(tensors) {
  const matrices = tensors.filter(({ shape }) => shape.length === 2 && shape[0] > 0 && shape[1] > 0);
  const order = (a, b) => inLayer(a.name) - inLayer(b.name) || b.shape[0] - a.shape[0] || (a.name < b.name ? -1 : 1);
  return matrices.sort(order).slice(0, MOST_OFFERED);
}

/**
 * Suggest both tables by name: { input, output }, names of tensors or null. `names` has usual paths of modules,
 * likeliest first. Without a head of a usual name, the input table is the output table as well.
 */
export function suggestTables(matrices, names) {
  const isForeign = (name) => name.split(".").some((part) => names.foreign.includes(part));
  const outer = matrices.filter(({ name }) => !inLayer(name) && !isForeign(name));
  const called = (tables, paths) => {
    for (const path of paths) {
      const found = tables.find(({ name }) => `.${moduleOf(name)}`.endsWith(`.${path}`));
      if (found) return found;
    }
    return null;
  };
  const head = called(outer, names.outputs), fits = (one, other) => one !== other && one.shape[1] === other.shape[1];
  const input = called(outer, names.inputs) ?? (head ? outer.find((one) => fits(one, head)) : null) ?? outer[0]
    ?? matrices[0] ?? null;
  if (!input) return { input: null, output: null };
  const fitting = outer.filter((one) => fits(one, input));
  return { input: input.name, output: (called(fitting, names.outputs) ?? input).name };
}

/** List tensors of a table's module other than weight and bias: [[part of the name, tensor]]. */
function relatedTensors(tensor, tensors) {
  if (!/\.weight$/.test(tensor.name)) return [];
  const module = `${moduleOf(tensor.name)}.`;
  const inside = tensors.filter(({ name }) => name.startsWith(module));
  const parts = inside.map((one) => [one.name.slice(module.length), one]);
  return parts.filter(([part]) => !["weight", "bias", "weight_format"].includes(part)
    && (!part.includes(".") || part.startsWith("weight.")));
}

/** Return [rows, columns] of a block with one scale; null if blocks do not divide the table. */
function scaleBlocks([rows, width], scale, sizes) {
  const [down, along] = scale.shape.length === 2 ? scale.shape : [scale.shape[0] ?? 1, 1];
  const block = (size, count, i) => {
    const asked = Array.isArray(sizes) ? sizes[i] : null;
    if (Math.ceil(size / asked) === count) return asked;
    return size % count === 0 ? size / count : null;
  };
  const blocks = [block(rows, down, 0), block(width, along, 1)];
  return blocks.every(Number.isSafeInteger) ? blocks : null;
}

/** Return a table with its scale, or the reason why its rows are unreadable. */
export function readableTable(tensor, { tensors, config }, files) {
  const held = (one) => ({ ...one, file: files.get(one.where) });
  const beside = relatedTensors(tensor, tensors), named = shorten(tensor.name);
  if (!beside.length && PLAIN_TYPES.includes(tensor.dtype)) return held(tensor);
  const more = beside.length ? ` beside ${beside.map(([part]) => shorten(part)).join(", ")}` : "";
  const packed = `${named} is packed (${tensor.dtype}${more}) in a way that this page does not read`;
  if (!CODE_TYPES.includes(tensor.dtype) || beside.length > 1) return packed;
  if (!beside.length) return tensor.dtype === "I8" ? `${named} is I8, and no scale is stored beside it` : held(tensor);
  const [[part, scale]] = beside, factor = Object.hasOwn(SCALE_FACTORS, part) ? SCALE_FACTORS[part] : null;
  if (factor === null || !PLAIN_TYPES.includes(scale.dtype) || scale.shape.length > 2) return packed;
  const blocks = scaleBlocks(tensor.shape, scale, config?.quantization_config?.weight_block_size);
  return blocks ? { ...held(tensor), scale: { table: held(scale), blocks, factor } } : packed;
}
