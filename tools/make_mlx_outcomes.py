"""Write src/tiewise/checkpoint/data/mlx_lm.json: what mlx-lm loads from each family in every state of the tables.

    python tools/make_mlx_outcomes.py             writes the file (some minutes; needs mlx-lm[cpu] in this environment)
    python tools/make_mlx_outcomes.py llama …     prints these families' entries

transformers saves a tiny model of each family. The tool puts it into each state of the loader matrix, with the flag
true, false and absent at every level, and loads it with mlx-lm. If the loaded model has a parameter equal to the head,
the tool sets it to zero: the model uses a separate head if its logits change. A family whose tiny model loads in no
state is left out: mlx-lm does not read its config, which says nothing about its tables.
"""

from __future__ import annotations

import json
import pkgutil
import sys
import tempfile
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import transformers
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import models
from mlx_lm.utils import MODEL_REMAPPING, load_model
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))
import saved_models as saved  # noqa: E402

from tiewise.checkpoint.claims import FLAG  # noqa: E402
from tiewise.checkpoint.families import family  # noqa: E402
from tiewise.checkpoint.family_record import family_data  # noqa: E402
from tiewise.checkpoint.loader_columns import ALONE, MLX_LETTERS, NEITHER, NONE, SAME, STATES  # noqa: E402

TARGET = ROOT / "src" / "tiewise" / "checkpoint" / "data" / "mlx_lm.json"
ABOUT = (
    "Made by tools/make_mlx_outcomes.py; do not edit. served, model types of which mlx-lm has a model, by its own name "
    "or by the one that it takes for it. families: by the flag true, false and absent, a letter for each state of the "
    "tables (no head, equal head, other head, head alone, neither): t tied, u both as stored, d head dropped, e load "
    "error. Other families were not run."
)
FLAGS = (True, False, None)
LETTERS = {word: letter for letter, word in MLX_LETTERS.items()}
# keys of published configs that transformers 5 does not write
PUBLISHED = {"rope_scaling": None, "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "rotary_emb_base": 10_000}
PUBLISHED |= {"n_ctx": 64, "mlp_bias": False, "sliding_window_pattern": 2}


def main() -> None:
    """Write the file, or print single entries."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        for kind in sys.argv[1:]:
            print(kind, entry(kind))
        return
    modules = {module.name for module in pkgutil.iter_modules(models.__path__)}
    served = sorted({*modules, *(kind for kind, name in MODEL_REMAPPING.items() if name in modules)})
    families = {}
    for kind in (kind for kind in served if kind in family_data()["families"]):
        letters = entry(kind)
        families |= {kind: letters} if letters is not None else {}
        print(kind, letters, file=sys.stderr)
    data = {"about": ABOUT, "version": mlx_lm.__version__, "date": date.today().isoformat(), "served": served}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(letters)}" for kind, letters in sorted(families.items()))
    TARGET.write_text("{\n" + ",\n".join([*lines, f'"families": {{\n{rows}\n}}']) + "\n}\n", "utf-8")


def entry(kind: str) -> str | None:
    """Return the letters of one family in three groups of five, or None.

    None means that no state loads, or that a loaded model cannot be run.
    """
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    name = next((name for name in family(kind).ends.classes if name.endswith(ends)), None)
    if name is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            stored = _saved(name, Path(folder))
        except Exception as error:  # too big, or not built from this config
            print(f"{kind}: {type(error).__name__}", file=sys.stderr)
            return None
        words = [[_outcome(Path(folder), *stored, flag, state) for state in STATES] for flag in FLAGS]
    if all(word in ("load error", None) for row in words for word in row) or any(None in row for row in words):
        return None
    return " ".join("".join(LETTERS[str(word)] for word in row) for row in words)


def _saved(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """Save a tiny untied model of a class and return its contents.

    These are (tensors, config, names of input tables, names of the head).
    """
    model = saved.tiny(name, False)
    tables, head = saved.ends(model)
    model.save_pretrained(folder)
    output = saved.stored_as(folder, head.weight)
    inputs = sorted({n for table in tables for n in saved.stored_as(folder, table.weight)} - {*output})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if not inputs or not output or FLAG not in config.get("text_config", {FLAG: None}):
        raise ValueError("no ends, or no flag at the level that mlx-lm reads")
    return (
        load_file(folder / "model.safetensors"),
        _published(config),
        inputs,
        output,
    )


def _published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys that published configs have."""
    rope = config.get("rope_parameters") or {}
    rope = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    added = {"rope_theta": rope.get("rope_theta", 10_000.0)} | PUBLISHED
    if isinstance(config.get("num_attention_heads"), int) and isinstance(config.get("hidden_size"), int):
        added["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if isinstance(text := config.get("text_config"), dict):
        added["vocab_size"] = text.get("vocab_size")
        config = config | {"text_config": _published(text)}
    return added | config


def _outcome(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any], inputs: list[str], output: list[str],
    flag: bool | None, state: str,
) -> str | None:  # fmt: skip
    """Save one state, load it with mlx-lm and return the outcome.

    None if the loaded model has no forward pass that shows its head.
    """
    table, head = tensors[inputs[0]], tensors[inputs[0]] if state == SAME else tensors[output[0]]
    removed = {NONE: output, ALONE: inputs, NEITHER: [*inputs, *output]}.get(state, [])
    stored = {n: head if n in output else array for n, array in tensors.items() if n not in removed}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    flagged = saved.without(config, FLAG) if flag is None else saved.flagged(config, flag) | {FLAG: flag}
    (folder / "config.json").write_text(json.dumps(flagged))
    try:
        model, _ = load_model(folder, lazy=False)
    except (Exception, SystemExit):  # one of its files calls sys.exit if a package is missing
        return "load error"
    parameters = {name: np.array(value.astype(mx.float32)) for name, value in tree_flatten(model.parameters())}

    def equal_to(values: Any) -> list[str]:
        """Return the names of the loaded parameters with these values."""
        return [name for name, value in parameters.items() if value.shape == values.shape and (value == values).all()]

    tables = equal_to(table)
    if not tables:
        return "random table"
    heads = [name for name in equal_to(head) if name != tables[0]]
    if heads:
        ids = mx.array([[3, 5, 7, 11]])
        try:
            before = np.array(model(ids).astype(mx.float32))
            model.update(tree_unflatten([(heads[0], mx.zeros(head.shape))]))
            is_used = not np.array_equal(before, np.array(model(ids).astype(mx.float32)))
        except Exception:
            return None
        if is_used:
            return "untied"
    return "head dropped" if state == STATES[2] else "tied"


if __name__ == "__main__":
    main()
