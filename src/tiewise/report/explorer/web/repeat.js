// Commands that repeat the numbers of an opened checkpoint from its files alone, in Python with nothing of tiewise.

/** A word of a command line, in quotes where a shell needs them. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

/** A command line of tiewise for a checkpoint. */
export const commandLine = (name, verb, ...options) => ["tiewise", verb, quoted(name), ...options].join(" ");

/** A command that runs some statements behind E and U, the two tables [V, D], whole and in 64 bits. */
export function python(opened, ...statements) {
  const { input, output, tied } = opened.ends, table = (one) => tableCode(opened, one);
  const lines = ["import torch", "from safetensors import safe_open",
    't = lambda f, n: safe_open(f, "pt").get_tensor(n).double()', `E = ${table(input)}`,
    output && `U = ${tied ? "E" : table(output)}`, ...statements];
  return `python -c ${quoted(lines.filter(Boolean).join("; "))}`;
}

/** A stored tensor, read from where the commands beside it expect the checkpoint: in the folder where they are run. */
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

/** Statements behind which s holds what each of some tokens says of every token that may follow [n, V]. */
export const storedCode = (ids) => [`s = E[[${ids}]] @ U.T`];

/** Of a pair both ways, of one token itself: its score in s and its rank. */
export const waysCode = ([a, b]) =>
  `print([(s[i, j].item(), 1 + (s[i] > s[i, j] + 1e-12).sum().item()) for i, j in `
    + `${b === undefined ? `[(0, ${a})]` : `[(0, ${b}), (1, ${a})]`}])`;

export const highestCode = (most) => `print([(x.values.tolist(), x.indices.tolist()) for x in [s.topk(${most})]])`;

/** The rows of a table, "E" or "U", that lie nearest to some by angle; without those themselves. */
export const nearestCode = (table, ids, most) => [
  `n = ${table} / ${table}.norm(dim=1, keepdim=True)`, `s = (n[[${ids}]] @ n.T).nan_to_num(-2)`,
  `s[range(${ids.length}), [${ids}]] = -2`, highestCode(most)];

/** Medians and outer twentieths of lengths in 48 equal steps of the logarithm of a token's number, from 1. */
export const bandsCode = (table) => [
  `n = ${table}.norm(dim=1)`, "r = torch.arange(1, len(n) + 1).double().log()", "w = (r[-1].exp() + 1).log() / 48",
  "b = (r / w).floor()",
  "print([(round(((k + .5) * w).exp().item()), *(x[int(q * len(x))].item() for q in (.05, .5, .95))) "
    + "for k in b.unique() for x in [n[b == k].sort().values]])"];
