// Commands that compute the numbers of an open checkpoint from its files, in Python without tiewise.

/** Quote a word of a command line if a shell needs it. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

/** Return a tiewise command for a checkpoint. */
export const commandLine = (name, verb, ...options) => ["tiewise", verb, quoted(name), ...options].join(" ");

/** Return a Python command that loads both tables and runs statements. E and U [V, D] are in fp64. */
export function python(opened, ...statements) {
  const { input, output, tied } = opened.ends, table = (one) => tableCode(opened, one);
  const lines = ["import torch", "from safetensors import safe_open",
    't = lambda f, n: safe_open(f, "pt").get_tensor(n).double()', `E = ${table(input)}`,
    output && `U = ${tied ? "E" : table(output)}`, ...statements];
  return `python -c ${quoted(lines.filter(Boolean).join("; "))}`;
}

/** Return the code that reads a tensor of a checkpoint in the current folder. */
function tensorCode({ name: folder }, { where, saved = where, name }) {
  return `t(${JSON.stringify(folder === saved ? saved : `${folder}/${saved}`)}, ${JSON.stringify(name)})`;
}

function tableCode(opened, table) {
  const codes = tensorCode(opened, table);
  if (!table.scale) return codes;
  const { table: scale, blocks: [down, along], factor } = table.scale, [rows, width] = table.shape;
  const sizes = scale.shape.length === 2 ? scale.shape : [scale.shape[0] ?? 1, 1];
  const each = `${tensorCode(opened, scale)}.reshape(${sizes.join(", ")})`
    + `.repeat_interleave(${down}, 0)[:${rows}].repeat_interleave(${along}, 1)[:, :${width}]`;
  return `${codes} * ${each}${factor === 1 ? "" : ` * ${factor}`}`;
}

/** Return statements that compute s [n, V]: scores of all tokens after some tokens. */
export const storedCode = (ids) => [`s = E[[${ids}]] @ U.T`];

/** Return a statement that prints score and rank of a pair in both orders. */
export const waysCode = ([a, b]) =>
  `print([(s[i, j].item(), 1 + (s[i] > s[i, j] + 1e-12).sum().item()) for i, j in `
    + `${b === undefined ? `[(0, ${a})]` : `[(0, ${b}), (1, ${a})]`}])`;

export const highestCode = (most) => `print([(x.values.tolist(), x.indices.tolist()) for x in [s.topk(${most})]])`;

/** Return the statements that find the nearest other rows of table "E" or "U" by angle. */
export const nearestCode = (table, ids, most) => [
  `n = ${table} / ${table}.norm(dim=1, keepdim=True)`, `s = (n[[${ids}]] @ n.T).nan_to_num(-2)`,
  `s[range(${ids.length}), [${ids}]] = -2`, highestCode(most)];

/** Return the statements that print median, 5th and 95th percentile of lengths in 48 logarithmic bins. */
export const bandsCode = (table) => [
  `n = ${table}.norm(dim=1)`, "r = torch.arange(1, len(n) + 1).double().log()", "w = (r[-1].exp() + 1).log() / 48",
  "b = (r / w).floor()",
  "print([(round(((k + .5) * w).exp().item()), *(x[int(q * len(x))].item() for q in (.05, .5, .95))) "
    + "for k in b.unique() for x in [n[b == k].sort().values]])"];
