"""Make src/tiewise/checkpoint/data/mlx_lm.json: what mlx-lm makes of each family in every state of the loader matrix.

    python tools/make_mlx_outcomes.py             writes the file (some minutes; wants mlx-lm[cpu] in this environment)
    python tools/make_mlx_outcomes.py llama …     prints these families' entries

A tiny model of each family is saved by transformers, put into each state with the flag true, false and absent at every
level, and loaded. Which end the logits are made of is asked of the loaded model: where a parameter beside the table
holds the head, it is zeroed, and the logits move or do not. A family of which a tiny model does not load in any state
is left out: its config is not one that mlx-lm takes, which says nothing of its tables.
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
# what published configs say and those that transformers 5 writes do not
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
    own = {found.name for found in pkgutil.iter_modules(models.__path__)}
    served = sorted({*own, *(kind for kind, name in MODEL_REMAPPING.items() if name in own)})
    families = {}
    for kind in (kind for kind in served if kind in family_data()["families"]):
        found = entry(kind)
        families |= {kind: found} if found is not None else {}
        print(kind, found, file=sys.stderr)
    data = {"about": ABOUT, "version": mlx_lm.__version__, "date": date.today().isoformat(), "served": served}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in sorted(families.items()))
    TARGET.write_text("{\n" + ",\n".join([*lines, f'"families": {{\n{rows}\n}}']) + "\n}\n", "utf-8")


def entry(kind: str) -> str | None:
    """Letters of one family, three groups of five; None where no state of it loads."""
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
        words = [[_made(Path(folder), *stored, flag, state) for state in STATES] for flag in FLAGS]
    if all(word in ("load error", None) for row in words for word in row) or any(None in row for row in words):
        return None
    return " ".join("".join(LETTERS[str(word)] for word in row) for row in words)


def _saved(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """(tensors, config, names of input tables, names of the head) of a tiny untied model of a class."""
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
    rope = config.get("rope_parameters") or {}
    rope = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    made = {"rope_theta": rope.get("rope_theta", 10_000.0)} | PUBLISHED
    if isinstance(config.get("num_attention_heads"), int) and isinstance(config.get("hidden_size"), int):
        made["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if isinstance(text := config.get("text_config"), dict):
        made["vocab_size"] = text.get("vocab_size")
        config = config | {"text_config": _published(text)}
    return made | config


def _made(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any], inputs: list[str], output: list[str],
    flag: bool | None, state: str,
) -> str | None:  # fmt: skip
    """What is made of one state; None where the loaded model has no forward that says it."""
    table, head = tensors[inputs[0]], tensors[inputs[0]] if state == SAME else tensors[output[0]]
    gone = {NONE: output, ALONE: inputs, NEITHER: [*inputs, *output]}.get(state, [])
    stored = {n: head if n in output else array for n, array in tensors.items() if n not in gone}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = saved.without(config, FLAG) if flag is None else saved.flagged(config, flag) | {FLAG: flag}
    (folder / "config.json").write_text(json.dumps(said))
    try:
        model, _ = load_model(folder, lazy=False)
    except (Exception, SystemExit):  # one of its files ends the process where a package is missing
        return "load error"
    held = {name: np.array(value.astype(mx.float32)) for name, value in tree_flatten(model.parameters())}

    def holding(values: Any) -> list[str]:
        return [name for name, value in held.items() if value.shape == values.shape and (value == values).all()]

    found = holding(table)
    if not found:
        return "random table"
    own = [name for name in holding(head) if name != found[0]]
    if own:
        ids = mx.array([[3, 5, 7, 11]])
        try:
            before = np.array(model(ids).astype(mx.float32))
            model.update(tree_unflatten([(own[0], mx.zeros(head.shape))]))
            moved = not np.array_equal(before, np.array(model(ids).astype(mx.float32)))
        except Exception:
            return None
        if moved:
            return "untied"
    return "head dropped" if state == STATES[2] else "tied"


if __name__ == "__main__":
    main()
