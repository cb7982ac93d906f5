"""Random checkpoint folders: a tiny saved model with random changes, all drawn from one seed.

    checkpoint = draw_checkpoint(seed)
    checkpoint.write(folder)

`SUBJECTS` lists the possible changes. A checkpoint has at most one change of each subject.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import saved_models as saved
import torch
import transformers as tr
from safetensors.torch import load_file, save_file

from tiewise.checkpoint import loader_columns as columns

FLAG, FILE, INDEX = saved.FLAG, "model.safetensors", "model.safetensors.index.json"
ABSENT = "absent"
# keys of published configs that transformers 5 does not write
PUBLISHED = {"rope_scaling": None, "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "rotary_emb_base": 10_000}
PUBLISHED |= {"n_ctx": 64, "mlp_bias": False, "sliding_window_pattern": 2}
# {model_type: keys that only its published configs have}, with values for the tiny sizes
FAMILY_KEYS = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "exaone4": {"sliding_window_pattern": "LG"},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "lfm2": {"block_dim": 32, "block_ff_dim": 40},
    "mamba2": {"intermediate_size": 64},
    "mellum": {"num_experts": 4},
    "minimax": {"shared_intermediate_size": 0, "rotary_dim": 8},
    "minimax_m2": {"shared_intermediate_size": 0, "rotary_dim": 8},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_moe": {"num_experts": 4},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_vl_moe_text": {"num_experts": 4, "norm_topk_prob": True},
    "solar_open": {"intermediate_size": 40, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
}
# booleans of a config that do not decide which tensors a class has
NOT_OF_TENSORS = (FLAG, "use_cache", "is_encoder_decoder", "is_decoder", "return_dict", "torchscript")


class CannotBuildError(Exception):
    """A class that has no tiny model with separate tables."""


@dataclass
class Checkpoint:
    """A saved model with the changes made to it so far."""

    class_name: str
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    inputs: list[str]  # stored names of the input tables, the main one first
    heads: list[str]  # stored names of the output head
    biases: list[str]  # stored biases with a row per token
    prefix: str  # prefix of the body's tensors, such as "model."
    shape: tuple[int, ...]  # shape of the main input table
    shards: int = 1
    has_index: bool = True
    lost_shard: int | None = None
    file: str = FILE
    tokenizer: dict[str, Any] | None = None
    changes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        """Return the `model_type` of the config."""
        return str(self.config.get("model_type"))

    def write(self, folder: Path) -> None:
        """Write the checkpoint into an empty folder."""
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.tokenizer is not None:
            (folder / "tokenizer.json").write_text(json.dumps(self.tokenizer))
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        if self.shards == 1:
            save_file(tensors, folder / self.file, {"format": "pt"})
            return
        self._write_shards(folder, tensors)

    def _write_shards(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Write the tensors into several files, with an index."""
        names, weight_map = list(tensors), {}
        for number in range(self.shards):
            file = f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[number :: self.shards]}
            weight_map |= dict.fromkeys(part, file)
            if number != self.lost_shard:
                save_file(part, folder / file, {"format": "pt"})
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.has_index:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index))

    def rename(self, names: Sequence[str], new_name: Callable[[str], str]) -> None:
        """Rename stored tensors, in their order."""
        new_names = {name: new_name(name) for name in names}
        self.tensors = {new_names.get(name, name): tensor for name, tensor in self.tensors.items()}
        for listed in (self.inputs, self.heads, self.biases):
            listed[:] = [new_names.get(name, name) for name in listed]

    def stored(self, names: Sequence[str]) -> np.ndarray | None:
        """Return the first of these tensors that is stored, as float32; None if none is."""
        for name in names:
            if name in self.tensors:
                return self.tensors[name].to(torch.float32).numpy()
        return None

    def levels(self) -> list[dict[str, Any]]:
        """Return the levels of the config that may have the flag: the root, and text parts."""
        return [self.config, *(part for part in self.config.values() if isinstance(part, dict) and _has_flag(part))]


def _has_flag(part: dict[str, Any]) -> bool:
    """Return whether a level of a config has a flag or a vocabulary."""
    return FLAG in part or "vocab_size" in part


@lru_cache(maxsize=512)  # classes without settings fit
def saved_class(name: str, settings: str = "{}") -> Checkpoint:
    """Return a tiny untied model of a class, as transformers saves it.

    Args:
        name: class of transformers.
        settings: JSON object of config values that replace the tiny ones.

    Raises:
        CannotBuildError: the class needs other settings, is too big, or has no token table.
    """
    try:
        model = saved.tiny(name, False, **json.loads(settings))
        tables, head = saved.ends(model)
    except Exception as error:
        raise CannotBuildError(f"{name} with {settings}: {error}") from error
    if not tables:
        raise CannotBuildError(f"{name} has no token table")
    if head is not None:  # T5 ties whatever the flag says
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        heads = saved.stored_as(folder, head.weight) if head is not None else []
        inputs = [name for table in tables for name in saved.stored_as(folder, table.weight) if name not in heads]
        tensors = load_file(f"{folder}/{FILE}")
        config = json.loads(Path(folder, "config.json").read_text())
    if not inputs:
        raise CannotBuildError(f"{name} stores no token table")
    rows = tensors[(heads or inputs)[0]].shape[0]
    biases = [name for name, tensor in tensors.items() if name.endswith("bias") and tensor.shape[-1:] == (rows,)]
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    inputs = list(dict.fromkeys(inputs))
    return Checkpoint(name, tensors, config, inputs, heads, biases, prefix, tuple(tensors[inputs[0]].shape))


def copy_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy whose tensors, config and lists can be changed."""
    config = json.loads(json.dumps(checkpoint.config))
    return Checkpoint(
        checkpoint.class_name, dict(checkpoint.tensors), config, list(checkpoint.inputs), list(checkpoint.heads),
        list(checkpoint.biases), checkpoint.prefix, checkpoint.shape,
    )  # fmt: skip


def draw_checkpoint(seed: int, names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint of a seed.

    Args:
        seed: decides everything.
        names: classes of transformers to draw from; one that cannot be built is replaced by another.
    """
    draw = random.Random(seed)
    checkpoint = _drawn_class(draw, names)
    for subject, chance in SUBJECTS.items():
        if draw.random() >= chance:
            continue
        change = draw.choice(CHANGES[subject])
        done = change(checkpoint, draw)
        if done:
            checkpoint.changes.append(done)
    return checkpoint


def draw_healthy(seed: int, names: Sequence[str]) -> Checkpoint:
    """Return the checkpoint of a seed as transformers saves it, with drawn settings and without changes."""
    return _drawn_class(random.Random(seed), names)


def _drawn_class(draw: random.Random, names: Sequence[str]) -> Checkpoint:
    """Return a copy of a drawn class that can be built, with drawn settings where it accepts them."""
    while True:
        name = draw.choice(names)
        try:
            plain = saved_class(name)
        except CannotBuildError:
            continue
        if draw.random() < 0.6:
            return copy_of(plain)
        settings = drawn_settings(plain.config, draw)
        try:
            other = copy_of(_built_with(name, settings))
        except CannotBuildError:
            return copy_of(plain)
        other.changes.append(f"built with {settings}")
        return other


def _built_with(name: str, settings: dict[str, Any]) -> Checkpoint:
    """Return a saved class with settings. Only one without settings is cached."""
    if not settings:
        return saved_class(name)
    return saved_class.__wrapped__(name, json.dumps(settings))


def drawn_settings(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return a few changed values of a config: sizes, a kind of rotary positions, booleans that add tensors."""
    booleans = [key for key, value in config.items() if isinstance(value, bool) and key not in NOT_OF_TENSORS]
    settings: dict[str, Any] = {}
    for key in draw.sample(booleans, min(len(booleans), draw.choice([0, 1, 1]))):
        settings[key] = not config[key]
    sizes = {"vocab_size": [70, 128], "num_key_value_heads": [1, 2], "intermediate_size": [24, 56], "head_dim": [16]}
    for key in draw.sample(sorted(sizes), draw.choice([0, 1, 2])):
        if isinstance(config.get(key), int):
            settings[key] = draw.choice(sizes[key])
    if isinstance(config.get("num_hidden_layers"), int) and "layer_types" not in config and draw.random() < 0.3:
        settings["num_hidden_layers"] = draw.choice([1, 3])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and draw.random() < 0.3:
        scaled = {"rope_type": draw.choice(["linear", "dynamic"]), "factor": 2.0}
        settings["rope_parameters"] = rope | scaled
    return settings


@dataclass(frozen=True)
class State:
    """Flag and state of the tables of a checkpoint."""

    flag: bool | None  # at every level that has one; None: absent
    tables: str  # one of `STATES` of loader_columns


def in_state(checkpoint: Checkpoint, state: State) -> Checkpoint:
    """Return a copy of an untied checkpoint in a state of the loader matrix."""
    made = copy_of(checkpoint)
    table = made.tensors[made.inputs[0]]
    if state.tables == columns.SAME:
        made.tensors |= dict.fromkeys(made.heads, table)
    ends = [*made.inputs, *made.heads]
    removed = {columns.NONE: made.heads, columns.ALONE: made.inputs, columns.NEITHER: ends}
    for name in removed.get(state.tables, ()):
        del made.tensors[name]
    if state.flag is None:
        made.config = saved.without(made.config, FLAG)
    else:
        made.config = saved.flagged(made.config, state.flag) | {FLAG: state.flag}
    return made


# Changes: each makes one change at random and returns its description, "" if it does not apply.


def drop_head(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove the head's tensors."""
    for name in checkpoint.heads:
        del checkpoint.tensors[name]
    return "no head" if checkpoint.heads else ""


def copy_table_to_head(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store the input table a second time as the head."""
    table = checkpoint.tensors[checkpoint.inputs[0]]
    for name in checkpoint.heads:
        if checkpoint.tensors[name].shape != table.shape:
            return ""
        checkpoint.tensors[name] = table
    return "equal head" if checkpoint.heads else ""


def copy_table_with_one_other_row(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store the input table as the head, except for one row."""
    if not copy_table_to_head(checkpoint, draw):
        return ""
    changed = checkpoint.tensors[checkpoint.heads[0]].clone()
    changed[draw.randrange(len(changed))] += 1
    checkpoint.tensors |= dict.fromkeys(checkpoint.heads, changed)
    return "head with one other row"


def drop_tables(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove the input tables, or one of several."""
    names = checkpoint.inputs
    if len(names) > 1 and draw.random() < 0.5:
        names = [draw.choice(names)]
    for name in names:
        del checkpoint.tensors[name]
    return f"no {', '.join(names)}"


def drop_both(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove all tables of both ends."""
    for name in (*checkpoint.inputs, *checkpoint.heads):
        del checkpoint.tensors[name]
    return "neither end"


def leave(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Leave both tables as they are, with different values."""
    return ""


def set_flag(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Set the flag to one value at each level that may have it."""
    value = draw.choice([True, True, True, False, False, ABSENT])
    for level in checkpoint.levels():
        _write_flag(level, value)
    return f"flag {value}"


def set_flags_apart(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Set the flag of each level on its own."""
    values = [draw.choice([True, False, ABSENT]) for _ in checkpoint.levels()]
    for level, value in zip(checkpoint.levels(), values, strict=True):
        _write_flag(level, value)
    return f"flags {values}"


def spoil_flag(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write a flag that is neither true nor false."""
    value = draw.choice([None, "true", 1])
    checkpoint.config[FLAG] = value
    return f"flag {value!r}"


def _write_flag(level: dict[str, Any], value: Any) -> None:
    """Write or remove the flag of a level."""
    level.pop(FLAG, None)
    if value != ABSENT:
        level[FLAG] = value


PREFIXES = ("_orig_mod.", "module.", "model.", "language_model.", "base_model.model.", "transformer.")


def put_prefix(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Put a prefix before all names, or before those of one end."""
    prefix = draw.choice(PREFIXES)
    which = draw.choice(["all", "all", "inputs", "heads"])
    names = list(checkpoint.tensors) if which == "all" else getattr(checkpoint, which)
    checkpoint.rename(names, lambda name: prefix + name)
    return f"{prefix} before {which}"


def drop_prefix(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove the body's prefix, as a save of the body alone."""
    names = [name for name in checkpoint.tensors if name.startswith(checkpoint.prefix)]
    if not checkpoint.prefix or not names:
        return ""
    checkpoint.rename(names, lambda name: name.removeprefix(checkpoint.prefix))
    return f"no {checkpoint.prefix}"


def double_prefix(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Repeat the body's prefix."""
    names = [name for name in checkpoint.tensors if name.startswith(checkpoint.prefix)]
    if not checkpoint.prefix or not names:
        return ""
    checkpoint.rename(names, lambda name: checkpoint.prefix + name)
    return f"{checkpoint.prefix} twice"


def change_rows(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store more or fewer rows than the config says, for one end or both."""
    names = draw.choice([checkpoint.inputs, checkpoint.heads, [*checkpoint.inputs, *checkpoint.heads]])
    rows = draw.choice([-8, -1, 1, 8])
    done = []
    for name in names:
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.dim() != 2:
            continue
        padded = torch.cat([tensor, torch.ones(max(rows, 0), tensor.shape[1], dtype=tensor.dtype)])
        checkpoint.tensors[name] = padded[: len(tensor) + rows]
        done.append(name)
    return f"{rows:+} rows of {', '.join(done)}" if done else ""


def resize_healthily(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store more rows and write their number into the config, as a resized model has."""
    sizes = [level for level in checkpoint.levels() if level.get("vocab_size") is not None]
    rows = checkpoint.shape[0]
    ends = (*checkpoint.inputs, *checkpoint.heads, *checkpoint.biases)
    stored = [name for name in ends if name in checkpoint.tensors]
    if len(sizes) != 1 or sizes[0]["vocab_size"] != rows:
        return ""
    for name in stored:
        tensor = checkpoint.tensors[name]
        axis = list(tensor.shape).index(rows) if rows in tensor.shape else None
        if axis is None:
            return ""
        more = [8 if number == axis else length for number, length in enumerate(tensor.shape)]
        checkpoint.tensors[name] = torch.cat([tensor, torch.ones(more, dtype=tensor.dtype)], axis)
    sizes[0]["vocab_size"] = rows + 8
    return "8 rows more, also in the config"


def narrow_an_end(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store one end with half its width."""
    names = draw.choice([checkpoint.inputs, checkpoint.heads])
    for name in names:
        if name in checkpoint.tensors:
            checkpoint.tensors[name] = checkpoint.tensors[name][..., : checkpoint.tensors[name].shape[-1] // 2]
    return f"half the width of {', '.join(names)}" if names else ""


def change_dtype(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store everything, or one end, in another type."""
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float64])
    which = draw.choice(["all", "inputs", "heads"])
    names = list(checkpoint.tensors) if which == "all" else getattr(checkpoint, which)
    for name in names:
        tensor = checkpoint.tensors.get(name)
        if tensor is not None and tensor.is_floating_point():
            checkpoint.tensors[name] = tensor.to(dtype)
    written = ""
    if which == "all" and dtype != torch.float64 and draw.random() < 0.7:
        checkpoint.config["dtype"] = str(dtype).removeprefix("torch.")
        written = ", also in the config"
    return f"{which} in {dtype}{written}"


EXTRA = ("extra.weight", "lm_head.bias", "rotary_emb.inv_freq", "mtp.layers.0.norm.weight", "vision_tower.norm.weight")


def add_tensor(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store a tensor that the class lacks."""
    name = draw.choice(EXTRA)
    if draw.random() < 0.4:
        name = checkpoint.prefix + name
    if name in checkpoint.tensors:
        return ""
    shape = draw.choice([(16,), checkpoint.shape, (checkpoint.shape[0],)])
    checkpoint.tensors[name] = torch.ones(shape)
    return f"{name} {list(shape)} more"


def add_layer(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store a copy of the last layer with the next number, as models that predict several tokens do."""
    layers = numbered_layers(checkpoint.tensors)
    if not layers:
        return ""
    before = max(layers, key=lambda prefix: len(layers[prefix]))
    last = max(layers[before])
    for name in list(checkpoint.tensors):
        if name.startswith(f"{before}.{last}."):
            new = name.replace(f"{before}.{last}.", f"{before}.{last + 1}.", 1)
            checkpoint.tensors[new] = checkpoint.tensors[name]
    return f"one more of {before}"


def numbered_layers(names: Sequence[str]) -> dict[str, set[int]]:
    """Return {name before the number: numbers} of the layers with these tensors."""
    layers: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        if numbers:
            layers.setdefault(".".join(parts[: numbers[0]]), set()).add(int(parts[numbers[0]]))
    return layers


def drop_tensor(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove one tensor that is no table of an end."""
    others = [name for name in checkpoint.tensors if name not in (*checkpoint.inputs, *checkpoint.heads)]
    if not others:
        return ""
    gone = draw.choice(others)
    del checkpoint.tensors[gone]
    return f"no {gone}"


def drop_outer_tensor(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove one tensor outside the layers: a norm, a bias, a map."""
    ends = (*checkpoint.inputs, *checkpoint.heads)
    outer = [name for name in checkpoint.tensors if name not in ends and not any(map(str.isdigit, name.split(".")))]
    if not outer:
        return ""
    gone = draw.choice(outer)
    del checkpoint.tensors[gone]
    return f"no {gone}"


def drop_layer(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Remove all tensors of one layer."""
    layers = numbered_layers(checkpoint.tensors)
    if not layers:
        return ""
    before = draw.choice(sorted(layers))
    number = draw.choice(sorted(layers[before]))
    gone = f"{before}.{number}."
    checkpoint.tensors = {n: tensor for n, tensor in checkpoint.tensors.items() if not n.startswith(gone)}
    return f"no {gone}*"


def rename_layers(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Rename the list of layers."""
    layers = numbered_layers(checkpoint.tensors)
    if not layers:
        return ""
    before = max(layers, key=lambda prefix: len(layers[prefix]))
    names = [name for name in checkpoint.tensors if name.startswith(f"{before}.")]
    checkpoint.rename(names, lambda name: name.replace(before, before + "s", 1))
    return f"{before}s for {before}"


def spoil_bias(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Shorten or reshape a bias with a row per token."""
    biases = [name for name in checkpoint.biases if name in checkpoint.tensors]
    if not biases:
        return ""
    name, how = draw.choice(biases), draw.choice(["short", "flat"])
    value = checkpoint.tensors[name]
    checkpoint.tensors[name] = value[..., :-8] if how == "short" else value.reshape(1, -1)
    return f"{name} {how}"


def quantise_as_mlx(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Pack every matrix as mlx-lm packs it: 4 bits, a scale and a bias for each 32 values."""
    pack_as_mlx(checkpoint, [name for name in checkpoint.tensors if is_packed_by_mlx(checkpoint, name)])
    return "quantised by mlx-lm"


def is_packed_by_mlx(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether mlx-lm can pack a tensor: a matrix whose width is a multiple of 32."""
    tensor = checkpoint.tensors[name]
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[1] % 32 == 0


def pack_as_mlx(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Pack these matrices: 4 bits, a scale and a bias for each 32 values."""
    packed = {}
    for name, tensor in checkpoint.tensors.items():
        if name not in names:
            packed[name] = tensor
            continue
        rows, width = tensor.shape
        module = name.removesuffix(".weight")
        packed[name] = torch.randint(0, 2**31, (rows, width // 8)).to(torch.uint32)
        packed[f"{module}.scales"] = torch.full((rows, width // 32), 0.01)
        packed[f"{module}.biases"] = torch.full((rows, width // 32), -0.08)
    checkpoint.tensors = packed
    checkpoint.config["quantization"] = {"group_size": 32, "bits": 4}


def write_shards(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Spread the tensors over two or three files with an index."""
    checkpoint.shards = draw.choice([2, 3])
    return f"{checkpoint.shards} shards"


def lose_index(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write shards without their index."""
    checkpoint.shards, checkpoint.has_index = 2, False
    return "2 shards without an index"


def lose_shard(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write an index and not all of its files."""
    checkpoint.shards = 2
    checkpoint.lost_shard = draw.choice([0, 1])
    return f"shard {checkpoint.lost_shard + 1} of 2 lost"


def rename_file(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Store the tensors in a file with another name."""
    checkpoint.file = draw.choice(["consolidated.safetensors", "model.fp16.safetensors", "model-00001.safetensors"])
    return f"in {checkpoint.file}"


def write_tokenizer(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write a tokenizer with as many tokens as rows, more, or fewer."""
    count = checkpoint.shape[0] + draw.choice([0, 0, -8, 8])
    vocab = {f"t{number}": number for number in range(count)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    checkpoint.tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    return f"tokenizer of {count}"


def write_published_keys(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write the keys that published configs have next to those of transformers 5."""
    checkpoint.config = published(checkpoint.config)
    return "published keys"


def write_published_keys_alone(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Write the keys that published configs have, without those of transformers 5."""
    checkpoint.config = published(checkpoint.config)
    for level in (checkpoint.config, checkpoint.config.get("text_config", {})):
        level.pop("rope_parameters", None)
        if "dtype" in level:
            level["torch_dtype"] = level.pop("dtype")
    return "published keys alone"


def drop_default_keys(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Leave out the keys that have the class's default values, as transformers 4 does."""
    defaults = getattr(tr, checkpoint.class_name).config_class().to_dict()
    kept = ("model_type", "architectures", "dtype", FLAG)
    gone = [key for key, value in checkpoint.config.items() if key not in kept and defaults.get(key, ABSENT) == value]
    for key in gone:
        del checkpoint.config[key]
    return f"default values left out ({len(gone)})"


def drop_key(checkpoint: Checkpoint, draw: random.Random) -> str:
    """Leave out one key that has the class's default value."""
    defaults = getattr(tr, checkpoint.class_name).config_class().to_dict()
    kept = ("model_type", "architectures", FLAG)
    keys = [key for key, value in checkpoint.config.items() if key not in kept and defaults.get(key, ABSENT) == value]
    if not keys:
        return ""
    gone = draw.choice(keys)
    del checkpoint.config[gone]
    return f"no key {gone}"


def published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys that published configs have."""
    rope = config.get("rope_parameters") or {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    added = {"rope_theta": rope.get("rope_theta", 10_000.0)} | PUBLISHED
    added |= FAMILY_KEYS.get(str(config.get("model_type")), {})
    if isinstance(config.get("num_attention_heads"), int) and isinstance(config.get("hidden_size"), int):
        added["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    text = config.get("text_config")
    if isinstance(text, dict):
        added["vocab_size"] = text.get("vocab_size")
        config = config | {"text_config": published(text)}
    return added | config


Change = Callable[[Checkpoint, random.Random], str]
SUBJECTS = {  # {subject: chance of a change}, in the order in which they are made
    "config keys": 0.75,
    "flag": 1.0,
    "ends": 1.0,
    "rows": 0.15,
    "type": 0.1,
    "other tensors": 0.2,
    "names": 0.15,
    "quantisation": 0.04,
    "files": 0.15,
    "tokenizer": 0.2,
}
CHANGES: dict[str, tuple[Change, ...]] = {
    "config keys": (
        write_published_keys,
        write_published_keys,
        write_published_keys_alone,
        drop_default_keys,
        drop_key,
    ),
    "flag": (set_flag,) * 8 + (set_flags_apart, spoil_flag),
    "ends": (
        leave,
        leave,
        drop_head,
        drop_head,
        copy_table_to_head,
        copy_table_to_head,
        copy_table_with_one_other_row,
        drop_tables,
        drop_both,
    ),
    "rows": (change_rows, change_rows, resize_healthily, narrow_an_end),
    "type": (change_dtype,),
    "other tensors": (
        add_tensor,
        add_tensor,
        add_layer,
        drop_tensor,
        drop_outer_tensor,
        drop_layer,
        rename_layers,
        spoil_bias,
    ),
    "names": (put_prefix, drop_prefix, double_prefix),
    "quantisation": (quantise_as_mlx,),
    "files": (write_shards, write_shards, lose_index, lose_shard, rename_file),
    "tokenizer": (write_tokenizer,),
}
